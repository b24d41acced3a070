// These tests prove that state flows down several levels of real relays, that acks and nacks flow
// up, and that relays never feed each other in a cycle.
package relay_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	serverapp "github.com/slicecast/slicecast/server/app"
	"github.com/slicecast/slicecast/server/fanout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is the timeout for steps that take milliseconds on an idle machine.
const patience = 30 * time.Second

var plaintext = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}

// server is a running server.
type server struct {
	t        *testing.T
	address  string
	debug    string
	log      *logtest.Buffer
	registry *prometheus.Registry
	stop     func()
}

// serve runs a server whose state comes from a source or from other servers.
func serve(t *testing.T, address string, from source.Source, upstreams ...string) *server {
	t.Helper()
	return serveDecoding(t, address, wire.Decode, from, upstreams...)
}

// serveDecoding runs a server. A relay decodes frames with decode.
func serveDecoding(
	t *testing.T, address string, decode func(wire.Frame) (*wire.Response, error), from source.Source, upstreams ...string,
) *server {
	t.Helper()
	s := &server{t: t, log: &logtest.Buffer{}, registry: prometheus.NewRegistry(), debug: filepath.Join(t.TempDir(), "debug.sock")}
	c := serverapp.Config{
		Source: from, BindAddress: address, DebugSocket: s.debug, HeartbeatInterval: time.Second, DrainWindow: time.Millisecond, GracePeriod: patience,
		MaxBehindWait: patience, Logger: slog.New(slog.NewTextHandler(s.log, nil)), Registry: s.registry,
	}
	if s, ok := from.(interface{ shards() uint32 }); ok {
		c.Shards = s.shards()
		// Time limits are multiples of it, and a busy machine takes seconds for so many shards.
		c.HeartbeatInterval = fanout.DefaultHeartbeat
	}
	if s, ok := from.(interface{ behindWait() time.Duration }); ok {
		c.MaxBehindWait = s.behindWait()
	}
	if len(upstreams) > 0 {
		c.Upstream = &client.Options{
			Servers: client.Static(upstreams...), DialOptions: plaintext, Logger: c.Logger, Registerer: s.registry,
			MaxBackoff: 100 * time.Millisecond, Decode: decode,
		}
	}
	app, err := serverapp.New(c)
	require.NoError(t, err)
	s.address = app.Addresses().GRPC.String()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- app.Run(ctx) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	t.Cleanup(s.stop)
	return s
}

// metric returns the value of a counter or gauge, summed over its labels.
func (s *server) metric(name string) (sum float64) {
	families, err := s.registry.Gather()
	require.NoError(s.t, err)
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// status returns the server's GetStatusResponse.
func (s *server) status() *pb.GetStatusResponse {
	conn, err := grpc.NewClient("unix:"+s.debug, plaintext...)
	require.NoError(s.t, err)
	defer func() { require.NoError(s.t, conn.Close()) }()
	status, err := pb.NewDebugServiceClient(conn).GetStatus(s.t.Context(), &pb.GetStatusRequest{})
	require.NoError(s.t, err)
	return status
}

// cluster is a source that the test writes to.
type cluster struct {
	ready   chan struct{}
	sink    source.Sink
	version uint64 // resource version of the last write
}

func newCluster() *cluster { return &cluster{ready: make(chan struct{})} }

// again returns a cluster with the initial state at a later time.
func (c *cluster) again() *cluster {
	n := newCluster()
	n.version = c.version
	return n
}

func (c *cluster) Run(ctx context.Context, sink source.Sink) error {
	c.sink = sink
	c.fill(0, 20, 2)
	for _, name := range []string{"node-1", "node-2"} {
		sink.Upsert(&model.Node{Name: name, Labels: map[string]string{"zone": "a"}}, 0)
	}
	sink.Synced()
	close(c.ready)
	<-ctx.Done()
	return nil
}

// fill writes Services with this number of endpoints each.
func (c *cluster) fill(from, to, endpoints int) {
	for i := from; i < to; i++ {
		name := fmt.Sprint("service-", i)
		c.version += 2
		c.sink.Upsert(model.NewService(model.Service{Namespace: "default", Name: name, Type: model.ClusterIP}), c.version-1)
		c.sink.Upsert(sliceOf(i, endpoints), c.version)
	}
}

// sliceOf returns the slice that fill writes for a Service.
func sliceOf(service, endpoints int) *model.Slice {
	name := fmt.Sprint("service-", service)
	s := model.Slice{Namespace: "default", Name: name, Service: name, Family: model.IPv4}
	for e := range endpoints {
		s.Endpoints = append(s.Endpoints, model.Endpoint{
			Address: netip.AddrFrom4([4]byte{10, byte(service), 0, byte(e)}), Conditions: model.Conditions{Ready: true, Serving: true},
		})
	}
	return model.NewSlice(s)
}

// agent is a running agent of a node.
type agent struct {
	*client.Client
	t       *testing.T
	cache   *client.Cache
	mu      sync.Mutex
	updates int // updates with content
	synced  chan struct{}
	stop    func()
}

// join runs an agent until the test ends or it is stopped. With the cache of another agent, it
// resumes from that cache.
func join(t *testing.T, name string, cache *client.Cache, servers ...string) *agent {
	t.Helper()
	if cache == nil {
		cache = client.NewCache()
	}
	a := &agent{t: t, cache: cache, synced: make(chan struct{})}
	first := sync.OnceFunc(func() { close(a.synced) })
	a.Client = client.New(client.Options{
		Servers: client.Static(servers...), NodeName: name, DialOptions: plaintext, Cache: cache, Logger: slog.New(slog.DiscardHandler),
		Observe: func(r *wire.Response, _ int) {
			a.mu.Lock()
			if r.Update != nil && r.Update.Len() > 0 {
				a.updates++
			}
			a.mu.Unlock()
			if r.InSync != nil {
				first()
			}
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	a.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	t.Cleanup(a.stop)
	select {
	case <-a.synced:
	case <-time.After(patience):
		require.Fail(t, "not in sync", "with %v", servers)
	}
	return a
}

// has waits until the agent's cache has this number of endpoints of a Service.
func (a *agent) has(service, endpoints int) {
	a.t.Helper()
	require.Eventually(a.t, func() bool {
		_, slices := a.cache.Service(model.ServiceKey{Namespace: "default", Name: fmt.Sprint("service-", service)})
		return len(slices) == 1 && len(slices[0].Endpoints) == endpoints
	}, patience, time.Millisecond)
}

// ackAll acks all positions to the server.
func (a *agent) ackAll() {
	if changes, ok := a.cache.Take(); ok {
		a.Ack(changes.Epoch, changes.Positions)
	}
}

func TestThreeLevels(t *testing.T) {
	c := newCluster()
	root := serve(t, "127.0.0.1:0", c)
	first := serve(t, "127.0.0.1:0", nil, root.address)
	second := serve(t, "127.0.0.1:0", nil, first.address)
	<-c.ready
	a, b := join(t, "node-1", nil, second.address), join(t, "node-2", nil, root.address)
	require.Equal(t, "a", a.cache.Node().Labels["zone"], "its Node has come through two relays")
	_, atRoot := b.cache.Digests()
	_, behind := a.cache.Digests()
	require.Equal(t, atRoot, behind)

	c.fill(3, 4, 7)
	a.has(3, 7)
	b.has(3, 7)
	c.version++
	c.sink.Remove(model.Key{Kind: model.KindSlice, Namespace: "default", Name: "service-4"}, c.version)
	node := &model.Node{Name: "node-1", Labels: map[string]string{"zone": "b"}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}
	c.sink.Upsert(node, 0)
	require.Eventually(t, func() bool {
		_, slices := a.cache.Service(model.ServiceKey{Namespace: "default", Name: "service-4"})
		return len(slices) == 0 && a.cache.Node().Equal(node)
	}, patience, time.Millisecond)

	// A new stream between root and relays sends no objects again, and the resource versions are
	// those of the cluster.
	a.stop()
	for _, to := range []*server{root, first, second, root} {
		moved := join(t, "node-1", a.cache, to.address)
		require.Zero(t, moved.updates)
		moved.stop()
	}
	require.Zero(t, root.metric("slicecast_server_behind_waits_total")+second.metric("slicecast_server_behind_waits_total"))

	// A relay keeps its state while its server is down. It refuses other relays meanwhile.
	root.stop()
	require.Eventually(t, func() bool { return first.metric("slicecast_upstream_connected") == 0 }, patience, time.Millisecond)
	a = join(t, "node-1", nil, first.address)
	a.has(3, 7)
	third := serve(t, "127.0.0.1:0", nil, first.address)
	require.Eventually(t, func() bool { return contains(third.log, "has no stream from its own server") }, patience, time.Millisecond)
	again := c.again()
	serve(t, root.address, again)
	<-again.ready
	a.has(3, 2) // the cluster's state by then
	join(t, "node-3", nil, third.address)
}

// TestAcksOfARelaysNodes checks that a relay acks only what its nodes have programmed, and passes
// on what they cannot program.
func TestAcksOfARelaysNodes(t *testing.T) {
	c := newCluster()
	root := serve(t, "127.0.0.1:0", c)
	relay := serve(t, "127.0.0.1:0", nil, root.address)
	<-c.ready
	a, b := join(t, "node-1", nil, relay.address), join(t, "node-2", nil, relay.address)
	a.ackAll()
	b.ackAll()
	require.Eventually(t, func() bool { return root.metric("slicecast_server_nodes") == 2 }, patience, time.Millisecond)
	converged := func() uint64 {
		families, err := root.registry.Gather()
		require.NoError(t, err)
		for _, f := range families {
			if f.GetName() == "slicecast_server_convergence_duration_seconds" {
				for _, m := range f.GetMetric() {
					if m.GetLabel()[0].GetValue() == "1" {
						return m.GetHistogram().GetSampleCount()
					}
				}
			}
		}
		return 0
	}
	for n := range 3 {
		c.fill(n, n+1, 9)
		a.has(n, 9)
		b.has(n, 9)
		before := converged() // the Service and its slice may have been published apart
		a.ackAll()
		require.Equal(t, before, converged(), "one of two nodes has it")
		b.ackAll()
		require.Eventually(t, func() bool { return converged() > before }, patience, time.Millisecond)
	}
	for _, c := range root.status().GetConvergences() {
		require.EqualValues(t, 2, c.GetNodes())
		require.Len(t, c.GetLast(), 1, "of the relay")
		require.Contains(t, []string{"node-1", "node-2"}, c.GetLast()[0].GetNodeName(), "the root names the node behind the relay")
		require.Equal(t, c.GetTimeToAll().AsDuration(), c.GetLast()[0].GetTime().AsDuration())
	}
	b.Nack(model.ServiceKey{Namespace: "default", Name: "service-1"}, "no room")
	require.Eventually(t, func() bool { return root.metric("slicecast_server_nacks_total") == 1 }, patience, time.Millisecond)
	b.stop()
	require.Eventually(t, func() bool { return root.metric("slicecast_server_nodes") == 1 }, patience, time.Millisecond)
}

// TestNacksOutliveTheServer checks that each server of a relay receives the open Nacks of the
// relay's nodes.
func TestNacksOutliveTheServer(t *testing.T) {
	c := newCluster()
	root := serve(t, "127.0.0.1:0", c)
	relay := serve(t, "127.0.0.1:0", nil, root.address)
	<-c.ready
	a, b := join(t, "node-1", nil, relay.address), join(t, "node-2", nil, relay.address)
	nacks := func(s *server) float64 { return s.metric("slicecast_server_nacks_total") }
	for i := range 3 {
		a.Nack(model.ServiceKey{Namespace: "default", Name: fmt.Sprint("service-", i)}, "no room")
	}
	b.Nack(model.ServiceKey{Namespace: "default", Name: "service-1"}, "no room")
	require.Eventually(t, func() bool { return nacks(root) == 4 }, patience, time.Millisecond)
	root.stop()
	require.Eventually(t, func() bool { return relay.metric("slicecast_upstream_connected") == 0 }, patience, time.Millisecond)
	a.Resolve(model.ServiceKey{Namespace: "default", Name: "service-2"})
	a.Nack(model.ServiceKey{Namespace: "default", Name: "service-3"}, "no room")
	a.Nack(model.ServiceKey{Namespace: "default", Name: "service-4"}, "no room")
	require.Eventually(t, func() bool { return nacks(relay) == 6 }, patience, time.Millisecond)
	b.stop() // it may have moved to another server by now
	require.Eventually(t, func() bool { return relay.metric("slicecast_server_streams") == 1 }, patience, time.Millisecond)

	again := c.again()
	root = serve(t, root.address, again)
	require.Eventually(t, func() bool { return nacks(root) == 4 }, patience, time.Millisecond)
	require.Equal(t, 4, root.log.Count("behind=node-1"), root.log)
	for _, service := range []string{"service-0", "service-1", "service-3", "service-4"} {
		require.Contains(t, root.log.String(), service)
	}
	require.Zero(t, relay.metric("slicecast_upstream_dropped_nacks_total"))
}

// TestACycleIsRefused checks that a relay is not fed by itself, even if it is the only relay that
// has lost its server.
func TestACycleIsRefused(t *testing.T) {
	c := newCluster()
	root := serve(t, "127.0.0.1:0", c)
	<-c.ready
	last := reserve(t)
	first := serve(t, "127.0.0.1:0", nil, root.address, last)
	middle := serve(t, "127.0.0.1:0", nil, first.address)
	join(t, "node-1", nil, middle.address).stop()
	serve(t, last, nil, middle.address)
	join(t, "node-2", nil, last).stop()

	root.stop()
	require.Eventually(t, func() bool {
		return contains(first.log, "fed by this relay") || contains(first.log, "its own server")
	}, patience, time.Millisecond)
	waitAlone(t, first)
	a := join(t, "node-1", nil, last)
	a.has(1, 2)
}

// TestACycleOfStalePaths has three relays that could feed each other. Two of them have servers of
// their own and lose them one after the other. The paths that each relay received when its stream
// started are no longer true then.
func TestACycleOfStalePaths(t *testing.T) {
	c, c2 := newCluster(), newCluster()
	root, root2 := serve(t, "127.0.0.1:0", c), serve(t, "127.0.0.1:0", c2)
	<-c.ready
	<-c2.ready
	addressA, addressC := reserve(t), reserve(t)
	// Each relay starts while its second server is not running yet, and therefore follows the
	// first.
	relayX := serve(t, "127.0.0.1:0", nil, root2.address, addressA)
	atX := join(t, "node-1", nil, relayX.address)
	relayA := serve(t, addressA, nil, root.address, addressC)
	join(t, "node-2", nil, relayA.address)
	relayC := serve(t, addressC, nil, relayX.address)
	atC := join(t, "node-3", nil, relayC.address)

	root2.stop()
	c.fill(3, 4, 7)
	atX.has(3, 7)
	atC.has(3, 7)
	root.stop()
	waitAlone(t, relayA, relayX, relayC)

	again := c.again()
	serve(t, root.address, again)
	<-again.ready
	atC.has(3, 2) // the cluster's state by then
}

// reserve returns an address that no server listens on yet.
func reserve(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}

// waitAlone waits until none of these relays has a server.
func waitAlone(t *testing.T, relays ...*server) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, r := range relays {
			if r.metric("slicecast_upstream_connected") != 0 {
				return false
			}
		}
		return true
	}, patience, time.Millisecond)
}

func contains(l *logtest.Buffer, s string) bool { return strings.Contains(l.String(), s) }
