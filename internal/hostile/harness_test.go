// This file runs real servers and honest nodes, measures how long updates and new nodes take, and
// compares that with the same during an attack.
package hostile

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/server/app"
)

const (
	// patience bounds waits for events that take milliseconds on an idle machine.
	patience = 2 * time.Minute
	tick     = 2 * time.Millisecond
)

// These are the server's transports, by the protocol that a client offers in TLS.
const (
	lean    = wire.Protocol
	grpcGo  = "h2"
	neither = "" // the attack ends before a protocol is chosen
)

var both = []string{lean, grpcGo}

// objects is the number of the cluster's Services. Each has one slice with endpointsOfOne
// endpoints.
const objects, endpointsOfOne = 100, 100

// cluster is a server's source. It starts with the objects, and then changes one slice at a time.
type cluster struct {
	mu      sync.Mutex                // guards the fields below
	version uint64                    // the latest resourceVersion
	state   map[model.Key]model.Keyed // all objects
	sinks   map[source.Sink]struct{}  // those of the servers
}

func newCluster() *cluster {
	c := &cluster{version: 1, state: make(map[model.Key]model.Keyed), sinks: make(map[source.Sink]struct{})}
	for i := range objects {
		s := modeltest.Web()
		n := *s
		n.Name = fmt.Sprint("service-", i)
		n.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}
		service := model.NewService(n)
		c.state[service.Key()] = service
		slice := sliceOf(i, 0)
		c.state[slice.Key()] = slice
	}
	return c
}

// sliceOf returns a version of the slice of the i-th Service.
func sliceOf(i, version int) *model.Slice {
	n := modeltest.WebSlice(endpointsOfOne)
	n.Name, n.Service = fmt.Sprintf("service-%d-1", i), fmt.Sprint("service-", i)
	n.Endpoints[0].Zone = fmt.Sprint("zone-", version)
	return model.NewSlice(n)
}

// Run implements source.Source.
func (c *cluster) Run(ctx context.Context, sink source.Sink) error {
	c.mu.Lock()
	for _, kind := range []model.Kind{model.KindNode, model.KindService, model.KindSlice} {
		var list []model.Keyed
		for key, o := range c.state {
			if key.Kind == kind {
				list = append(list, o)
			}
		}
		sink.Replace(kind, list, c.version)
	}
	sink.Synced()
	c.sinks[sink] = struct{}{}
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.sinks, sink)
	return nil
}

// upsert changes a slice. It also reports progress for the other kinds, as a real watch does from
// time to time.
func (c *cluster) upsert(s *model.Slice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	c.state[s.Key()] = s
	for sink := range c.sinks {
		sink.Progress(model.KindService, c.version)
		sink.Upsert(s, c.version)
	}
}

// server is a slicecast-server that runs in this process.
type server struct {
	*app.Server
	registry *prometheus.Registry
	// reviews counts the TokenReviews that the server has requested.
	reviews *atomic.Int64
	// drain makes the server drain and end. ended is closed once it has ended.
	drain context.CancelFunc
	ended chan struct{}
}

// serve runs a server until the test ends or drain is called.
func serve(t *testing.T, c *cluster, set ...func(*app.Config)) *server {
	t.Helper()
	s := &server{registry: prometheus.NewRegistry(), reviews: new(atomic.Int64), ended: make(chan struct{})}
	config := app.Config{
		Source: c, SourceKind: "test", TLS: &identities.server, BindAddress: "127.0.0.1:0",
		HealthzBindAddress: "127.0.0.1:0", MetricsBindAddress: "127.0.0.1:0",
		HeartbeatInterval: time.Second, DrainWindow: 20 * time.Millisecond, GracePeriod: 200 * time.Millisecond,
		MaxBehindWait: 300 * time.Millisecond, Tokens: tokens(s.reviews), Logger: slog.New(slog.DiscardHandler), Registry: s.registry,
	}
	for _, f := range set {
		f(&config)
	}
	var err error
	s.Server, err = app.New(config)
	require.NoError(t, err)
	var ctx context.Context
	ctx, s.drain = context.WithCancel(context.Background())
	go func() {
		defer close(s.ended)
		if err := s.Run(ctx); err != nil {
			t.Errorf("the server ended: %v", err)
		}
	}()
	t.Cleanup(func() {
		s.drain()
		<-s.ended
	})
	return s
}

func (s *server) address() string { return s.Addresses().GRPC.String() }

// counter is a metric of the server, with the value of its label if it has one.
type counter struct{ name, label string }

// value returns the value of a counter.
func (s *server) value(c counter) (sum float64) {
	for _, f := range must(s.registry.Gather()) {
		if f.GetName() != c.name {
			continue
		}
		for _, m := range f.GetMetric() {
			if c.label == "" || len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == c.label {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// tlsConfig returns a client's configuration that offers a protocol.
func tlsConfig(protocol string, certificates ...tls.Certificate) *tls.Config {
	c := &tls.Config{
		RootCAs: identities.ca.Pool(), Certificates: certificates, MinVersion: tls.VersionTLS13, ServerName: "127.0.0.1",
		ClientSessionCache: nil, // every handshake is a full one
	}
	if protocol != neither {
		c.NextProtos = []string{protocol}
	}
	return c
}

// node is the client of an honest node.
type node struct {
	cache  *client.Cache
	synced chan struct{} // closed by the first InSync
	// got receives the version of the slice that changes, once the cache holds it.
	got  chan model.Version
	stop func()
}

// follow runs an honest node until the test ends or stop is called.
func follow(t *testing.T, name, protocol string, watched model.Key, addresses ...string) *node {
	t.Helper()
	n := &node{cache: client.NewCache(), synced: make(chan struct{}), got: make(chan model.Version, 16)}
	var client_ *client.Client
	var inSync sync.Once
	var last model.Version
	client_ = client.New(client.Options{
		Servers: client.Static(addresses...), NodeName: name, Cache: n.cache, MaxBackoff: 20 * time.Millisecond,
		DialOptions: []grpc.DialOption{
			grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig(protocol, identities.node(name)))),
		},
		Logger: slog.New(slog.DiscardHandler),
		Observe: func(r *wire.Response, _ int) {
			if changes, ok := n.cache.Take(); ok && len(changes.Positions) > 0 {
				client_.Ack(changes.Epoch, changes.Positions)
			}
			if r.InSync != nil {
				inSync.Do(func() { close(n.synced) })
			}
			if r.Update == nil {
				return
			}
			service := model.ServiceKey{Namespace: watched.Namespace, Name: changing}
			if slice := n.cache.Slice(service.Shard(shards), watched); slice != nil && slice.ContentVersion() != last {
				last = slice.ContentVersion()
				select {
				case n.got <- last:
				default: // nobody waits for it
				}
			}
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := client_.Run(ctx); err != nil {
			panic(err)
		}
	}()
	n.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(n.stop)
	return n
}

// changing is the Service whose slice changes.
const changing = "service-0"

// honest has the nodes that use one or several servers during an attack.
type honest struct {
	t         *testing.T
	cluster   *cluster
	addresses []string
	nodes     []*node
	version   int
}

// names counts the node names that were used, so that names are unique.
var names atomic.Int64

func nodeName(prefix string) string { return fmt.Sprint(prefix, "-", names.Add(1)) }

// newHonest brings count nodes in sync, half of them on each transport.
func newHonest(t *testing.T, c *cluster, count int, addresses ...string) *honest {
	t.Helper()
	h := &honest{t: t, cluster: c, addresses: addresses}
	for i := range count {
		h.nodes = append(h.nodes, follow(t, nodeName("honest"), both[i%2], sliceOf(0, 0).Key(), addresses...))
	}
	for _, n := range h.nodes {
		h.await(n.synced, "an honest node is in sync")
	}
	return h
}

func (h *honest) await(done <-chan struct{}, what string) {
	h.t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		h.t.Fatalf("not within %v: %s", patience, what)
	}
}

// sample is what honest clients have measured: how long each update took to each node, and how long
// new nodes took to be in sync.
type sample struct{ updates, syncs []time.Duration }

// rounds is the lowest number of measured updates, and newcomers that of new nodes.
const rounds, newcomers = 8, 2

// measure changes the slice repeatedly, each time after all nodes have the previous change, and
// brings new nodes in sync. It returns once that was done often enough and done is closed.
func (h *honest) measure(done <-chan struct{}) (s sample) {
	h.t.Helper()
	for round := 0; ; round++ {
		select {
		case <-done:
			if round >= rounds {
				return s
			}
		default:
		}
		if round%(rounds/newcomers) == 1 {
			s.syncs = append(s.syncs, h.newcomer(both[len(s.syncs)%2]))
		}
		h.version++
		slice := sliceOf(0, h.version)
		begin := time.Now()
		h.cluster.upsert(slice)
		late := time.After(patience)
		for i, n := range h.nodes {
			for got := (model.Version{}); got != slice.ContentVersion(); {
				select {
				case got = <-n.got:
				case <-late:
					h.t.Fatalf("honest node %d has not got an update within %v", i, patience)
				}
			}
			s.updates = append(s.updates, time.Since(begin))
		}
	}
}

// newcomer brings a new node in sync, and returns how long that took.
func (h *honest) newcomer(protocol string) time.Duration {
	h.t.Helper()
	name := nodeName("newcomer")
	identities.node(name) // creates the certificate before the measurement
	begin := time.Now()
	n := follow(h.t, name, protocol, sliceOf(0, 0).Key(), h.addresses...)
	defer n.stop()
	h.await(n.synced, "a new node is in sync")
	return time.Since(begin)
}

// part returns the duration within which that many percent of all are.
func part(all []time.Duration, percent int) time.Duration {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[(len(sorted)-1)*percent/100].Round(10 * time.Microsecond)
}

// factor is how many times longer honest clients may wait during an attack than without it. A
// duration below its floor is always acceptable: the attackers run in the same process and compute
// on the same few CPUs. If a bound fails, honest clients have to wait until the server gives up on
// an attacker, which takes 10 seconds or more.
const (
	factor      = 20
	floorMedian = 250 * time.Millisecond
	floorMost   = 3 * time.Second
)

// compare compares what honest clients measured during an attack with what they measured alone.
// longer is added to what new nodes may take.
func compare(alone, beside sample, longer time.Duration) error {
	for _, c := range []struct {
		what          string
		alone, beside time.Duration
		floor         time.Duration
	}{
		{"half of the updates", part(alone.updates, 50), part(beside.updates, 50), floorMedian},
		{"99 % of the updates", part(alone.updates, 99), part(beside.updates, 99), floorMost},
		{"new nodes in sync", part(alone.syncs, 100), part(beside.syncs, 100), floorMost + longer},
	} {
		if c.beside > max(factor*c.alone, c.floor) {
			return fmt.Errorf("%s: within %v, and alone within %v", c.what, c.beside, c.alone)
		}
	}
	return nil
}

// requireUnharmed requires that honest clients did about as well as alone. If they did not, it
// repeats the measurement without attackers, as the machine may have become slower.
func (h *honest) requireUnharmed(alone, beside sample, longer time.Duration) {
	h.t.Helper()
	h.t.Logf("%d updates: 50 %% within %v, 99 %% within %v; %d new nodes in sync within %v", len(beside.updates),
		part(beside.updates, 50), part(beside.updates, 99), len(beside.syncs), part(beside.syncs, 100))
	if err := compare(alone, beside, longer); err != nil {
		now := h.measure(closed())
		h.t.Logf("measured again alone, as %v: 50 %% within %v, 99 %% within %v; in sync within %v", err, part(now.updates, 50),
			part(now.updates, 99), part(now.syncs, 100))
		require.NoError(h.t, compare(now, beside, longer))
	}
}
