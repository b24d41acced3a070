// Package h2 serves one gRPC method to thousands of clients that mostly listen, for little more than what the TLS records
// cost that they are sent.
//
// grpc-go hands each message from goroutine to goroutine and keeps five of them and their buffers for each connection. A
// Server writes from the goroutine that has something to say, keeps two goroutines for a connection, and buffers only while
// something is written. It speaks HTTP/2 (RFC 9113) and gRPC over it as any server does, to grpc-go's client among others.
// A Mux puts it and a grpc.Server on one port.
//
// Guarantees:
//
//   - A connection has one stream at a time; when it has ended, there may be another.
//   - What is sent on a stream arrives in order and complete, or the stream ends with an error on both sides.
//   - Stream.TrySend never waits, and sends all or nothing.
//   - An idle connection has no buffers but that of its largest request headers. One whose client does not read has, beside
//     the state of TLS, at most 64 KiB that wait for it: what one write could not get rid of and what the client asked for
//     itself. Then it is closed.
//   - The connection is read whatever its writes wait for, so a client that is gone is found by pings at any time.
//   - A client that breaks the protocol, or keeps the server busy with frames that lead to nothing, loses its connection.
package h2

import (
	"context"
	"errors"
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
	// Serve runs the stream, in a goroutine of its own. What it returns becomes the stream's gRPC status, unless the stream has
	// ended for another reason: then Stream.Context is done, and Serve must return. It is called once, whatever happens.
	Serve() error
	// Message takes one message of the client, which is valid during the call only. Messages come in order, those that were
	// there before the session was open before Serve, the others beside it, on the goroutine that reads the connection: it must
	// not wait. An error ends the stream with that status.
	Message(b []byte) error
	// CloseSend says that there are no more messages; the stream goes on. It must not wait either.
	CloseSend()
}

// Options are what a Server is made of. All are required.
type Options struct {
	// Path is the method that is served: /package.Service/Method.
	Path string
	// Open decides about a stream before anything is sent: its error is the stream's status. It may wait; what the client sends
	// meanwhile is kept, up to a window of flow control. The Stream's context holds the client's metadata and peer.Peer as
	// grpc-go gives them. The connection is a stranger to its Mux until Connection.Enter is called; see ConnectionOf.
	Open func(*Stream) (Session, error)
	// MaxReceive is the size of the largest message of a client, in bytes; a larger one is RESOURCE_EXHAUSTED.
	MaxReceive int
	// MaxHeaderBytes bounds a request's headers, counted as RFC 9113, section 6.5.2, does.
	MaxHeaderBytes uint32
	// A client that was silent for PingInterval is pinged, and disconnected if it stays silent for PingTimeout.
	PingInterval, PingTimeout time.Duration
	// MinClientPing is how often a client may ping; one that does so more often, while it is sent nothing else, is disconnected.
	MinClientPing time.Duration
	// MaxIdle is how long a connection may go without a stream.
	MaxIdle    time.Duration
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// errStopped ends the connections of a server that is stopped.
var errStopped = errors.New("the server is stopped")

// Server serves the connections that a Mux brings.
type Server struct {
	options Options
	// parse is parseRequest, blockTime is maxBlockTime and writeTime is maxWriteTime, except in
	// tests.
	parse                func(f *http2.MetaHeadersFrame, path string) (request, *refusal)
	blockTime, writeTime time.Duration
	violations           prometheus.Counter
	// extra are streams beside another one of their connection.
	extra       prometheus.Counter
	extraLogged rate.Sometimes
	wait        sync.WaitGroup // for all goroutines, each of which is started from another or under mu

	mu    sync.Mutex // before conn.mu
	conns map[*conn]struct{}
	ended bool // no more connections
}

// New makes a server.
func New(o Options) *Server {
	s := &Server{
		options: o, parse: parseRequest, blockTime: maxBlockTime, writeTime: maxWriteTime,
		violations: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "slicecast_server_protocol_errors_total",
			Help: "Connections over TLS that were closed because the client broke the protocol of HTTP/2, if it is an agent, or sent too many frames.",
		}),
		extra: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "slicecast_server_extra_streams_total",
			Help: "Streams of agents that were refused because their connection had one already.",
		}),
		extraLogged: rate.Sometimes{Interval: logInterval},
		conns:       map[*conn]struct{}{},
	}
	o.Registerer.MustRegister(s.violations, s.extra)
	return s
}

// serve takes over a connection, which is TLS over the socket.
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

// end is for all connections, and there will be no more of them.
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

// GracefulStop lets the streams go on until they end by themselves, and no new ones begin. When the context ends, it stops
// those that are left and gives the context's error.
func (s *Server) GracefulStop(ctx context.Context) error {
	s.end((*conn).drainLocked)
	done := make(chan struct{})
	go func() {
		s.wait.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		s.Stop()
		<-done
		return ctx.Err()
	}
}
