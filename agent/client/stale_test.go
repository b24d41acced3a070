// These tests prove that a client leaves a server that says that it is stale, only for one that is
// not, and that an outage of all servers ends no stream and causes few attempts.
package client

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// hurried makes clients leave stale servers and return within milliseconds.
func hurried(t *discovery.Times) {
	t.StaleAfter, t.MinSearchPause, t.MaxSearchPause = 5*time.Millisecond, 10*time.Millisecond, 20*time.Millisecond
	t.ReturnAfter = 20 * time.Millisecond
}

// staleness returns the heartbeat of a server that becomes stale, or is stale no longer.
func staleness(ms uint64) *pb.StreamResponse {
	return &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{StaleMs: &ms}}}
}

// TestStaleServerIsLeft checks that a client stays with a stale server as long as all others are
// stale, refuse it or are away. It leaves for one that is not stale, and returns once the first one
// is not stale either.
func TestStaleServerIsLeft(t *testing.T) {
	id := newIdentity(t)
	servers, instances, addresses := replicas(t, id, 3)
	instances[2].stop()
	servers[0].play = oneShard(1, staleness(60_000))
	servers[1].play = oneShard(2)
	servers[0].stale.Store(true)
	servers[1].stale.Store(true)
	o := quiet(id, Options{Servers: Static(addresses...)})
	c, _ := run(t, NewCache(), o, hurried)
	require.Eventually(t, func() bool { return servers[1].probes.Load() >= 3 }, patience, tick)
	require.Equal(t, 1, servers[0].streams())
	require.Zero(t, servers[1].streams())
	require.InDelta(t, time.Minute, time.Since(c.Connection().StaleSince), float64(30*time.Second))
	require.EqualValues(t, 1, metric(t, o.Registerer, "server_stale"))
	require.Positive(t, metric(t, o.Registerer, "probes_total", "stale"))
	require.Positive(t, metric(t, o.Registerer, "probes_total", "failed"))

	servers[1].stale.Store(false)
	servers[1].waitStreams(t, 1)
	require.Eventually(t, func() bool { return c.Connection().Server.Address == addresses[1] }, patience, tick)
	require.Zero(t, c.Connection().StaleSince)
	require.Zero(t, metric(t, o.Registerer, "server_stale"))
	require.EqualValues(t, 1, metric(t, o.Registerer, "moves_total", "stale"))
	asked := servers[0].probes.Load()
	require.Eventually(t, func() bool { return servers[0].probes.Load() >= asked+3 }, patience, tick)
	require.Equal(t, 1, servers[0].streams(), "it is still stale")

	servers[0].play = oneShard(1)
	servers[0].stale.Store(false)
	servers[0].waitStreams(t, 2)
	require.Equal(t, 1, servers[1].streams())
	require.EqualValues(t, 1, metric(t, o.Registerer, "moves_total", "preferred"))
}

// TestStaleInWelcome checks a server that is stale from the beginning and does not bring the client
// in sync.
func TestStaleInWelcome(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 2)
	servers[0].play = says(welcome(&pb.Welcome{Epoch: 1, ShardCount: 1, StaleMs: 1 << 63}))
	servers[1].play = oneShard(2)
	servers[0].stale.Store(true)
	o := quiet(id, Options{Servers: Static(addresses...)})
	run(t, NewCache(), o, hurried)
	servers[1].waitStreams(t, 1)
	require.Equal(t, 1, servers[0].streams())
}

// TestStaleNoLonger checks that a server that recovers in time is not left, and that no other
// server is asked.
func TestStaleNoLonger(t *testing.T) {
	id := newIdentity(t)
	servers, _, addresses := replicas(t, id, 2)
	more := []any{}
	for range 100 {
		more = append(more, staleness(1), staleness(0))
	}
	servers[0].play = oneShard(1, append(more, nodeUpdate("node-1", &pb.Node{Name: "node-1"}))...)
	servers[1].play = oneShard(2)
	cache := NewCache()
	c, _ := run(t, cache, quiet(id, Options{Servers: Static(addresses...)}))
	require.Eventually(t, func() bool { return cache.Node() != nil }, patience, tick)
	require.Zero(t, c.Connection().StaleSince)
	require.Zero(t, servers[1].probes.Load())
	require.Equal(t, 1, servers[0].streams())
}

// member is a server of a fleet.
type member struct {
	hub      *fanout.Hub
	listener *bufconn.Listener
	// stale returns since when the server is stale; nil means that it is not.
	stale   atomic.Pointer[func() time.Time]
	refuses atomic.Bool // after five seconds, as if it could not have tokens reviewed
}

// cutOff makes the server stale from now on.
func (m *member) cutOff() {
	now := time.Now()
	stale := func() time.Time { return now }
	m.stale.Store(&stale)
}

// fleet has two servers and the clients of many nodes, in a bubble of synctest.
type fleet struct {
	t          *testing.T
	a, b       member
	registries []*prometheus.Registry
}

// bubble runs f in a bubble of synctest. The process has one encoder of frames, which must not be
// made in a bubble, so bubble makes it first.
func bubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	_, err := wire.Compress(make(wire.Frame, 4<<10))
	require.NoError(t, err)
	synctest.Test(t, f)
}

// newFleet starts a fleet and waits until all nodes are in sync. The caller must call stop.
func newFleet(t *testing.T, nodes int) (f *fleet, stop func()) {
	t.Helper()
	f = &fleet{t: t}
	s := filled(t, 20)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, m := range []*member{&f.a, &f.b} {
		m.hub = fanout.New(fanout.Options{
			Store: s, Logger: slog.New(slog.DiscardHandler),
			Authorize: func(context.Context, pb.ClientKind, string) (string, time.Time, error) {
				if m.refuses.Load() {
					<-time.After(5 * time.Second)
					return "", time.Time{}, status.Error(codes.Unavailable, "cannot have the token reviewed")
				}
				return "", time.Time{}, nil
			},
			Stale: func() (time.Time, string) {
				if stale := m.stale.Load(); stale != nil {
					return (*stale)(), "nobody answers"
				}
				return time.Time{}, ""
			},
		})
		m.listener = bufconn.Listen(64 << 10)
		g := grpc.NewServer(fanout.ServerOption())
		pb.RegisterDistributionServiceServer(g, m.hub)
		running.Go(func() { _ = g.Serve(m.listener) }) // until it is stopped
		running.Go(func() { m.hub.Run(ctx) })
		running.Go(func() { <-ctx.Done(); g.Stop() })
	}
	dialer := grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		return map[string]*member{"a:1": &f.a, "b:1": &f.b}[address].listener.DialContext(ctx)
	})
	for i := range nodes {
		registry := prometheus.NewRegistry()
		f.registries = append(f.registries, registry)
		c := New(Options{
			Servers:  Static("passthrough:///a:1", "passthrough:///b:1"),
			NodeName: fmt.Sprint("node-", i), Cache: NewCache(), Logger: slog.New(slog.DiscardHandler), Registerer: registry,
			DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()), dialer},
		})
		running.Go(func() { _ = c.Run(ctx) }) // its error is always nil
	}
	<-time.After(time.Minute)
	require.EqualValues(t, nodes, f.count("connected"))
	return f, func() {
		cancel()
		running.Wait()
	}
}

// count returns the sum of a metric of all nodes.
func (f *fleet) count(name string, labels ...string) (sum float64) {
	for _, r := range f.registries {
		sum += metric(f.t, r, name, labels...)
	}
	return sum
}

// probes returns how often all nodes have asked other servers.
func (f *fleet) probes() float64 {
	return f.count("probes_total", "fresh") + f.count("probes_total", "stale") + f.count("probes_total", "failed")
}

// TestOutage checks a fleet in an outage of the API server that lasts ten minutes: all servers are
// stale, and one of them cannot have tokens reviewed either. No stream ends, and there are few
// attempts. When one server recovers, all nodes move there. When the other one does, its nodes
// return.
func TestOutage(t *testing.T) {
	const nodes = 30
	bubble(t, func(t *testing.T) {
		f, stop := newFleet(t, nodes)
		defer stop()
		before := f.a.hub.Status().GetNodes()
		require.NotZero(t, before)
		require.NotZero(t, f.b.hub.Status().GetNodes())
		require.Zero(t, f.probes())

		f.a.cutOff()
		f.b.cutOff()
		f.b.refuses.Store(true)
		<-time.After(10 * time.Minute)
		require.EqualValues(t, nodes, f.count("connected"))
		require.Zero(t, f.count("disconnects_total"))
		rate := f.probes() / nodes / 10
		t.Logf("%.2f attempts per node per minute", rate)
		require.Positive(t, rate)
		require.LessOrEqual(t, rate, 0.7)

		f.b.stale.Store(nil)
		f.b.refuses.Store(false)
		<-time.After(discovery.DefaultTimes.MaxSearchPause + time.Minute)
		require.EqualValues(t, nodes, f.b.hub.Status().GetNodes())
		require.EqualValues(t, before, f.count("moves_total", "stale"))
		require.EqualValues(t, before, f.count("disconnects_total"))

		f.a.stale.Store(nil)
		<-time.After(2*discovery.DefaultTimes.ReturnAfter + time.Minute)
		require.Equal(t, before, f.a.hub.Status().GetNodes())
	})
}

// TestServerThatLiesAboutStaleness checks a server that says in turn that it is stale and that it
// is not. A node leaves it and returns to it at most once in five minutes, and all nodes stay in
// sync.
func TestServerThatLiesAboutStaleness(t *testing.T) {
	const nodes, hours = 10, 1
	for name, period := range map[string]time.Duration{"each second": time.Second, "each minute": time.Minute} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f, stop := newFleet(t, nodes)
				defer stop()
				served := f.a.hub.Status().GetNodes()
				lies := func() time.Time {
					if now := time.Now(); now.UnixNano()/int64(period)%2 == 0 {
						return now.Add(-time.Hour)
					}
					return time.Time{}
				}
				f.a.stale.Store(&lies)
				for range hours * 60 {
					<-time.After(time.Minute)
					require.LessOrEqual(t, nodes-f.count("connected"), 1.0, "a node may be on its way")
				}
				each := f.count("moves_total", "stale") / float64(served)
				t.Logf("%.1f moves and %.1f attempts per node of the server in %d hours", each, f.probes()/float64(served), hours)
				require.LessOrEqual(t, each, hours*60/discovery.DefaultTimes.ReturnAfter.Minutes())
				require.LessOrEqual(t, f.probes()/float64(served), hours*60*0.7)
			})
		})
	}
}
