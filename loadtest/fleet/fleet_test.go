package fleet

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/generate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemo(t *testing.T) {
	m := newMemo[string, int](10)
	calls := 0
	get := func(key string, cost int) int {
		v, err := m.get(key, cost, func() (int, error) { calls++; return calls, nil })
		require.NoError(t, err)
		return v
	}
	require.Equal(t, 1, get("a", 4))
	require.Equal(t, 1, get("a", 4))
	require.Equal(t, 2, get("b", 4))
	require.Equal(t, 3, get("c", 4), "a goes")
	require.Equal(t, 2, get("b", 4))
	require.Equal(t, 4, get("a", 4), "computed again")
	require.Equal(t, 5, get("large", 100), "is kept alone")
	require.Equal(t, 5, get("large", 100))
	require.Equal(t, 1, m.lru.Len())

	failed := errors.New("failed")
	for range 2 {
		_, err := m.get("error", 1, func() (int, error) { return 0, failed })
		require.ErrorIs(t, err, failed)
	}
}

func cluster(t *testing.T) *generate.Cluster {
	g, err := generate.New(generate.Config{Nodes: 2, Services: 1, Endpoints: 3})
	require.NoError(t, err)
	return g
}

// delta gives the slice of the cluster before and after a change, and the delta between.
func delta(g *generate.Cluster, c generate.Change) (before, after *model.Slice, d *model.SliceDelta) {
	for _, o := range g.Objects() {
		if s, ok := o.(*model.Slice); ok {
			before = s
		}
	}
	after = g.Make(c)
	return before, after, model.Diff(before, after)
}

func TestNodesShareObjects(t *testing.T) {
	s := newShared()
	g := cluster(t)
	before, after, d := delta(g, g.Changes(generate.Plan{Start: time.Now(), Count: 1, Rate: 1})[0])
	f, err := wire.EncodeUpdate(&model.Update{To: 1, Full: true, Slices: []*model.Slice{before}})
	require.NoError(t, err)
	one, err := s.decode(f)
	require.NoError(t, err)
	other, err := s.decode(append(wire.Frame(nil), f...))
	require.NoError(t, err)
	require.Same(t, one, other)

	held := one.Update.Slices[0]
	first, err := s.apply(d, held)
	require.NoError(t, err)
	require.Equal(t, after.ContentVersion(), first.ContentVersion())
	second, err := s.apply(d, held)
	require.NoError(t, err)
	require.Same(t, first, second)

	// A slice that only says that it is the same is not.
	tampered := *before
	third, err := s.apply(d, &tampered)
	require.NoError(t, err)
	require.NotSame(t, first, third)
	_, err = s.apply(d, after)
	require.ErrorIs(t, err, model.ErrBase)
}

func fleetOf(nodes int) *Fleet {
	f := &Fleet{}
	for i := range nodes {
		f.nodes = append(f.nodes, &node{index: i, name: generate.NodeName(i)})
	}
	return f
}

func TestWindowCountsEachChangeOnceOnEachNode(t *testing.T) {
	f := fleetOf(2)
	g := cluster(t)
	start := time.UnixMilli(1_700_000_000_000)
	changes := g.Changes(generate.Plan{Start: start, Count: 3, Rate: 10}) // 100 ms apart, all of the same slice
	w := f.Open(changes)
	update := func(c generate.Change) *model.Update {
		_, _, d := delta(g, c)
		return &model.Update{Deltas: []*model.SliceDelta{d}}
	}
	first, second, third := update(changes[0]), update(changes[1]), update(changes[2])

	// Node 0 gets each, and the second twice; node 1 gets the first two in one.
	w.received(0, first, start.Add(10*time.Millisecond))
	w.received(0, second, start.Add(110*time.Millisecond))
	w.received(0, second, start.Add(999*time.Millisecond))
	w.received(1, second, start.Add(120*time.Millisecond))
	reached, all := w.Progress()
	require.EqualValues(t, 4, reached)
	require.EqualValues(t, 6, all)
	name, missing := f.Behind(w)
	require.Equal(t, "node-00000", name)
	require.Equal(t, 1, missing)

	w.received(0, third, start.Add(210*time.Millisecond))
	name, _ = f.Behind(w)
	require.Equal(t, "node-00001", name)
	select {
	case <-w.Delivered():
		t.Fatal("node 1 lacks a change")
	default:
	}
	// A whole slice says as much as a delta.
	w.received(1, &model.Update{Slices: []*model.Slice{{
		Namespace: changes[2].Slice.Namespace, Name: changes[2].Slice.Name, LastChangeTriggerTimeMS: changes[2].TriggerMS,
	}}}, start.Add(210*time.Millisecond))
	<-w.Delivered()
	_, missing = f.Behind(w)
	require.Zero(t, missing)

	h := w.Latencies()
	require.EqualValues(t, 6, h.TotalCount())
	near := func(want time.Duration, got int64) { require.InEpsilon(t, want.Microseconds(), got, 0.001) }
	near(10*time.Millisecond, h.ValueAtQuantile(50))
	near(120*time.Millisecond, h.Max())
	require.EqualValues(t, 6, w.Objects())
}

func TestWindowWithoutListGoesByTriggerTimes(t *testing.T) {
	w := fleetOf(1).Open(nil)
	now := time.Now()
	slice := func(trigger time.Time) *model.Update {
		return &model.Update{Slices: []*model.Slice{{LastChangeTriggerTimeMS: trigger.UnixMilli()}}}
	}
	w.received(0, slice(w.opened.Add(-time.Hour)), now)
	w.received(0, slice(w.opened.Add(time.Second)), w.opened.Add(2*time.Second))
	require.EqualValues(t, 2, w.Objects())
	h := w.Latencies()
	require.EqualValues(t, 1, h.TotalCount(), "what changed before the window is no latency")
	require.InEpsilon(t, time.Second.Microseconds(), h.Max(), 0.002)
}

func TestSyncCountsWhatComesUntilEveryNodeIsThere(t *testing.T) {
	f := fleetOf(2)
	n := f.nodes[0]
	n.traffic.Received.Add(1000)
	n.messages.Add(900)
	n.started = time.Now().Add(-time.Hour)
	s := f.AwaitSync()
	require.Equal(t, "node-00000", s.Missing())

	n.traffic.Received.Add(50)
	n.messages.Add(30)
	s.reached(n)
	n.traffic.Received.Add(7)
	s.reached(n) // on one more stream
	require.Equal(t, 1, s.Reached())
	require.Equal(t, "node-00001", s.Missing())
	select {
	case <-s.Done():
		t.Fatal("a node is missing")
	default:
	}
	s.reached(f.nodes[1])
	<-s.Done()
	require.Empty(t, s.Missing())
	require.Equal(t, Synced{Bytes: 50, MessageBytes: 30, Duration: s.Nodes()[0].Duration}, s.Nodes()[0])
	require.Less(t, s.Nodes()[0].Duration, time.Hour, "since AwaitSync")
}
