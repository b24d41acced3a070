package connection

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/slicecast/slicecast/agent/client/discovery"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// reachTimeout bounds one attempt to connect to the preferred server.
const reachTimeout = 10 * time.Second

// move is a stream's plan to leave for the server that the node prefers.
//
// Invariants:
//
//  1. The stream goes on until the client is connected to target.
//  2. The receiving goroutine sets target and starts timer. The sending goroutine waits for timer.
//     While reaching is set, one goroutine reaches for target; it alone sets failed.
type move struct {
	timer    *time.Timer
	target   atomic.Pointer[discovery.Server] // nil means that the stream stays
	reaching atomic.Bool
	// failed is when the last attempt failed. nil means that none has.
	failed atomic.Pointer[time.Time]
}

// prepared is an open connection that the next stream to its server will use.
type prepared struct {
	server discovery.Server
	conn   *grpc.ClientConn
}

// learn stores the servers that the stream names and plans anew whether to move.
func (s *stream) learn(m *pb.Servers) {
	addresses := make([]string, 0, len(m.GetServers()))
	for _, server := range m.GetServers() {
		addresses = append(addresses, server.GetAddress())
	}
	named := s.choice.Named(addresses, s.server)
	if slices.Equal(named, s.cache.Servers()) {
		return
	}
	s.cache.SetServers(named)
	s.serversChanged = true
	if s.synced {
		s.planMove()
	}
}

// planMove decides whether and when the client moves to the server that it prefers.
func (s *stream) planMove() {
	preferred, ok := s.choice.Preferred(s.server)
	if !ok || s.drained > 0 {
		s.move.target.Store(nil)
		s.move.timer.Stop()
		return
	}
	if target := s.move.target.Load(); target != nil && *target == preferred {
		return
	}
	var failed time.Time
	if t := s.move.failed.Load(); t != nil {
		failed = *t
	}
	s.move.target.Store(&preferred)
	s.move.timer.Reset(s.choice.MoveDelay(preferred, s.serversChanged, failed))
}

// reach connects to the preferred server and then ends the stream. If it cannot connect, the stream
// goes on and reach schedules another attempt.
func (s *stream) reach(ctx context.Context) {
	target := s.move.target.Load()
	if target == nil || !s.move.reaching.CompareAndSwap(false, true) {
		return
	}
	defer s.move.reaching.Store(false)
	conn, err := s.dial(*target)
	if err == nil {
		err = waitReady(ctx, conn)
	}
	if err != nil {
		now := time.Now()
		s.move.failed.Store(&now)
		s.log.Info("Cannot reach the preferred server, staying with the current one",
			"server", target.Address, "err", err)
		s.move.timer.Reset(s.choice.ReturnDelay())
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
			return errors.Join(fmt.Errorf("connection state is %v", state), conn.Close())
		}
	}
}
