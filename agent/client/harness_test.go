// The harness of these tests connects a real Client to a real hub over TLS, or to scripted servers.
package client

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	// patience is the timeout for steps that take milliseconds on an idle machine.
	patience = 60 * time.Second
	tick     = 2 * time.Millisecond
	// noHeartbeat disables heartbeats in tests that do not concern them, because heartbeats repair
	// what a test should detect.
	noHeartbeat = time.Hour
)

// identity is a CA with a server certificate for loopback.
type identity struct {
	server grpc.ServerOption
	client []grpc.DialOption
}

func newIdentity(t *testing.T) identity {
	t.Helper()
	ca, err := testca.New()
	require.NoError(t, err)
	return identityOf(t, ca, "127.0.0.1", "server.example")
}

// identityOf returns an identity with a server certificate for these names.
func identityOf(t *testing.T, ca *testca.CA, names ...string) identity {
	t.Helper()
	cert, err := ca.Server(names...)
	require.NoError(t, err)
	return identity{
		server: grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13})),
		client: []grpc.DialOption{
			grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: ca.Pool(), MinVersion: tls.VersionTLS13})),
		},
	}
}

// instance is a running server, either a real one or a scripted one.
type instance struct {
	address string
	stop    func()
	hub     *fanout.Hub // nil for a scripted server
}

// serve runs a server until the test ends or stop is called.
func serve(t *testing.T, id identity, s pb.DistributionServiceServer, options ...grpc.ServerOption) *instance {
	t.Helper()
	server := grpc.NewServer(append(options, id.server)...)
	pb.RegisterDistributionServiceServer(server, s)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	i := &instance{address: l.Addr().String(), stop: sync.OnceFunc(func() {
		server.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("serve: %v", err)
		}
	})}
	t.Cleanup(i.stop)
	return i
}

// serveStore runs a real server.
func serveStore(t *testing.T, id identity, s *store.Store, heartbeat time.Duration) *instance {
	t.Helper()
	hub := fanout.New(fanout.Options{
		Store: s, Heartbeat: heartbeat, DrainWindow: 20 * time.Millisecond, MaxBehindWait: time.Hour, Logger: slog.New(slog.DiscardHandler),
		Authorize: func(context.Context, pb.ClientKind, string) (string, time.Time, error) { return "", time.Time{}, nil },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { hub.Run(ctx) })
	i := serve(t, id, hub, fanout.ServerOption())
	i.hub = hub
	stop := i.stop
	i.stop = sync.OnceFunc(func() {
		stop()
		cancel()
		running.Wait()
	})
	t.Cleanup(i.stop)
	return i
}

// agent is a running client.
type agent struct {
	*Client
	cache    *Cache
	registry *prometheus.Registry
	mu       sync.Mutex
	// These fields count messages and their bytes, by kind.
	updates, updateBytes, inSyncs, otherBytes int
	stop                                      func()
}

// connect runs a client until the test ends or stop is called. check, if any, is called after each
// message.
func connect(t *testing.T, id identity, cache *Cache, check func(*wire.Response), servers ...string) *agent {
	t.Helper()
	a := &agent{cache: cache, registry: prometheus.NewRegistry()}
	a.Client, a.stop = run(t, cache, Options{
		Servers: Static(servers...), NodeName: "node-1", DialOptions: id.client,
		Logger: slog.New(slog.DiscardHandler), Registerer: a.registry,
		Observe: func(r *wire.Response, size int) {
			if check != nil {
				check(r)
			}
			a.mu.Lock()
			defer a.mu.Unlock()
			switch {
			case r.Update != nil:
				a.updates++
				a.updateBytes += size
			case r.InSync != nil:
				a.inSyncs++
				a.otherBytes += size
			case r.Heartbeat == nil:
				a.otherBytes += size
			}
		},
	})
	return a
}

// run runs a client with short delays until the test ends or stop is called.
func run(t *testing.T, cache *Cache, o Options, set ...func(*discovery.Times)) (c *Client, stop func()) {
	t.Helper()
	o.Cache = cache
	times := discovery.DefaultTimes
	times.MinBackoff, times.MaxBackoff = 4*time.Millisecond, 40*time.Millisecond
	for _, f := range set {
		f(&times)
	}
	c = newClient(o, times)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := c.Run(ctx); err != nil {
			panic(err)
		}
	})
	stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(stop)
	return c, stop
}

// metric returns the value of a gauge or counter of an agent.
func metric(t *testing.T, registry prometheus.Registerer, name string, labels ...string) float64 {
	t.Helper()
	families, err := registry.(*prometheus.Registry).Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != "slicecast_agent_"+name {
			continue
		}
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if slices.Equal(values, labels) {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

func (a *agent) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	return metric(t, a.registry, name, labels...)
}

// resyncs returns how often the agent has asked for state again, for a reason.
func (a *agent) resyncs(t *testing.T, reason string) float64 {
	t.Helper()
	return a.metric(t, "resyncs_total", reason)
}

// counts returns the number and bytes of updates, the bytes of all other messages except
// heartbeats, and how often the agent was in sync.
func (a *agent) counts() (updates, updateBytes, otherBytes, inSyncs int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.updates, a.updateBytes, a.otherBytes, a.inSyncs
}

// waitInSync waits until the agent has been in sync n times.
func (a *agent) waitInSync(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { _, _, _, inSyncs := a.counts(); return inSyncs >= n }, patience, tick)
}

// holds reports whether a cache holds what a store has published, by position, digest and content.
func holds(c *Cache, s *store.Store) bool {
	sequences, digests := c.Digests()
	if len(sequences) != int(s.Shards()) {
		return false
	}
	for i := range s.Shards() {
		if sequences[i] != s.Snapshot(i).Sequence() || digests[i] != s.Snapshot(i).Digest() {
			return false
		}
	}
	n := 0
	for _, key := range c.Services() {
		service, slices := c.Service(key)
		snapshot := s.Snapshot(key.Shard(s.Shards()))
		if service != nil {
			n++
			if there, ok := snapshot.Get(service.Key()).(*model.Service); !ok || !same(there, service) {
				return false
			}
		}
		for _, slice := range slices {
			n++
			if there, ok := snapshot.Get(slice.Key()).(*model.Slice); !ok || there.Service != key.Name || !sameSlice(there, slice) {
				return false
			}
		}
	}
	for i := range s.Shards() {
		n -= s.Snapshot(i).Len()
	}
	return n == 0
}

// same and sameSlice compare content without the version that came with it.
func same(a, b *model.Service) bool {
	return model.NewService(*a).ContentVersion() == model.NewService(*b).ContentVersion()
}

func sameSlice(a, b *model.Slice) bool {
	return rehash(a).ContentVersion() == rehash(b).ContentVersion()
}

func rehash(s *model.Slice) *model.Slice {
	n := *s
	n.Endpoints = append([]model.Endpoint(nil), s.Endpoints...)
	return model.NewSlice(n)
}

func waitHolds(t *testing.T, c *Cache, s *store.Store) {
	t.Helper()
	require.Eventually(t, func() bool { return holds(c, s) }, patience, tick)
}

const epoch = 5

var (
	named   = modeltest.NamedSlice
	web     = modeltest.ChangedWeb
	unready = modeltest.Unready
	service = modeltest.NamedService
)

// welcomed returns the Writer of an empty cache at position 1 of all shards.
func welcomed(t *testing.T, shards uint32) *cache.Writer {
	t.Helper()
	w := &cache.Writer{Cache: NewCache()}
	require.NoError(t, w.Welcome(epoch, shards))
	require.NoError(t, w.InSync(slices.Repeat([]uint64{1}, int(shards)), model.ResourceVersions{}))
	_, ok := w.Take()
	require.True(t, ok)
	return w
}

func apply(t *testing.T, w *cache.Writer, u *model.Update) {
	t.Helper()
	_, err := w.Apply(u)
	require.NoError(t, err)
}

// tamper replaces the object that a cache holds, as a bug or faulty memory would.
func tamper(t require.TestingT, c *Cache, s *model.Slice) {
	shard := c.ShardOf(s.ServiceKey())
	sequence := c.Sequence(shard)
	_, err := (&cache.Writer{Cache: c}).Apply(&model.Update{Shard: shard, From: sequence, To: sequence, Slices: []*model.Slice{s}})
	require.NoError(t, err)
}

// cacheHas reports whether a cache holds a slice in this version.
func cacheHas(c *Cache, s *model.Slice) bool {
	_, slices := c.Service(s.ServiceKey())
	for _, held := range slices {
		if held.Name == s.Name {
			return held.ContentVersion() == s.ContentVersion() && sameSlice(held, s)
		}
	}
	return false
}

// stateDigest returns the digest, as in a Hello, of a state with these shards.
func stateDigest(shards ...model.Digest) []byte {
	digest := model.StateDigest(shards)
	return digest[:]
}
