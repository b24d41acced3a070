package h2

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/wire"
)

// Protocol is what a client offers in TLS (ALPN, RFC 7301), before "h2", to be served by a Server.
// The connection then carries standard HTTP/2 and gRPC; the name only selects the server.
const Protocol = wire.Protocol

// http2Protocol is the registered name of HTTP/2.
const http2Protocol = "h2"

const (
	// These bound the wait after a temporary error of Accept, such as too many open files.
	minAcceptDelay, maxAcceptDelay = 5 * time.Millisecond, time.Second
	// logInterval is how often trouble of one kind that strangers can cause is logged.
	logInterval = time.Minute
)

// MuxOptions configures a Mux. All fields are required.
type MuxOptions struct {
	Listener net.Listener
	// TLS is the server's configuration. The Mux replaces its NextProtos, and those of the
	// configurations that GetConfigForClient returns.
	TLS *tls.Config
	// Server serves the connections of clients that offer Protocol.
	Server *Server
	// A connection is a stranger until Connection.Enter has admitted a call. StrangerTimeout bounds
	// the time from accept until then, for TLS, HTTP/2 and the call together. MaxIdle is how long
	// the connection may be without an admitted call after that.
	StrangerTimeout, MaxIdle time.Duration
	// MaxStrangersOfNodes bounds the strangers whose address is a Node's, and MaxStrangers the
	// others. MaxStrangersPerAddress bounds those of one address. In IPv6 a /64 counts as one
	// address, unless the address is a Node's. Newcomers displace the oldest strangers.
	MaxStrangersOfNodes, MaxStrangers, MaxStrangersPerAddress int
	// NodeAddress reports whether an address is a Node's. It must not wait.
	NodeAddress func(netip.Addr) bool
	Logger      *slog.Logger
	Registerer  prometheus.Registerer
}

// Mux accepts TLS connections for two servers on one listener. A Server serves connections that
// speak Protocol. A grpc.Server, which serves GRPC() with Credentials(), serves the others.
//
// Handshakes run concurrently, but only a few compute at a time. So a thousand clients that connect
// at once do not delay those that are connected, and a client that answers slowly delays no other.
// Addresses take turns, so that a client is not delayed by how many others one address has. A
// handshake with a client certificate goes on in places of its own, so that it delays none without.
//
// Invariants:
//
//  1. Once ctx has ended, no handshake starts.
//  2. Each handshake that computes has a place, and those that wait for a client have none.
type Mux struct {
	options MuxOptions
	tls     credentials.TransportCredentials
	// anonymous has the places of handshakes, and certified those of handshakes whose client has
	// sent a certificate; see socket.turn.
	anonymous, certified *bounded.Turns

	grpc   handover
	ctx    context.Context // of all handshakes; ends with Close
	cancel context.CancelFunc
	mu     sync.Mutex     // orders the start of handshakes and Close
	wait   sync.WaitGroup // counts the handshakes
	conns  *connections
	warn   rate.Sometimes
	errors prometheus.Counter
}

// NewMux returns a Mux. It accepts connections while Serve runs.
func NewMux(o MuxOptions) *Mux {
	m := &Mux{
		options:   o,
		anonymous: bounded.NewTurns(runtime.GOMAXPROCS(0)), certified: bounded.NewTurns(runtime.GOMAXPROCS(0)),
		grpc: handover{address: o.Listener.Addr(), conns: make(chan net.Conn), closed: make(chan struct{})},
		warn: rate.Sometimes{Interval: logInterval},
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "slicecast_server_handshake_errors_total",
			Help: "Number of connections that ended before the TLS handshake did.",
		}),
	}
	m.tls = credentials.NewTLS(m.config(o.TLS))
	m.conns = newConnections(&m.options)
	o.Registerer.MustRegister(m.errors)
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m
}

// config returns the configuration of TLS with the protocols that a Mux serves.
func (m *Mux) config(c *tls.Config) *tls.Config {
	return bounded.Handshakes(c, func(_ *tls.ClientHelloInfo, c *tls.Config) error {
		c.NextProtos = []string{Protocol, http2Protocol}
		c.DynamicRecordSizingDisabled = true // one write is one record and one system call
		return nil
	}, func(under net.Conn, state tls.ConnectionState) error {
		if len(state.PeerCertificates) == 0 {
			return nil
		}
		turn := under.(*socket).turn
		turn.of.show(state.PeerCertificates)
		return turn.move(m.certified)
	})
}

// Serve accepts connections until the listener is closed. It then returns nil.
func (m *Mux) Serve() error {
	var delay time.Duration
	for {
		conn, err := m.options.Listener.Accept()
		switch temporary := (interface{ Temporary() bool })(nil); {
		case err == nil:
			delay = 0
			m.start(conn)
		case errors.Is(err, net.ErrClosed):
			return nil
		case errors.As(err, &temporary) && temporary.Temporary():
			m.warn.Do(func() {
				m.options.Logger.Warn("Cannot accept connections, trying again",
					"address", m.grpc.address.String(), "err", err)
			})
			delay = min(max(2*delay, minAcceptDelay), maxAcceptDelay)
			select {
			case <-time.After(delay):
			case <-m.ctx.Done():
				return nil
			}
		default:
			return fmt.Errorf("accept on %v: %w", m.grpc.address, err)
		}
	}
}

func (m *Mux) start(conn net.Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx.Err() != nil {
		conn.Close()
		return
	}
	c := m.conns.enter(conn)
	m.wait.Go(func() { m.handshake(c) })
}

func (m *Mux) handshake(c *Connection) {
	// the handshake then fails, and its error is counted
	stop := context.AfterFunc(m.ctx, func() { _ = c.raw.Close(); c.end() })
	defer stop()
	s := &socket{Conn: c.raw, turn: &turn{places: m.anonymous, of: c}}
	conn, info, err := m.secure(s)
	if err != nil {
		m.errors.Inc()
		var certificate *tls.CertificateVerificationError
		if errors.As(err, &certificate) {
			m.conns.closed.Add(reasonCertificate, c.raw.RemoteAddr(), "err", err)
		}
		m.options.Logger.Debug("TLS handshake failed", "client", c.raw.RemoteAddr().String(), "err", err)
		c.raw.Close()
		c.end()
		return
	}
	if info.State.NegotiatedProtocol != Protocol {
		handed := newHandedOver(conn, s, connectionInfo{info, c}, m.options.Server)
		select {
		case m.grpc.conns <- handed:
		case <-m.grpc.closed:
			_ = handed.Close()
		case <-m.ctx.Done():
			_ = handed.Close()
		}
		return
	}
	if err := m.options.Server.serve(conn, s, connectionInfo{info, c}); err != nil {
		m.options.Logger.Debug("Cannot serve a connection", "client", c.raw.RemoteAddr().String(), "err", err)
		c.raw.Close()
		c.end()
	}
}

// secure does the TLS handshake. It holds a place from the client's first bytes on, except while it
// waits for the client.
func (m *Mux) secure(s *socket) (net.Conn, credentials.TLSInfo, error) {
	defer func() {
		s.turn.leave()
		s.turn = nil
	}()
	conn, info, err := m.tls.ServerHandshake(s)
	if err != nil {
		return nil, credentials.TLSInfo{}, err
	}
	return conn, info.(credentials.TLSInfo), nil
}

// Close closes the listener and the connections of strangers. A grpc.Server that stops would
// otherwise wait for the first bytes of each of them before it tells its other clients. Connections
// with an admitted call, or that had one, stay open. The grpc.Server closes GRPC().
func (m *Mux) Close() error {
	err := m.options.Listener.Close()
	m.mu.Lock()
	m.cancel()
	m.mu.Unlock()
	m.wait.Wait()
	m.conns.closeStrangers()
	return err
}

// GRPC returns the listener for a grpc.Server with Credentials.
func (m *Mux) GRPC() net.Listener { return &m.grpc }

// handover is a listener of connections that a Mux has accepted.
type handover struct {
	address net.Addr
	conns   chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

// Accept implements net.Listener.
func (h *handover) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *handover) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

// Addr implements net.Listener.
func (h *handover) Addr() net.Addr { return h.address }

// handedOver is a connection with a completed TLS handshake that grpc-go serves. It adds bounds
// that grpc-go lacks: on the client's frames, and on how long the client may not read.
type handedOver struct {
	net.Conn
	info   connectionInfo
	server *Server
	guard  guard
	over   sync.Once // done by Close or a violation, whichever comes first
}

func newHandedOver(conn net.Conn, under *socket, info connectionInfo, s *Server) *handedOver {
	h := &handedOver{Conn: conn, info: info, server: s}
	h.guard = s.newGuard(conn, under, info.connection, true, func() { h.broken(errBlockTooSlow) })
	return h
}

// broken closes the connection of a client that broke the protocol.
func (h *handedOver) broken(v violation) {
	h.over.Do(func() {
		h.server.violations.Inc()
		h.server.options.Logger.Debug("Client broke the protocol", "client", h.RemoteAddr().String(), "err", v)
	})
	_ = h.Close() // the client is given up
}

// Read implements net.Conn.
func (h *handedOver) Read(b []byte) (int, error) {
	n, err := h.guard.Read(b)
	var v violation
	if errors.As(err, &v) {
		h.broken(v)
	}
	return n, err
}

// Write implements net.Conn.
func (h *handedOver) Write(b []byte) (int, error) {
	if err := h.SetWriteDeadline(time.Now().Add(h.server.writeTime)); err != nil {
		return 0, err
	}
	n, err := h.Conn.Write(b)
	h.guard.budget.pay(n)
	if err != nil {
		_ = h.Close() // grpc-go would only notice at its next read that the client is gone
	}
	return n, err
}

// Close implements net.Conn.
func (h *handedOver) Close() error {
	h.over.Do(func() {})
	h.info.connection.end()
	return h.Conn.Close()
}

// handedOverCredentials accepts the connections of a handover, whose handshake is done.
type handedOverCredentials struct{}

// Credentials returns the credentials for the grpc.Server that serves Mux.GRPC. Handlers see the
// same peer as with credentials.NewTLS; ConnectionOf returns what the Mux adds.
func Credentials() credentials.TransportCredentials { return handedOverCredentials{} }

// ServerHandshake implements credentials.TransportCredentials.
func (handedOverCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	h, ok := c.(*handedOver)
	if !ok {
		return nil, nil, fmt.Errorf("unsupported connection type %T: use these credentials with the listener of a Mux",
			c)
	}
	return h, h.info, nil
}

// ClientHandshake implements credentials.TransportCredentials.
func (handedOverCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these credentials are for servers: use credentials.NewTLS for a client")
}

// Info implements credentials.TransportCredentials.
func (handedOverCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (c handedOverCredentials) Clone() credentials.TransportCredentials { return c }

// OverrideServerName implements credentials.TransportCredentials. Only clients use it.
func (handedOverCredentials) OverrideServerName(string) error { return nil }
