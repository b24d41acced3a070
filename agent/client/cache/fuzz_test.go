// This fuzz target proves that whatever servers send leaves the cache's invariants intact.
package cache

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// FuzzUpdates checks that the cache applies or refuses each Update as a whole, whatever servers
// send. It also checks the cache's invariants: digests match the content, each slice is with its
// Service and in its shard, nothing is held twice, and all objects are canonical.
func FuzzUpdates(f *testing.F) {
	web, slice := modeltest.Web(), model.NewSlice(modeltest.WebSlice(3))
	flipped := modeltest.WebSlice(3)
	flipped.Endpoints[1].Conditions.Ready = false
	other := modeltest.WebSlice(1)
	other.Service = "other"
	shard := web.ServiceKey().Shard(2)
	var all []byte
	for _, u := range []*model.Update{
		{Shard: shard, To: 2, Full: true, Services: []*model.Service{web}, Slices: []*model.Slice{slice}},
		{Shard: shard, From: 2, To: 3, Deltas: []*model.SliceDelta{model.Diff(slice, model.NewSlice(flipped))}},
		{Shard: shard, From: 3, To: 4, Removed: []model.Key{web.Key()}, FullBuckets: []uint32{slice.Key().Bucket()}},
		{Shard: model.NewSlice(other).ServiceKey().Shard(2), To: 5, Slices: []*model.Slice{model.NewSlice(other)}},
	} {
		frame, err := wire.EncodeUpdate(u)
		require.NoError(f, err)
		all = protowire.AppendBytes(all, frame)
		f.Add(protowire.AppendBytes(nil, frame))
	}
	f.Add(all)
	f.Add(twice(f, slice))
	part, err := wire.Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: &pb.ShardUpdate{Sequence: 1, More: true}}})
	require.NoError(f, err)
	f.Add(protowire.AppendBytes(nil, part))
	f.Fuzz(checkUpdates)
}

// checkUpdates applies the frames in data. Each is preceded by its length.
func checkUpdates(t *testing.T, data []byte) {
	w, parts := &Writer{Cache: New()}, NewParts(2)
	require.NoError(t, w.Welcome(1, 2))
	for len(data) > 0 {
		frame, n := protowire.ConsumeBytes(data)
		if n < 0 {
			return
		}
		data = data[n:]
		r, err := wire.Decode(frame)
		if err != nil || r.Update == nil {
			continue
		}
		u, err := parts.Join(r.Update, r.More)
		if u != nil {
			_, err = w.Apply(u)
		}
		if err != nil {
			require.ErrorIs(t, err, ErrProtocol)
		}
		checkCache(t, w.Cache)
	}
}

func checkCache(t *testing.T, c *Cache) {
	t.Helper()
	for i := range c.shards {
		s := &c.shards[i]
		digest := s.currentDigest()
		s.revision++
		require.Equal(t, s.currentDigest(), digest, "it follows the objects")
		slices := 0
		for key, held := range s.services {
			require.Equal(t, uint32(i), key.Shard(2))
			require.True(t, held.service != nil || len(held.slices) > 0, "nothing is kept of what is gone")
			if held.service != nil {
				require.NoError(t, held.service.Check())
			}
			slices += len(held.slices)
			for _, slice := range held.slices {
				require.NoError(t, slice.Check())
				require.Equal(t, key, slice.ServiceKey())
				require.Same(t, slice, s.slices[slice.Key()])
			}
		}
		require.Len(t, s.slices, slices)
	}
}

// twice returns the frames of a slice and of a delta that names an endpoint twice. The delta
// promises the version that would result.
func twice(t testing.TB, s *model.Slice) []byte {
	e := modeltest.WebEndpoint(200)
	shard := s.ServiceKey().Shard(2)
	whole, err := wire.EncodeUpdate(&model.Update{Shard: shard, To: 2, Full: true, Slices: []*model.Slice{s}})
	require.NoError(t, err)
	delta, err := wire.EncodeUpdate(&model.Update{Shard: shard, From: 2, To: 3, Deltas: []*model.SliceDelta{{
		Namespace: s.Namespace, Name: s.Name, Version: model.Version{2}, Endpoints: []model.Endpoint{e, e},
	}}})
	require.NoError(t, err)
	return protowire.AppendBytes(protowire.AppendBytes(nil, whole), delta)
}
