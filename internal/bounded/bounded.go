// Package bounded bounds the connections to ports that are open to strangers, and serves HTTP on
// them.
//
// Guarantees:
//
//   - A Port never has more connections than its limits allow, in total and from one address. An
//     IPv6 /64 counts as one address. An IPv4 address that is mapped to IPv6 counts as the IPv4
//     address.
//   - No newcomer is refused. If there is no room, one connection of the address with the most
//     connections is closed: the one that has been silent for the longest time. So a probe of a
//     kubelet or load balancer is answered however many connections others hold.
//   - TLS handshakes are paced. One that waits for its turn is a connection like others: it counts,
//     and may be closed to make room.
package bounded

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/time/rate"
)

// MaxHandshake bounds the bytes of a client's part of a TLS handshake. It is above the largest
// record, which may be read with it.
const MaxHandshake = 32 << 10

// unbounded is the number of bytes that may be read of what is no handshake.
const unbounded = -1

// maxHeaderBytes bounds a request's headers, in bytes. It leaves room for a ServiceAccount token.
const maxHeaderBytes = 16 << 10

// logInterval is how often displaced connections of a port are logged.
const logInterval = time.Minute

// Limits bounds the connections to a port.
type Limits struct {
	// Total and PerAddress bound the connections that are open at a time.
	Total, PerAddress int
	// Read is how long a TLS handshake may take, and then a request with its headers to arrive.
	Read time.Duration
	// Write is how long an answer may take, once the request's headers have arrived.
	Write time.Duration
	// Idle is how long a connection may wait for its next request.
	Idle time.Duration
	// Handshakes bounds the TLS handshakes per second; Total of them may come at once. A handshake
	// costs most of the CPU time that a stranger can take. Zero means no bound.
	Handshakes rate.Limit
}

var (
	// Health has the limits of health checks. Probes are small, and most of them use a new
	// connection.
	Health = Limits{Total: 256, PerAddress: 64, Read: 5 * time.Second, Write: 5 * time.Second, Idle: 20 * time.Second}
	// ServiceHealth has the limits of all health checks of Services together. Load balancers check
	// many Services from few addresses.
	ServiceHealth = Limits{Total: 1024, PerAddress: 256, Read: 5 * time.Second, Write: 5 * time.Second, Idle: 20 * time.Second}
	// Metrics has the limits of metrics. Write leaves time for a slow reader of many metrics, and
	// Idle is longer than the intervals of scrapers.
	// All of Total have had their turn within Read.
	Metrics = Limits{
		Total: 64, PerAddress: 16, Read: 10 * time.Second, Write: 30 * time.Second, Idle: 3 * time.Minute, Handshakes: 20,
	}
	// Plaintext has the limits of gRPC without TLS. All agents may come from one address, such as
	// that of a mesh's proxy, or of a test. There are no timeouts, as the gRPC server has its own.
	Plaintext = Limits{Total: 16384, PerAddress: 8192}
)

// NewDisplaced returns the metric of displaced connections by port. component is "server" or
// "agent".
func NewDisplaced(r prometheus.Registerer, component string) *prometheus.CounterVec {
	return promauto.With(r).NewCounterVec(prometheus.CounterOpts{
		Namespace: "slicecast", Subsystem: component, Name: "displaced_connections_total",
		Help: "Number of connections that were closed to make room for new ones, by port: health, service_health, " +
			"metrics, pages (kube-proxy's), or plaintext (gRPC without TLS).",
	}, []string{"port"})
}

// Port bounds the connections of one listener, or of several that share the limits. Its invariants,
// under mu:
//
//  1. conns has every connection that is admitted and not removed, each at its index.
//  2. addresses has exactly the addresses of these connections, and each address counts its
//     connections.
//  3. conns has at most limits.Total connections, and each address at most limits.PerAddress.
type Port struct {
	name      string
	limits    Limits
	logger    *slog.Logger
	displaced prometheus.Counter
	warn      rate.Sometimes

	clock atomic.Uint64 // counts the reads and writes of all connections

	handshakes *rate.Limiter
	// turn has one place, for the handshake that waits for handshakes. Only one does, so that those
	// which are closed meanwhile leave no reservations. Addresses take turns.
	turn *Turns

	mu        sync.Mutex // guards the fields below
	conns     []*conn    // in no order; each has its index
	addresses map[netip.Prefix]*address
}

type address struct {
	count int // number of its connections; guarded by Port.mu
}

// NewPort returns a Port without listeners. name is its label in displaced, which NewDisplaced
// returns.
func NewPort(name string, limits Limits, logger *slog.Logger, displaced *prometheus.CounterVec) *Port {
	pace := limits.Handshakes
	if pace == 0 {
		pace = rate.Inf
	}
	return &Port{
		handshakes: rate.NewLimiter(pace, limits.Total), turn: NewTurns(1),
		name: name, limits: limits, logger: logger, displaced: displaced.WithLabelValues(name),
		warn: rate.Sometimes{Interval: logInterval}, addresses: make(map[netip.Prefix]*address),
	}
}

// Listener returns a listener that accepts the connections of l within the limits.
func (p *Port) Listener(l net.Listener) net.Listener { return &listener{l, p, unbounded} }

// Server returns an HTTP server with the limits' timeouts, for one of the port's listeners.
func (p *Port) Server(handler http.Handler) *http.Server {
	return &http.Server{
		Handler: handler, MaxHeaderBytes: maxHeaderBytes,
		ReadTimeout: p.limits.Read, WriteTimeout: p.limits.Write, IdleTimeout: p.limits.Idle,
		ErrorLog: slog.NewLogLogger(p.logger.Handler(), slog.LevelDebug),
	}
}

// Serve answers requests on l within the limits until ctx ends, over TLS unless config is nil. It
// then closes l. Pending requests have one second to finish.
func (p *Port) Serve(ctx context.Context, l net.Listener, config *tls.Config, handler http.Handler) error {
	within := p.Listener(l)
	if config != nil {
		within = tls.NewListener(&listener{l, p, MaxHandshake}, p.paced(config))
	}
	server := p.Server(handler)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(within) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serve HTTP on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	shutdown, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := server.Shutdown(shutdown); err != nil {
		_ = server.Close() // the only error is that of the listener, which Shutdown has closed
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", l.Addr(), err)
	}
	return nil
}

// paced returns the configuration of a listener of the port with paced and bounded handshakes.
func (p *Port) paced(config *tls.Config) *tls.Config {
	return Handshakes(config, func(hello *tls.ClientHelloInfo, _ *tls.Config) error {
		return p.awaitTurn(hello.Context(), hello.Conn.(*conn))
	}, func(under net.Conn, _ tls.ConnectionState) error {
		under.(*conn).left = unbounded
		return nil
	})
}

// Handshakes returns a server's configuration that calls functions in each handshake. It calls
// begin once the client's first message is there, before anything is computed, with a copy of the
// configuration that the handshake will use. It calls shown once the client's certificates are
// there, or it has sent none. If VerifyConnection verifies the certificates, that comes next.
func Handshakes(
	config *tls.Config, begin func(*tls.ClientHelloInfo, *tls.Config) error, shown func(net.Conn, tls.ConnectionState) error,
) *tls.Config {
	choose := config.GetConfigForClient
	out := config.Clone()
	out.GetConfigForClient = func(hello *tls.ClientHelloInfo) (chosen *tls.Config, err error) {
		if choose != nil {
			if chosen, err = choose(hello); err != nil {
				return nil, err
			}
		}
		if chosen == nil {
			chosen = config
		}
		chosen = chosen.Clone()
		verify := chosen.VerifyConnection
		chosen.VerifyConnection = func(state tls.ConnectionState) error {
			if err := shown(hello.Conn, state); err != nil || verify == nil {
				return err
			}
			return verify(state)
		}
		return chosen, begin(hello, chosen)
	}
	return out
}

// awaitTurn waits until a connection's handshake may be computed. It returns an error if ctx ends
// or the connection is closed, or if the handshake would take too long.
func (p *Port) awaitTurn(ctx context.Context, c *conn) error {
	late := time.AfterFunc(p.limits.Read, func() { _ = c.close() })
	defer late.Stop()
	if !p.turn.Take(c.prefix, false, c.gone) {
		return net.ErrClosed
	}
	defer p.turn.Leave()
	reserved := p.handshakes.Reserve()
	wait := time.NewTimer(reserved.Delay())
	defer wait.Stop()
	select {
	case <-wait.C:
		return nil
	case <-c.gone:
		reserved.Cancel()
		return net.ErrClosed
	case <-ctx.Done():
		reserved.Cancel()
		return ctx.Err()
	}
}

type listener struct {
	net.Listener
	port *Port
	left int // see conn
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.port.admit(raw, l.left), nil
}

func (p *Port) admit(raw net.Conn, left int) *conn {
	gone := make(chan struct{})
	c := &conn{Conn: raw, port: p, left: left, gone: gone, close: sync.OnceValue(func() error {
		close(gone)
		return raw.Close()
	})}
	c.active()
	prefix := origin(raw.RemoteAddr())
	p.mu.Lock()
	from := p.addresses[prefix]
	if from == nil {
		from = new(address)
	}
	var victim *conn
	switch {
	case from.count >= p.limits.PerAddress:
		victim = p.victimLocked(from)
	case len(p.conns) >= p.limits.Total:
		victim = p.victimLocked(nil)
	}
	if victim != nil {
		p.removeLocked(victim)
	}
	p.addresses[prefix] = from
	from.count++
	c.prefix, c.from, c.index = prefix, from, len(p.conns)
	p.conns = append(p.conns, c)
	p.mu.Unlock()
	if victim != nil {
		p.displace(victim)
	}
	return c
}

// victimLocked returns the connection to displace. It is the one that has been silent for the
// longest time among those from an address, or, if from is nil, among those from the addresses with
// the most connections.
func (p *Port) victimLocked(from *address) (victim *conn) {
	for _, c := range p.conns {
		switch {
		case from != nil && c.from != from:
		case victim == nil, c.from.count > victim.from.count,
			c.from.count == victim.from.count && c.last.Load() < victim.last.Load():
			victim = c
		}
	}
	return victim
}

// removeLocked removes a connection, if it is not removed yet.
func (p *Port) removeLocked(c *conn) {
	if c.index < 0 {
		return
	}
	last := p.conns[len(p.conns)-1]
	p.conns[c.index], last.index = last, c.index
	p.conns[len(p.conns)-1] = nil
	p.conns = p.conns[:len(p.conns)-1]
	c.index = -1
	if c.from.count--; c.from.count == 0 {
		delete(p.addresses, c.prefix)
	}
}

func (p *Port) displace(c *conn) {
	p.displaced.Inc()
	p.warn.Do(func() {
		p.logger.Warn("Closed a connection to make room for a new one; logged at most once per interval",
			"port", p.name, "client", c.RemoteAddr().String(), "interval", logInterval)
	})
	_ = c.close() // the client is not told
}

type conn struct {
	net.Conn
	port *Port
	// left is how many bytes of a TLS handshake may still be read; unbounded after it, and without
	// TLS. Only the reading goroutine uses it.
	left int
	// close closes Conn. When it returns, the socket is closed, even if another caller was first.
	close func() error
	gone  <-chan struct{} // closed when close is called
	last  atomic.Uint64   // the port's clock at the last read or write

	prefix netip.Prefix
	from   *address
	index  int // in Port.conns; -1 if removed; guarded by Port.mu
}

func (c *conn) active() { c.last.Store(c.port.clock.Add(1)) }

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) {
	if c.left != unbounded {
		if c.left == 0 {
			return 0, errors.New("the TLS handshake is too long")
		}
		b = b[:min(len(b), c.left)]
	}
	n, err := c.Conn.Read(b)
	if c.left != unbounded {
		c.left -= n
	}
	if n > 0 {
		c.active()
	}
	return n, err
}

// Write implements net.Conn.
func (c *conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if n > 0 {
		c.active()
	}
	return n, err
}

// Close implements net.Conn.
func (c *conn) Close() error {
	err := c.close() // the connection counts until its socket is closed
	c.port.mu.Lock()
	defer c.port.mu.Unlock()
	c.port.removeLocked(c)
	return err
}

// origin returns the prefix that counts as the address of a client. Addresses other than IP share
// one.
func origin(a net.Addr) netip.Prefix {
	from, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{}
	}
	bits := 64
	ip := from.Addr().Unmap()
	if ip.Is4() {
		bits = 32
	}
	return netip.PrefixFrom(ip.WithZone(""), bits).Masked()
}
