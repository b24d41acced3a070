// Package h2 serves one gRPC method to thousands of clients that mostly receive. Its cost is little
// more than that of the TLS records that they are sent.
//
// grpc-go hands each message from goroutine to goroutine, and keeps five goroutines and their
// buffers for each connection. A Server writes from the goroutine that sends, keeps two goroutines
// for a connection, and buffers only during a write. It speaks standard HTTP/2 (RFC 9113) and gRPC,
// so any client can use it, such as grpc-go's. A Mux serves a Server and a grpc.Server on one port.
//
// Guarantees:
//
//   - A connection has one stream at a time. After a stream has ended, the client may open another.
//   - Messages on a stream arrive complete and in order, or the stream ends with an error on both
//     sides.
//   - Stream.TrySend never waits, and sends everything or nothing.
//   - An idle connection has no buffers except one of the size of its largest request headers.
//   - If a client does not read, its connection buffers at most 64 KiB in addition to the state of
//     TLS: the rest of one write, and answers to the client's own frames. Beyond that, the
//     connection is closed.
//   - The connection is read even while its writes are blocked, so pings always detect a client
//     that is gone.
//   - A client that breaks the protocol, or that keeps the server busy with useless frames, loses
//     its connection.
package h2

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/http2"
	"golang.org/x/time/rate"
)

// Session is the server's side of a stream.
type Session interface {
	// Serve runs the stream, in a goroutine of its own, and is called exactly once. Its result
	// becomes the stream's gRPC status. If the stream ends for another reason, Stream.Context is
	// done, and Serve must return.
	Serve() error
	// Message processes one message of the client. b is valid only during the call. Messages arrive
	// in order. Those that arrived before the session was open come before Serve is called. Later
	// ones come concurrently with Serve, on the goroutine that reads the connection, so Message
	// must not wait. An error ends the stream with that status.
	Message(b []byte) error
	// CloseSend reports that the client sends no more messages. The stream goes on. CloseSend must
	// not wait.
	CloseSend()
}

// Options configures a Server. All fields are required.
type Options struct {
	// Path is the served method: /package.Service/Method.
	Path string
	// Open accepts or refuses a stream before anything is sent on it. Its error is the stream's
	// status. Open may wait; meanwhile, the client's messages are buffered, up to a window of flow
	// control. The Stream's context carries the client's metadata and peer.Peer as in grpc-go. The
	// connection is a stranger to its Mux until Connection.Enter is called; see ConnectionOf.
	Open func(*Stream) (Session, error)
	// MaxReceive is the size of the largest message from a client, in bytes. A larger message ends
	// the stream with RESOURCE_EXHAUSTED.
	MaxReceive int
	// MaxHeaderBytes bounds a request's headers, counted as in RFC 9113, section 6.5.2.
	MaxHeaderBytes uint32
	// A client that was silent for PingInterval is pinged. If it stays silent for PingTimeout, it
	// is disconnected.
	PingInterval, PingTimeout time.Duration
	// MinClientPing is the shortest interval between a client's pings. A client that pings more
	// often while it is sent nothing else is disconnected.
	MinClientPing time.Duration
	// MaxIdle is how long a connection may be without a stream.
	MaxIdle    time.Duration
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// Server serves the connections that a Mux hands over.
//
// Invariants, under mu:
//
//  1. conns has exactly the connections whose goroutine has not ended.
//  2. Once ended is set, no connection is added.
type Server struct {
	options Options
	// parse, blockTime and writeTime are parseRequest, maxBlockTime and maxWriteTime, except in
	// tests.
	parse                func(f *http2.MetaHeadersFrame, path string) (request, *refusal)
	blockTime, writeTime time.Duration
	violations           prometheus.Counter
	// extra counts streams that were refused because their connection had one already.
	extra       prometheus.Counter
	extraLogged rate.Sometimes
	// wait counts all goroutines. Each of them is started by another one, or under mu before the
	// server has ended.
	wait sync.WaitGroup

	mu    sync.Mutex // guards the fields below; locked before conn.mu
	conns map[*conn]struct{}
	ended bool // no more connections are accepted
}

// New returns a Server and registers its metrics. It panics if they are registered already.
func New(o Options) *Server {
	s := &Server{
		options: o, parse: parseRequest, blockTime: maxBlockTime, writeTime: maxWriteTime,
		violations: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "slicecast_server_protocol_errors_total",
			Help: "Number of TLS connections that were closed because the client sent too many frames or an excessive " +
				"header block or, if it is an agent or a relay, broke the HTTP/2 protocol in any way.",
		}),
		extra: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "slicecast_server_extra_streams_total",
			Help: "Number of streams of agents and relays that were refused because their connection already had one.",
		}),
		extraLogged: rate.Sometimes{Interval: logInterval},
		conns:       map[*conn]struct{}{},
	}
	o.Registerer.MustRegister(s.violations, s.extra)
	return s
}

// serve starts to serve a connection. secure is TLS over the socket under.
func (s *Server) serve(secure net.Conn, under *socket, info connectionInfo) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return errStopped
	}
	c := newConn(s, secure, under, info)
	if err := c.start(); err != nil {
		return err
	}
	s.conns[c] = struct{}{}
	s.wait.Go(c.run)
	return nil
}

func (s *Server) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	c.gone()
}

// end refuses further connections and calls each for every open one, under its lock.
func (s *Server) end(each func(*conn)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for c := range s.conns {
		c.mu.Lock()
		each(c)
		c.mu.Unlock()
	}
}

// Stop closes all connections and waits for the sessions to return.
func (s *Server) Stop() {
	s.end(func(c *conn) { c.closeLocked(errStopped, false) })
	s.wait.Wait()
}

// GracefulStop refuses new streams and waits for the open ones to end. When the context ends, it
// stops the remaining streams and returns the context's error.
func (s *Server) GracefulStop(ctx context.Context) error {
	s.end((*conn).drainLocked)
	stop := context.AfterFunc(ctx, s.Stop)
	s.wait.Wait()
	if !stop() {
		return ctx.Err()
	}
	return nil
}
