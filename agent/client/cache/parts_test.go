// These tests prove that an Update which arrives in parts is applied as a whole or not at all.
package cache

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
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
		u, err := parts.Join(part, true, 0)
		require.NoError(t, err)
		require.Nil(t, u)
		require.True(t, parts.Waiting())
		_, digests := c.Digests()
		require.Equal(t, before, digests)
	}
	u, err := parts.Join(&model.Update{To: 9, Full: true, Services: []*model.Service{service("b")}}, false, 0)
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
		_, err := parts.Join(u, true, 0)
		require.NoError(t, err)
		_, err = parts.Join(part("second"), true, 0)
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
		whole, err := parts.Join(u, i < 3, 0)
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
		_, err := parts.Join(first, true, 0)
		require.NoError(t, err)
		_, err = parts.Join(u, false, 0)
		require.ErrorIs(t, err, ErrProtocol, name)
	}
	for more, refused := range []bool{false, true} {
		parts := NewParts(1)
		_, err := parts.Join(&model.Update{FullBuckets: make([]uint32, model.Buckets/2)}, true, 0)
		require.NoError(t, err)
		_, err = parts.Join(&model.Update{FullBuckets: make([]uint32, model.Buckets/2+more)}, false, 0)
		require.Equal(t, refused, err != nil)
	}
}

// TestUnfinishedUpdatesAreBounded checks that the parts of all unfinished updates share one bound,
// and that a finished update no longer counts.
func TestUnfinishedUpdatesAreBounded(t *testing.T) {
	parts := NewParts(4)
	part := func(shard uint32, more bool) error {
		_, err := parts.Join(&model.Update{Shard: shard, Full: true, To: 1}, more, maxUnfinished/4)
		return err
	}
	for range 3 {
		require.NoError(t, part(0, true))
		require.NoError(t, part(0, false))
		require.NoError(t, part(1, true))
		require.NoError(t, part(1, false))
	}
	require.NoError(t, part(2, true))
	require.NoError(t, part(2, true))
	require.NoError(t, part(3, true))
	require.NoError(t, part(3, false))
	require.ErrorIs(t, part(0, true), ErrProtocol)

	// Each object takes memory beyond its encoded size, even if it does not decode.
	u := &model.Update{Removed: make([]model.Key, 2), Unreadable: make([]model.Unreadable, 3)}
	for above, refused := range []bool{false, true} {
		_, err := NewParts(1).Join(u, true, maxUnfinished-5*objectMemory+above)
		require.Equal(t, refused, err != nil)
	}
}
