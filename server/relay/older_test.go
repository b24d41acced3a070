// These tests prove that agents and relays of different versions lose no field for good, and ask
// for little again when they meet. Decoders that drop fields stand for older software; servers are
// real.
package relay_test

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// older decodes a frame as software does that knows neither IPVS schedulers nor zones.
func older(f wire.Frame) (*wire.Response, error) {
	r, err := wire.Decode(f)
	if err != nil || r.Update == nil {
		return r, err
	}
	u := r.Update
	for i, s := range u.Services {
		o := *s
		o.IPVSScheduler = ""
		u.Services[i] = model.NewService(o)
		claim(u, s, u.Services[i])
	}
	for i, s := range u.Slices {
		o := *s
		o.Endpoints = slices.Clone(s.Endpoints)
		for j := range o.Endpoints {
			o.Endpoints[j].Zone = ""
		}
		u.Slices[i] = model.NewSlice(o)
		claim(u, s, u.Slices[i])
	}
	return r, nil
}

// claim notes the version with which an object was sent, if the receiver knows only part of it.
func claim(u *model.Update, sent, known model.Object) {
	if version := sent.ContentVersion(); version != known.ContentVersion() {
		u.Unverified = append(u.Unverified, model.Unverified{Key: sent.Key(), Version: version})
	}
}

// newer is a Service with fields that older software does not know.
var newer = model.ServiceKey{Namespace: "default", Name: "newer"}

// serveNewer runs a server that has the Service newer.
func serveNewer(t *testing.T) (*cluster, *server) {
	c := newCluster()
	root := serve(t, "127.0.0.1:0", c)
	<-c.ready
	upsertNewer(c, "sh")
	return c, root
}

func upsertNewer(c *cluster, scheduler string) {
	c.version++
	c.sink.Upsert(model.NewService(model.Service{Namespace: newer.Namespace, Name: newer.Name, Type: model.ClusterIP, IPVSScheduler: scheduler}), c.version)
	c.sink.Upsert(model.NewSlice(model.Slice{
		Namespace: newer.Namespace, Name: newer.Name + "-1", Service: newer.Name, Family: model.IPv4,
		Endpoints: []model.Endpoint{{Address: netip.MustParseAddr("10.0.0.1"), Zone: "a", Conditions: model.Conditions{Ready: true, Serving: true}}},
	}), c.version)
}

// knows returns the scheduler and the zone of newer in a cache, or nothing until the cache holds
// both objects.
func knows(c *client.Cache) (all []string) {
	s, list := c.Service(newer)
	if s == nil || len(list) == 0 {
		return nil
	}
	return []string{s.IPVSScheduler, list[0].Endpoints[0].Zone}
}

// follower is a running agent of some version.
type follower struct {
	cache    *client.Cache
	registry *prometheus.Registry
	beats    atomic.Int64 // heartbeats with a digest
	stop     func()
}

// follow runs an agent until it is stopped. The agent starts with a checkpoint or with another
// agent's cache.
func follow(t *testing.T, address, path string, cache *client.Cache, decode func(wire.Frame) (*wire.Response, error)) *follower {
	f := &follower{cache: cache, registry: prometheus.NewRegistry()}
	quiet := slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(t.Context())
	running, ended := 1, make(chan error, 2)
	if path != "" {
		k := checkpoint.Open(checkpoint.Options{Path: path, NodeName: "node-1", Cache: cache, Logger: quiet})
		running++
		go func() { k.Run(ctx); ended <- nil }()
	}
	a := client.New(client.Options{
		Servers: client.Static(address), NodeName: "node-1", DialOptions: plaintext, Cache: cache, Decode: decode, Logger: quiet, Registerer: f.registry,
		Observe: func(r *wire.Response, _ int) {
			if len(r.Heartbeat.GetDigest()) > 0 {
				f.beats.Add(1)
			}
		},
	})
	go func() { ended <- a.Run(ctx) }()
	f.stop = func() {
		cancel()
		for range running {
			require.NoError(t, <-ended)
		}
	}
	return f
}

func (f *follower) await(t *testing.T, want ...string) {
	t.Helper()
	require.Eventually(t, func() bool { _, ok := f.cache.Take(); return ok && slices.Equal(want, knows(f.cache)) }, patience, time.Millisecond)
}

// TestAnUpdatedAgentGetsWhatTheOlderOneDidNotKnow checks an agent that starts from the checkpoint
// of an older agent.
func TestAnUpdatedAgentGetsWhatTheOlderOneDidNotKnow(t *testing.T) {
	_, root := serveNewer(t)
	path := filepath.Join(t.TempDir(), "checkpoint")
	before := follow(t, root.address, path, client.NewCache(), older)
	before.await(t, "", "")
	before.stop()
	require.FileExists(t, path)
	now := follow(t, root.address, path, client.NewCache(), wire.Decode)
	now.await(t, "sh", "a")
	now.stop()
	last := client.NewCache()
	again := follow(t, root.address, path, last, wire.Decode)
	again.await(t, "sh", "a")
	again.stop()
}

// TestTheChainIsUpdatedInAnyOrder checks a chain whose relay in the middle is updated last. Then
// all below it get what that relay did not know, although their own software stays the same.
func TestTheChainIsUpdatedInAnyOrder(t *testing.T) {
	c, root := serveNewer(t)
	middle := serveDecoding(t, "127.0.0.1:0", older, nil, root.address)
	last := serve(t, "127.0.0.1:0", nil, middle.address)
	above, below := follow(t, middle.address, "", client.NewCache(), wire.Decode), follow(t, last.address, "", client.NewCache(), wire.Decode)
	both := func(want ...string) {
		t.Helper()
		above.await(t, want...)
		below.await(t, want...)
	}
	both("", "")
	upsertNewer(c, "dh") // the middle sees no change
	c.fill(3, 4, 7)
	middle.stop()
	serve(t, middle.address, nil, root.address)
	both("dh", "a")
	above.stop()
	below.stop()
}

// TestDeltasThatDoNotDecode checks an agent that can decode a server's slices but not its deltas.
// It must ask for the slices and lack nothing.
func TestDeltasThatDoNotDecode(t *testing.T) {
	c := newCluster()
	root := serve(t, "127.0.0.1:0", c)
	<-c.ready
	cache := client.NewCache()
	a := follow(t, root.address, "", cache, func(f wire.Frame) (*wire.Response, error) {
		r, err := wire.Decode(f)
		if err == nil && r.Update != nil {
			for _, d := range r.Update.Deltas {
				r.Update.Unreadable = append(r.Update.Unreadable, model.Unreadable{Key: d.Key(), Version: d.Version, Delta: true})
				r.Problems = append(r.Problems, wire.Problem{Key: d.Key(), Err: model.ErrBase})
			}
			r.Update.Deltas = nil
		}
		return r, err
	})
	has := func(endpoints int) {
		t.Helper()
		require.Eventually(t, func() bool {
			_, held := cache.Service(model.ServiceKey{Namespace: "default", Name: "service-3"})
			return len(held) == 1 && len(held[0].Endpoints) == endpoints
		}, patience, time.Millisecond)
	}
	c.fill(3, 4, 50)
	has(50)
	for n := range 5 {
		c.fill(3, 4, 51+n)
		has(51 + n)
	}
	a.stop()
	asked := resyncs(t, a.registry)
	require.Positive(t, asked["delta"])
	require.Len(t, asked, 1)
	require.Zero(t, root.metric("slicecast_server_nacks_total"))
}

// TestAnAgentThatIsOlderItself checks that an agent asks once on each stream for what it does not
// wholly know, because an earlier server may have sent something else under the same version. On a
// quiet stream it asks for nothing more.
func TestAnAgentThatIsOlderItself(t *testing.T) {
	c, root := serveNewer(t)
	cache := client.NewCache()
	for _, want := range []map[string]float64{{}, {"resume": 1}, {"resume": 1}} {
		a := follow(t, root.address, "", cache, older)
		a.await(t, "", "")
		upsertNewer(c, "dh")
		upsertNewer(c, "sh")
		beats := a.beats.Load()
		require.Eventually(t, func() bool { return a.beats.Load() >= beats+2 }, patience, time.Millisecond)
		a.stop()
		require.Equal(t, want, resyncs(t, a.registry))
	}
}

// resyncs returns how often an agent has asked for state again, by reason.
func resyncs(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	families, err := registry.Gather()
	require.NoError(t, err)
	out := map[string]float64{}
	for _, f := range families {
		if f.GetName() == "slicecast_agent_resyncs_total" {
			for _, m := range f.GetMetric() {
				if n := m.GetCounter().GetValue(); n > 0 {
					out[m.GetLabel()[0].GetValue()] = n
				}
			}
		}
	}
	return out
}
