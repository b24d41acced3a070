package client

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// largeSlices returns slices of one shard that need several frames.
func largeSlices(n int) (objects []model.Object) {
	for i := range n {
		s := *named(fmt.Sprint("slice-", i), "web", 1000)
		for j := range s.Endpoints {
			s.Endpoints[j].NodeHints = []string{strings.Repeat("n", wire.MaxPart/6000), strings.Repeat("o", wire.MaxPart/6000)}
		}
		objects = append(objects, model.NewSlice(s))
	}
	return objects
}

// decodedParts returns the frames of an Update as a client decodes them.
func decodedParts(t *testing.T, u *model.Update) (parts []*wire.Response) {
	t.Helper()
	frames, err := wire.EncodeParts(u)
	require.NoError(t, err)
	for _, f := range frames {
		r, err := wire.Decode(f)
		require.NoError(t, err)
		parts = append(parts, r)
	}
	require.GreaterOrEqual(t, len(parts), 3)
	return parts
}

// TestNothingIsAppliedBeforeTheLastPart checks that no part of an Update is visible or acked before
// the last part has arrived, even if an InSync or another stream comes first.
func TestNothingIsAppliedBeforeTheLastPart(t *testing.T) {
	c := inSyncWith(t, 7, 1, nil, named("old", "web", 3))
	_, ok := c.Take()
	require.True(t, ok)
	u := &model.Update{From: 100, To: 101, Removed: []model.Key{named("old", "web", 3).Key()}}
	for _, o := range largeSlices(8) {
		u.Slices = append(u.Slices, o.(*model.Slice))
	}
	parts := decodedParts(t, u)
	apply := func(parts []*wire.Response) {
		t.Helper()
		for _, r := range parts {
			_, err := c.apply(r.Update, r.More)
			require.NoError(t, err)
		}
	}
	untouched := func() {
		t.Helper()
		changes, ok := c.Take()
		require.True(t, ok)
		require.Empty(t, changes.Services)
		require.Empty(t, changes.Positions)
		_, list := c.Service(model.ServiceKey{Namespace: "default", Name: "web"})
		require.Len(t, list, 1)
		require.EqualValues(t, 100, c.sequence(0))
	}
	apply(parts[:len(parts)-1])
	untouched()
	require.ErrorIs(t, c.synced(&pb.InSync{Sequences: []uint64{101}}), errProtocol)
	untouched()
	require.NoError(t, c.welcome(7, 1)) // starts another stream
	apply(parts[:1])
	untouched()
	apply(parts[1:])
	changes, ok := c.Take()
	require.True(t, ok)
	require.Equal(t, map[uint32]uint64{0: 101}, changes.Positions)
	_, list := c.Service(model.ServiceKey{Namespace: "default", Name: "web"})
	require.Len(t, list, 8)
}

// TestCheckpointOfALargeShard checks that a checkpoint holds a shard that needs several frames.
func TestCheckpointOfALargeShard(t *testing.T) {
	objects := largeSlices(2 * wire.MaxFrame / wire.MaxPart * 3)
	c := inSyncWith(t, 7, 1, nil, objects...)
	k := open(t, filepath.Join(t.TempDir(), "checkpoint"), c)
	k.save()
	require.Greater(t, len(k.encoder.shards[0].sections), 2*wire.MaxFrame/wire.MaxPart)
	restored := open(t, k.options.Path, NewCache())
	require.True(t, restored.restored, restored.logs)
	require.Equal(t, k.cache.shards[0].digest, restored.cache.shards[0].digest)
	require.Len(t, restored.cache.shards[0].slices, len(objects))
}

// TestPartsMayBeShared checks that several caches can apply the same first part of an update
// without changing it. Simulated nodes in one process do so.
func TestPartsMayBeShared(t *testing.T) {
	u := &model.Update{From: 100, To: 101, Removed: make([]model.Key, 1, 8)}
	u.Removed[0] = named("old", "web", 3).Key()
	rest := &model.Update{From: 100, To: 101, Removed: []model.Key{named("older", "web", 3).Key()}}
	for range 2 {
		c := inSyncWith(t, 7, 1, nil, named("old", "web", 3), named("older", "web", 3))
		_, err := c.apply(u, true)
		require.NoError(t, err)
		_, err = c.apply(rest, true)
		require.NoError(t, err)
		require.Zero(t, u.Removed[:2][1])
	}
}
