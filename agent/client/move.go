package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// reachTimeout bounds the attempt to reach a server that a client wants to move to.
const reachTimeout = 10 * time.Second

// errMove ends a stream whose client has reached a server that it prefers.
var errMove = errors.New("another server is preferred")

// move is a stream's intention to go to another server: the first of this node's by hashing. The stream goes on until that
// one is reached.
type move struct {
	timer    *time.Timer
	target   atomic.Pointer[Server]
	reaching atomic.Bool
	// failed is when the last attempt failed, in nanoseconds since 1970; 0: none has.
	failed atomic.Int64
}

// prepared is a connection that waits for its stream.
type prepared struct {
	server Server
	conn   *grpc.ClientConn
}

// learn takes the servers that the stream tells of.
func (s *stream) learn(m *pb.Servers) {
	changed := s.options.Cache.setServers(serversFromProto(m, s.names(s.server)))
	s.serversChanged = s.serversChanged || changed
	if s.synced && changed {
		s.considerMove()
	}
}

// considerMove decides whether and when the client moves. Where servers have come or gone, nodes move within moveWindow;
// a node that is elsewhere for another reason, or has just moved, waits for returnAfter or up to twice as long, so that no
// node goes to and fro. Where servers tell of none, it goes by those that it was given.
func (s *stream) considerMove() {
	known := s.options.Cache.knownServers()
	if len(known) == 0 {
		known = s.choice.given
	}
	known = preference(known, s.choice.node)
	if len(known) == 0 || known[0].Address == s.server.Address || s.drained > 0 {
		s.move.target.Store(nil)
		s.move.timer.Stop()
		return
	}
	if target := s.move.target.Load(); target != nil && *target == known[0] {
		return
	}
	d := rand.N(s.times.moveWindow)
	tried := time.Unix(0, s.move.failed.Load())
	if !s.serversChanged || time.Since(s.choice.moved) < s.times.returnAfter || time.Since(tried) < s.times.returnAfter {
		d = s.times.returnDelay()
	}
	s.move.target.Store(&known[0])
	s.move.timer.Reset(d + s.choice.rests(known[0].Address))
}

func (t *times) returnDelay() time.Duration { return t.returnAfter + rand.N(t.returnAfter) }

// reach connects to the preferred server, and then ends the stream. Where that fails the stream goes on.
func (s *stream) reach(ctx context.Context) {
	target := s.move.target.Load()
	if target == nil || !s.move.reaching.CompareAndSwap(false, true) {
		return
	}
	defer s.move.reaching.Store(false)
	conn, err := s.connect(*target)
	if err == nil {
		err = waitReady(ctx, conn)
	}
	if err != nil {
		s.move.failed.Store(time.Now().UnixNano())
		s.log.Info("The server that is this node's by hashing can't be reached; staying", "server", target.Address, "err", err)
		s.move.timer.Reset(s.times.returnDelay())
		return
	}
	s.prepared = &prepared{*target, conn}
	s.cancel(errMove)
}

// waitReady waits for a connection, and closes it where it does not come.
func waitReady(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	conn.Connect()
	for {
		switch state := conn.GetState(); {
		case state == connectivity.Ready:
			return nil
		case state == connectivity.TransientFailure || !conn.WaitForStateChange(ctx, state):
			return errors.Join(fmt.Errorf("no connection: %v", state), conn.Close())
		}
	}
}

// takePrepared gives the connection that was prepared, if it is to this server, and otherwise closes it.
func (c *Client) takePrepared(server Server) *grpc.ClientConn {
	p := c.prepared
	c.prepared = nil
	switch {
	case p == nil:
		return nil
	case p.server != server:
		_ = p.conn.Close()
		return nil
	}
	return p.conn
}
