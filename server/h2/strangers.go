package h2

import (
	"container/list"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// sourceBits is the length of the prefix of IPv6 addresses that count as one address: networks hand out no less than a /64.
const sourceBits = 64

// Reasons for which connections are refused or closed.
const (
	reasonAddress     = "address"
	reasonStrangers   = "strangers"
	reasonTimeout     = "timeout"
	reasonCertificate = "certificate"
)

// refusals counts connections that are refused or closed, by reason, and logs the first of each minute.
type refusals struct {
	log      *slog.Logger
	count    *prometheus.CounterVec
	messages map[string]string // by reason, for the log
	logged   map[string]*rate.Sometimes
}

func newRefusals(o *MuxOptions) *refusals {
	r := &refusals{
		log: o.Logger,
		count: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "slicecast_server_refused_connections_total",
			Help: "Connections that the server closed, by reason: address (a newer one of the same address took its place before the client " +
				"had shown who it is), strangers (the same, for one of any address), timeout (for too long no call was let in) or certificate " +
				"(the client's is not valid, or of another CA).",
		}, []string{"reason"}),
		messages: map[string]string{
			reasonAddress:     "too many clients of this address have not shown who they are, and this was the oldest",
			reasonStrangers:   "too many clients have not shown who they are, and this was the oldest",
			reasonTimeout:     "for too long no call was let in",
			reasonCertificate: "the client certificate is not valid: compare the client's CA with this server's client CA",
		},
		logged: make(map[string]*rate.Sometimes),
	}
	for reason := range r.messages {
		r.count.WithLabelValues(reason)
		r.logged[reason] = &rate.Sometimes{Interval: logInterval}
	}
	o.Registerer.MustRegister(r.count)
	return r
}

// add counts a connection.
func (r *refusals) add(reason string, client net.Addr, attributes ...any) {
	r.count.WithLabelValues(reason).Inc()
	r.logged[reason].Do(func() {
		r.log.Warn("Connection closed; more for this reason are only counted for a while", append([]any{"reason", reason,
			"client", client.String(), "message", r.messages[reason], "interval", logInterval}, attributes...)...)
	})
}

// connections are a Mux's connections, from accept to their end.
//
// A connection is a stranger until a call on it has been let in (see Connection.Enter). What follows holds for strangers:
//
//  1. They end MuxOptions.StrangerTimeout after accept, whatever their clients send meanwhile.
//  2. There are at most MaxStrangersOfNodes whose address is a Node's, at most MaxStrangers whose address is none, and at most
//     MaxStrangersPerAddress of one source. A newcomer takes the place of the oldest one, so those of Nodes make room only for
//     each other.
type connections struct {
	options *MuxOptions
	refused *refusals

	mu sync.Mutex
	// ofNodes and others hold all strangers, sources those of each source; each oldest first. No list in sources is empty.
	ofNodes, others list.List
	sources         map[netip.Prefix]*list.List
}

func newConnections(o *MuxOptions, r *refusals) *connections {
	return &connections{options: o, refused: r, sources: make(map[netip.Prefix]*list.List)}
}

// Connection is a connection of a client to a Mux.
type Connection struct {
	all *connections
	raw net.Conn
	// source is the network that counts as one address, and ofNode whether it is the address of a Node.
	source netip.Prefix
	ofNode bool
	timer  *time.Timer

	// all.mu guards what follows.
	places [2]*list.Element // in the lists of strangers; nil if it is none
	calls  int              // that have been let in and go on
	until  time.Time        // when the connection ends, unless there are calls then
	over   bool
}

// source returns what counts as one address, and whether it is a Node's. Each address of a Node counts for itself, as many
// Nodes may share an IPv6 /64.
func (a *connections) source(of net.Addr) (source netip.Prefix, ofNode bool) {
	parsed, err := netip.ParseAddrPort(of.String())
	if err != nil {
		return netip.Prefix{}, false // those without an address share one
	}
	address := parsed.Addr().Unmap().WithZone("")
	bits := address.BitLen()
	if ofNode = a.options.NodeAddress(address); !ofNode && address.Is6() {
		bits = sourceBits
	}
	return netip.PrefixFrom(address, bits).Masked(), ofNode
}

// enter adds a connection, as a stranger. Another stranger may end for it.
func (a *connections) enter(raw net.Conn) *Connection {
	c := &Connection{all: a, raw: raw, until: time.Now().Add(a.options.StrangerTimeout)}
	c.source, c.ofNode = a.source(raw.RemoteAddr())

	a.mu.Lock()
	displaced, reason := a.displacedLocked(c)
	if displaced != nil {
		displaced.overLocked()
	}
	ofSource := a.sources[c.source]
	if ofSource == nil {
		ofSource = list.New()
		a.sources[c.source] = ofSource
	}
	c.places = [2]*list.Element{c.classLocked().PushBack(c), ofSource.PushBack(c)}
	c.timer = time.AfterFunc(a.options.StrangerTimeout, c.expire)
	a.mu.Unlock()

	if displaced != nil {
		a.refused.add(reason, displaced.raw.RemoteAddr())
		_ = displaced.raw.Close() // who serves it notices
	}
	return c
}

// displacedLocked returns the stranger that makes room for a newcomer, and why. It returns nil if there is room.
func (a *connections) displacedLocked(newcomer *Connection) (_ *Connection, reason string) {
	oldest := func(l *list.List) *Connection { return l.Front().Value.(*Connection) }
	most := a.options.MaxStrangers
	if newcomer.ofNode {
		most = a.options.MaxStrangersOfNodes
	}
	if ofSource := a.sources[newcomer.source]; ofSource != nil && ofSource.Len() >= a.options.MaxStrangersPerAddress {
		return oldest(ofSource), reasonAddress
	}
	if class := newcomer.classLocked(); class.Len() >= most {
		return oldest(class), reasonStrangers
	}
	return nil, ""
}

// classLocked returns the strangers that the connection makes room for, and takes the place of.
func (c *Connection) classLocked() *list.List {
	if c.ofNode {
		return &c.all.ofNodes
	}
	return &c.all.others
}

// knownLocked takes the connection from the strangers, if it is one.
func (c *Connection) knownLocked() {
	if c.places[0] == nil {
		return
	}
	c.classLocked().Remove(c.places[0])
	ofSource := c.all.sources[c.source]
	if ofSource.Remove(c.places[1]); ofSource.Len() == 0 {
		delete(c.all.sources, c.source)
	}
	c.places = [2]*list.Element{}
}

// overLocked makes the connection one that counts no more.
func (c *Connection) overLocked() {
	c.over = true
	c.timer.Stop()
	c.knownLocked()
}

// end is called when the connection has ended, once or more.
func (c *Connection) end() {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	c.overLocked()
}

// expire ends a connection that has been without a call for too long.
func (c *Connection) expire() {
	a := c.all
	a.mu.Lock()
	if c.over || c.calls > 0 || time.Now().Before(c.until) {
		a.mu.Unlock()
		return
	}
	c.overLocked()
	a.mu.Unlock()
	a.refused.add(reasonTimeout, c.raw.RemoteAddr())
	_ = c.raw.Close()
}

// Enter lets a call in, whose context ends with it: the client has shown who it is. The connection is no stranger any more,
// and lasts as long as there are such calls, and MuxOptions.MaxIdle longer. The error is a gRPC status.
func (c *Connection) Enter(ctx context.Context) error {
	a := c.all
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.over {
		return status.Error(codes.Unavailable, "the connection has ended")
	}
	c.knownLocked()
	c.calls++
	c.timer.Stop()
	context.AfterFunc(ctx, c.leave)
	return nil
}

// leave is the end of a call that was let in.
func (c *Connection) leave() {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	if c.calls--; c.calls == 0 && !c.over {
		c.until = time.Now().Add(c.all.options.MaxIdle)
		c.timer.Reset(c.all.options.MaxIdle)
	}
}

// connectionInfo is the AuthInfo of a Mux's connections.
type connectionInfo struct {
	credentials.TLSInfo
	connection *Connection
}

// ConnectionOf returns the connection that a call came on, and the call's context with the peer.Peer of a connection that
// credentials.NewTLS has made.
func ConnectionOf(ctx context.Context) (*Connection, context.Context) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, ctx
	}
	info, ok := p.AuthInfo.(connectionInfo)
	if !ok {
		return nil, ctx
	}
	plain := *p
	plain.AuthInfo = info.TLSInfo
	return info.connection, peer.NewContext(ctx, &plain)
}
