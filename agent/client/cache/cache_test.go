// These tests prove what a Cache does with Updates: what it holds, what it reports as changed, and
// what it refuses.
package cache

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

const epoch = 5

var webKey = model.ServiceKey{Namespace: "default", Name: "web"}

var (
	named   = modeltest.NamedSlice
	web     = modeltest.ChangedWeb
	unready = modeltest.Unready
	service = modeltest.NamedService
)

// welcomed returns the Writer of an empty cache at position 1 of all shards.
func welcomed(t *testing.T, shards uint32) *Writer {
	t.Helper()
	w := &Writer{Cache: New()}
	require.NoError(t, w.Welcome(epoch, shards))
	require.NoError(t, w.InSync(slices.Repeat([]uint64{1}, int(shards)), model.ResourceVersions{}))
	_, ok := w.Take()
	require.True(t, ok)
	return w
}

func apply(t *testing.T, w *Writer, u *model.Update) (missing []model.Key) {
	t.Helper()
	out, err := w.Apply(u)
	require.NoError(t, err)
	return out.Missing
}

// has reports whether a cache holds a slice in this version.
func has(c *Cache, s *model.Slice) bool {
	_, slices := c.Service(s.ServiceKey())
	for _, held := range slices {
		if held.Name == s.Name {
			return held.ContentVersion() == s.ContentVersion() && modeltest.Diff(s.Endpoints, held.Endpoints) == ""
		}
	}
	return false
}

func TestTakeGivesNothingBeforeInSync(t *testing.T) {
	c := &Writer{Cache: New()}
	require.NoError(t, c.Welcome(epoch, 1))
	apply(t, c, &model.Update{To: 3, Full: true, Services: []*model.Service{service("web")}, ResourceVersions: model.ResourceVersions{Services: 8}})
	c.SetNode(&model.Node{Name: "n"})
	_, ok := c.Take()
	require.False(t, ok)
	select {
	case <-c.Dirty():
		t.Fatal("dirty")
	default:
	}
	require.NoError(t, c.InSync([]uint64{3}, model.ResourceVersions{Services: 8}))
	<-c.Dirty()
	changes, ok := c.Take()
	require.True(t, ok)
	require.Equal(t, Changes{Services: []model.ServiceKey{webKey}, Positions: map[uint32]uint64{0: 3}, Epoch: epoch, Shards: 1, Node: true}, changes)
	changes, ok = c.Take()
	require.True(t, ok)
	require.Empty(t, changes.Services)
	require.Empty(t, changes.Positions)
	require.Equal(t, "n", c.Node().Name)

	h := c.Begin()
	require.EqualValues(t, epoch, h.Epoch)
	require.EqualValues(t, 8, h.ResourceVersions.Services)
	require.Equal(t, []uint64{3}, h.Sequences)
	require.Equal(t, model.StateDigest([]model.Digest{modeltest.ShardDigest(service("web"))}), h.Digest)
}

// TestChangesDuringTakeAreReported checks that a change is in some Take although it comes while
// another Take runs.
func TestChangesDuringTakeAreReported(t *testing.T) {
	const updates = 5000
	w := welcomed(t, 1)
	written := make(chan error, 1)
	go func() {
		for i := range uint64(updates) {
			_, err := w.Apply(&model.Update{From: i + 1, To: i + 2, Services: []*model.Service{service(fmt.Sprint("s-", i))}})
			if err != nil {
				written <- err
				return
			}
		}
		written <- nil
	}()
	taken, position := make(map[model.ServiceKey]bool), uint64(0)
	for done := false; !done; {
		select {
		case err := <-written:
			require.NoError(t, err)
			done = true // after one more Take
		default:
		}
		changes, ok := w.Take()
		require.True(t, ok)
		for _, key := range changes.Services {
			taken[key] = true
		}
		position = max(position, changes.Positions[0])
	}
	require.Len(t, taken, updates)
	require.EqualValues(t, updates+1, position)
}

func TestApplyTouchesTheServicesThatChange(t *testing.T) {
	c := welcomed(t, 1)
	steps := []struct {
		update  *model.Update
		touched []string
	}{
		{&model.Update{Services: []*model.Service{service("a")}, Slices: []*model.Slice{named("s", "a", 3)}}, []string{"a"}},
		{&model.Update{Slices: []*model.Slice{named("s2", "b", 3)}}, []string{"b"}},
		// The slice moves from Service a to Service b.
		{&model.Update{Slices: []*model.Slice{named("s", "b", 3)}}, []string{"a", "b"}},
		{&model.Update{Deltas: []*model.SliceDelta{model.Diff(named("s", "b", 3), named("s", "b", 4))}}, []string{"b"}},
		{&model.Update{Removed: []model.Key{service("a").Key(), service("gone").Key(), named("gone", "", 0).Key()}}, []string{"a"}},
		{&model.Update{Full: true, Services: []*model.Service{service("b")}, Slices: []*model.Slice{named("s", "b", 4)}}, []string{"b"}},
		{&model.Update{Full: true}, []string{"b"}},
	}
	for i, step := range steps {
		step.update.From, step.update.To = uint64(i+1), uint64(i+2)
		require.Empty(t, apply(t, c, step.update))
		changes, ok := c.Take()
		require.True(t, ok)
		var names []string
		for _, key := range changes.Services {
			names = append(names, key.Name)
		}
		require.ElementsMatch(t, step.touched, names, "step %d", i)
		require.Equal(t, map[uint32]uint64{0: uint64(i + 2)}, changes.Positions)
		if i == 2 {
			_, a := c.Service(model.ServiceKey{Namespace: "default", Name: "a"})
			require.Empty(t, a)
			_, b := c.Service(model.ServiceKey{Namespace: "default", Name: "b"})
			require.Len(t, b, 2)
		}
	}
	_, digests := c.Digests()
	require.Equal(t, []model.Digest{{}}, digests)
	require.Empty(t, c.Services())
}

func TestUpdateIsAtomic(t *testing.T) {
	c := welcomed(t, 8)
	right := webKey.Shard(8)
	apply(t, c, &model.Update{Shard: right, From: 1, To: 2, Services: []*model.Service{service("web")}})
	sequences, digests := c.Digests()
	stranger := service("stranger-1")
	require.NotEqual(t, right, stranger.ServiceKey().Shard(8))
	for _, u := range []*model.Update{
		{Shard: right, From: 2, To: 3, Removed: []model.Key{service("web").Key()}, Services: []*model.Service{stranger}},
		{Shard: right, To: 3, Full: true, Services: []*model.Service{stranger}},
		{Shard: right, From: 3, To: 4, Removed: []model.Key{service("web").Key()}},
		{Shard: right, From: 0, To: 1, Removed: []model.Key{service("web").Key()}},
		{Shard: 8, Full: true},
		{Shard: right, From: 2, To: 3, Slices: []*model.Slice{named("s", stranger.Name, 1)}},
	} {
		_, err := c.Apply(u)
		require.ErrorIs(t, err, ErrProtocol)
		s, d := c.Digests()
		require.Equal(t, sequences, s)
		require.Equal(t, digests, d)
	}
	// A change that the cache already has may arrive again.
	apply(t, c, &model.Update{Shard: right, From: 0, To: 2, Services: []*model.Service{service("web")}})
	// What is whole fits any position.
	apply(t, c, &model.Update{Shard: right, From: 8, To: 9, FullBuckets: []uint32{0}})
	apply(t, c, &model.Update{Shard: right, To: 7, Full: true})
	require.EqualValues(t, 7, c.Sequence(right))
	require.Zero(t, c.Sequence(8), "there is no such shard")
}

// TestWholeBuckets checks that an Update of whole buckets removes what these buckets no longer
// have, and nothing else. What stays as it was counts as no change.
func TestWholeBuckets(t *testing.T) {
	c := welcomed(t, 1)
	in := make(map[uint32][]*model.Slice)
	u := &model.Update{From: 1, To: 2, Services: []*model.Service{service("web")}}
	for i := range 300 {
		s := named(fmt.Sprint("s-", i), "web", 1)
		in[s.Key().Bucket()] = append(in[s.Key().Bucket()], s)
		u.Slices = append(u.Slices, s)
	}
	apply(t, c, u)
	before, _ := c.Counts()
	bucket := service("web").Key().Bucket()
	kept := in[bucket][:1]
	require.Greater(t, len(in[bucket]), 1)
	apply(t, c, &model.Update{To: 3, FullBuckets: []uint32{bucket}, Services: []*model.Service{service("web")}, Slices: kept})
	want := []model.Object{service("web"), kept[0]}
	for other, list := range in {
		for _, s := range list {
			if other != bucket {
				want = append(want, s)
			}
		}
	}
	_, digests := c.Digests()
	require.Equal(t, []model.Digest{modeltest.ShardDigest(want...)}, digests)
	after, _ := c.Counts()
	require.Equal(t, Counts{before.Services, before.Slices + uint64(len(in[bucket])-1)}, after)
}

// TestDigestsFollowChanges checks that the digest is that of the present content after each change,
// though it was computed before.
func TestDigestsFollowChanges(t *testing.T) {
	w := welcomed(t, 1)
	changed := *service("a")
	changed.ClientIPAffinitySeconds = 5
	a := model.NewService(changed)
	next(t, w, &model.Update{Services: []*model.Service{service("a")}})
	requireDigest(t, w, service("a"))
	next(t, w, &model.Update{Services: []*model.Service{a}})
	requireDigest(t, w, a)
	next(t, w, &model.Update{Slices: []*model.Slice{named("s", "a", 2)}})
	requireDigest(t, w, a, named("s", "a", 2))
	next(t, w, &model.Update{Deltas: []*model.SliceDelta{model.Diff(named("s", "a", 2), named("s", "a", 1))}})
	requireDigest(t, w, a, named("s", "a", 1))
	next(t, w, &model.Update{Removed: []model.Key{a.Key()}})
	requireDigest(t, w, named("s", "a", 1))
	_, ok := w.BucketDigests(1)
	require.False(t, ok, "there is no such shard")
}

// TestDiffers checks that only digests of the same position are compared.
func TestDiffers(t *testing.T) {
	w := welcomed(t, 2)
	apply(t, w, &model.Update{Shard: webKey.Shard(2), From: 1, To: 4, Services: []*model.Service{service("web")}})
	_, digests := w.Digests()
	require.False(t, w.Differs(5, model.StateDigest(digests)))
	require.True(t, w.Differs(5, model.Digest{1}))
	require.False(t, w.Differs(4, model.Digest{1}))
	require.False(t, w.Differs(6, model.Digest{1}))
}

// TestStatus checks the summary of a cache, which tables and metrics show.
func TestStatus(t *testing.T) {
	w := &Writer{Cache: New()}
	require.Zero(t, w.Status())
	require.Zero(t, w.ShardOf(webKey), "the number of shards is unknown")
	w = welcomed(t, 4)
	shard := webKey.Shard(4)
	require.NotZero(t, shard)
	require.Equal(t, shard, w.ShardOf(webKey))
	slice := named("s", "web", 3)
	apply(t, w, &model.Update{
		Shard: shard, From: 1, To: 2, Services: []*model.Service{service("web")}, Slices: []*model.Slice{slice, named("t", "web", 4)},
		ResourceVersions: model.ResourceVersions{Services: 7},
	})
	sequences, digests := w.Digests()
	require.EqualValues(t, 2, sequences[shard])
	require.Equal(t, Status{
		Epoch: epoch, Sequences: sequences, Digests: digests, ResourceVersions: model.ResourceVersions{Services: 7},
		Services: 1, Slices: 2, Endpoints: 7, InSync: true,
	}, w.Status())
	require.Equal(t, slice, w.Slice(shard, slice.Key()))
	require.Nil(t, w.Slice(0, slice.Key()))
	require.Nil(t, w.Slice(4, slice.Key()), "there is no such shard")
}

// TestWelcomeIsChecked checks which epochs and numbers of shards a server may have.
func TestWelcomeIsChecked(t *testing.T) {
	for _, shards := range []uint32{1, 2, 64, MaxShards} {
		require.NoError(t, CheckWelcome(1, shards))
		require.ErrorIs(t, CheckWelcome(0, shards), ErrProtocol)
	}
	for _, shards := range []uint32{0, 3, MaxShards - 1, MaxShards + 1, 2 * MaxShards, 1<<32 - 1} {
		require.ErrorIs(t, CheckWelcome(1, shards), ErrProtocol, shards)
	}
	require.False(t, ValidShards(-4))
	w := welcomed(t, 1)
	require.ErrorIs(t, w.Welcome(0, 1), ErrProtocol)
	require.EqualValues(t, epoch, w.Epoch())
}

// TestPositionsAreOfAnEpoch checks that positions of an earlier epoch are neither resumed from nor
// acknowledged in a new one.
func TestPositionsAreOfAnEpoch(t *testing.T) {
	w := welcomed(t, 2)
	apply(t, w, &model.Update{Shard: 1, From: 1, To: 4})
	require.NoError(t, w.Welcome(epoch, 2))
	require.Equal(t, []uint64{1, 4}, w.Begin().Sequences)
	require.NoError(t, w.Welcome(epoch+1, 2))
	require.Equal(t, []uint64{0, 0}, w.Begin().Sequences)
	changes, ok := w.Take()
	require.True(t, ok)
	require.Empty(t, changes.Positions)
	require.EqualValues(t, epoch+1, changes.Epoch)
}

// TestDirty checks that the cache signals each change once its content counts.
func TestDirty(t *testing.T) {
	w := welcomed(t, 1)
	<-w.Dirty()
	dirty := func() bool {
		select {
		case <-w.Dirty():
			return true
		default:
			return false
		}
	}
	require.False(t, dirty())
	next(t, w, &model.Update{})
	require.True(t, dirty())
	w.SetNode(&model.Node{Name: "n"})
	require.True(t, dirty())
	w.SetNode(&model.Node{Name: "n"})
	require.False(t, dirty(), "it is the same Node")
}

// TestTriggersAreBounded checks that changes which nobody takes do not fill a node's memory.
func TestTriggersAreBounded(t *testing.T) {
	w := welcomed(t, 1)
	states := [2]*model.Slice{}
	for i := range states {
		s := modeltest.WebSlice(1 + i)
		s.LastChangeTriggerTimeMS = int64(1 + i)
		states[i] = model.NewSlice(s)
	}
	u := &model.Update{}
	for i := range MaxTriggers + 1 {
		u.Slices = append(u.Slices, states[i%2])
	}
	next(t, w, u)
	changes, _ := w.Take()
	require.Len(t, changes.Triggers, MaxTriggers)
	_, pending := w.Counts()
	require.Zero(t, pending)
}

// TestTheNodeIsKept checks that a Node which is deleted stays with Deleting set, and that one which
// is registered anew keeps the addresses and pod CIDRs of the previous one until it has its own.
func TestTheNodeIsKept(t *testing.T) {
	address, other := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	pods, others := netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("10.1.1.0/24")
	node := func(label string, address netip.Addr, pods netip.Prefix) *model.Node {
		return &model.Node{
			Name: "n", Labels: map[string]string{"zone": label}, Addresses: []netip.Addr{address}, PodCIDRs: []netip.Prefix{pods},
		}
	}
	w := welcomed(t, 1)
	set := func(n, want *model.Node, deleted bool) {
		t.Helper()
		require.Equal(t, deleted, w.SetNode(n))
		require.Equal(t, want, w.Node())
		changes, _ := w.Take()
		require.True(t, changes.Node)
		changes, _ = w.Take()
		require.False(t, changes.Node)
	}
	require.False(t, w.SetNode(nil), "there was none")
	require.Nil(t, w.Node())
	set(node("a", address, pods), node("a", address, pods), false)
	gone := node("a", address, pods)
	gone.Deleting = true
	set(nil, gone, true)
	require.True(t, w.SetNode(nil), "it is still deleted")
	set(&model.Node{Name: "n", Labels: map[string]string{"zone": "b"}}, node("b", address, pods), false)
	set(node("b", other, others), node("b", other, others), false)
}

// TestRelayHearsOfEverything checks that a relay is told what an Update named, as the cache now
// holds it, and what is gone.
func TestRelayHearsOfEverything(t *testing.T) {
	w := welcomed(t, 1)
	w.Relay = true
	s, changed := named("s", "web", 2), named("s", "web", 3)
	out := next(t, w, &model.Update{
		Services: []*model.Service{service("web")}, Slices: []*model.Slice{s, named("t", "web", 1)},
		ResourceVersions: model.ResourceVersions{Slices: 3},
	})
	require.Equal(t, &Applied{
		Objects:          []model.Object{service("web"), s, named("t", "web", 1)},
		ResourceVersions: model.ResourceVersions{Slices: 3},
	}, out.Applied)
	out = next(t, w, &model.Update{Deltas: []*model.SliceDelta{model.Diff(s, changed), {Namespace: "default", Name: "unknown"}}})
	require.Len(t, out.Applied.Objects, 1)
	require.Equal(t, changed.ContentVersion(), out.Applied.Objects[0].ContentVersion())
	out = next(t, w, &model.Update{Full: true, Slices: []*model.Slice{changed}})
	require.Equal(t, []model.Object{changed}, out.Applied.Objects)
	require.ElementsMatch(t, []model.Key{service("web").Key(), named("t", "", 0).Key(), named("unknown", "", 0).Key()}, out.Applied.Removed)
	w.SetServers([]Server{{Address: "a:1"}})
	require.Equal(t, []Server{{Address: "a:1"}}, w.Servers())
}

func TestDeltasThatDoNotFitAreMissing(t *testing.T) {
	c := welcomed(t, 1)
	apply(t, c, &model.Update{From: 1, To: 2, Slices: []*model.Slice{named("s", "web", 5), named("t", "web", 5)}})
	delta := func(name string, from, to int) *model.SliceDelta {
		return model.Diff(named(name, "web", from), named(name, "web", to))
	}
	missing := apply(t, c, &model.Update{From: 2, To: 3, Deltas: []*model.SliceDelta{
		delta("s", 6, 7), delta("t", 5, 6), delta("unknown", 5, 6),
	}})
	require.Equal(t, []model.Key{named("s", "", 0).Key(), named("unknown", "", 0).Key()}, missing)
	require.True(t, has(c.Cache, named("s", "web", 5)), "it stays as it is")
	require.True(t, has(c.Cache, named("t", "web", 6)))
	// A slice that already is what the delta results in is not missing, though the delta fits it no
	// longer.
	require.Empty(t, apply(t, c, &model.Update{From: 3, To: 4, Deltas: []*model.SliceDelta{delta("t", 6, 4)}}))
	require.Empty(t, apply(t, c, &model.Update{From: 3, To: 4, Deltas: []*model.SliceDelta{delta("t", 6, 4)}}))
	require.True(t, has(c.Cache, named("t", "web", 4)))
}

// TestShardThatLacksSomethingHasNoPosition checks that a shard with missing objects has no position
// to ack or resume from. It gets one when the objects arrive or turn out not to exist.
func TestShardThatLacksSomethingHasNoPosition(t *testing.T) {
	key := named("unknown", "", 0).Key()
	for name, answer := range map[string]*model.Update{
		"it comes":            {From: 2, To: 2, Slices: []*model.Slice{named("unknown", "web", 1)}},
		"it is gone":          {From: 2, To: 2, Removed: []model.Key{key}},
		"the shard is whole":  {To: 2, Full: true},
		"it comes by a delta": {From: 2, To: 3, Slices: []*model.Slice{named("unknown", "web", 2)}},
	} {
		t.Run(name, func(t *testing.T) {
			c := welcomed(t, 1)
			missing := apply(t, c, &model.Update{From: 1, To: 2, Services: []*model.Service{service("web")},
				Deltas: []*model.SliceDelta{{Namespace: key.Namespace, Name: key.Name, Version: model.Version{2}}}})
			require.Equal(t, []model.Key{key}, missing)

			changes, ok := c.Take()
			require.True(t, ok)
			require.Equal(t, []model.ServiceKey{webKey}, changes.Services, "the rest of the update counts")
			require.Empty(t, changes.Positions)
			require.Equal(t, []uint64{0}, c.Contents(everything).Sequences)

			apply(t, c, answer)
			changes, ok = c.Take()
			require.True(t, ok)
			require.Equal(t, map[uint32]uint64{0: answer.To}, changes.Positions)
			require.Equal(t, []uint64{answer.To}, c.Contents(everything).Sequences)
		})
	}
}

// TestWhatWasMissingIsNotMissedForever checks that a slice is no longer missing on the next stream.
// The server may then have the version of the slice that the cache holds, so that the stream brings
// nothing.
func TestWhatWasMissingIsNotMissedForever(t *testing.T) {
	c := welcomed(t, 1)
	apply(t, c, &model.Update{From: 1, To: 2, Slices: []*model.Slice{named("s", "web", 1)}})
	require.Len(t, apply(t, c, &model.Update{From: 2, To: 3,
		Deltas: []*model.SliceDelta{{Namespace: "default", Name: "s", Version: model.Version{2}}}}), 1)
	_, ok := c.Take()
	require.True(t, ok)
	require.NoError(t, c.InSync([]uint64{3}, model.ResourceVersions{}))
	changes, _ := c.Take()
	require.Empty(t, changes.Positions, "the answer is still to come on this stream")

	c.Begin()
	require.NoError(t, c.Welcome(epoch, 1))
	require.NoError(t, c.InSync([]uint64{4}, model.ResourceVersions{}))
	changes, _ = c.Take()
	require.Equal(t, map[uint32]uint64{0: 4}, changes.Positions)
}

// TestWhatIsMissingBeforeInSyncStaysMissing checks that a slice which is found missing before
// InSync stays so until it arrives, however the stream ends.
func TestWhatIsMissingBeforeInSyncStaysMissing(t *testing.T) {
	c := welcomed(t, 1)
	apply(t, c, &model.Update{From: 1, To: 2, Slices: []*model.Slice{named("s", "web", 1)}})
	delta := func() *model.Update {
		return &model.Update{From: 2, To: 3, Deltas: []*model.SliceDelta{{Namespace: "default", Name: "s", Version: model.Version{2}}}}
	}
	positions := func() map[uint32]uint64 {
		changes, ok := c.Take()
		require.True(t, ok)
		return changes.Positions
	}
	held := func() uint64 { return c.Contents(everything).Sequences[0] }
	require.Equal(t, map[uint32]uint64{0: 2}, positions())
	require.NoError(t, c.Welcome(epoch, 1))
	require.Len(t, apply(t, c, delta()), 1)
	require.NoError(t, c.InSync([]uint64{3}, model.ResourceVersions{}))
	require.Empty(t, positions())
	require.Zero(t, held())

	// The stream breaks before the answer arrives, and the next stream breaks before its first
	// message.
	c.Begin()
	require.NoError(t, c.Welcome(epoch, 1))
	require.Empty(t, positions())
	require.Zero(t, held())
	require.NoError(t, c.Welcome(epoch, 1))
	apply(t, c, &model.Update{To: 3, Full: true, Slices: []*model.Slice{named("s", "web", 2)}})
	require.NoError(t, c.InSync([]uint64{3}, model.ResourceVersions{}))
	require.Equal(t, map[uint32]uint64{0: 3}, positions())
	require.EqualValues(t, 3, held())
}

// TestAnotherNumberOfShards checks that the content stays when a server has another number of
// shards. It stays in its new shards until the server says otherwise.
func TestAnotherNumberOfShards(t *testing.T) {
	c := welcomed(t, 4)
	var all []*model.Service
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		s := service(name)
		all = append(all, s)
		shard := s.ServiceKey().Shard(4)
		sequences, _ := c.Digests()
		apply(t, c, &model.Update{
			Shard: shard, From: sequences[shard], To: sequences[shard] + 1,
			Services: []*model.Service{s}, Slices: []*model.Slice{named("slice-"+name, name, 2)},
		})
	}
	require.NoError(t, c.Welcome(epoch+1, 1))
	sequences, digests := c.Digests()
	require.Equal(t, []uint64{0}, sequences)
	var want []model.Object
	for _, s := range all {
		held, slices := c.Service(s.ServiceKey())
		require.Same(t, s, held)
		require.Len(t, slices, 1)
		want = append(want, s, slices[0])
	}
	require.Equal(t, []model.Digest{modeltest.ShardDigest(want...)}, digests)
}

// TestAnotherNumberOfShardsInTheSameEpoch checks that a server which wrongly changes its number of
// shards within an epoch does not make the cache use shards that no longer exist.
func TestAnotherNumberOfShardsInTheSameEpoch(t *testing.T) {
	c := welcomed(t, 4)
	apply(t, c, &model.Update{Shard: 3, From: 1, To: 2})
	require.NoError(t, c.Welcome(epoch, 2))
	changes, ok := c.Take()
	require.True(t, ok)
	require.Empty(t, changes.Positions)
	sequences, _ := c.Digests()
	require.Equal(t, []uint64{0, 0}, sequences)
}

// TestAnotherNumberOfShardsAmidAHandOver covers a client that loses its server while a slice moves
// between Services and is in both their shards. If the next server has one shard for both Services,
// the Service that loses the slice must be marked as touched.
func TestAnotherNumberOfShardsAmidAHandOver(t *testing.T) {
	a, b := model.ServiceKey{Namespace: "default", Name: "a"}, model.ServiceKey{Namespace: "default", Name: "b"}
	for b.Shard(4) == a.Shard(4) {
		b.Name += "b"
	}
	c := welcomed(t, 4)
	apply(t, c, &model.Update{Shard: a.Shard(4), From: 1, To: 2, Slices: []*model.Slice{named("s", a.Name, 2)}})
	apply(t, c, &model.Update{Shard: b.Shard(4), From: 1, To: 2, Slices: []*model.Slice{named("s", b.Name, 2)}})
	c.Take()
	require.NoError(t, c.Welcome(epoch+1, 1))
	apply(t, c, &model.Update{To: 1, Full: true, Slices: []*model.Slice{named("s", b.Name, 2)}})
	changes, _ := c.Take()
	require.ElementsMatch(t, []model.ServiceKey{a, b}, changes.Services)
	require.Equal(t, []model.ServiceKey{b}, c.Services())
	_, digests := c.Digests()
	require.Equal(t, []model.Digest{modeltest.ShardDigest(named("s", b.Name, 2))}, digests)
}

// TestDeltasOfUnverifiedContent checks that a delta whose result cannot be verified is applied
// only to the exact state that it starts from.
func TestDeltasOfUnverifiedContent(t *testing.T) {
	before := web(func(*model.Slice) {})
	delta := model.Diff(before, web(unready(1)))
	claim := []model.Unverified{{Key: before.Key(), Version: model.Version{7}}}
	for name, c := range map[string]struct {
		prepare func(*Writer)
		from    uint64
		applied bool
	}{
		"at its position":        {func(*Writer) {}, 2, true},
		"ahead of it":            {func(*Writer) {}, 1, false},
		"an object that waits":   {func(c *Writer) { c.shards[0].setMissing(before.Key()) }, 2, false},
		"one that is unreadable": {func(c *Writer) { c.shards[0].setUnreadable(before.Key(), model.Version{8}) }, 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			cache := welcomed(t, 1)
			apply(t, cache, &model.Update{From: 1, To: 2, Slices: []*model.Slice{before}, Unverified: claim})
			c.prepare(cache)
			apply(t, cache, &model.Update{From: c.from, To: 3, Deltas: []*model.SliceDelta{delta}})
			require.Equal(t, c.applied, !cache.Slice(0, before.Key()).Endpoints[1].Conditions.Ready)
		})
	}
}

// TestVersionsSeen checks that a cache has the resource versions of the last server that brought it
// in sync, not the highest ones ever received.
func TestVersionsSeen(t *testing.T) {
	c := welcomed(t, 1)
	seen := func() model.ResourceVersions { return c.Begin().ResourceVersions }
	require.NoError(t, c.InSync([]uint64{1}, model.ResourceVersions{Services: 5, Slices: 1<<64 - 1}))
	require.EqualValues(t, uint64(1<<64-1), seen().Slices)
	require.NoError(t, c.Welcome(epoch+1, 1))
	require.EqualValues(t, uint64(1<<64-1), seen().Slices, "as long as no server has brought it in sync")
	require.NoError(t, c.InSync([]uint64{1}, model.ResourceVersions{Services: 4, Slices: 7}))
	require.EqualValues(t, 4, seen().Services)
	require.EqualValues(t, 7, seen().Slices)
	apply(t, c, &model.Update{From: 1, To: 2, ResourceVersions: model.ResourceVersions{Slices: 9}})
	require.EqualValues(t, 9, seen().Slices)
	c.SetSeen(model.ResourceVersions{Services: 1, Slices: 2})
	require.Equal(t, model.ResourceVersions{Services: 1, Slices: 2}, seen())
}

// TestRelayHearsOfAHandOver checks that a slice which moves to a Service in another shard exists
// all the time, whichever shard's update arrives first.
func TestRelayHearsOfAHandOver(t *testing.T) {
	a, b := model.ServiceKey{Namespace: "default", Name: "a"}, model.ServiceKey{Namespace: "default", Name: "b"}
	for b.Shard(4) == a.Shard(4) {
		b.Name += "b"
	}
	before, after := named("s", a.Name, 2), named("s", b.Name, 2)
	c := welcomed(t, 4)
	c.Relay = true
	applied := func(service model.ServiceKey, u *model.Update) *Applied {
		u.Shard = service.Shard(4)
		sequences, _ := c.Digests()
		u.From, u.To = sequences[u.Shard], sequences[u.Shard]+1
		out, err := c.Apply(u)
		require.NoError(t, err)
		return out.Applied
	}
	removed := []model.Key{before.Key()}
	objects := func(o model.Object) *Applied { return &Applied{Objects: []model.Object{o}} }
	require.Equal(t, objects(before), applied(a, &model.Update{Slices: []*model.Slice{before}}))
	require.Equal(t, objects(after), applied(b, &model.Update{Slices: []*model.Slice{after}}))
	require.Equal(t, objects(after), applied(a, &model.Update{Removed: removed}), "it is in the other shard")
	require.Equal(t, &Applied{Removed: removed}, applied(b, &model.Update{Removed: removed}))
}

func TestBucketsOutOfBounds(t *testing.T) {
	c := welcomed(t, 1)
	_, err := c.Apply(&model.Update{To: 2, FullBuckets: []uint32{model.Buckets}})
	require.ErrorIs(t, err, ErrProtocol)
	_, err = c.Apply(&model.Update{To: 2, FullBuckets: []uint32{model.Buckets - 1}})
	require.NoError(t, err)
}

// TestChangesAreCounted asserts what counts as a change, and which last-change-trigger-times Take
// returns.
func TestChangesAreCounted(t *testing.T) {
	w := &Writer{Cache: New()}
	require.NoError(t, w.Welcome(epoch, 1))
	first := web()
	apply(t, w, &model.Update{To: 1, Full: true, Services: []*model.Service{service("web")}, Slices: []*model.Slice{first}})
	require.NoError(t, w.InSync([]uint64{1}, model.ResourceVersions{}))
	all, pending := w.Counts()
	require.Equal(t, Counts{Services: 1, Slices: 1}, all)
	require.Equal(t, all, pending)
	changes, _ := w.Take()
	require.Empty(t, changes.Triggers, "the first state is no change")
	_, pending = w.Counts()
	require.Zero(t, pending)

	// The same again, and then a change with and without a new time.
	apply(t, w, &model.Update{From: 1, To: 2, Services: []*model.Service{service("web")}, Slices: []*model.Slice{first}})
	all, _ = w.Counts()
	require.Equal(t, Counts{Services: 1, Slices: 1}, all)
	at := first.LastChangeTriggerTimeMS
	for i, want := range [][]int64{{at + 5}, nil, {at + 7}} {
		next := *first
		next.Endpoints = next.Endpoints[:len(next.Endpoints)-1-i]
		next.LastChangeTriggerTimeMS = at + []int64{5, 5, 7}[i]
		apply(t, w, &model.Update{From: uint64(2 + i), To: uint64(3 + i), Slices: []*model.Slice{model.NewSlice(next)}})
		changes, _ := w.Take()
		var times []int64
		for _, trigger := range changes.Triggers {
			require.Equal(t, webKey, trigger.Service)
			require.Equal(t, first.Family, trigger.Family)
			times = append(times, trigger.TimeMS)
		}
		require.Equal(t, want, times)
	}
	apply(t, w, &model.Update{From: 5, To: 6, Removed: []model.Key{first.Key(), service("web").Key()}})
	all, pending = w.Counts()
	require.Equal(t, Counts{Services: 2, Slices: 5}, all)
	require.Equal(t, Counts{Services: 1, Slices: 1}, pending)
}

// TestNothingRemainsOfChurn asserts that Services and slices that come and go leave nothing behind.
// Otherwise, names that never come back would fill a node's memory (kubernetes/kubernetes#128928).
func TestNothingRemainsOfChurn(t *testing.T) {
	const shards = 4
	w := welcomed(t, shards)
	sequences := slices.Repeat([]uint64{1}, shards)
	update := func(shard uint32, change func(*model.Update)) {
		u := &model.Update{Shard: shard, From: sequences[shard], To: sequences[shard] + 1}
		change(u)
		sequences[shard]++
		require.Empty(t, apply(t, w, u))
	}
	for i := range 2000 {
		object, slice := service(fmt.Sprint("web-", i)), named(fmt.Sprint("slice-", i), fmt.Sprint("web-", i), 10)
		shard := slice.ServiceKey().Shard(shards)
		update(shard, func(u *model.Update) {
			u.Services, u.Slices = []*model.Service{object}, []*model.Slice{slice}
		})
		update(shard, func(u *model.Update) { u.Removed = []model.Key{object.Key(), slice.Key()} })
		if i%100 == 0 {
			_, ok := w.Take()
			require.True(t, ok)
		}
	}
	_, ok := w.Take()
	require.True(t, ok)
	for i := range w.shards {
		s := &w.shards[i]
		for what, n := range map[string]int{
			"objects": s.len(), "services": len(s.services), "missing": len(s.missing), "unreadable": len(s.unreadable), "changed": len(s.changed),
		} {
			require.Zero(t, n, what)
		}
	}
	require.Empty(t, w.pending.services)
	require.Empty(t, w.pending.triggers)
}

// TestStaleContentIsNotAcknowledged asserts that a cache that uses a checkpoint has no position to
// acknowledge until a server has brought it in sync, even if updates have arrived.
func TestStaleContentIsNotAcknowledged(t *testing.T) {
	w := &Writer{Cache: New()}
	require.NoError(t, w.Restore(&Contents{
		Epoch: epoch, Sequences: []uint64{3}, Shards: []*model.Update{{Full: true, Services: []*model.Service{service("web")}}},
	}))
	require.True(t, w.UseRestored())
	changes, ok := w.Take()
	require.True(t, ok)
	require.Equal(t, []model.ServiceKey{webKey}, changes.Services)
	require.Empty(t, changes.Positions)

	require.NoError(t, w.Welcome(epoch+1, 1))
	apply(t, w, &model.Update{To: 9, Full: true, Services: []*model.Service{service("web")}})
	changes, ok = w.Take()
	require.True(t, ok)
	require.Empty(t, changes.Positions)

	require.NoError(t, w.InSync([]uint64{9}, model.ResourceVersions{}))
	changes, ok = w.Take()
	require.True(t, ok)
	require.Equal(t, map[uint32]uint64{0: 9}, changes.Positions)
}
