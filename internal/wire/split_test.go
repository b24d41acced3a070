// These tests prove that an Update of any size is sent as frames that are each bounded, compressed
// or not, and that together they hold the Update.
package wire

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// largest returns an Update with Services that have the maximum number of external IPs of one
// family, and with slices whose endpoints have about bytes of other content on the wire.
func largest(services, slices, bytes int) *model.Update {
	u := &model.Update{Shard: 3, From: 6, To: 8, ResourceVersions: model.ResourceVersions{Services: 5, Slices: 6}}
	for i := range services {
		s := model.Service{Namespace: "default", Name: fmt.Sprint("service-", i), Type: model.ClusterIP}
		for j := range model.MaxFrontends {
			s.ExternalIPs = append(s.ExternalIPs, netip.AddrFrom4([4]byte{100, byte(j >> 16), byte(j >> 8), byte(j)}))
		}
		u.Services = append(u.Services, model.NewService(s))
	}
	for i := range slices {
		s := modeltest.WebSlice(1000)
		s.Name = fmt.Sprint("slice-", i)
		for j := range s.Endpoints {
			s.Endpoints[j].NodeHints = names(bytes / len(s.Endpoints))
		}
		u.Slices = append(u.Slices, model.NewSlice(s))
	}
	return u
}

// names returns Node names with a total length of bytes.
func names(bytes int) (out []string) {
	const longest = 250
	for i := 0; bytes > 0; i++ {
		name := string(rune('a'+i)) + strings.Repeat("n", min(bytes, longest)-1)
		out = append(out, name)
		bytes -= len(name)
	}
	return out
}

// together decodes frames, checks that each is bounded, and returns them as one Update.
func together(t *testing.T, frames []Frame) *model.Update {
	t.Helper()
	var all *model.Update
	for i, f := range frames {
		require.LessOrEqual(t, len(f), MaxPart+2<<10)
		r, err := Decode(f)
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		require.Equal(t, i < len(frames)-1, r.More)
		u := r.Update
		if all == nil {
			all = u
			continue
		}
		require.Equal(t, [3]any{all.From, all.To, all.Full}, [3]any{u.From, u.To, u.Full})
		require.Equal(t, all.ResourceVersions, u.ResourceVersions)
		all.FullBuckets = append(all.FullBuckets, u.FullBuckets...)
		all.Services = append(all.Services, u.Services...)
		all.Slices = append(all.Slices, u.Slices...)
		all.Deltas = append(all.Deltas, u.Deltas...)
		all.Removed = append(all.Removed, u.Removed...)
	}
	return all
}

// TestLargeUpdatesAreSplit checks that the frames of any Update are small, compressed or not, and
// hold the same as the Update together.
func TestLargeUpdatesAreSplit(t *testing.T) {
	of := func(change func(*model.Update)) *model.Update {
		u := largest(3, 3, MaxPart/2)
		change(u)
		return u
	}
	deltas := &model.Update{Shard: 1, From: 1, To: 2}
	before := largest(0, 30, 64<<10).Slices
	for _, s := range before {
		after := *s
		after.Endpoints = append([]model.Endpoint(nil), s.Endpoints...)
		for i := range after.Endpoints[:900] {
			after.Endpoints[i].Zone += "y"
		}
		deltas.Deltas = append(deltas.Deltas, model.Diff(s, model.NewSlice(after)))
	}
	removed := &model.Update{Shard: 1, From: 1, To: 2}
	for i := range 30_000 {
		key := model.Key{Kind: model.KindSlice, Namespace: "default", Name: fmt.Sprint(strings.Repeat("s", 100), i)}
		removed.Removed = append(removed.Removed, key)
	}
	for name, u := range map[string]*model.Update{
		"a change":        of(func(*model.Update) {}),
		"a shard":         of(func(u *model.Update) { u.From, u.Full = 0, true }),
		"buckets":         of(func(u *model.Update) { u.From, u.FullBuckets = u.To, []uint32{1, 5, 9} }),
		"deltas":          deltas,
		"removed objects": removed,
	} {
		t.Run(name, func(t *testing.T) {
			frames, err := EncodeParts(u)
			require.NoError(t, err)
			require.GreaterOrEqual(t, len(frames), 3)
			want, err := EncodeUpdate(u)
			require.NoError(t, err)
			same := func(frames []Frame) {
				t.Helper()
				got, err := EncodeUpdate(together(t, frames))
				require.NoError(t, err)
				require.True(t, bytes.Equal(want, got))
			}
			same(frames)
			compressed, err := CompressParts(frames)
			require.NoError(t, err)
			require.Less(t, Bytes(compressed), Bytes(frames))
			same(compressed)
		})
	}
}

// TestEncodeBeginning checks that a client waits for more after the frames of the first part,
// however many these are.
func TestEncodeBeginning(t *testing.T) {
	for _, u := range []*model.Update{{To: 1, Full: true}, largest(0, 3, MaxPart/2)} {
		frames, err := EncodeBeginning(u)
		require.NoError(t, err)
		for _, f := range frames {
			r, err := Decode(f)
			require.NoError(t, err)
			require.True(t, r.More)
		}
	}
}

// TestPartsAtTheBound checks that an Update at the bound is one frame, and that it is two frames
// above it. An object larger than a part has a frame to itself.
func TestPartsAtTheBound(t *testing.T) {
	u := largest(0, 1, MaxPart/2)
	last, parts := 0, 1
	for i := 0; parts == 1; i++ {
		require.LessOrEqual(t, last, MaxPart+10)
		require.Less(t, i, MaxPart/10, "each Service has more bytes than that")
		u.Services = append(u.Services, model.NewService(model.Service{
			Namespace: "default", Name: fmt.Sprint("service-", i), Type: model.ClusterIP, ExternalIPs: largest(1, 0, 0).Services[0].ExternalIPs[:100:100],
		}))
		frames, err := EncodeParts(u)
		require.NoError(t, err)
		if parts = len(frames); parts == 1 {
			last = len(frames[0])
		}
	}
	require.Equal(t, 2, parts)
	require.Greater(t, last, MaxPart-4<<10, "the last single frame was at the bound")
	u = largest(0, 2, 3*MaxPart/2)
	u.Services = append(u.Services, modeltest.Web())
	frames, err := EncodeParts(u)
	require.NoError(t, err)
	require.Len(t, frames, 3)
	together := 0
	for _, f := range frames {
		r, err := Decode(f)
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		together += r.Update.Len()
	}
	require.Equal(t, 3, together)

	for above, want := range []int{1, 2} {
		object := within(1000, make([]byte, MaxPart/2-5))
		require.Len(t, object, MaxPart/2)
		frames, err := assembleParts(&pb.ShardUpdate{}, [][]byte{object, object[above:], make([]byte, 2*above)})
		require.NoError(t, err)
		require.Len(t, frames, want)
	}
}

// TestCompress checks that only frames which become smaller are compressed, so that compression
// never costs a client bytes.
func TestCompress(t *testing.T) {
	for size, want := range map[int]bool{compressAbove - 1: false, compressAbove: true} {
		f, err := Compress(make(Frame, size))
		require.NoError(t, err)
		require.Equal(t, want, len(f) < size, size)
	}
	f, smaller := make(Frame, 2*compressAbove), 0
	_, _ = rand.NewChaCha8([32]byte{}).Read(f)
	for i := range f {
		f[i] &= 0x7f // the more such bytes, the smaller f becomes
		c, err := Compress(f)
		require.NoError(t, err)
		if len(c) < len(f) {
			require.EqualValues(t, responseZstd, c[0]>>3)
			smaller++
		} else {
			require.Equal(t, f, c)
		}
	}
	require.Greater(t, smaller, 100)
	require.Less(t, smaller, len(f))
}
