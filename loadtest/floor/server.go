// Package floor measures a lower bound on costs: messages on TLS connections and nothing else,
// without HTTP/2, state or answers. Its server side runs in the process that is measured, and its
// client side in the processes with nodes. The bound is therefore measured in the same processes,
// on the same machine, and at the same time.
package floor

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/slicecast/slicecast/loadtest/generate"
)

// greeting is the number of bytes that the server sends once a connection is ready.
const greeting = 1

// Writes describes what a Server writes.
type Writes struct {
	// Size is the size of a message, in bytes.
	Size int `json:"size"`
	// AtATime is the number of connections to write to concurrently. 0 means one for each CPU.
	AtATime int `json:"atATime"`
	// Schedule says when each connection gets a message.
	Schedule generate.Schedule `json:"schedule"`
}

// Server writes to the connections that it has accepted.
type Server struct {
	listener net.Listener
	wait     sync.WaitGroup
	ctx      context.Context // context of handshakes
	cancel   context.CancelFunc

	mu    sync.Mutex // guards the fields below
	conns []*tls.Conn
	ended bool
}

// Listen starts a server on loopback. It greets each connection with one byte once the connection
// is ready, and reads nothing.
func Listen(config *tls.Config) (*Server, error) {
	config = config.Clone()
	config.DynamicRecordSizingDisabled = true // one record and one system call for each write
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		return nil, err
	}
	s := &Server{listener: l}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.wait.Go(s.accept)
	return s, nil
}

// Address returns the address that the server listens on.
func (s *Server) Address() string { return s.listener.Addr().String() }

func (s *Server) accept() {
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return // closed; after other errors, clients report that they got no greeting
		}
		s.wait.Go(func() { s.begin(c.(*tls.Conn)) })
	}
}

// begin completes the handshake of a connection and greets it. A connection that fails is closed
// without a greeting.
func (s *Server) begin(c *tls.Conn) {
	if c.HandshakeContext(s.ctx) != nil {
		c.NetConn().Close()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		c.NetConn().Close()
		return
	}
	s.conns = append(s.conns, c)
	_, _ = c.Write(make([]byte, greeting))
}

// Write writes a message to every connection at each time of the schedule, and returns how late
// these rounds started.
func (s *Server) Write(ctx context.Context, w Writes) (generate.Lag, error) {
	s.mu.Lock()
	conns := s.conns
	s.mu.Unlock()
	workers := w.AtATime
	if workers == 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	message := make([]byte, w.Size)
	return w.Schedule.Follow(ctx, func(int) error {
		var next atomic.Int64
		var all errgroup.Group
		for range workers {
			all.Go(func() error {
				for {
					i := int(next.Add(1)) - 1
					if i >= len(conns) {
						return nil
					}
					if _, err := conns[i].Write(message); err != nil {
						return fmt.Errorf("write to a raw connection: %w", err)
					}
				}
			})
		}
		return all.Wait()
	})
}

// Close stops listening, closes all connections, and waits for the server's goroutines.
func (s *Server) Close() {
	s.listener.Close()
	s.cancel()
	s.mu.Lock()
	s.ended = true
	for _, c := range s.conns {
		// This unblocks writes. c.Close would first send an alert, and wait for up to 5 s if the client
		// does not read.
		c.NetConn().Close()
	}
	s.mu.Unlock()
	s.wait.Wait()
}
