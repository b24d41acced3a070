// Package floor measures against what nobody can do better: messages written to TLS connections and nothing else, without
// HTTP/2, state or answers. Its server side runs in the process that is measured, its client side with the nodes, so that it
// is the same two processes, machine and moment that pay.
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

// greeting is what a connection begins with when the server's side of it is ready.
const greeting = 1

// Writes are what a Server writes.
type Writes struct {
	// Size of a message in bytes.
	Size int `json:"size"`
	// AtATime is how many connections are written to at the same time; 0: as many as there are CPUs.
	AtATime int `json:"atATime"`
	// Schedule says when each connection gets a message.
	Schedule generate.Schedule `json:"schedule"`
}

// Server writes to the connections that it has accepted.
type Server struct {
	listener net.Listener
	wait     sync.WaitGroup
	ctx      context.Context // of handshakes
	cancel   context.CancelFunc

	mu    sync.Mutex // guards what follows
	conns []*tls.Conn
	ended bool
}

// Listen takes connections on loopback, and greets each with one byte when it is ready. Nothing is read from them.
func Listen(config *tls.Config) (*Server, error) {
	config = config.Clone()
	config.DynamicRecordSizingDisabled = true // one write is one record, and one system call
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		return nil, err
	}
	s := &Server{listener: l}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.wait.Go(s.accept)
	return s, nil
}

// Address that it listens on.
func (s *Server) Address() string { return s.listener.Addr().String() }

func (s *Server) accept() {
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return // closed; else clients wait for a greeting in vain, and say so
		}
		s.wait.Go(func() { s.begin(c.(*tls.Conn)) })
	}
}

// begin makes a connection ready. One that fails is not greeted.
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

// Write writes a message to every connection each time that the schedule says, and tells how late it began with that.
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
						return fmt.Errorf("raw connection: %w", err)
					}
				}
			})
		}
		return all.Wait()
	})
}

// Close ends all connections.
func (s *Server) Close() {
	s.listener.Close()
	s.cancel()
	s.mu.Lock()
	s.ended = true
	for _, c := range s.conns {
		c.NetConn().Close() // ends a write too
	}
	s.mu.Unlock()
	s.wait.Wait()
}
