// These tests prove that a frame of any size and content costs its receiver a bounded amount of
// memory, and which objects of a large frame are left out.
package wire

import (
	"bytes"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// repeated returns a message of size bytes that repeats one field with this content.
func repeated(number protowire.Number, content string, size int) []byte {
	field := protowire.AppendString(protowire.AppendTag(nil, number, protowire.BytesType), content)
	return bytes.Repeat(field, size/len(field))
}

// within returns a message with another message in one field.
func within(number protowire.Number, message []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), message)
}

// objects returns the frame of an update that repeats an object up to size bytes.
func objects(number protowire.Number, object []byte, size int) Frame {
	return within(responseShardUpdate, bytes.Repeat(within(number, object), max(1, size/(len(object)+4))))
}

// addresses returns different internal IPs of a Node that take size bytes.
func addresses(size int) (out []byte) {
	for i := 0; len(out) < size-20; i++ {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		out = append(out, within(3, []byte(a.String()))...)
	}
	return out
}

// TestFirstErrorEndsDecoding proves that an object is read no further than to its first invalid
// field or its bound, as some bytes of a compressed frame may be a million fields.
func TestFirstErrorEndsDecoding(t *testing.T) {
	many := func(field protowire.Number, text string) []byte { return repeated(field, text, fewBytes-64) }
	for name, f := range map[string]Frame{
		"removed addresses":    objects(updateDeltas, many(6, "x"), maxSeveral/2),
		"empty addresses":      objects(updateDeltas, many(6, ""), maxSeveral/2),
		"cluster IPs":          objects(updateServices, many(5, ""), maxSeveral/2),
		"source ranges":        objects(updateServices, many(12, ""), maxSeveral/2),
		"one delta of a frame": objects(updateDeltas, repeated(6, "x", maxSeveral-100), 0),
	} {
		compressed, err := Compress(f)
		require.NoError(t, err)
		var objects float64
		if r, err := Decode(compressed); err == nil {
			objects = float64(len(r.Problems))
		}
		allocations := testing.AllocsPerRun(1, func() { _, _ = Decode(compressed) })
		t.Logf("%s: %.0f allocations, %.0f objects", name, allocations, objects)
		require.Less(t, allocations, 2000+100*objects, name)
	}
}

// TestFramesStaySmall checks that a frame of any size and content costs its receiver a bounded
// amount of memory. Compressed, most of these frames have a few hundred bytes.
func TestFramesStaySmall(t *testing.T) {
	const most, live, allocated = MaxFrame - 64, 100 << 20, 1 << 30
	for name, f := range map[string]Frame{
		"empty removed objects":               within(responseShardUpdate, repeated(updateRemoved, "", most)),
		"empty removed objects in a part":     within(responseShardUpdate, repeated(updateRemoved, "", MaxPart)),
		"empty Services":                      within(responseShardUpdate, repeated(updateServices, "", most)),
		"empty Services in a part":            within(responseShardUpdate, repeated(updateServices, "", MaxPart)),
		"empty slices in a part":              within(responseShardUpdate, repeated(updateSlices, "", MaxPart)),
		"empty deltas in a part":              within(responseShardUpdate, repeated(updateDeltas, "", MaxPart)),
		"a slice of empty endpoints":          objects(updateSlices, repeated(7, "", most-10), 0),
		"slices of empty endpoints":           objects(updateSlices, repeated(7, "", 2000), MaxPart),
		"an endpoint of empty hints":          objects(updateSlices, within(7, repeated(8, "", most-20)), 0),
		"a delta's endpoint of empty hints":   objects(updateDeltas, within(4, repeated(7, "", most-20)), 0),
		"a delta of empty conditions":         objects(updateDeltas, repeated(5, "", most-10), 0),
		"deltas of empty conditions":          objects(updateDeltas, repeated(5, "", 3000), MaxPart),
		"a delta of removed addresses":        objects(updateDeltas, repeated(6, "::", most-10), 0),
		"a Service of empty ports":            objects(updateServices, repeated(8, "", most-10), 0),
		"a Service of empty external IPs":     objects(updateServices, repeated(6, "", most-10), 0),
		"a Service with one long external IP": objects(updateServices, repeated(6, strings.Repeat("\x01", most-20), most), 0),
		"a Service with a long name":          objects(updateServices, repeated(2, strings.Repeat("n", most-20), most), 0),
		"a removed object with a long name":   objects(updateRemoved, repeated(3, strings.Repeat("n", most-20), most), 0),
		"many buckets":                        within(responseShardUpdate, repeated(11, strings.Repeat("\x01", 1000), most)),
		"buckets one by one":                  within(responseShardUpdate, bytes.Repeat([]byte{11 << 3, 1}, most/2)),
		"a Node with empty addresses":         within(3, within(1, repeated(3, "", most-10))),
		"a Node with many addresses":          within(3, within(1, append(repeated(1, "n", 3), addresses(2*MaxPart-100)...))),
		"a Node with many pod CIDRs":          within(3, within(1, append(repeated(1, "n", 3), repeated(4, "10.0.0.0/8", 1<<20)...))),
		"a Node with empty labels":            within(3, within(1, repeated(2, "", most-10))),
		"a Node's long name":                  within(3, repeated(2, strings.Repeat("n", most-20), most)),
		"empty servers":                       within(7, repeated(1, "", most)),
		"a question for buckets":              within(8, within(1, bytes.Repeat([]byte{1}, most-20))),
		"positions in InSync":                 within(4, within(1, bytes.Repeat([]byte{1}, most-20))),
		"a path":                              within(1, within(6, make([]byte, most-32))),
		"unknown fields of an update":         within(responseShardUpdate, repeated(1000, "", most/8)),
		"unknown fields of a message":         repeated(1000, "", most/8),
		"updates":                             repeated(responseShardUpdate, "", most),
		"an update's parts in one":            bytes.Repeat(objects(updateSlices, nil, 1000), MaxPart/1010),
	} {
		t.Run(name, func(t *testing.T) {
			compressed, err := Compress(f)
			require.NoError(t, err)
			var before, after, held runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			begin := time.Now()
			r, err := Decode(compressed)
			took := time.Since(begin)
			runtime.ReadMemStats(&after)
			runtime.GC()
			runtime.ReadMemStats(&held)
			t.Logf("%d bytes, %d compressed: %v, %d MiB allocated, %d MiB live; %v", len(f), len(compressed), took,
				(after.TotalAlloc-before.TotalAlloc)>>20, (held.HeapAlloc-min(before.HeapAlloc, held.HeapAlloc))>>20, err)
			require.Less(t, held.HeapAlloc, before.HeapAlloc+live)
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(allocated))
			if r != nil {
				require.LessOrEqual(t, len(r.Problems), maxProblems)
				for _, p := range r.Problems {
					require.LessOrEqual(t, len(p.Key.Namespace)+len(p.Key.Name)+len(p.Err.Error()), 1<<10)
				}
			}
			runtime.KeepAlive(r)
		})
	}
}

// TestFramesOfSeveralObjects checks that a frame larger than a part holds one object or is refused
// as a whole.
func TestFramesOfSeveralObjects(t *testing.T) {
	big := largest(0, 1, 2_000_000)
	frame, err := EncodeUpdate(big)
	require.NoError(t, err)
	require.Greater(t, len(frame), 3*MaxPart/2)
	r, err := Decode(frame)
	require.NoError(t, err)
	require.Empty(t, r.Problems)
	require.Len(t, r.Update.Slices, 1)

	big.Services = append(big.Services, modeltest.Web())
	frame, err = EncodeUpdate(big)
	require.NoError(t, err)
	for _, f := range []Frame{frame, compressed(t, frame)} {
		_, err = Decode(f)
		require.ErrorContains(t, err, "several objects")
	}
}

// padding returns an unknown field that has this size in bytes.
func padding(t *testing.T, size int) []byte {
	t.Helper()
	content := size - protowire.SizeTag(2000) - protowire.SizeVarint(uint64(size))
	field := within(2000, make([]byte, content))
	require.Len(t, field, size)
	return field
}

// TestBounds checks that a frame at a bound is decoded, and that one above it is not.
func TestBounds(t *testing.T) {
	service := slices.Concat(within(1, []byte("default")), within(2, []byte("web")), within(3, modeltest.Digests(1)), []byte{4 << 3, 1})
	slice := slices.Concat(within(1, []byte("default")), within(2, []byte("web")), within(3, modeltest.Digests(1)), within(4, []byte("web")), []byte{5 << 3, 1})
	delta := service[:len(service)-2]
	// extra returns n fields with numbers.
	extra := func(n int) []byte { return bytes.Repeat([]byte{14 << 3, 1}, n) }
	endpoint := within(1, []byte("10.0.0.1"))
	for name, c := range map[string]struct {
		frame func(above int) Frame
		says  string
	}{
		"a message without objects": {func(above int) Frame {
			return within(5, padding(t, maxSeveral-4+above))
		}, "may have"},
		"a Node": {func(above int) Frame {
			return within(responseNodeUpdate, append(within(2, []byte("n")), padding(t, maxNode-7+above)...))
		}, "may have"},
		"the name of a Node": {func(above int) Frame {
			return within(responseNodeUpdate, within(2, bytes.Repeat([]byte("n"), maxName+above)))
		}, "the name of a Node has 254 bytes"},
		"several objects": {func(above int) Frame {
			two := slices.Concat(within(updateServices, service), within(updateServices, service))
			return within(responseShardUpdate, append(two, padding(t, maxSeveral-len(two)+above)...))
		}, "several objects"},
		"the entries of a Service": {func(above int) Frame {
			return within(responseShardUpdate, within(updateServices, append(service, extra(maxFields-4+above)...)))
		}, "fields"},
		"the entries of a slice and of its endpoints": {func(above int) Frame {
			large := within(sliceEndpoints, append(endpoint, extra(maxFields-7+above)...))
			return within(responseShardUpdate, within(updateSlices, append(slice, large...)))
		}, "fields"},
		"the entries of a delta and of its endpoints": {func(above int) Frame {
			large := within(deltaEndpoints, append(endpoint, extra(maxFields-5+above)...))
			return within(responseShardUpdate, within(updateDeltas, append(delta, large...)))
		}, "fields"},
	} {
		r, err := Decode(c.frame(0))
		require.NoError(t, err, name)
		require.Empty(t, r.Problems, name)
		_, err = Decode(c.frame(1))
		require.ErrorContains(t, err, c.says, name)
	}
}

// TestLongKeysOfBadObjects checks that a key which could not be sent to another server is not kept
// of an object that does not decode.
func TestLongKeysOfBadObjects(t *testing.T) {
	long, longest := strings.Repeat("n", maxName+1), strings.Repeat("n", maxName)
	for _, s := range []*pb.Service{{Namespace: "a", Name: long}, {Namespace: long, Name: "a"}, {Namespace: "a"}} {
		s.Version = modeltest.Digests(1)
		f, err := Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: &pb.ShardUpdate{Services: []*pb.Service{s}}}})
		require.NoError(t, err)
		r, err := Decode(f)
		require.NoError(t, err)
		require.Len(t, r.Problems, 1)
		require.Len(t, r.Update.Unreadable, 1)
		require.Zero(t, r.Update.Unreadable[0].Version, "it is not remembered")
		require.Equal(t, r.Problems[0].Key, r.Update.Unreadable[0].Key)
	}
	s := &pb.Service{Namespace: longest, Name: longest, Version: modeltest.Digests(1)}
	u, problems := decoded(t, &pb.ShardUpdate{Services: []*pb.Service{s}})
	require.Len(t, problems, 1)
	key := model.Key{Kind: model.KindService, Namespace: longest, Name: longest}
	require.Equal(t, []model.Unreadable{{Key: key, Version: model.Version(s.GetVersion())}}, u.Unreadable)
}
