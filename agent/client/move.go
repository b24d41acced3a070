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

// reachTimeout bounds one attempt to connect to the preferred server.
const reachTimeout = 10 * time.Second

// errMove ends a stream once the client is connected to a server that it prefers.
var errMove = errors.New("another server is preferred")

// move is a stream's plan to leave for the server that the node prefers. The stream goes on until
// the client is connected to that server.
type move struct {
	timer    *time.Timer
	target   atomic.Pointer[Server]
	reaching atomic.Bool
	// failed is the time of the last failed attempt, in nanoseconds since 1970. 0 means that none
	// has failed.
	failed atomic.Int64
}

// prepared is an open connection that the next stream to its server will use.
type prepared struct {
	server Server
	conn   *grpc.ClientConn
}

// learn stores the servers that the stream names and reconsiders whether to move.
func (s *stream) learn(m *pb.Servers) {
	changed := s.options.Cache.setServers(serversFromProto(m, s.names(s.server)))
	s.serversChanged = s.serversChanged || changed
	if s.synced && changed {
		s.considerMove()
	}
}

// considerMove decides whether and when the client moves to the server that it prefers. If the set
// of servers has changed, the client moves within moveWindow. If it is on another server for any
// other reason, or has moved recently, it waits for returnAfter to twice returnAfter, so that no
// node moves back and forth. If no stream has named servers, those of Options.Servers count.
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

// reach connects to the preferred server and then ends the stream. If it cannot connect, the stream
// goes on and reach schedules another attempt.
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

// waitReady waits until conn is ready. If conn does not become ready in time, waitReady closes it
// and returns an error.
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

// takePrepared returns the prepared connection if it leads to this server, and nil otherwise. It
// closes a connection to another server.
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
