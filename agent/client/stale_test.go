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

// TestStaleNoLonger checks that a server that recovers in time is not left, and that no other server
// is asked.
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

// TestOutage checks a fleet in an outage of the API server that lasts ten minutes: all servers are
// stale, and one of them cannot review tokens either. No stream ends, and there are few attempts.
// When one server recovers, all nodes move there. When the other one does, its nodes return.
func TestOutage(t *testing.T) {
	const nodes = 40
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 20)
		type server struct {
			hub      *fanout.Hub
			listener *bufconn.Listener
			since    atomic.Pointer[time.Time]
			refuses  atomic.Bool
		}
		servers := map[string]*server{"a:1": {}, "b:1": {}}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		for _, server := range servers {
			server.hub = fanout.New(fanout.Options{
				Store: s, Logger: slog.New(slog.DiscardHandler),
				Authorize: func(context.Context, pb.ClientKind, string) (string, time.Time, error) {
					if server.refuses.Load() {
						<-time.After(5 * time.Second)
						return "", time.Time{}, status.Error(codes.Unavailable, "cannot have the token reviewed")
					}
					return "", time.Time{}, nil
				},
				Stale: func() (time.Time, string) {
					if since := server.since.Load(); since != nil {
						return *since, "nobody answers"
					}
					return time.Time{}, ""
				},
			})
			server.listener = bufconn.Listen(64 << 10)
			g := grpc.NewServer(fanout.ServerOption())
			pb.RegisterDistributionServiceServer(g, server.hub)
			running.Go(func() { _ = g.Serve(server.listener) }) // until it is stopped
			running.Go(func() { <-ctx.Done(); g.Stop() })
			running.Go(func() { server.hub.Run(ctx) })
		}
		dialer := grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return servers[address].listener.DialContext(ctx)
		})
		registries := make([]*prometheus.Registry, nodes)
		for i := range nodes {
			registries[i] = prometheus.NewRegistry()
			c := New(Options{
				Servers: func(context.Context) ([]Server, error) {
					return []Server{{Address: "passthrough:///a:1"}, {Address: "passthrough:///b:1"}}, nil
				},
				NodeName: fmt.Sprint("node-", i), Cache: NewCache(), Logger: slog.New(slog.DiscardHandler), Registerer: registries[i],
				DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()), dialer},
			})
			running.Go(func() { _ = c.Run(ctx) }) // its error is always nil
		}
		count := func(name string, labels ...string) (sum float64) {
			for _, r := range registries {
				sum += metric(t, r, name, labels...)
			}
			return sum
		}
		probes := func() float64 {
			return count("probes_total", "fresh") + count("probes_total", "stale") + count("probes_total", "failed")
		}
		served := func(address string) uint32 { return servers[address].hub.Status().GetNodes() }
		defer running.Wait()
		defer cancel()

		<-time.After(time.Minute)
		require.EqualValues(t, nodes, count("connected"))
		before := served("a:1")
		require.NotZero(t, before)
		require.NotZero(t, served("b:1"))
		require.Zero(t, probes())

		now := time.Now()
		servers["a:1"].since.Store(&now)
		servers["b:1"].since.Store(&now)
		servers["b:1"].refuses.Store(true)
		<-time.After(10 * time.Minute)
		require.EqualValues(t, nodes, count("connected"))
		require.Zero(t, count("disconnects_total"))
		rate := probes() / nodes / 10
		t.Logf("%.2f attempts per node per minute", rate)
		require.Positive(t, rate)
		require.LessOrEqual(t, rate, 0.7)

		servers["b:1"].since.Store(nil)
		servers["b:1"].refuses.Store(false)
		<-time.After(discovery.DefaultTimes.MaxSearchPause + time.Minute)
		require.EqualValues(t, nodes, served("b:1"))
		require.EqualValues(t, before, count("moves_total", "stale"))
		require.EqualValues(t, before, count("disconnects_total"))

		servers["a:1"].since.Store(nil)
		<-time.After(2 * discovery.DefaultTimes.ReturnAfter)
		require.Equal(t, before, served("a:1"))
	})
}
