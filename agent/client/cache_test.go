package client

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const epoch = 5

var webKey = model.ServiceKey{Namespace: "default", Name: "web"}

// welcomed returns an empty cache at position 1 of all shards.
func welcomed(t *testing.T, shards uint32) *Cache {
	t.Helper()
	c := NewCache()
	require.NoError(t, c.welcome(epoch, shards))
	require.NoError(t, c.synced(&pb.InSync{Sequences: slices.Repeat([]uint64{1}, int(shards))}))
	_, ok := c.Take()
	require.True(t, ok)
	return c
}

func apply(t *testing.T, c *Cache, u *model.Update) (missing []model.Key) {
	t.Helper()
	out, err := c.apply(u, false)
	require.NoError(t, err)
	return out.missing
}

func always() bool { return true }

func service(name string) *model.Service {
	return model.NewService(model.Service{Namespace: "default", Name: name, Type: model.ClusterIP})
}

func TestTakeGivesNothingBeforeInSync(t *testing.T) {
	c := NewCache()
	require.NoError(t, c.welcome(epoch, 1))
	apply(t, c, &model.Update{To: 3, Full: true, Services: []*model.Service{service("web")}, ResourceVersions: model.ResourceVersions{Services: 8}})
	c.setNode(&model.Node{Name: "n"})
	_, ok := c.Take()
	require.False(t, ok)
	select {
	case <-c.Dirty():
		t.Fatal("dirty")
	default:
	}
	require.NoError(t, c.synced(&pb.InSync{Sequences: []uint64{3}, ResourceVersions: &pb.ResourceVersions{Services: 8}}))
	<-c.Dirty()
	changes, ok := c.Take()
	require.True(t, ok)
	require.Equal(t, Changes{Services: []model.ServiceKey{webKey}, Positions: map[uint32]uint64{0: 3}, Epoch: epoch, Shards: 1, Node: true}, changes)
	changes, ok = c.Take()
	require.True(t, ok)
	require.Empty(t, changes.Services)
	require.Empty(t, changes.Positions)
	require.Equal(t, "n", c.Node().Name)

	h := &pb.Hello{}
	c.hello(h)
	require.EqualValues(t, epoch, h.GetEpoch())
	require.EqualValues(t, 8, h.GetResourceVersions().GetServices())
	require.Equal(t, []uint64{3}, h.GetSequences())
	require.Equal(t, stateDigest(modeltest.ShardDigest(service("web"))), h.GetDigest())
}

// stateDigest returns the digest, as in a Hello, of a state with these shards.
func stateDigest(shards ...model.Digest) []byte {
	digest := model.StateDigest(shards)
	return digest[:]
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
	} {
		_, err := c.apply(u, false)
		require.ErrorIs(t, err, errProtocol)
		s, d := c.Digests()
		require.Equal(t, sequences, s)
		require.Equal(t, digests, d)
	}
	// A change that the cache already has may arrive again.
	apply(t, c, &model.Update{Shard: right, From: 0, To: 2, Services: []*model.Service{service("web")}})
}

func TestPartsAreAppliedTogether(t *testing.T) {
	c := welcomed(t, 1)
	apply(t, c, &model.Update{From: 1, To: 2, Services: []*model.Service{service("old")}, Slices: []*model.Slice{named("kept", "old", 1)}})
	_, before := c.Digests()
	for _, part := range []*model.Update{
		{To: 9, Full: true, Services: []*model.Service{service("a")}},
		{To: 9, Full: true, Slices: []*model.Slice{named("s", "a", 2)}, Unreadable: []model.Unreadable{{Key: named("kept", "", 0).Key()}}},
	} {
		out, err := c.apply(part, true)
		require.NoError(t, err)
		require.Empty(t, out)
		_, digests := c.Digests()
		require.Equal(t, before, digests)
	}
	apply(t, c, &model.Update{To: 9, Full: true, Services: []*model.Service{service("b")}})
	require.ElementsMatch(t, []model.ServiceKey{{Namespace: "default", Name: "a"}, {Namespace: "default", Name: "b"},
		{Namespace: "default", Name: "old"}}, c.Services())
	old, kept := c.Service(model.ServiceKey{Namespace: "default", Name: "old"})
	require.Nil(t, old)
	require.Equal(t, []*model.Slice{named("kept", "old", 1)}, kept, "it is in the shard, and could not be read")
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
	require.True(t, cacheHas(c, named("s", "web", 5)), "it stays as it is")
	require.True(t, cacheHas(c, named("t", "web", 6)))
	// A slice that already is what the delta results in is not missing.
	require.Empty(t, apply(t, c, &model.Update{From: 2, To: 3, Deltas: []*model.SliceDelta{delta("t", 5, 6)}}))
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
			var h pb.Hello
			c.hello(&h)
			require.Equal(t, []uint64{0}, h.GetSequences())

			apply(t, c, answer)
			changes, ok = c.Take()
			require.True(t, ok)
			require.Equal(t, map[uint32]uint64{0: answer.To}, changes.Positions)
			c.hello(&h)
			require.Equal(t, []uint64{answer.To}, h.GetSequences())
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
	c.resubscribe(nil)
	require.NoError(t, c.synced(&pb.InSync{Sequences: []uint64{3}}))
	changes, _ := c.Take()
	require.Empty(t, changes.Positions, "the answer is still to come on this stream")

	c.subscribe(nil)
	require.NoError(t, c.welcome(epoch, 1))
	require.NoError(t, c.synced(&pb.InSync{Sequences: []uint64{4}}))
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
	held := func() uint64 {
		var h pb.Hello
		c.hello(&h)
		return h.GetSequences()[0]
	}
	require.Equal(t, map[uint32]uint64{0: 2}, positions())
	require.NoError(t, c.welcome(epoch, 1))
	require.Len(t, apply(t, c, delta()), 1)
	require.NoError(t, c.synced(&pb.InSync{Sequences: []uint64{3}}))
	require.Empty(t, positions())
	require.Zero(t, held())

	// The stream breaks before the answer arrives, and the next stream breaks before its first
	// message.
	require.NoError(t, c.welcome(epoch, 1))
	require.Empty(t, positions())
	require.Zero(t, held())
	require.NoError(t, c.welcome(epoch, 1))
	apply(t, c, &model.Update{To: 3, Full: true, Slices: []*model.Slice{named("s", "web", 2)}})
	require.NoError(t, c.synced(&pb.InSync{Sequences: []uint64{3}}))
	require.Equal(t, map[uint32]uint64{0: 3}, positions())
	require.EqualValues(t, 3, held())
}

func TestDivergenceIsToldOnceForADigest(t *testing.T) {
	c := welcomed(t, 2)
	beat := func(sequence uint64, digest byte) []uint32 {
		return c.diverged(&pb.Digests{Sequences: []uint64{1, sequence}, Digests: modeltest.Digests(0, digest)}, always)
	}
	require.Empty(t, beat(1, 0))
	require.Empty(t, beat(2, 7), "another position can't be compared")
	require.Equal(t, []uint32{1}, beat(1, 7))
	require.Empty(t, beat(1, 7), "it was asked for")
	require.Equal(t, []uint32{1}, beat(1, 8))
	require.Empty(t, beat(1, 0), "it has helped")
	require.Equal(t, []uint32{1}, beat(1, 8), "so that is worth it again")
	require.NoError(t, c.welcome(epoch, 2))
	require.Equal(t, []uint32{1}, beat(1, 8), "on a new stream it is asked for again")
	require.Empty(t, c.diverged(&pb.Digests{Sequences: []uint64{1}, Digests: modeltest.Digests(9)}, always))
	require.Empty(t, c.diverged(&pb.Digests{Sequences: []uint64{1, 1}, Digests: []byte{9}}, always))
	both := &pb.Digests{Sequences: []uint64{1, 1}, Digests: modeltest.Digests(9, 9)}
	allowed := 0
	require.Equal(t, []uint32{0}, c.diverged(both, func() bool { allowed++; return allowed == 1 }))
	require.Equal(t, []uint32{1}, c.diverged(both, always), "it was not asked for")
}

// TestHeartbeatsTellOfDivergence checks that differs reports a difference only at the same
// position, and each digest once per stream.
func TestHeartbeatsTellOfDivergence(t *testing.T) {
	c := welcomed(t, 2)
	beat := func(sum uint64, digests ...model.Digest) bool {
		state := model.StateDigest(digests)
		return c.differs(&pb.Heartbeat{SequenceSum: sum, Digest: state[:]}, always)
	}
	require.False(t, beat(2, model.Digest{}, model.Digest{}), "it holds the same")
	require.False(t, beat(3, model.Digest{}, model.Digest{7}), "another position can't be compared")
	require.True(t, beat(2, model.Digest{}, model.Digest{7}))
	require.False(t, beat(2, model.Digest{}, model.Digest{7}), "it has asked")
	require.True(t, beat(2, model.Digest{}, model.Digest{8}))
	require.NoError(t, c.welcome(epoch, 2))
	require.True(t, beat(2, model.Digest{}, model.Digest{8}), "on a new stream it asks again")
	require.False(t, c.differs(&pb.Heartbeat{}, always), "a sign of life has nothing to compare")
	require.False(t, c.differs(&pb.Heartbeat{SequenceSum: 2, Digest: []byte{1}}, always))
	never := func() bool { return false }
	require.False(t, c.differs(&pb.Heartbeat{SequenceSum: 2, Digest: modeltest.Digests(9)}, never))
	require.True(t, c.differs(&pb.Heartbeat{SequenceSum: 2, Digest: modeltest.Digests(9)}, always), "it was not allowed to ask")
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
	require.NoError(t, c.welcome(epoch+1, 1))
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
	require.NoError(t, c.welcome(epoch, 2))
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
	require.NoError(t, c.welcome(epoch+1, 1))
	apply(t, c, &model.Update{To: 1, Full: true, Slices: []*model.Slice{named("s", b.Name, 2)}})
	changes, _ := c.Take()
	require.ElementsMatch(t, []model.ServiceKey{a, b}, changes.Services)
	require.Equal(t, []model.ServiceKey{b}, c.Services())
	_, digests := c.Digests()
	require.Equal(t, []model.Digest{modeltest.ShardDigest(named("s", b.Name, 2))}, digests)
}

// restart returns the cache of an agent that starts with the checkpoint of c.
func restart(t *testing.T, c *Cache) *Cache {
	t.Helper()
	d, err := decodeCheckpoint(encoded(t, c), "node-1")
	require.NoError(t, err)
	restarted := NewCache()
	restarted.restore(d.cache)
	return restarted
}

// TestDeletedNodeStays checks that a deleted Node stays in the cache and in the checkpoint with
// Deleting set, until the Node exists again.
func TestDeletedNodeStays(t *testing.T) {
	c := welcomed(t, 1)
	require.False(t, c.setNode(nil), "there was none")
	require.Nil(t, c.Node())
	n := model.Node{
		Name: "node-1", Labels: map[string]string{"zone": "a"},
		InternalIPs: []netip.Addr{netip.MustParseAddr("192.168.0.2")},
	}
	require.False(t, c.setNode(&n))
	require.NoError(t, c.synced(&pb.InSync{Sequences: make([]uint64, 1)}))
	changes, _ := c.Take()
	require.True(t, changes.Node)

	deleted := n
	deleted.Deleting = true
	for what, c := range map[string]*Cache{"at run time": c, "while the agent was away": restart(t, c)} {
		for range 2 {
			require.True(t, c.setNode(nil), what)
			require.Equal(t, &deleted, c.Node(), what)
		}
	}
	changes, _ = c.Take()
	require.True(t, changes.Node)
	restarted := restart(t, c)
	require.Equal(t, &deleted, restarted.Node(), "no server has said otherwise yet")
	require.False(t, restarted.setNode(&n))
	require.Equal(t, &n, restarted.Node())
}

// TestNodeThatIsRegisteredAnew checks that a new Node's content counts, but that the old addresses
// and pod CIDRs stay until the new Node has its own. That holds whether or not the agent has seen
// the deletion.
func TestNodeThatIsRegisteredAnew(t *testing.T) {
	before := &model.Node{
		Name: "node-1", Labels: map[string]string{"zone": "a"},
		InternalIPs: []netip.Addr{netip.MustParseAddr("2001:db8::1")},
		PodCIDRs:    []netip.Prefix{netip.MustParsePrefix("fd00:10:180::/64")},
	}
	again := &model.Node{Name: "node-1", Labels: map[string]string{"zone": "b"}}
	known := &model.Node{Name: "node-1", Labels: again.Labels, InternalIPs: before.InternalIPs, PodCIDRs: before.PodCIDRs}
	own := &model.Node{
		Name: "node-1", Labels: again.Labels,
		InternalIPs: []netip.Addr{netip.MustParseAddr("192.168.0.2")},
		PodCIDRs:    []netip.Prefix{netip.MustParsePrefix("10.180.0.0/24")},
	}
	c := welcomed(t, 1)
	c.setNode(before)
	for what, c := range map[string]*Cache{"at run time": c, "while the agent was away": restart(t, c)} {
		c.setNode(nil)
		require.False(t, c.setNode(again), what)
		require.Equal(t, known, c.Node(), what)
		require.Equal(t, known, restart(t, c).Node(), "a restart before it has its own")
		require.False(t, c.setNode(own), what)
		require.Equal(t, own, c.Node(), what)
	}
	require.Equal(t, &model.Node{Name: "node-1", Labels: map[string]string{"zone": "b"}}, again, "objects are immutable")
}

// TestRestoredServices checks that a cache returns the restored Services with UDP ports once, as
// they were restored.
func TestRestoredServices(t *testing.T) {
	service := func(name string, protocols ...model.Protocol) *model.Service {
		s := model.Service{Namespace: "default", Name: name, Type: model.ClusterIP}
		for i, p := range protocols {
			s.Ports = append(s.Ports, model.ServicePort{Name: string(rune('a' + i)), Protocol: p, Port: 53})
		}
		return model.NewService(s)
	}
	dns, gone := service("dns", model.TCP, model.UDP), service("gone", model.UDP)
	c := welcomed(t, 1)
	apply(t, c, &model.Update{From: 1, To: 2, Services: []*model.Service{service("web", model.TCP), dns, gone}})
	require.Empty(t, c.TakeRestored())
	c = restart(t, c)
	require.NoError(t, c.welcome(epoch+1, 1))
	apply(t, c, &model.Update{To: 1, Full: true, Services: []*model.Service{service("new", model.UDP), service("dns", model.UDP)}})
	restored := c.TakeRestored()
	slices.SortFunc(restored, func(a, b *model.Service) int { return a.Key().Compare(b.Key()) })
	require.Equal(t, []*model.Service{dns, gone}, restored)
	require.Empty(t, c.TakeRestored())
}

// sourceFunc is a source.Source for tests.
type sourceFunc func(ctx context.Context, sink source.Sink) error

func (f sourceFunc) Run(ctx context.Context, sink source.Sink) error { return f(ctx, sink) }

func TestLocal(t *testing.T) {
	s, err := store.New(store.Options{Shards: 2})
	require.NoError(t, err)
	cache := NewCache()
	l := &Local{Store: s, Cache: cache, NodeName: "n", Source: sourceFunc(func(ctx context.Context, sink source.Sink) error {
		sink.Upsert(service("web"), 1)
		sink.Upsert(&model.Node{Name: "n"}, 1)
		sink.Synced()
		<-cache.Dirty()
		sink.Upsert(named("s", "web", 2), 2)
		<-cache.Dirty()
		sink.Upsert(named("s", "web", 3), 3)
		sink.Remove(model.Key{Kind: model.KindNode, Name: "n"}, 3)
		<-ctx.Done()
		return nil
	})}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	require.Eventually(t, func() bool { return cacheHas(cache, named("s", "web", 3)) }, patience, tick)
	require.True(t, holds(cache, s))
	changes, ok := cache.Take()
	require.True(t, ok)
	require.Equal(t, []model.ServiceKey{webKey}, changes.Services)
	require.Equal(t, s.Epoch(), changes.Epoch)
	cancel()
	require.NoError(t, <-done)
}

// TestDeltasOfContentThatIsNotExact checks that a delta whose result cannot be verified is applied
// only to the exact state that it starts from.
func TestDeltasOfContentThatIsNotExact(t *testing.T) {
	before := web(func(*model.Slice) {})
	delta := model.Diff(before, web(unready(1)))
	held := func() *model.Slice {
		s := modeltest.WebSlice(100)
		return model.NewSlice(s).WithVersion(model.Version{7}, nil)
	}
	for name, c := range map[string]struct {
		prepare func(*Cache)
		from    uint64
		applied bool
	}{
		"at its position":        {func(*Cache) {}, 2, true},
		"ahead of it":            {func(*Cache) {}, 1, false},
		"an object that waits":   {func(c *Cache) { c.shards[0].setMissing(before.Key()) }, 2, false},
		"one that is unreadable": {func(c *Cache) { c.shards[0].setUnreadable(before.Key(), model.Version{8}) }, 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			cache := welcomed(t, 1)
			apply(t, cache, &model.Update{From: 1, To: 2, Slices: []*model.Slice{held()}})
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
	seen := func() *pb.ResourceVersions {
		var h pb.Hello
		c.hello(&h)
		return h.GetResourceVersions()
	}
	require.NoError(t, c.synced(&pb.InSync{Sequences: []uint64{1}, ResourceVersions: &pb.ResourceVersions{Services: 5, Slices: 1<<64 - 1}}))
	require.EqualValues(t, uint64(1<<64-1), seen().GetSlices())
	require.NoError(t, c.welcome(epoch+1, 1))
	require.EqualValues(t, uint64(1<<64-1), seen().GetSlices(), "as long as no server has brought it in sync")
	require.NoError(t, c.synced(&pb.InSync{Sequences: []uint64{1}, ResourceVersions: &pb.ResourceVersions{Services: 4, Slices: 7}}))
	require.EqualValues(t, 4, seen().GetServices())
	require.EqualValues(t, 7, seen().GetSlices())
	apply(t, c, &model.Update{From: 1, To: 2, ResourceVersions: model.ResourceVersions{Slices: 9}})
	require.EqualValues(t, 9, seen().GetSlices())
}
