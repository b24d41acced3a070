package generate

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var config = Config{Nodes: 7, Services: 5, Endpoints: 230, Seed: 3}

func newCluster(t *testing.T) *Cluster {
	g, err := New(config)
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

func TestStateFollowsFromConfig(t *testing.T) {
	g := newCluster(t)
	objects := g.Objects()
	require.Len(t, objects, 5+5*3, "a slice has at most 100 endpoints")
	require.Len(t, versions(objects), len(objects), "all have different names")
	addresses := make(map[string]bool)
	ready := 0
	for _, o := range objects {
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
	require.Equal(t, versions(objects), versions(newCluster(t).Objects()))
}

func TestLargeServicesAreWhatChanges(t *testing.T) {
	c := Config{Nodes: 3, Services: 4, Endpoints: 10, LargeServices: 2, LargeEndpoints: 150, Seed: 3}
	g, err := New(c)
	require.NoError(t, err)
	require.Len(t, g.Objects(), 4+2+4+2*2)
	sizes := make(map[model.Key]int)
	for _, o := range g.Objects() {
		if s, ok := o.(*model.Slice); ok {
			sizes[o.Key()] = len(s.Endpoints)
		}
	}
	changed := make(map[model.Key]int)
	for _, c := range g.Changes(Plan{Start: time.Now(), Count: 300, Rate: 10}) {
		changed[c.Slice]++
	}
	require.Len(t, changed, 4)
	for key, n := range changed {
		require.Equal(t, sizes[key], n)
		require.GreaterOrEqual(t, n, 50)
	}
}

func TestPlacesFollowFromTheSeed(t *testing.T) {
	other := config
	other.Seed++
	g, err := New(other)
	require.NoError(t, err)
	require.NotEqual(t, versions(newCluster(t).Objects()), versions(g.Objects()))
}

func TestConfigOutOfRange(t *testing.T) {
	for _, c := range []Config{
		{Nodes: 0, Services: 1, Endpoints: 1}, {Nodes: 1, Services: 0, Endpoints: 1}, {Nodes: 1, Services: 1, Endpoints: 0},
		{Nodes: 1 << 20, Services: 1, Endpoints: 1}, {Nodes: 1, Services: 1 << 20, Endpoints: 1}, {Nodes: 1, Services: 1 << 11, Endpoints: 1 << 11},
		{Nodes: 1, Services: 1, Endpoints: 1, LargeServices: 1}, {Nodes: 1, Services: 1, Endpoints: 1, LargeServices: -1},
		{Nodes: 1, Services: 1, Endpoints: 1, LargeServices: 2, LargeEndpoints: 1 << 20},
	} {
		_, err := New(c)
		require.ErrorContains(t, err, "use ", "%+v", c)
	}
}

func TestPlan(t *testing.T) {
	g := newCluster(t)
	start := time.UnixMilli(1_700_000_000_000)
	all := 5 * 230
	plan := Plan{Start: start, Count: all, Rate: 5000}
	changes := g.Changes(plan)
	require.Len(t, changes, all)
	type endpoint struct {
		slice model.Key
		index int
	}
	seen := make(map[endpoint]bool)
	trigger := make(map[model.Key]int64)
	for i, c := range changes {
		require.Equal(t, start.Add(time.Duration(i)*200*time.Microsecond), c.Due)
		require.Greater(t, c.TriggerMS, trigger[c.Slice], "slice and time tell the change")
		require.GreaterOrEqual(t, c.TriggerMS, c.Due.UnixMilli())
		trigger[c.Slice] = c.TriggerMS
		seen[endpoint{c.Slice, int(c.place.endpoint)}] = true
	}
	require.Len(t, seen, all, "no endpoint changes twice before all have changed")

	// A plan that follows goes on where this one ended.
	half := g.Changes(Plan{Start: start, First: all / 2, Count: 1, Rate: 1})
	require.Equal(t, changes[all/2].place, half[0].place)
	require.Equal(t, changes[all/2].Slice, half[0].Slice)
}

func TestChangesGoBothWaysInTurns(t *testing.T) {
	g := newCluster(t)
	for i, c := range g.Changes(Plan{Start: time.Now(), Count: 100, Rate: 10}) {
		conditions := g.Make(c).Endpoints[c.place.endpoint].Conditions
		require.Equal(t, i%2 == 1, conditions.Ready)
		require.Equal(t, conditions.Ready, conditions.Serving)
	}
}

func TestMakeIsUndoneByTheNextRound(t *testing.T) {
	g := newCluster(t)
	before := versions(g.Objects())
	plan := Plan{Start: time.Now(), Count: 5 * 230, Rate: 10}
	changes := g.Changes(plan)
	s := g.Make(changes[0])
	require.NotEqual(t, before[s.Key()], s.ContentVersion())
	require.Equal(t, changes[0].TriggerMS, s.LastChangeTriggerTimeMS)
	for _, c := range changes[1:] {
		g.Make(c)
	}
	require.NotEqual(t, before, versions(g.Objects()), "those that were ready are not, and the other way round")
	for _, c := range changes {
		g.Make(c)
	}
	require.Equal(t, before, versions(g.Objects()))
}

func TestSourceCarriesOutPlans(t *testing.T) {
	s, err := store.New(store.Options{})
	require.NoError(t, err)
	source := NewSource(newCluster(t))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- source.Run(ctx, s) }()

	mine := newCluster(t)
	for first := 0; first < 40; first += 20 {
		plan := Plan{Start: time.Now(), First: first, Count: 20, Rate: 10_000}
		lag, err := source.Churn(ctx, plan)
		require.NoError(t, err)
		require.GreaterOrEqual(t, lag.Max, lag.P99)
		for _, c := range mine.Changes(plan) {
			mine.Make(c)
		}
	}
	s.Publish()
	require.NotNil(t, s.Node(NodeName(6)))
	var have []model.Object
	for i := range s.Shards() {
		u := s.Snapshot(i).Since(0)
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
	_, err = source.Churn(ctx, Plan{Count: 1, Rate: 1})
	require.ErrorIs(t, err, context.Canceled)
}
