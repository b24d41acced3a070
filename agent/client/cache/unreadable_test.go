// These tests prove what a cache does with objects that do not decode, with objects that it cannot
// verify, and with slices that are missing. It keeps what it holds, compares digests as the server
// does, and says what to ask for. It forgets them neither too early nor too late, and there is a
// bound for them.
package cache

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// claimed is an object that counts in digests with the version that a server claims.
type claimed struct {
	model.Object
	version model.Version
}

func (c claimed) ContentVersion() model.Version { return c.version }

// as returns the object with the version that a server claims.
func as(o model.Object, version byte) model.Object { return claimed{o, model.Version{version}} }

// unreadableSlice says that a slice has this version at the server and did not decode.
func unreadableSlice(name string, version byte, delta bool) model.Unreadable {
	return model.Unreadable{Key: named(name, "", 0).Key(), Version: model.Version{version}, Delta: delta}
}

// requireDigest checks that the only shard counts in digests as if it held these objects.
func requireDigest(t *testing.T, w *Writer, objects ...model.Object) {
	t.Helper()
	want := modeltest.ShardDigest(objects...)
	_, digests := w.Digests()
	require.Equal(t, []model.Digest{want}, digests)
	buckets, ok := w.BucketDigests(0)
	require.True(t, ok)
	require.Equal(t, want, model.ShardDigest(buckets))
}

// next applies an Update from the present position of the only shard to the next one.
func next(t *testing.T, w *Writer, u *model.Update) Outcome {
	t.Helper()
	u.From, u.To = w.Sequence(0), w.Sequence(0)+1
	if u.Full {
		u.From = 0
	}
	out, err := w.Apply(u)
	require.NoError(t, err)
	return out
}

// TestUnreadableObjects checks that an object which does not decode stays as it was, counts in
// digests as the server has it, and ends to be unreadable with whatever the server says next of it.
func TestUnreadableObjects(t *testing.T) {
	a, b, svc := named("a", "web", 3), named("b", "web", 3), service("web")
	for name, c := range map[string]struct {
		update   *model.Update
		readable []model.Key
		objects  []model.Object
	}{
		"the slices arrive":       {&model.Update{Slices: []*model.Slice{a, b}}, []model.Key{a.Key(), b.Key()}, []model.Object{a, b, as(svc, 9)}},
		"the Service arrives":     {&model.Update{Services: []*model.Service{svc}}, []model.Key{svc.Key()}, []model.Object{as(a, 9), as(b, 9), svc}},
		"a slice is removed":      {&model.Update{Removed: []model.Key{a.Key()}}, []model.Key{a.Key()}, []model.Object{as(b, 9), as(svc, 9)}},
		"the shard is whole":      {&model.Update{Full: true, Slices: []*model.Slice{a}}, []model.Key{a.Key(), b.Key(), svc.Key()}, []model.Object{a}},
		"a whole bucket lacks it": {&model.Update{FullBuckets: []uint32{b.Key().Bucket()}}, []model.Key{b.Key()}, []model.Object{as(a, 9), as(svc, 9)}},
		"a delta leads to what the cache holds": {
			&model.Update{Deltas: []*model.SliceDelta{model.Diff(named("a", "web", 4), a)}}, []model.Key{a.Key()}, []model.Object{a, as(b, 9), as(svc, 9)},
		},
		"nothing of them": {&model.Update{}, nil, []model.Object{as(a, 9), as(b, 9), as(svc, 9)}},
	} {
		t.Run(name, func(t *testing.T) {
			require.NotEqual(t, a.Key().Bucket(), b.Key().Bucket())
			require.NotEqual(t, svc.Key().Bucket(), b.Key().Bucket())
			w := welcomed(t, 1)
			next(t, w, &model.Update{Slices: []*model.Slice{a, b}})
			requireDigest(t, w, a, b)
			revision := w.shards[0].revision
			out := next(t, w, &model.Update{Unreadable: []model.Unreadable{
				unreadableSlice("a", 9, false), unreadableSlice("b", 9, false), {Key: svc.Key(), Version: model.Version{9}},
				{Key: named("no version", "", 0).Key()},
			}})
			require.Empty(t, out, "the server would send the same again")
			require.Greater(t, w.shards[0].revision, revision, "a checkpoint must not keep the position")
			require.True(t, has(w.Cache, a))
			require.True(t, w.IsUnreadable(0, a.Key()))
			require.False(t, w.IsUnreadable(0, named("c", "", 0).Key()))
			require.False(t, w.IsUnreadable(1, a.Key()), "there is no such shard")
			require.Empty(t, w.ChangedUnreadable())
			requireDigest(t, w, as(a, 9), as(b, 9), as(svc, 9))
			changes, _ := w.Take()
			require.Equal(t, map[uint32]uint64{0: 3}, changes.Positions, "nothing is missing")

			out = next(t, w, c.update)
			require.ElementsMatch(t, c.readable, out.Readable)
			require.Empty(t, out.Missing)
			requireDigest(t, w, c.objects...)
			for _, key := range c.readable {
				require.False(t, w.IsUnreadable(0, key))
			}
		})
	}
}

// TestChangesOfUnreadableSlices checks that a delta of an unreadable slice is not asked for at
// once, but noted until the server says something else of the slice.
func TestChangesOfUnreadableSlices(t *testing.T) {
	a := named("a", "web", 3)
	delta := &model.SliceDelta{Namespace: "default", Name: "a", Version: model.Version{10}}
	for name, c := range map[string]struct{ change, update *model.Update }{
		"a delta": {&model.Update{Deltas: []*model.SliceDelta{delta}}, &model.Update{Slices: []*model.Slice{a}}},
		"a delta that does not decode": {
			&model.Update{Unreadable: []model.Unreadable{unreadableSlice("a", 10, true)}}, &model.Update{Removed: []model.Key{a.Key()}},
		},
		"the whole slice, again": {
			&model.Update{Deltas: []*model.SliceDelta{delta}}, &model.Update{Unreadable: []model.Unreadable{unreadableSlice("a", 11, false)}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := welcomed(t, 1)
			next(t, w, &model.Update{Slices: []*model.Slice{a}})
			next(t, w, &model.Update{Unreadable: []model.Unreadable{unreadableSlice("a", 9, false)}})
			requireDigest(t, w, as(a, 9))
			require.Empty(t, next(t, w, c.change), "the server would have to send the slice after each of its changes")
			requireDigest(t, w, as(a, 10))
			require.Equal(t, map[uint32][]model.Key{0: {a.Key()}}, w.ChangedUnreadable())
			require.True(t, has(w.Cache, a))
			changes, _ := w.Take()
			require.Equal(t, map[uint32]uint64{0: 4}, changes.Positions)

			next(t, w, c.update)
			require.Empty(t, w.ChangedUnreadable())
		})
	}
}

// TestDeltasThatDoNotDecode checks that a slice is asked for once if its delta does not decode, and
// that it is no longer missing when the whole slice does not decode either.
func TestDeltasThatDoNotDecode(t *testing.T) {
	a := named("a", "web", 3)
	w := welcomed(t, 1)
	next(t, w, &model.Update{Slices: []*model.Slice{a}})
	delta := func() *model.Update {
		return &model.Update{Unreadable: []model.Unreadable{unreadableSlice("a", 9, true)}}
	}
	require.Equal(t, Outcome{Undecoded: []model.Key{a.Key()}}, next(t, w, delta()))
	require.Empty(t, next(t, w, delta()), "the answer has both changes")
	require.Empty(t, next(t, w, &model.Update{Deltas: []*model.SliceDelta{{Namespace: "default", Name: "a", Version: model.Version{10}}}}))
	require.False(t, w.IsUnreadable(0, a.Key()))
	requireDigest(t, w, a)
	changes, _ := w.Take()
	require.Empty(t, changes.Positions)

	next(t, w, &model.Update{Unreadable: []model.Unreadable{unreadableSlice("a", 10, false)}})
	changes, _ = w.Take()
	require.Equal(t, map[uint32]uint64{0: 6}, changes.Positions)
	require.True(t, w.IsUnreadable(0, a.Key()))
}

// TestUnfitIsBounded checks that a server cannot fill a node's memory with the names of objects
// that do not decode, or of slices that it has never sent.
func TestUnfitIsBounded(t *testing.T) {
	key := func(i int) model.Key {
		return model.Key{Kind: model.KindSlice, Namespace: "default", Name: fmt.Sprint("s-", i)}
	}
	unreadable := func(shard uint32, from, to int) *model.Update {
		u := &model.Update{Shard: shard, From: 1, To: 5}
		for i := from; i < to; i++ {
			u.Unreadable = append(u.Unreadable, model.Unreadable{Key: key(i), Version: model.Version{1}})
		}
		return u
	}
	w := welcomed(t, 2)
	apply(t, w, unreadable(0, 0, MaxUnfit/2))
	apply(t, w, unreadable(1, MaxUnfit/2, MaxUnfit))
	apply(t, w, unreadable(1, MaxUnfit/2, MaxUnfit)) // they are known
	_, err := w.Apply(unreadable(1, MaxUnfit, MaxUnfit+1))
	require.ErrorIs(t, err, ErrProtocol)
	apply(t, w, &model.Update{Shard: 0, From: 1, To: 6, Removed: []model.Key{key(0)}})
	apply(t, w, unreadable(1, MaxUnfit, MaxUnfit+1))
	_, err = w.Apply(unreadable(1, MaxUnfit+1, MaxUnfit+2))
	require.ErrorIs(t, err, ErrProtocol)
	w.Begin()
	require.NoError(t, w.Welcome(epoch, 1))
	out, err := w.Apply(&model.Update{Full: true, To: 7, Unreadable: unreadable(0, 0, MaxUnfit).Unreadable})
	require.NoError(t, err, "on the next stream, nothing is known of them")
	require.Empty(t, out.Readable)

	deltas := func(from, to int) *model.Update {
		u := &model.Update{Full: true, To: 8}
		for i := from; i < to; i++ {
			u.Deltas = append(u.Deltas, &model.SliceDelta{Namespace: "default", Name: key(i).Name, Version: model.Version{1}})
		}
		return u
	}
	w = welcomed(t, 1)
	require.Len(t, apply(t, w, deltas(0, MaxUnfit)), MaxUnfit)
	require.Len(t, next(t, w, &model.Update{Deltas: deltas(MaxUnfit, MaxUnfit+1).Deltas}).Missing, 1)
	_, err = w.Apply(&model.Update{Full: true, To: 9})
	require.ErrorIs(t, err, ErrProtocol)
	w.Begin() // the next server sends what differs
	require.Len(t, next(t, w, &model.Update{Deltas: deltas(0, MaxUnfit+1).Deltas}).Missing, MaxUnfit+1)
	w.Begin()
	require.Len(t, next(t, w, &model.Update{Deltas: deltas(0, MaxUnfit).Deltas}).Missing, MaxUnfit)
	require.Empty(t, next(t, w, &model.Update{Removed: []model.Key{key(0), key(1)}}).Missing)
	require.Len(t, next(t, w, &model.Update{Deltas: deltas(0, 2).Deltas}).Missing, 2)
	require.Empty(t, next(t, w, &model.Update{}).Missing)
}

// TestClaimsEndWithTheirStream checks that objects which a cache cannot verify count in digests as
// the server has them, but on the next stream as what the cache holds. Their shard has no position
// there, because the next server may claim the same epoch.
func TestClaimsEndWithTheirStream(t *testing.T) {
	proved, partly, svc, unreadable := named("proved", "web", 1), named("partly", "web", 2), service("web"), named("unreadable", "web", 3)
	delta := func(endpoints int, version byte) *model.SliceDelta {
		d := model.Diff(partly, named("partly", "web", endpoints))
		d.Version = model.Version{version}
		return d
	}
	for name, c := range map[string]struct {
		update *model.Update
		counts []model.Object // on this stream
		holds  []model.Object
	}{
		"partly unknown": {
			&model.Update{}, []model.Object{proved, as(partly, 8), as(svc, 8), unreadable}, []model.Object{proved, partly, svc, unreadable},
		},
		"unreadable": {
			&model.Update{Unreadable: []model.Unreadable{unreadableSlice("unreadable", 9, false)}},
			[]model.Object{proved, as(partly, 8), as(svc, 8), as(unreadable, 9)}, []model.Object{proved, partly, svc, unreadable},
		},
		"a delta of what is partly unknown": {
			&model.Update{Deltas: []*model.SliceDelta{delta(3, 9)}},
			[]model.Object{proved, as(partly, 9), as(svc, 8), unreadable}, []model.Object{proved, named("partly", "web", 3), svc, unreadable},
		},
		"a delta to what is known": {
			&model.Update{Deltas: []*model.SliceDelta{model.Diff(partly, named("partly", "web", 3))}, Removed: []model.Key{svc.Key()}},
			[]model.Object{proved, named("partly", "web", 3), unreadable}, nil,
		},
		"they come whole": {&model.Update{Services: []*model.Service{svc}, Slices: []*model.Slice{partly}}, []model.Object{proved, partly, svc, unreadable}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := welcomed(t, 1)
			next(t, w, &model.Update{
				Services: []*model.Service{svc}, Slices: []*model.Slice{proved, partly, unreadable},
				Unverified: []model.Unverified{{Key: partly.Key(), Version: model.Version{8}}, {Key: svc.Key(), Version: model.Version{8}}},
			})
			w.Take()
			require.Empty(t, next(t, w, c.update).Missing)
			requireDigest(t, w, c.counts...)
			position := w.Contents(func(int, uint64) bool { return false }).Sequences
			require.Equal(t, position, w.Begin().Sequences, "a checkpoint has the position of a Hello")
			require.NoError(t, w.Welcome(epoch, 1))
			if c.holds == nil { // nothing rests on a claim
				requireDigest(t, w, c.counts...)
				require.Equal(t, []uint64{3}, position)
				return
			}
			requireDigest(t, w, c.holds...)
			require.Equal(t, []uint64{0}, position)
			require.False(t, w.IsUnreadable(0, unreadable.Key()))
			changes, ok := w.Take()
			require.True(t, ok)
			require.Empty(t, changes.Positions, "the next server may have sent something else at this position")
		})
	}
}
