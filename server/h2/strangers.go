package h2

import (
	"container/list"
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// sourceBits is the length of the prefix of IPv6 addresses that count as one address: networks hand out no less than a /64.
const sourceBits = 64

// A connection may have maxRefusedCalls calls refused at once because of their credentials, and
// another one each refusedCallEvery. Each of them may have the server check a signature. An agent
// opens a new connection after one.
const (
	maxRefusedCalls  = 2
	refusedCallEvery = 10 * time.Second
)

// Reasons for which connections are closed.
const (
	reasonAddress     = "address"
	reasonStrangers   = "strangers"
	reasonTimeout     = "timeout"
	reasonCertificate = "certificate"
	reasonCaller      = "caller"
	reasonRefused     = "refused"
)

// connections are a Mux's connections, from accept to their end.
//
// A connection is a stranger until a call on it has been let in (see Connection.Enter). What follows holds for strangers:
//
//  1. They end MuxOptions.StrangerTimeout after accept, whatever their clients send meanwhile.
//  2. There are at most MaxStrangersOfNodes whose address is a Node's, at most MaxStrangers whose address is none, and at most
//     MaxStrangersPerAddress of one source. A newcomer takes the place of the oldest one, so those of Nodes make room only for
//     each other.
//  3. They send at most maxStrangerFrames frames, which the guards count.
//
// And for every connection: credentials are refused for at most maxRefusedCalls calls, and one more
// each refusedCallEvery, beside those that are under way at the same time.
type connections struct {
	options *MuxOptions
	// closed counts connections, refused calls.
	closed, refused *refusals

	mu sync.Mutex
	// ofNodes and others hold all strangers, sources those of each source; each oldest first. No list in sources is empty.
	ofNodes, others list.List
	sources         map[netip.Prefix]*list.List
	callers         map[string]*holdings
}

func newConnections(o *MuxOptions) *connections {
	return &connections{
		options: o, closed: newClosed(o), refused: newRefused(o),
		sources: make(map[netip.Prefix]*list.List), callers: make(map[string]*holdings),
	}
}

// Connection is a connection of a client to a Mux.
type Connection struct {
	all *connections
	raw net.Conn
	// source is the network that counts as one address, and ofNode whether it is the address of a Node.
	source netip.Prefix
	ofNode bool
	timer  *time.Timer
	known  atomic.Bool // a call has been let in

	// all.mu guards what follows.
	places [2]*list.Element // in the lists of strangers; nil if it is none
	calls  int              // that have been let in and go on
	until  time.Time        // when the connection ends, unless there are calls then
	over   bool
	// refusals has a token for each call that may still be refused; nil means that none was
	// refused.
	refusals *rate.Limiter
	owner    string // the Caller of the first call that was let in and bounded
	owned    *list.Element
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
		displaced.close(reason)
	}
	return c
}

// close closes a connection that is over, for a reason. Who serves it notices.
func (c *Connection) close(reason string, attributes ...any) {
	c.all.closed.add(reason, c.raw.RemoteAddr(), attributes...)
	_ = c.raw.Close()
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
	c.disownLocked()
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
	c.close(reasonTimeout)
}

// stranger reports whether no call on the connection has been let in yet.
func (c *Connection) stranger() bool { return !c.known.Load() }

// Enter lets a call in, whose context ends with it, if identify tells whose it is: the client has
// shown who it is. The connection is no stranger any more, and lasts as long as there are such
// calls, and MuxOptions.MaxIdle longer. The error is a gRPC status. A connection on which identify
// has refused too many calls ends, and identify is not called.
func (c *Connection) Enter(ctx context.Context, identify func() (Caller, error)) error {
	if err := c.mayCall(); err != nil {
		return err
	}
	by, err := identify()
	if err != nil {
		c.refuse()
		return err
	}
	return c.letIn(ctx, by)
}

// mayCall ends the connection if too many calls were refused. Nothing is counted beyond the
// connection, so a client whose credentials are good loses nothing by the refusals of others at its
// address.
func (c *Connection) mayCall() error {
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

// refuse counts a call whose credentials are refused.
func (c *Connection) refuse() {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	if c.refusals == nil {
		c.refusals = rate.NewLimiter(rate.Every(refusedCallEvery), maxRefusedCalls)
	}
	c.refusals.Allow() // those that were under way at the same time may be more
}

func (c *Connection) letIn(ctx context.Context, by Caller) error {
	displaced, reason, err := c.enter(ctx, by)
	if displaced != nil {
		displaced.close(reasonCaller, "caller", by.Name)
	}
	if reason != "" {
		c.all.refused.add(reason, c.raw.RemoteAddr(), "err", err)
	}
	return err
}

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

// leave is the end of a call that was let in.
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
