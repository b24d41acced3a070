package h2

import (
	"container/list"
	"context"
	"crypto/x509"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/refusals"
)

// sourceBits is the length of the IPv6 prefix that counts as one address. Networks assign at least
// a /64.
const sourceBits = 64

// maxRefusedCalls is how many calls of a connection may be refused at once because of their
// credentials; one more may be refused each refusedCallEvery. Each refused call may cost the server
// the check of a signature. An agent opens a new connection after a refused call.
const (
	maxRefusedCalls  = 2
	refusedCallEvery = 10 * time.Second
)

// These are the reasons for which connections are closed.
const (
	reasonAddress     = "address"
	reasonStrangers   = "strangers"
	reasonTimeout     = "timeout"
	reasonCertificate = "certificate"
	reasonCaller      = "caller"
	reasonRefused     = "refused"
)

// connections holds a Mux's connections from accept to their end.
//
// A connection is a stranger until a call on it is admitted (see Connection.Enter). Invariants for
// strangers:
//
//  1. They end MuxOptions.StrangerTimeout after accept, whatever their clients send meanwhile.
//  2. At most MaxStrangersOfNodes strangers have the address of a Node, at most MaxStrangers have
//     another one, and at most MaxStrangersPerAddress come from one source. A newcomer displaces
//     the oldest stranger, so strangers from Nodes are displaced only by each other.
//  3. They send at most maxStrangerFrames frames, which the guards count.
//
// Invariant for every connection:
//
//  4. Credentials are refused for at most maxRefusedCalls calls, and for one more each
//     refusedCallEvery, in addition to calls that are checked at the same time.
type connections struct {
	options *MuxOptions
	// closed counts closed connections, and refused counts refused calls.
	closed, refused *refusals.Counter

	mu sync.Mutex // guards the fields below and those of Connection that say so
	// ofNodes and others together hold all strangers, and sources the strangers of each source.
	// Each list has the oldest first. No list in sources is empty.
	ofNodes, others list.List
	sources         map[netip.Prefix]*list.List
	callers         map[string]*holdings
	// certified has the connections whose client has sent a certificate, and that still count.
	certified map[*Connection]struct{}
}

func newConnections(o *MuxOptions) *connections {
	return &connections{
		options: o, sources: make(map[netip.Prefix]*list.List), callers: make(map[string]*holdings),
		certified: make(map[*Connection]struct{}),
		closed: refusals.New(o.Logger, o.Registerer, prometheus.CounterOpts{
			Name: "slicecast_server_refused_connections_total",
			Help: "Number of connections that the server closed, by reason. For address, strangers and caller, a newer " +
				"connection took the place of the oldest one: of an address or of all addresses, without an admitted " +
				"call, or of a node. For timeout, no call was admitted in time. For certificate, the client certificate " +
				"is invalid. For refused, the credentials of too many calls were refused.",
		}, map[string]string{
			reasonAddress:   "too many connections from this address have no admitted call, and this was the oldest",
			reasonStrangers: "too many connections have no admitted call, and this was the oldest",
			reasonTimeout:   "no call was admitted in time",
			reasonCertificate: "the client certificate is invalid: check that a CA in this server's --client-ca-file " +
				"issued it",
			reasonRefused: "the credentials of too many of its calls were refused",
			reasonCaller:  "the caller has too many connections, and this was the oldest",
		}),
		refused: refusals.New(o.Logger, o.Registerer, prometheus.CounterOpts{
			Name: "slicecast_server_refused_calls_total",
			Help: "Number of calls that were refused because their caller has too much open, by reason: connections or " +
				"calls.",
		}, map[string]string{
			reasonConnections: "the caller has too many connections",
			reasonCalls:       "the caller has too many calls",
		}),
	}
}

// Connection is a client's connection to a Mux.
type Connection struct {
	all *connections
	raw net.Conn
	// source is the network that counts as one address. ofNode reports whether it is the address of
	// a Node.
	source netip.Prefix
	ofNode bool
	timer  *time.Timer
	known  atomic.Bool   // set once a call has been admitted
	gone   chan struct{} // closed once the connection no longer counts

	// all.mu guards the fields below.
	places [2]*list.Element    // in the two lists of strangers; nil if it is none
	calls  int                 // open calls that were admitted
	until  time.Time           // when the connection ends, unless it has calls then
	over   bool                // set once the connection no longer counts
	chain  []*x509.Certificate // the client's certificates, its own first; set once
	// refusals has a token for each call that may still be refused; nil means that none was
	// refused.
	refusals *rate.Limiter
	owner    string // the Caller of the first admitted call with a name; empty if there is none
	owned    *list.Element
}

// source returns the network that counts as one address, and whether the address is a Node's. Each
// address of a Node counts for itself, as many Nodes may share an IPv6 /64.
func (a *connections) source(of net.Addr) (source netip.Prefix, ofNode bool) {
	parsed, err := netip.ParseAddrPort(of.String())
	if err != nil {
		return netip.Prefix{}, false // all connections without an address share one source
	}
	address := parsed.Addr().Unmap().WithZone("")
	bits := address.BitLen()
	if ofNode = a.options.NodeAddress(address); !ofNode && address.Is6() {
		bits = sourceBits
	}
	return netip.PrefixFrom(address, bits).Masked(), ofNode
}

// enter adds a connection as a stranger. It may close another stranger to make room.
func (a *connections) enter(raw net.Conn) *Connection {
	c := &Connection{all: a, raw: raw, until: time.Now().Add(a.options.StrangerTimeout), gone: make(chan struct{})}
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
		displaced.close(reason)
	}
	return c
}

// close closes a connection that is over. Its server notices by a failed read or write.
func (c *Connection) close(reason string, attributes ...any) {
	c.all.closed.Add(reason, c.raw.RemoteAddr(), attributes...)
	_ = c.raw.Close()
}

// displacedLocked returns the stranger that has to make room for a newcomer, and why. It returns
// nil if there is room.
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

// classLocked returns the list of strangers in which the connection competes for a place.
func (c *Connection) classLocked() *list.List {
	if c.ofNode {
		return &c.all.ofNodes
	}
	return &c.all.others
}

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

func (c *Connection) overLocked() {
	if !c.over {
		close(c.gone)
	}
	c.over = true
	c.timer.Stop()
	c.knownLocked()
	c.disownLocked()
	delete(c.all.certified, c)
}

// show notes the certificates that the client has sent, before they are verified.
func (c *Connection) show(chain []*x509.Certificate) {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	if c.chain = chain; !c.over {
		c.all.certified[c] = struct{}{}
	}
}

// Recheck closes the connections whose client certificates verify does not accept. Call it when the
// CAs have changed. The handshakes that verify a certificate later must do so with the new CAs.
func (m *Mux) Recheck(verify func(chain []*x509.Certificate) error) {
	a := m.conns
	a.mu.Lock()
	certified := slices.Collect(maps.Keys(a.certified))
	a.mu.Unlock()
	for _, c := range certified {
		err := verify(c.chain)
		if err == nil {
			continue
		}
		a.mu.Lock()
		over := c.over
		c.overLocked()
		a.mu.Unlock()
		if !over {
			c.close(reasonCertificate, "err", err)
		}
	}
}

// closeStrangers closes all strangers.
func (a *connections) closeStrangers() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, class := range []*list.List{&a.ofNodes, &a.others} {
		for class.Len() > 0 {
			c := class.Front().Value.(*Connection)
			c.overLocked()
			_ = c.raw.Close() // its server notices
		}
	}
}

// end must be called when the connection has ended. It may be called more than once.
func (c *Connection) end() {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	c.overLocked()
}

// expire closes the connection if it has been without a call for too long.
func (c *Connection) expire() {
	a := c.all
	a.mu.Lock()
	if c.over || c.calls > 0 || time.Now().Before(c.until) {
		a.mu.Unlock()
		return
	}
	c.overLocked()
	a.mu.Unlock()
	c.close(reasonTimeout)
}

func (c *Connection) stranger() bool { return !c.known.Load() }

// Enter admits a call, if identify returns its caller without an error. ctx must end with the call.
// The connection is then no longer a stranger. It lasts while it has admitted calls, and
// MuxOptions.MaxIdle longer. Enter returns a gRPC status as its error. If identify has refused too
// many calls on the connection, Enter closes the connection without calling identify.
func (c *Connection) Enter(ctx context.Context, identify func() (Caller, error)) error {
	if err := c.endIfRefusedOften(); err != nil {
		return err
	}
	by, err := identify()
	if err != nil {
		c.Refuse()
		return err
	}
	displaced, reason, err := c.enter(ctx, by)
	if displaced != nil {
		displaced.close(reasonCaller, "caller", by.Name)
	}
	if reason != "" {
		c.all.refused.Add(reason, c.raw.RemoteAddr(), "err", err)
	}
	return err
}

// endIfRefusedOften closes the connection if too many of its calls were refused, and then returns
// an error. Refusals are only counted per connection, so a client with valid credentials does not
// suffer from the refusals of others at its address.
func (c *Connection) endIfRefusedOften() error {
	a := c.all
	a.mu.Lock()
	if c.over || c.refusals == nil || c.refusals.Tokens() >= 1 {
		a.mu.Unlock()
		return nil
	}
	c.overLocked()
	a.mu.Unlock()
	c.close(reasonRefused)
	return status.Error(codes.Unavailable, "too many calls on this connection were refused")
}

// Refuse counts a call that is refused because of its credentials or of what the caller may do.
func (c *Connection) Refuse() {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	if c.refusals == nil {
		c.refusals = rate.NewLimiter(rate.Every(refusedCallEvery), maxRefusedCalls)
	}
	c.refusals.Allow() // calls that are checked at the same time may exceed the limit
}

// enter counts a call. Its results are those of holdLocked.
func (c *Connection) enter(ctx context.Context, by Caller) (displaced *Connection, reason string, err error) {
	a := c.all
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.over {
		return nil, "", status.Error(codes.Unavailable, "the connection has ended")
	}
	if displaced, reason, err = c.holdLocked(by); err != nil {
		return nil, reason, err
	}
	if displaced != nil {
		displaced.overLocked()
	}
	c.knownLocked()
	c.known.Store(true)
	c.calls++
	c.timer.Stop()
	context.AfterFunc(ctx, func() { c.leave(by) })
	return displaced, "", nil
}

func (c *Connection) leave(by Caller) {
	a := c.all
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dropCallLocked(by)
	if c.calls--; c.calls == 0 && !c.over {
		c.until = time.Now().Add(a.options.MaxIdle)
		c.timer.Reset(a.options.MaxIdle)
	}
}

type connectionInfo struct {
	credentials.TLSInfo
	connection *Connection
}

// ConnectionOf returns the connection of a call, and the call's context with a peer.Peer as from
// credentials.NewTLS. For a call that did not come through a Mux, it returns nil and ctx.
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
