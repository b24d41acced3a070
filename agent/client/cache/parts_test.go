// These tests prove that an Update which arrives in parts is applied as a whole or not at all.
package cache

import (
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
	u := &model.Update{From: 100, To: 101, Removed: make([]model.Key, 1, 8)}
	u.Removed[0] = named("old", "web", 3).Key()
	rest := &model.Update{From: 100, To: 101, Removed: []model.Key{named("older", "web", 3).Key()}}
	for range 2 {
		parts := NewParts(1)
		_, err := parts.Join(u, true, 0)
		require.NoError(t, err)
		_, err = parts.Join(rest, true, 0)
		require.NoError(t, err)
		require.Zero(t, u.Removed[:2][1])
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
}
