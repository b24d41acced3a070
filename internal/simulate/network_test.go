// This file is the network: connections in memory between hosts, with delay, loss of connections,
// partitions of one direction or both, hosts that end, and hosts that vanish.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	// connectTime is how long a host tries to connect if nothing answers, as with TCP.
	connectTime = 60 * time.Second
	// socketBuffer is the number of bytes that are on their way or wait for the reader, per
	// direction. Writes wait beyond that.
	socketBuffer = 128 << 10
	// backlog is the number of connections that wait for a listener.
	backlog = 256
)

// way is one direction between two hosts, by IP address.
type way struct{ from, to string }

// weather is the state of a way.
type weather struct {
	cut   bool          // nothing arrives
	delay time.Duration // how long a byte takes
	rate  int           // bytes per second, of all connections together; 0 means any number
	// sentBy is when the last byte so far leaves, if there is a rate.
	sentBy time.Time
}

// network connects hosts.
//
// Invariants, under mu:
//
//  1. What was written to a connection arrives in order, or the connection breaks.
//  2. Nothing passes a way that is cut, including the end of a connection. It arrives later, unless
//     the connection breaks before.
//  3. A process that has ended sends nothing any more.
type network struct {
	mu        sync.Mutex // guards all fields, and those of connections and listeners
	ways      map[way]weather
	listeners map[netip.AddrPort]*listener
	conns     []*conn         // open ones, in the order in which they were made
	down      map[string]bool // hosts without power
	weathered chan struct{}   // closed when a way or a host changes
	nextPort  uint16
}

func newNetwork() *network {
	return &network{
		ways: make(map[way]weather), listeners: make(map[netip.AddrPort]*listener), down: make(map[string]bool),
		weathered: make(chan struct{}), nextPort: 32768,
	}
}

// set changes a way, and reports whether it is another one now.
func (n *network) set(w way, change func(*weather)) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := n.ways[w]
	now := before
	change(&now)
	n.ways[w] = now
	n.changedLocked()
	return now != before
}

// heal ends all cuts and delays.
func (n *network) heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.ways)
	n.changedLocked()
}

func (n *network) changedLocked() {
	close(n.weathered)
	n.weathered = make(chan struct{})
	for _, c := range n.conns {
		c.in.signalLocked()
	}
}

// power sets whether a host has power. Without it, connections are silent rather than broken.
func (n *network) power(host string, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down[host] = !on
	if !on {
		n.endLocked(host, func(*conn) bool { return true }, false)
	}
	n.changedLocked()
}

// process is what has connections on a host, and loses them when it ends.
type process struct {
	network *network
	host    string
	ended   bool
	end     chan struct{} // closed when ended is set

	// The network's mutex guards the fields below, as it guards ended.
	limit   int        // the memory that it may need, in bytes; 0 means any
	dirty   int        // bytes written to files that are not synchronized
	starved int        // the memory for which it was killed, in bytes; 0 if it was not
	keeps   func() int // what it counts of its own, in bytes; nil means nothing. It locks no network.
}

func (n *network) process(host string) *process {
	return &process{network: n, host: host, end: make(chan struct{})}
}

// kill ends the connections and listeners of a process. Peers see resets.
func (p *process) kill() {
	p.network.mu.Lock()
	defer p.network.mu.Unlock()
	p.killLocked()
}

func (p *process) killLocked() {
	n := p.network
	if !p.ended {
		p.ended = true
		close(p.end)
	}
	for address, l := range n.listeners {
		if l.process == p {
			delete(n.listeners, address)
			l.closeLocked()
		}
	}
	n.endLocked(p.host, func(c *conn) bool { return c.process == p }, true)
}

func (p *process) hasEnded() bool {
	p.network.mu.Lock()
	defer p.network.mu.Unlock()
	return p.ended
}

// reset breaks all connections between two hosts, and reports whether there were any.
func (n *network) reset(a, b string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := len(n.conns)
	n.endLocked(a, func(c *conn) bool { return c.in.way.from == b }, true)
	n.endLocked(b, func(c *conn) bool { return c.in.way.from == a }, true)
	return len(n.conns) < before
}

// endLocked ends the chosen connections of a host. If told, peers that can be reached see resets.
func (n *network) endLocked(host string, chosen func(*conn) bool, told bool) {
	for _, c := range slices.Clone(n.conns) {
		if c.in.way.to != host || !chosen(c) {
			continue
		}
		c.in.breakLocked(syscall.ECONNABORTED)
		c.gone = true
		peer := c.peer
		if told && !n.ways[peer.in.way].cut {
			peer.in.breakLocked(syscall.ECONNRESET)
		} else {
			// What was sent is lost, and nothing follows.
			peer.in.segments, peer.in.size = nil, 0
		}
		n.removeLocked(c)
	}
}

func (n *network) removeLocked(c *conn) {
	n.conns = slices.DeleteFunc(n.conns, func(o *conn) bool { return o == c })
}

// listener implements net.Listener.
type listener struct {
	process *process
	address netip.AddrPort
	queue   chan *conn
	ended   chan struct{}
	closed  bool
}

// listen returns a listener on an address of the process's host.
func (p *process) listen(address netip.AddrPort) *listener {
	p.network.mu.Lock()
	defer p.network.mu.Unlock()
	l := &listener{process: p, address: address, queue: make(chan *conn, backlog), ended: make(chan struct{})}
	p.network.listeners[address] = l
	return l
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.ended:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	n := l.process.network
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners[l.address] == l {
		delete(n.listeners, l.address)
	}
	l.closeLocked()
	return nil
}

func (l *listener) closeLocked() {
	if !l.closed {
		l.closed = true
		close(l.ended)
	}
}

// Addr implements net.Listener.
func (l *listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.address) }

// dial connects to an address. It is a function for gRPC and for net/http.
func (p *process) dial(ctx context.Context, _, to string) (net.Conn, error) {
	address, err := netip.ParseAddrPort(to)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	n := p.network
	there, back := way{p.host, address.Addr().String()}, way{address.Addr().String(), p.host}
	for {
		n.mu.Lock()
		changed := n.weathered
		blocked := n.ways[there].cut || n.ways[back].cut || n.down[there.to] || n.down[there.from]
		delay := n.ways[there].delay + n.ways[back].delay
		n.mu.Unlock()
		if !blocked {
			if err := p.pause(ctx, delay); err != nil {
				return nil, p.failed(to, err)
			}
			return p.connect(address)
		}
		select {
		case <-ctx.Done():
			return nil, p.failed(to, ctx.Err())
		case <-p.end:
			return nil, p.failed(to, errEnded)
		case <-changed:
		}
	}
}

func (p *process) dialGRPC(ctx context.Context, to string) (net.Conn, error) {
	return p.dial(ctx, "tcp", to)
}

func (p *process) failed(to string, err error) error {
	return &net.OpError{Op: "dial", Net: "tcp", Err: fmt.Errorf("%s to %s: %w", p.host, to, err)}
}

// pause waits, unless the context or the process ends.
func (p *process) pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-p.end:
		return errEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *process) connect(to netip.AddrPort) (net.Conn, error) {
	n := p.network
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.listeners[to]
	if p.ended || l == nil || len(l.queue) == cap(l.queue) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	n.nextPort++
	if n.nextPort == 0 {
		n.nextPort = 32768
	}
	from := netip.AddrPortFrom(netip.MustParseAddr(p.host), n.nextPort)
	here := &conn{process: p, local: from, remote: to}
	there := &conn{process: l.process, local: to, remote: from}
	here.peer, there.peer = there, here
	here.in = newPipe(n, way{l.process.host, p.host}, here)
	there.in = newPipe(n, way{p.host, l.process.host}, there)
	here.in.peer, there.in.peer = there, here
	n.conns = append(n.conns, here, there)
	l.queue <- there
	return here, nil
}

// segment is what one Write has sent; no bytes mean the end of the stream.
type segment struct {
	at   time.Time // when it arrives
	data []byte
}

// pipe is one direction of a connection. The network's mutex guards it.
type pipe struct {
	network  *network
	way      way
	owner    *conn // who reads
	peer     *conn // who writes
	segments []segment
	size     int       // bytes in segments
	last     time.Time // when the last segment arrives
	ended    bool      // the writer has sent the end
	err      error     // set once the pipe is broken
	changed  chan struct{}
	// readBy and writeBy are deadlines; zero means none.
	readBy, writeBy time.Time
}

func newPipe(n *network, w way, owner *conn) *pipe {
	return &pipe{network: n, way: w, owner: owner, changed: make(chan struct{})}
}

func (p *pipe) signalLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *pipe) breakLocked(err error) {
	if p.err == nil {
		p.err = err
		p.segments, p.size = nil, 0
	}
	p.signalLocked()
}

func passed(deadline time.Time) bool { return !deadline.IsZero() && !deadline.After(time.Now()) }

// wait unlocks the network's mutex until the pipe changes, or until one of the times; zero times do
// not count.
func (p *pipe) wait(times ...time.Time) {
	changed := p.changed
	var first time.Time
	for _, t := range times {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	p.network.mu.Unlock()
	defer p.network.mu.Lock()
	if first.IsZero() {
		<-changed
		return
	}
	t := time.NewTimer(time.Until(first))
	defer t.Stop()
	select {
	case <-changed:
	case <-t.C:
	}
}

func (p *pipe) read(b []byte) (int, error) {
	p.network.mu.Lock()
	defer p.network.mu.Unlock()
	for {
		var next time.Time
		switch {
		case p.owner.closed:
			return 0, net.ErrClosed
		case p.err != nil:
			return 0, p.err
		case passed(p.readBy):
			return 0, os.ErrDeadlineExceeded
		case len(b) == 0:
			return 0, nil
		case len(p.segments) > 0 && !p.network.ways[p.way].cut:
			first := &p.segments[0]
			if next = first.at; next.After(time.Now()) {
				break
			}
			if len(first.data) == 0 {
				return 0, io.EOF
			}
			n := copy(b, first.data)
			if first.data = first.data[n:]; len(first.data) == 0 {
				p.segments = p.segments[1:]
			}
			p.size -= n
			p.signalLocked()
			return n, nil
		}
		p.wait(next, p.readBy)
	}
}

// sendLocked sends as much of b as the buffer takes.
func (p *pipe) sendLocked(b []byte) int {
	n := min(len(b), socketBuffer-p.size)
	if n <= 0 {
		return 0
	}
	p.addLocked(append([]byte(nil), b[:n]...))
	p.size += n
	p.owner.process.chargeLocked()
	p.peer.process.chargeLocked()
	return n
}

func (p *pipe) addLocked(data []byte) {
	at, w := time.Now(), p.network.ways[p.way]
	if w.rate > 0 {
		if at.Before(w.sentBy) {
			at = w.sentBy
		}
		at = at.Add(time.Duration(len(data)) * time.Second / time.Duration(w.rate))
		w.sentBy = at
		p.network.ways[p.way] = w
	}
	at = at.Add(w.delay)
	if at.Before(p.last) {
		at = p.last
	}
	p.last = at
	p.segments = append(p.segments, segment{at, data})
	p.signalLocked()
}

// stateLocked returns the error of a write, if it fails at once.
func (p *pipe) stateLocked() error {
	switch {
	case p.peer.closed, p.ended:
		return net.ErrClosed
	case p.peer.in.err != nil:
		return p.peer.in.err
	case p.owner.gone || p.owner.closed:
		// The other side answers with a reset, if it can.
		w, back := p.network.ways[p.way], p.network.ways[p.peer.in.way]
		if !w.cut && !back.cut && !p.network.down[p.way.to] {
			p.peer.in.breakLocked(syscall.ECONNRESET)
			return syscall.EPIPE
		}
	}
	return nil
}

func (p *pipe) write(b []byte) (sent int, err error) {
	p.network.mu.Lock()
	defer p.network.mu.Unlock()
	for {
		if err := p.stateLocked(); err != nil {
			return sent, err
		}
		if passed(p.writeBy) {
			return sent, os.ErrDeadlineExceeded
		}
		if sent += p.sendLocked(b[sent:]); sent == len(b) {
			return sent, nil
		}
		p.wait(p.writeBy)
	}
}

// conn implements net.Conn. The network's mutex guards its fields.
type conn struct {
	process       *process
	local, remote netip.AddrPort
	in            *pipe // what it reads; it writes to peer.in
	peer          *conn
	closed        bool // by its own side
	gone          bool // its process has ended, or its connection was reset
}

var _ net.Conn = (*conn)(nil)

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) { return c.in.read(b) }

// Write implements net.Conn.
func (c *conn) Write(b []byte) (int, error) { return c.peer.in.write(b) }

// TryWrite writes what the buffer takes at once, as package h2 needs.
func (c *conn) TryWrite(b []byte) (int, error) {
	n := c.in.network
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := c.peer.in.stateLocked(); err != nil {
		return 0, err
	}
	return c.peer.in.sendLocked(b), nil
}

// CloseWrite sends the end of the stream.
func (c *conn) CloseWrite() error {
	n := c.in.network
	n.mu.Lock()
	defer n.mu.Unlock()
	c.endLocked()
	return nil
}

func (c *conn) endLocked() {
	if out := c.peer.in; !out.ended && out.err == nil {
		out.ended = true
		out.addLocked(nil)
	}
}

// Close implements net.Conn.
func (c *conn) Close() error {
	n := c.in.network
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.endLocked()
	c.closed = true
	n.removeLocked(c)
	c.in.segments, c.in.size = nil, 0
	c.in.signalLocked()
	c.peer.in.signalLocked()
	return nil
}

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(c.local) }

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.remote) }

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *conn) SetReadDeadline(t time.Time) error {
	c.in.network.mu.Lock()
	defer c.in.network.mu.Unlock()
	c.in.readBy = t
	c.in.signalLocked()
	return nil
}

// SetWriteDeadline implements net.Conn.
func (c *conn) SetWriteDeadline(t time.Time) error {
	c.in.network.mu.Lock()
	defer c.in.network.mu.Unlock()
	c.peer.in.writeBy = t
	c.peer.in.signalLocked()
	return nil
}
