// These tests prove that an Update which arrives in parts is applied as a whole or not at all.
package cache

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestPartsAreAppliedTogether checks that the last part of an Update brings all of it.
func TestPartsAreAppliedTogether(t *testing.T) {
	c := welcomed(t, 1)
	apply(t, c, &model.Update{From: 1, To: 2, Services: []*model.Service{service("old")}, Slices: []*model.Slice{named("kept", "old", 1)}})
	_, before := c.Digests()
	parts := NewParts(1)
	for _, part := range []*model.Update{
		{To: 9, Full: true, Services: []*model.Service{service("a")}},
		{To: 9, Full: true, Slices: []*model.Slice{named("s", "a", 2)}, Unreadable: []model.Unreadable{{Key: named("kept", "", 0).Key()}}},
	} {
		u, err := parts.Join(part, true)
		require.NoError(t, err)
		require.Nil(t, u)
		require.True(t, parts.Waiting())
		_, digests := c.Digests()
		require.Equal(t, before, digests)
	}
	u, err := parts.Join(&model.Update{To: 9, Full: true, Services: []*model.Service{service("b")}}, false)
	require.NoError(t, err)
	require.False(t, parts.Waiting())
	apply(t, c, u)
	require.ElementsMatch(t, []model.ServiceKey{{Namespace: "default", Name: "a"}, {Namespace: "default", Name: "b"},
		{Namespace: "default", Name: "old"}}, c.Services())
	old, kept := c.Service(model.ServiceKey{Namespace: "default", Name: "old"})
	require.Nil(t, old)
	require.Equal(t, []*model.Slice{named("kept", "old", 1)}, kept, "it is in the shard, and could not be read")
}

// TestPartsMayBeShared checks that several streams can receive the same first part of an update
// without changing it. Simulated nodes in one process do so.
func TestPartsMayBeShared(t *testing.T) {
	part := func(name string) *model.Update {
		slice := named(name, "web", 3)
		return &model.Update{
			From: 100, To: 101, FullBuckets: []uint32{1}, Removed: []model.Key{slice.Key()},
			Services: []*model.Service{service(name)}, Slices: []*model.Slice{slice}, Deltas: []*model.SliceDelta{{Name: name}},
			Unreadable: []model.Unreadable{{Key: slice.Key()}},
		}
	}
	u := part("first")
	u.FullBuckets, u.Removed, u.Unreadable = slices.Grow(u.FullBuckets, 8), slices.Grow(u.Removed, 8), slices.Grow(u.Unreadable, 8)
	u.Services, u.Slices, u.Deltas = slices.Grow(u.Services, 8), slices.Grow(u.Slices, 8), slices.Grow(u.Deltas, 8)
	for range 2 {
		parts := NewParts(1)
		_, err := parts.Join(u, true)
		require.NoError(t, err)
		_, err = parts.Join(part("second"), true)
		require.NoError(t, err)
		require.Zero(t, u.FullBuckets[:2][1])
		require.Zero(t, u.Removed[:2][1])
		require.Zero(t, u.Services[:2][1])
		require.Zero(t, u.Slices[:2][1])
		require.Zero(t, u.Deltas[:2][1])
		require.Zero(t, u.Unreadable[:2][1])
	}
}

// TestPartsHoldEverything checks that the whole Update has every list of every part.
func TestPartsHoldEverything(t *testing.T) {
	parts := NewParts(2)
	part := func(shard uint32, n int) *model.Update {
		slice := named(fmt.Sprint("s-", n), "web", 3)
		return &model.Update{
			Shard: shard, From: 100, To: 101, FullBuckets: []uint32{uint32(n)}, Removed: []model.Key{slice.Key()},
			Services: []*model.Service{service(slice.Name)}, Slices: []*model.Slice{slice}, Deltas: []*model.SliceDelta{{Name: slice.Name}},
			Unreadable:       []model.Unreadable{{Key: slice.Key()}},
			ResourceVersions: model.ResourceVersions{Services: uint64(n), Slices: uint64(10 - n)},
		}
	}
	a, b, c := part(1, 1), part(1, 2), part(1, 3)
	want := &model.Update{
		Shard: 1, From: 100, To: 101, FullBuckets: []uint32{1, 2, 3}, Removed: slices.Concat(a.Removed, b.Removed, c.Removed),
		Services: slices.Concat(a.Services, b.Services, c.Services), Slices: slices.Concat(a.Slices, b.Slices, c.Slices),
		Deltas: slices.Concat(a.Deltas, b.Deltas, c.Deltas), Unreadable: slices.Concat(a.Unreadable, b.Unreadable, c.Unreadable),
		ResourceVersions: model.ResourceVersions{Services: 3, Slices: 9},
	}
	for i, u := range []*model.Update{a, part(0, 7), b, c} {
		whole, err := parts.Join(u, i < 3)
		require.NoError(t, err)
		if i < 3 {
			require.Nil(t, whole)
			continue
		}
		require.Equal(t, want, whole)
	}
	require.True(t, parts.Waiting(), "the other shard's update is not complete")
}

// TestPartsThatDoNotFit checks that parts which a correct server does not send are refused.
func TestPartsThatDoNotFit(t *testing.T) {
	first := &model.Update{From: 3, To: 4}
	for name, u := range map[string]*model.Update{
		"another from":    {From: 2, To: 4},
		"another to":      {From: 3, To: 5},
		"the whole shard": {From: 3, To: 4, Full: true},
		"another shard":   {Shard: 1, From: 3, To: 4},
		"many buckets":    {From: 3, To: 4, FullBuckets: make([]uint32, model.Buckets+1)},
	} {
		parts := NewParts(1)
		_, err := parts.Join(first, true)
		require.NoError(t, err)
		_, err = parts.Join(u, false)
		require.ErrorIs(t, err, ErrProtocol, name)
	}
	for more, refused := range []bool{false, true} {
		parts := NewParts(1)
		_, err := parts.Join(&model.Update{FullBuckets: make([]uint32, model.Buckets/2)}, true)
		require.NoError(t, err)
		_, err = parts.Join(&model.Update{FullBuckets: make([]uint32, model.Buckets/2+more)}, false)
		require.Equal(t, refused, err != nil)
	}
}

// TestUnfinishedUpdatesAreBounded checks that the parts of all unfinished updates share one bound,
// and that a finished update no longer counts.
func TestUnfinishedUpdatesAreBounded(t *testing.T) {
	large := &model.Update{Shard: 0, Full: true, To: 1, Removed: make([]model.Key, 0, 1<<20)}
	size := large.Memory()
	parts := NewParts(4)
	join := func(shard uint32, more bool) error {
		u := *large
		u.Shard = shard
		_, err := parts.Join(&u, more)
		return err
	}
	for range 100 {
		require.NoError(t, join(0, true))
		require.NoError(t, join(1, true))
		require.NoError(t, join(0, false))
		require.NoError(t, join(1, false))
		require.NoError(t, join(2, false), "it waits for nothing")
		require.Zero(t, parts.memory)
	}
	joined := 0
	for join(uint32(joined%3), true) == nil {
		joined++
	}
	require.Equal(t, maxUnfinished/size, joined)
	require.ErrorIs(t, join(3, true), ErrProtocol)
	require.NoError(t, join(3, false), "it does not wait")
	whole, err := parts.Join(&model.Update{Shard: 1, Full: true, To: 1}, false)
	require.NoError(t, err)
	require.NotNil(t, whole)
	require.NoError(t, join(3, true), "there is room again")
}

// TestUnfinishedUpdatesCountWhatTheyHold measures the heap beside what is counted of updates that a
// server sends, decoded from their frames.
func TestUnfinishedUpdatesCountWhatTheyHold(t *testing.T) {
	heap := func() int {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	key := func(i, j int) *pb.ObjectKey {
		return &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Namespace: "default", Name: fmt.Sprint("s-", i, "-", j)}
	}
	version := make([]byte, model.HashSize)
	version[0] = 1
	for name, part := range map[string]func(i int) *pb.ShardUpdate{
		"slices": func(i int) *pb.ShardUpdate {
			return wire.UpdateToProto(&model.Update{Slices: []*model.Slice{named(fmt.Sprint("s-", i), "web", 1000)}})
		},
		"Services": func(i int) *pb.ShardUpdate {
			u := &model.Update{}
			for j := range 100 {
				u.Services = append(u.Services, service(fmt.Sprint("s-", i, "-", j)))
			}
			return wire.UpdateToProto(u)
		},
		"removals": func(i int) *pb.ShardUpdate {
			u := &pb.ShardUpdate{}
			for j := range 1000 {
				u.Removed = append(u.Removed, key(i, j))
			}
			return u
		},
		"deltas": func(i int) *pb.ShardUpdate {
			u := &pb.ShardUpdate{}
			for j := range 1000 {
				u.SliceDeltas = append(u.SliceDeltas, &pb.SliceDelta{
					Namespace: "default", Name: fmt.Sprint("s-", i, "-", j), Version: version, Removed: []string{"10.0.0.1"},
				})
			}
			return u
		},
		"objects that do not decode": func(i int) *pb.ShardUpdate {
			u := &pb.ShardUpdate{}
			for j := range 1000 {
				u.Slices = append(u.Slices, &pb.Slice{Namespace: "default", Name: fmt.Sprint("s-", i, "-", j), Version: version, Service: "web", AddressType: 77})
			}
			return u
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := heap()
			parts := NewParts(1)
			for i := range 200 {
				p := part(i)
				p.Sequence, p.More = 1, true
				f, err := wire.Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: p}})
				require.NoError(t, err)
				r, err := wire.Decode(f)
				require.NoError(t, err)
				require.Positive(t, r.Update.Len()+len(r.Update.Unreadable))
				_, err = parts.Join(r.Update, r.More)
				require.NoError(t, err)
			}
			held := heap() - before
			t.Logf("%d KiB are counted, and %d KiB held", parts.memory>>10, held>>10)
			require.LessOrEqual(t, held, parts.memory+1<<20)
			require.LessOrEqual(t, parts.memory, 3*held+1<<20)
			runtime.KeepAlive(parts)
		})
	}
}
