package connection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// reachTimeout bounds one attempt to reach another server.
const reachTimeout = 10 * time.Second

// errNotFresh means that another server is stale, too.
var errNotFresh = errors.New("the server is stale")

// move is a stream's plan to leave for another server: for the one that the node prefers, or, while
// the stream's server is stale, for any that is not.
//
// Invariants:
//
//  1. The stream goes on until another server has welcomed the client and is not stale.
//  2. The receiving goroutine sets target and starts the timers. The sending goroutine waits for
//     them. While reaching is set, one goroutine reaches for other servers; it alone sets failed,
//     told and the Connection's prepared.
type move struct {
	timer    *time.Timer
	target   atomic.Pointer[discovery.Server] // nil means that the stream stays
	reaching atomic.Bool
	// failed is when the last attempt failed. nil means that none has.
	failed atomic.Pointer[time.Time]
	// search fires when the client looks for a server that is not stale. told is set once it was
	// logged that there is none.
	search *time.Timer
	told   bool
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

// reachPreferred moves to the preferred server. If that server does not welcome the client or is
// stale, the stream goes on and reachPreferred schedules another attempt.
func (s *stream) reachPreferred(ctx context.Context) {
	target := s.move.target.Load()
	if target == nil {
		return
	}
	if !s.move.reaching.CompareAndSwap(false, true) {
		s.move.timer.Reset(reachTimeout)
		return
	}
	defer s.move.reaching.Store(false)
	if ctx.Err() != nil {
		return // as in reachFresh
	}
	if err := s.reach(ctx, *target); err != nil {
		now := time.Now()
		s.move.failed.Store(&now)
		s.log.Info("Cannot move to the preferred server, staying with the current one",
			"server", target.Address, "err", err)
		s.move.timer.Reset(s.choice.ReturnDelay())
		return
	}
	s.cancel(errMove)
}

// reachFresh moves to a server that is not stale, if the stream's own server is. If there is none,
// the stream goes on and reachFresh schedules another search.
func (s *stream) reachFresh(ctx context.Context) {
	if s.stale.Load() == nil {
		return
	}
	if !s.move.reaching.CompareAndSwap(false, true) {
		s.move.search.Reset(reachTimeout)
		return
	}
	defer s.move.reaching.Store(false)
	if ctx.Err() != nil {
		return // the stream moves already, and what was prepared for that must stay
	}
	s.choice.Searched()
	failed := errors.New("no other server is known")
	for i, server := range s.choice.Others(s.server) {
		err := s.reach(ctx, server)
		if ctx.Err() != nil || s.stale.Load() == nil {
			s.Close()
			return
		}
		if err == nil {
			s.cancel(errStale)
			return
		}
		if err = fmt.Errorf("%s: %w", server.Address, err); i == 0 {
			failed = err
		} else {
			failed = errors.Join(failed, err)
		}
	}
	level := slog.LevelDebug
	if !s.move.told {
		level, s.move.told = slog.LevelWarn, true
	}
	s.log.Log(ctx, level, "Server may lack changes, and no other server is known to have them; staying and trying again",
		"server", s.server.Address, "err", failed)
	s.move.search.Reset(s.choice.SearchDelay())
}

// reach connects to another server for the next stream. It returns an error unless the server would
// serve the client and is not stale.
func (s *stream) reach(ctx context.Context, server discovery.Server) error {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	conn, err := s.dial(server)
	if err != nil {
		return err
	}
	err = s.probe(ctx, conn)
	switch {
	case err == nil:
		s.Close() // what an earlier search has prepared
		s.prepared = &prepared{server, conn}
		s.metrics.probes.WithLabelValues(probeFresh).Inc()
		return nil
	case errors.Is(err, errNotFresh):
		s.metrics.probes.WithLabelValues(probeStale).Inc()
	default:
		s.metrics.probes.WithLabelValues(probeFailed).Inc()
		s.choice.Heed(server, err)
	}
	return errors.Join(err, conn.Close())
}

// probe returns an error unless the server behind conn welcomes the client and is not stale.
func (s *stream) probe(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	rpc, err := pb.NewDistributionServiceClient(conn).Stream(ctx)
	if err != nil {
		return err
	}
	hello := &pb.Hello{
		NodeName: s.options.NodeName, Kind: s.options.Kind, ClientVersion: s.options.Version,
		Programmer: s.options.Programmer, Probe: true,
	}
	if err := rpc.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: hello}}); err != nil {
		return endOf(rpc, err)
	}
	var f wire.Frame
	if err := rpc.RecvMsg(&f); err != nil {
		return err
	}
	r, err := s.options.Decode(f)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", cache.ErrProtocol, err)
	case r.Welcome == nil:
		return fmt.Errorf("%w: a message before welcome", cache.ErrProtocol)
	case r.Welcome.GetStaleMs() > 0:
		return errNotFresh
	}
	return s.check(r.Welcome)
}

// check returns an error if the client must not follow the server that has sent this Welcome.
func (c *Connection) check(w *pb.Welcome) error {
	if err := cache.CheckWelcome(w.GetEpoch(), w.GetShardCount()); err != nil {
		return err
	}
	if n := len(w.GetPath()); n > maxPath {
		return fmt.Errorf("%w: a path of %d servers", cache.ErrProtocol, n)
	}
	if c.options.Relay == nil {
		return nil
	}
	return c.options.Relay.Check(w.GetPath(), w.GetShardCount())
}

// setStale records for how many milliseconds the server has been stale; 0 means that it is not.
func (s *stream) setStale(ms uint64) {
	var since *time.Time
	if ms > 0 {
		t := time.Now().Add(-time.Duration(min(ms, uint64(maxStale.Milliseconds()))) * time.Millisecond)
		since = &t
	}
	before := s.stale.Swap(since)
	switch {
	case since == nil:
		s.move.search.Stop()
		s.metrics.serverStale.Set(0)
	case before == nil:
		s.log.Info("Server says that it may lack changes", "server", s.server.Address, "since", since)
		s.move.search.Reset(s.choice.SearchDelay())
		s.metrics.serverStale.Set(1)
	}
	s.recordStale()
}
