// TestGolden prints random frames and their digests, to compare commits by.
package wire

import (
	"crypto/sha256"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// TestGolden prints the frames of random updates as hashes, with the digests of what they lead to.
// It asserts that the digests are those of what is decoded again.
func TestGolden(t *testing.T) {
	for seed := range 50 {
		u := rapid.Custom(func(r *rapid.T) *model.Update {
			key := modeltest.ServiceKey(r)
			before := modeltest.Slice(r, modeltest.SliceKey(r))
			u := &model.Update{Shard: 3, From: 4, To: 5, Services: []*model.Service{modeltest.Service(r, key)}}
			after := modeltest.Changed(r, before)
			if d := model.Diff(before, after); d != nil {
				u.Deltas = append(u.Deltas, d)
			} else {
				u.Slices = append(u.Slices, after)
			}
			return u
		}).Example(seed)
		f, err := EncodeUpdate(u)
		require.NoError(t, err)
		r, err := Decode(f)
		require.NoError(t, err)
		digest := func(u *model.Update) model.Digest {
			var objects []model.Object
			for _, o := range u.Services {
				objects = append(objects, o)
			}
			for _, o := range u.Slices {
				objects = append(objects, o)
			}
			return modeltest.ShardDigest(objects...)
		}
		require.Equal(t, digest(u), digest(r.Update))
		fmt.Fprintf(t.Output(), "%d: %d bytes, %x, digest %x\n", seed, len(f), sha256.Sum256(f), digest(u))
	}
}
