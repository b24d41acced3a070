package upstream_test

import (
	"context"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// older decodes as software does that knows neither the schedulers of Services nor zones: it passes over these fields, and has the versions
// that the wire gives.
func older(f wire.Frame) (*wire.Response, error) { return less(f, "older", nil) }

// less decodes with fields left out: by a relay that says that it is of a version, or, if unknown says so, by this software itself.
func less(f wire.Frame, version string, unknown func() bool) (*wire.Response, error) {
	r, err := wire.Decode(f)
	if err != nil {
		return nil, err
	}
	if r.Welcome != nil {
		r.Welcome.ServerVersion = version
	}
	if r.Update != nil {
		for i, s := range r.Update.Services {
			o := *s
			o.IPVSScheduler = ""
			r.Update.Services[i] = model.NewService(o).WithVersion(s.ContentVersion(), unknown)
		}
		for i, s := range r.Update.Slices {
			o := *s
			o.Endpoints = slices.Clone(s.Endpoints)
			for j := range o.Endpoints {
				o.Endpoints[j].Zone = ""
			}
			r.Update.Slices[i] = model.NewSlice(o).WithVersion(s.ContentVersion(), unknown)
		}
	}
	return r, nil
}

// newer is what older software does not know all of.
var newer = model.ServiceKey{Namespace: "default", Name: "newer"}

// serveNewer serves it.
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

// knows gives the scheduler and the zone that a cache has; nothing, as long as it does not have both objects.
func knows(c *client.Cache) (all []string) {
	s, list := c.Service(newer)
	if s == nil || len(list) == 0 {
		return nil
	}
	return []string{s.IPVSScheduler, list[0].Endpoints[0].Zone}
}

// follower is an agent of some software.
type follower struct {
	cache    *client.Cache
	registry *prometheus.Registry
	stop     func()
}

// follow runs an agent, with a checkpoint or another one's cache, until it is stopped.
func follow(t *testing.T, address, checkpoint string, cache *client.Cache, decode func(wire.Frame) (*wire.Response, error)) *follower {
	f := &follower{cache: cache, registry: prometheus.NewRegistry()}
	quiet := slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(t.Context())
	running, ended := 1, make(chan error, 2)
	if checkpoint != "" {
		k, err := client.OpenCheckpoint(client.CheckpointOptions{Path: checkpoint, NodeName: "node-1", Cache: cache, Logger: quiet})
		require.NoError(t, err)
		running++
		go func() { k.Run(ctx); ended <- nil }()
	}
	a := client.New(client.Options{
		Servers: client.Static(address), NodeName: "node-1", DialOptions: plaintext, Cache: cache, Decode: decode, Logger: quiet, Registerer: f.registry,
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

// TestAnUpdatedAgentGetsWhatTheOlderOneDidNotKnow has an agent go on from a checkpoint that an older one wrote.
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

// TestAnAgentOfAnOlderRelayGetsWhatThatDidNotKnow has an agent come to a server that is newer than the one before. That it holds what its
// server does not know all of costs it nothing with each stream.
func TestAnAgentOfAnOlderRelayGetsWhatThatDidNotKnow(t *testing.T) {
	c, root := serveNewer(t)
	cache := client.NewCache()
	for range 2 {
		a := follow(t, root.address, "", cache, older)
		a.await(t, "", "")
		a.stop()
		require.Empty(t, resyncs(t, a.registry))
	}
	a := follow(t, root.address, "", cache, wire.Decode)
	a.await(t, "sh", "a")
	upsertNewer(c, "dh")
	a.await(t, "dh", "a")
	a.stop()
	require.Equal(t, map[string]float64{"software": 1}, resyncs(t, a.registry))
}

// TestDeltasThatDoNotDecode has an agent that cannot read a server's deltas, but what they are about: it asks for that, and lacks nothing.
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

// TestAnAgentThatIsOlderItself holds that what an agent does not know costs it nothing when it comes to a server of another version.
func TestAnAgentThatIsOlderItself(t *testing.T) {
	_, root := serveNewer(t)
	cache := client.NewCache()
	for _, version := range []string{"1", "2", "1"} {
		a := follow(t, root.address, "", cache, func(f wire.Frame) (*wire.Response, error) {
			return less(f, version, func() bool { return true })
		})
		a.await(t, "", "")
		a.stop()
		require.Empty(t, resyncs(t, a.registry))
	}
}

// resyncs gives what an agent has asked for again, by reason.
func resyncs(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	families, err := registry.Gather()
	require.NoError(t, err)
	out := map[string]float64{}
	for _, f := range families {
		if f.GetName() == "slicecast_agent_resyncs_total" {
			for _, m := range f.GetMetric() {
				out[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	return out
}
