// These tests prove that a cluster follows from its configuration and seed alone, and that each
// kind of change does what it says, at the planned times.
package generate

import (
	"context"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var config = Config{Nodes: 7, Services: []Group{{5, 230, 230}}, Seed: 3, Change: Flip}

func newCluster(t *testing.T, c Config) *Cluster {
	g, err := New(c)
	require.NoError(t, err)
	return g
}

func versions(objects []model.Object) map[model.Key]model.Version {
	out := make(map[model.Key]model.Version)
	for _, o := range objects {
		out[o.Key()] = o.ContentVersion()
	}
	return out
}

func flips(count int, rate float64) Plan {
	return Plan{Kind: Flip, Schedule: Schedule{Start: start, Count: count, Rate: rate}}
}

var start = time.UnixMilli(1_700_000_000_000)

func TestStateFollowsFromConfig(t *testing.T) {
	objects := newCluster(t, config).Objects()
	require.Len(t, objects, 5+5*3, "a slice has at most 100 endpoints")
	require.Len(t, versions(objects), len(objects), "objects share a name")
	addresses := make(map[string]bool)
	ready := 0
	for _, o := range objects {
		require.NoError(t, o.(interface{ Check() error }).Check(), "nodes would reject the object")
		if s, ok := o.(*model.Slice); ok {
			for _, e := range s.Endpoints {
				addresses[e.Address.String()] = true
				if e.Conditions.Ready {
					ready++
				}
				require.NotEmpty(t, e.NodeName)
			}
		}
	}
	require.Len(t, addresses, 5*230)
	require.Equal(t, 5*230/2, ready)
	require.Equal(t, versions(objects), versions(newCluster(t, config).Objects()))

	other := config
	other.Seed++
	require.NotEqual(t, versions(objects), versions(newCluster(t, other).Objects()))
	other = config
	other.Namespace = "mine"
	for _, o := range newCluster(t, other).Objects() {
		require.Equal(t, "mine", o.Key().Namespace)
	}
}

func TestRandomSizes(t *testing.T) {
	g := newCluster(t, Config{Nodes: 3, Services: []Group{{200, 1, 20}, {1, 500, 500}}, Seed: 1})
	sizes := make(map[int]int)
	for _, s := range g.services {
		sizes[len(s.addresses())]++
	}
	require.Len(t, sizes, 21, "200 Services cover the sizes 1 to 20, and one Service has 500")
	require.Equal(t, 1, sizes[500])
}

func TestOnlyChangingServicesChange(t *testing.T) {
	g := newCluster(t, Config{Nodes: 3, Services: []Group{{4, 10, 10}}, Changing: []Group{{2, 150, 150}}, Seed: 3, Change: Flip})
	require.Len(t, g.Objects(), 4+2+4+2*2)
	changed := make(map[model.Key]int)
	for c := range g.Play(flips(300, 10)) {
		changed[c.Key]++
	}
	require.Len(t, changed, 4)
	require.ElementsMatch(t, []int{100, 50, 100, 50}, slices.Collect(maps.Values(changed)), "an endpoint changed twice before all had changed")
}

func TestConfigOutOfRange(t *testing.T) {
	one := []Group{{1, 1, 1}}
	for _, c := range []Config{
		{Nodes: 0, Services: one}, {Nodes: 1}, {Nodes: 1, Services: []Group{{1, 0, 0}}}, {Nodes: 1, Services: []Group{{1, 2, 1}}},
		{Nodes: 1 << 20, Services: one}, {Nodes: 1, Services: []Group{{1 << 20, 1, 1}}}, {Nodes: 1, Services: []Group{{1 << 11, 1 << 11, 1 << 11}}},
		{Nodes: 1, Services: []Group{{-1, 1, 1}}}, {Nodes: 1, Services: one, Changing: []Group{{2, 1, 1 << 20}}}, {Nodes: 1, Services: one, Change: Drain},
	} {
		_, err := New(c)
		require.ErrorContains(t, err, "use ", "%+v", c)
	}
}

func TestFlips(t *testing.T) {
	g := newCluster(t, config)
	all := 5 * 230
	trigger := make(map[model.Key]int64)
	i := 0
	for c := range g.Play(flips(all, 5000)) {
		require.Equal(t, start.Add(time.Duration(i)*200*time.Microsecond), c.Due)
		require.Greater(t, c.TriggerMS, trigger[c.Key], "the trigger time does not identify the change")
		require.GreaterOrEqual(t, c.TriggerMS, c.Due.UnixMilli())
		require.Equal(t, c.TriggerMS, c.Slice.LastChangeTriggerTimeMS)
		trigger[c.Key] = c.TriggerMS
		i++
	}
	require.Equal(t, all, i)
}

func TestFlipsAlternateAndAreUndone(t *testing.T) {
	g := newCluster(t, config)
	before := versions(g.Objects())
	ready := func() (n int) {
		for _, s := range g.services {
			for _, slice := range s.slices {
				for _, e := range slice.endpoints {
					require.Equal(t, e.Conditions.Ready, e.Conditions.Serving)
					if e.Conditions.Ready {
						n++
					}
				}
			}
		}
		return n
	}
	was := ready()
	i := 0
	for range g.Play(flips(5*230, 10)) {
		now := ready()
		require.Equal(t, map[bool]int{true: -1, false: 1}[i%2 == 0], now-was, "flips do not alternate in direction")
		was = now
		i++
	}
	require.NotEqual(t, before, versions(g.Objects()), "after one round every endpoint is flipped")
	for range g.Play(flips(5*230, 10)) {
	}
	require.Equal(t, before, versions(g.Objects()))
}

// follow applies the changes of a plan as a watcher would, and checks each change. It returns their
// number.
func follow(t *testing.T, g *Cluster, p Plan) (count int) {
	held := make(map[model.Key]*model.Slice)
	for _, o := range g.Objects() {
		if s, ok := o.(*model.Slice); ok {
			held[s.Key()] = s
		}
	}
	last := start
	triggers := make(map[model.Key]int64)
	for c := range g.Play(p) {
		count++
		require.False(t, c.Due.Before(last), "changes are not in the order of their due times")
		last = c.Due
		require.Greater(t, c.TriggerMS, triggers[c.Key])
		triggers[c.Key] = c.TriggerMS
		if c.Removed {
			require.Contains(t, held, c.Key)
			delete(held, c.Key)
			continue
		}
		require.LessOrEqual(t, len(c.Slice.Endpoints), sliceSize)
		if old := held[c.Key]; old != nil {
			require.NotEqual(t, old.ContentVersion(), c.Slice.ContentVersion(), "%v", c.Key)
		}
		held[c.Key] = c.Slice
	}
	require.NotZero(t, count)
	have := make(map[model.Key]model.Version)
	for key, s := range held {
		have[key] = s.ContentVersion()
	}
	want := versions(g.Objects())
	for key := range want {
		if key.Kind == model.KindService {
			delete(want, key)
		}
	}
	require.Equal(t, want, have, "the state differs from the changes applied")
	return count
}

func TestRollReplacesAllPods(t *testing.T) {
	c := Config{Nodes: 7, Services: []Group{{3, 20, 20}}, Changing: []Group{{1, 1000, 1000}}, Seed: 3, Change: Roll}
	g := newCluster(t, c)
	s := g.changing[0]
	old := set(s.addresses())
	count := follow(t, g, Plan{Kind: Roll, Schedule: Schedule{Start: start, Rate: 100}, Batch: 10, Grace: time.Second})
	now := s.addresses()
	require.Len(t, now, 1000)
	for _, a := range now {
		require.NotContains(t, old, a)
	}
	for _, slice := range s.slices {
		for _, e := range slice.endpoints {
			require.Equal(t, model.Conditions{Ready: true, Serving: true}, e.Conditions)
		}
	}
	require.Greater(t, count, 1000, "the pods that go should be spread over many slices")
	require.Less(t, len(s.slices), 30, "slices should be filled up")
}

func TestScaleStartsWithoutEndpoints(t *testing.T) {
	g := newCluster(t, Config{Nodes: 7, Changing: []Group{{1, 250, 250}}, Seed: 3, Change: Scale})
	require.Len(t, g.changing[0].slices, 1, "a Service without endpoints keeps one slice")
	require.Empty(t, g.changing[0].addresses())
	require.Equal(t, 25, follow(t, g, Plan{Kind: Scale, Schedule: Schedule{Start: start, Rate: 100}, Batch: 10}))
	require.Len(t, g.changing[0].addresses(), 250)
	require.Len(t, g.changing[0].slices, 3, "slices should be full")
}

func TestDrainEmptiesNodes(t *testing.T) {
	g := newCluster(t, Config{Nodes: 10, Services: []Group{{30, 40, 40}}, Seed: 3, Change: Drain})
	follow(t, g, Plan{Kind: Drain, Schedule: Schedule{Start: start, Rate: 1, Count: 3}, Grace: time.Second})
	require.Len(t, g.pods.away, 3)
	for _, s := range g.services {
		require.Len(t, s.addresses(), 40)
		for node := range g.pods.away {
			require.Empty(t, s.on(node))
		}
	}
}

// TestRepacking plays the cases of the reconciler, one after the other.
func TestRepacking(t *testing.T) {
	g := newCluster(t, Config{Nodes: 2, Services: []Group{{1, 210, 210}}, Seed: 1})
	s := g.services[0]
	sizes := func() (out []int) {
		for _, slice := range s.slices {
			out = append(out, len(slice.endpoints))
		}
		return out
	}
	names := func(of []*slice) (out []string) {
		for _, slice := range of {
			out = append(out, strings.TrimPrefix(slice.name, "service-00000-"))
		}
		return out
	}
	require.Equal(t, []int{100, 100, 10}, sizes())
	first := func(slice, n int) map[netip.Addr]struct{} {
		gone := make(map[netip.Addr]struct{})
		for _, e := range s.slices[slice].endpoints[:n] {
			gone[e.Address] = struct{}{}
		}
		return gone
	}

	changed, removed := s.sync(first(0, 30), nil, nil)
	require.Equal(t, []int{70, 100, 10}, sizes(), "endpoints that go leave room")
	require.Equal(t, []string{"00000"}, names(changed))
	require.Empty(t, removed)

	changed, _ = s.sync(first(2, 1), nil, g.pods.some(5))
	require.Equal(t, []int{70, 100, 14}, sizes(), "new endpoints go into a slice that changes anyway")
	require.Equal(t, []string{"00002"}, names(changed))

	s.sync(nil, nil, g.pods.some(25))
	require.Equal(t, []int{95, 100, 14}, sizes(), "otherwise they go into the slice that they fill best")

	changed, _ = s.sync(nil, nil, g.pods.some(90))
	require.Equal(t, []int{95, 100, 14, 90}, sizes(), "or into a new slice")
	require.Equal(t, []string{"00003"}, names(changed))

	changed, removed = s.sync(first(2, 14), nil, nil)
	require.Equal(t, []int{95, 100, 90}, sizes())
	require.Empty(t, changed)
	require.Equal(t, []string{"00002"}, names(removed))

	changed, removed = s.sync(first(0, 95), nil, g.pods.some(50))
	require.Equal(t, []int{50, 100, 90}, sizes(), "a new slice replaces one that would be removed")
	require.Equal(t, []string{"00000"}, names(changed))
	require.Empty(t, removed)

	s.sync(set(s.addresses()), nil, nil)
	require.Equal(t, []int{0}, sizes(), "one slice without endpoints stays")
	require.Empty(t, s.slices[0].object(s).Ports)
}

func TestSourceCarriesOutPlans(t *testing.T) {
	s, err := store.New(store.Options{})
	require.NoError(t, err)
	now := time.Now()
	// The first half of the first plan is in the past. The second plan arrives while the source
	// runs.
	early := Plan{Kind: Flip, Schedule: Schedule{Start: now.Add(-time.Second), Count: 20, Rate: 10}}
	source := NewSource(newCluster(t, config), early)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- source.Run(ctx, s) }()

	mine := newCluster(t, config)
	late := Plan{Kind: Flip, Schedule: Schedule{Start: now.Add(1500 * time.Millisecond), Count: 20, Rate: 10_000}}
	require.NoError(t, source.Play(ctx, late))
	for _, p := range []Plan{early, late} {
		lag, err := source.Played(ctx)
		require.NoError(t, err)
		require.GreaterOrEqual(t, lag.Max, lag.P99)
		for range mine.Play(p) {
		}
	}
	s.Publish()
	require.NotNil(t, s.Node(NodeName(6)))
	var have []model.Object
	for i := range s.Shards() {
		u := s.Snapshot(i).Since(0)
		require.LessOrEqual(t, u.ResourceVersions.Slices, uint64(1+40))
		for _, o := range u.Services {
			have = append(have, o)
		}
		for _, o := range u.Slices {
			have = append(have, o)
		}
	}
	require.Equal(t, versions(mine.Objects()), versions(have))

	cancel()
	require.NoError(t, <-ended)
	_, err = source.Played(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestPoissonArrivals(t *testing.T) {
	const count, rate = 10_000, 100
	p := flips(count, rate)
	p.Arrivals, p.Seed = Poisson, 7
	times := func(p Plan) (out []time.Time) {
		for c := range newCluster(t, config).Play(p) {
			out = append(out, c.Due)
		}
		return out
	}
	all := times(p)
	require.Len(t, all, count)
	require.Equal(t, start, all[0])
	require.InDelta(t, count/rate, all[count-1].Sub(start).Seconds(), 5, "the rate differs from the plan by more than five standard deviations")
	long := 0
	for i, due := range all[1:] {
		interval := due.Sub(all[i])
		require.GreaterOrEqual(t, interval, time.Duration(0))
		if interval > time.Second/rate {
			long++
		}
	}
	require.InDelta(t, count/math.E, long, 250, "1/e of the intervals of an exponential distribution are longer than the mean")
	require.Equal(t, all, times(p), "the times should follow from the seed")
	p.Seed++
	require.NotEqual(t, all, times(p))

	// A batch is due when its first item is due.
	s := Schedule{Start: start, Count: 100, Rate: rate, Arrivals: Poisson, Seed: 7}
	due := s.times()
	for i := 0; i < s.Count; i += 10 {
		require.Equal(t, all[i], due(i))
	}
}
