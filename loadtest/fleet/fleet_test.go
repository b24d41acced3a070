// These tests prove that a window counts each change once for each node, apart for slow nodes, and
// that syncs count until a node is in sync. They also prove that nodes share what they decode only
// if it is the same.
package fleet

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/generate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func cluster(t *testing.T) *generate.Cluster {
	g, err := generate.New(generate.Config{Nodes: 2, Services: []generate.Group{{Count: 1, Least: 3, Most: 3}}})
	require.NoError(t, err)
	return g
}

var start = time.UnixMilli(1_700_000_000_000)

// flips returns changes of the same slice, 100 ms apart.
func flips(g *generate.Cluster, count int) []generate.Change {
	return slices.Collect(g.Play(generate.Plan{Kind: generate.Flip, Schedule: generate.Schedule{Start: start, Count: count, Rate: 10}}))
}

func sliceOf(g *generate.Cluster) (s *model.Slice) {
	for _, o := range g.Objects() {
		if o, ok := o.(*model.Slice); ok {
			s = o
		}
	}
	return s
}

func TestNodesShareObjects(t *testing.T) {
	s := newShared()
	g := cluster(t)
	before := sliceOf(g)
	after := flips(g, 1)[0].Slice
	d := model.Diff(before, after)
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

	// A different slice that claims the same version does not share results.
	tampered := *before
	third, err := s.apply(d, &tampered)
	require.NoError(t, err)
	require.NotSame(t, first, third)
	another := *before
	another.Endpoints = another.Endpoints[1:]
	fourth, err := s.apply(d, model.NewSlice(another))
	require.NoError(t, err)
	require.NotEqual(t, d.Version, fourth.ContentVersion(), "what becomes of another base is not what the delta promises")
}

func groupOf(nodes int) *Group {
	g := &Group{}
	for i := range nodes {
		g.Members = append(g.Members, &Member{Index: i, Name: generate.NodeName(i)})
	}
	return g
}

func names(members []*Member) (out []string) {
	for _, m := range members {
		out = append(out, m.Name)
	}
	return out
}

func TestWindowCountsEachChangeOnce(t *testing.T) {
	g := cluster(t)
	f := groupOf(2)
	before := sliceOf(g)
	changes := flips(g, 3)
	w := f.NewWindow(changes)
	f.Open(w)
	update := func(c generate.Change) *model.Update {
		d := model.Diff(before, c.Slice)
		before = c.Slice
		return &model.Update{Deltas: []*model.SliceDelta{d}}
	}
	first, second, third := update(changes[0]), update(changes[1]), update(changes[2])

	// Node 0 receives each change, the second one twice. Node 1 receives the first two in one
	// update.
	w.Received(f.Members[0], first, start.Add(10*time.Millisecond))
	w.Received(f.Members[0], second, start.Add(110*time.Millisecond))
	w.Received(f.Members[0], second, start.Add(999*time.Millisecond))
	w.Received(f.Members[1], second, start.Add(120*time.Millisecond))
	reached, owed, all := w.Progress()
	require.EqualValues(t, 4, reached)
	require.EqualValues(t, 6, owed, "all changes are due")
	require.EqualValues(t, 6, all)
	require.Equal(t, []string{"node-00000", "node-00001"}, names(w.Behind()))

	w.Received(f.Members[0], third, start.Add(230*time.Millisecond))
	require.Equal(t, []string{"node-00001"}, names(w.Behind()))
	select {
	case <-w.Delivered():
		t.Fatal("node 1 lacks a change")
	default:
	}
	// A whole slice counts like a delta.
	w.Received(f.Members[1], &model.Update{Slices: []*model.Slice{{
		Namespace: changes[2].Key.Namespace, Name: changes[2].Key.Name, LastChangeTriggerTimeMS: changes[2].TriggerMS,
	}}}, start.Add(210*time.Millisecond))
	<-w.Delivered()
	require.Empty(t, w.Behind())

	h, slow := w.Latencies()
	require.Zero(t, slow.TotalCount())
	require.EqualValues(t, 6, w.TakeRecent().TotalCount())
	require.Zero(t, w.TakeRecent().TotalCount())
	converged := w.Convergence()
	require.Equal(t, []int64{10_000, 10_000, 30_000}, converged[0], "one node is half of two")
	require.Equal(t, []int64{120_000, 20_000, 30_000}, converged[2], "the longest time counts, in any order of the nodes")
	require.EqualValues(t, 6, h.TotalCount())
	near := func(want time.Duration, got int64) { require.InEpsilon(t, want.Microseconds(), got, 0.001) }
	near(10*time.Millisecond, h.ValueAtQuantile(50))
	near(120*time.Millisecond, h.Max())
	require.EqualValues(t, 6, w.Objects())
}

func TestWindowCountsRemovals(t *testing.T) {
	f := groupOf(1)
	key := func(name string) model.Key { return model.Key{Kind: model.KindSlice, Namespace: "default", Name: name} }
	changes := []generate.Change{
		{Due: start, Key: key("a"), TriggerMS: start.UnixMilli()},
		{Due: start.Add(time.Second), Key: key("a"), TriggerMS: start.UnixMilli() + 1000, Removed: true},
		{Due: start.Add(time.Second), Key: key("b"), TriggerMS: start.UnixMilli() + 1000},
	}
	w := f.NewWindow(changes)
	w.Object(f.Members[0], key("a"), start.UnixMilli()+5000, false, start.Add(2*time.Second))
	reached, _, _ := w.Progress()
	require.EqualValues(t, 1, reached, "the slice has not been removed")
	w.Object(f.Members[0], key("b"), 0, true, start.Add(2*time.Second))
	reached, _, _ = w.Progress()
	require.EqualValues(t, 1, reached, "no removal of this slice is expected")
	w.Received(f.Members[0], &model.Update{Removed: []model.Key{key("a")}}, start.Add(2*time.Second))
	reached, _, _ = w.Progress()
	require.EqualValues(t, 2, reached)
	w.Finish(f.Members[0], start.Add(9*time.Second))
	<-w.Delivered()
	h, _ := w.Latencies()
	require.EqualValues(t, 3, h.TotalCount())
	require.InEpsilon(t, (8 * time.Second).Microseconds(), h.Max(), 0.001, "changes that Finish counts have its time")
}

func TestWindowSeparatesSlowNodes(t *testing.T) {
	f := groupOf(2)
	f.Members[1].Delay = time.Second
	g := cluster(t)
	changes := flips(g, 1)
	w := f.NewWindow(changes)
	for _, m := range f.Members {
		w.Object(m, changes[0].Key, changes[0].TriggerMS, false, start.Add(time.Second))
	}
	ordinary, slow := w.Latencies()
	require.EqualValues(t, 1, ordinary.TotalCount())
	require.EqualValues(t, 1, slow.TotalCount())
}

func TestWindowWithoutExpectedChanges(t *testing.T) {
	f := groupOf(1)
	w := f.NewWindow(nil)
	now := time.Now()
	slice := func(trigger time.Time) *model.Update {
		return &model.Update{Slices: []*model.Slice{{LastChangeTriggerTimeMS: trigger.UnixMilli()}}}
	}
	w.Received(f.Members[0], slice(w.made.Add(-time.Hour)), now)
	w.Received(f.Members[0], slice(w.made.Add(time.Second)), w.made.Add(2*time.Second))
	require.EqualValues(t, 2, w.Objects())
	h, _ := w.Latencies()
	require.EqualValues(t, 1, h.TotalCount(), "a change before the window has no latency")
	require.InEpsilon(t, time.Second.Microseconds(), h.Max(), 0.002)
}

func TestSyncOfSomeNodes(t *testing.T) {
	f := groupOf(3)
	s := f.AwaitSync(func(m *Member) bool { return m.Index > 0 })
	require.EqualValues(t, 2, s.left.Load())
	f.Reached(f.Members[0])
	require.EqualValues(t, 2, s.left.Load(), "node 0 is not awaited")
	require.Equal(t, "node-00001", s.Missing())
	f.Reached(f.Members[1])
	f.Reached(f.Members[2])
	<-s.Done()
	require.Len(t, s.Nodes(), 2)
	<-f.AwaitSync(func(*Member) bool { return false }).Done()
}

func TestSyncCountsUntilInSync(t *testing.T) {
	f := groupOf(2)
	n := f.Members[0]
	n.Traffic.Received.Add(1000)
	n.Messages.Add(900)
	n.Started = time.Now().Add(-time.Hour)
	s := f.AwaitSync(nil)
	require.Equal(t, "node-00000", s.Missing())

	n.Traffic.Received.Add(50)
	n.Messages.Add(30)
	s.reached(n)
	n.Traffic.Received.Add(7)
	s.reached(n) // on a further stream
	require.EqualValues(t, 1, s.left.Load())
	require.Equal(t, "node-00001", s.Missing())
	select {
	case <-s.Done():
		t.Fatal("a node is missing")
	default:
	}
	s.reached(f.Members[1])
	<-s.Done()
	require.Empty(t, s.Missing())
	require.Equal(t, Synced{Bytes: 50, MessageBytes: 30, Duration: s.Nodes()[0].Duration}, s.Nodes()[0])
	require.Less(t, s.Nodes()[0].Duration, time.Hour, "the duration counts from AwaitSync")
}
