// These tests prove that the bounds on memory count what is held: they measure the heap beside each
// bound while it is reached.
package fanout

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// heap returns the bytes of the heap that are in use.
func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// requireCounted requires that a bound's count is at least the heap that build has brought into
// use, apart from an eighth that the allocator may add and from what others in this process may
// have used. It is at most four times as much.
func requireCounted(t *testing.T, build func() (kept any, counted int)) {
	t.Helper()
	before := heap()
	kept, counted := build()
	held := heap() - before
	runtime.KeepAlive(kept)
	t.Logf("%d KiB are counted, and %d KiB held", counted>>10, held>>10)
	require.LessOrEqual(t, held, counted*9/8+1<<20)
	require.LessOrEqual(t, counted, 4*held+1<<20)
}

// fat returns a slice with the most memory for its endpoints that a tenant can write. Its strings
// are its own.
func fat(version, endpoints, hints int) *model.Slice {
	s := model.Slice{Namespace: "default", Name: "fat", Service: "web", Family: model.IPv4}
	for i := range 100 {
		s.Ports = append(s.Ports, model.SlicePort{Name: fmt.Sprint("p", i), Protocol: model.TCP, Port: uint16(i + 1)})
	}
	for i := range endpoints {
		e := model.Endpoint{
			Address: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), NodeName: fmt.Sprintf("node-%d", i),
			Conditions: model.Conditions{Ready: true, Serving: true},
		}
		for h := range hints {
			e.ZoneHints = append(e.ZoneHints, fmt.Sprintf("z-%d", h))
			e.NodeHints = append(e.NodeHints, fmt.Sprintf("n-%d", h))
		}
		if i == 0 {
			e.Zone = fmt.Sprint("zone-", version)
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return model.NewSlice(s)
}

// TestTheRingCountsWhatItHolds fills the ring with changes of which each keeps an earlier state
// alive.
func TestTheRingCountsWhatItHolds(t *testing.T) {
	for name, next := range map[string]func(i int) *model.Update{
		"deltas of large slices": func(i int) *model.Update {
			d := model.Diff(fat(i, 1000, 0), fat(i+1, 1000, 0))
			return &model.Update{From: uint64(i), To: uint64(i + 1), Deltas: []*model.SliceDelta{d}}
		},
		"deltas of slices with hints": func(i int) *model.Update {
			d := model.Diff(fat(i, 200, model.MaxHints), fat(i+1, 200, model.MaxHints))
			return &model.Update{From: uint64(i), To: uint64(i + 1), Deltas: []*model.SliceDelta{d}}
		},
		"whole slices": func(i int) *model.Update {
			return &model.Update{From: uint64(i), To: uint64(i + 1), Slices: []*model.Slice{fat(i, 100, model.MaxHints)}}
		},
		"removals": func(i int) *model.Update {
			u := &model.Update{From: uint64(i), To: uint64(i + 1)}
			for j := range 500 {
				key := model.Key{Kind: model.KindSlice, Namespace: fmt.Sprint("n-", i), Name: fmt.Sprint("slice-", i, "-", j)}
				u.Removed = append(u.Removed, key)
				u.Left = append(u.Left, model.Departure{Key: key, Service: model.ServiceKey{Namespace: key.Namespace, Name: "web"}})
			}
			return u
		},
		"small changes": func(i int) *model.Update {
			d := model.Diff(fat(i, 2, 0), fat(i+1, 2, 0))
			return &model.Update{From: uint64(i), To: uint64(i + 1), Deltas: []*model.SliceDelta{d}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			requireCounted(t, func() (any, int) {
				r := new(ring)
				for i := range ringEntries {
					var e entry
					u := next(i)
					frames, err := wire.EncodeParts(u)
					require.NoError(t, err)
					e.add(u, frames)
					r.add(e)
				}
				entries, held := r.size()
				require.True(t, entries == ringEntries || held > ringBytes/2)
				require.LessOrEqual(t, held, ringBytes)
				// A batch keeps no more alive than it may.
				b := r.after(r.tail, batch{})
				require.LessOrEqual(t, b.held, batchHeld+b.held/len(b.updates))
				return r, held
			})
		})
	}
}

// TestTheFramesCountWhatTheyHold fills the cache of frames, compressed or not.
func TestTheFramesCountWhatTheyHold(t *testing.T) {
	_, err := wire.Compress(make(wire.Frame, 1<<20)) // makes what all compression shares
	require.NoError(t, err)
	for _, compressed := range []bool{false, true} {
		requireCounted(t, func() (any, int) {
			c := newFrameCache(16 << 20)
			for i := range 1000 {
				_, err := c.get(frameKey{to: uint64(i)}, func() ([]wire.Frame, error) {
					frames, err := wire.EncodeParts(&model.Update{Full: true, To: 1, Slices: []*model.Slice{fat(i, 1000, 1)}})
					if err == nil && compressed {
						return wire.CompressParts(frames)
					}
					return frames, err
				})
				require.NoError(t, err)
			}
			return c, c.size()
		})
	}
}

// TestRequestsCountWhatTheyHold fills the requests of many sessions.
func TestRequestsCountWhatTheyHold(t *testing.T) {
	for name, next := range map[string]func(i int) *pb.Resync{
		"short names": func(int) *pb.Resync {
			m := &pb.Resync{}
			for range maxKeys {
				m.Keys = append(m.Keys, &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Name: string([]byte("x"))})
			}
			return m
		},
		"long names": func(i int) *pb.Resync {
			return &pb.Resync{Keys: []*pb.ObjectKey{{
				Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Namespace: strings.Repeat("n", 63), Name: strings.Repeat("x", 1000+i%2),
			}}}
		},
		"buckets": func(i int) *pb.Resync {
			return &pb.Resync{Shard: uint32(i % 64), BucketDigests: make([]byte, model.Buckets*model.HashSize)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			requireCounted(t, func() (any, int) {
				all := make([]requests, 50)
				counted := 0
				for i := range all {
					for n := 0; n < 10_000; n++ {
						b, err := proto.Marshal(next(n))
						require.NoError(t, err)
						m := &pb.Resync{} // as it comes from the wire
						require.NoError(t, proto.Unmarshal(b, m))
						keys, err := keysOf(m)
						require.NoError(t, err)
						if !all[i].addResync(m, keys, 64) {
							break
						}
						require.LessOrEqual(t, all[i].size, maxWaiting+64*resyncBytes)
					}
					counted += all[i].size
				}
				return all, counted
			})
		})
	}
}

// TestHeapOfRelayedNacks fills what a server holds of a relay's nacks with the longest of
// everything.
func TestHeapOfRelayedNacks(t *testing.T) {
	s := filled(t, 1)
	h := running(t, Options{Store: s})
	p := connect(t, h, &pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
	defer p.cancel()
	eventually(t, p.session.synced.Load)
	before := heap()
	for i := range wire.MaxRelayedNacks {
		for _, size := range []int{maxNackKey - 7, 32 << 10} { // the former is just kept
			name := fmt.Sprint(strings.Repeat("n", size), 1_000_000+i)
			require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
				Key: &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Name: name}, Reason: name, NodeName: name,
			}}}))
		}
	}
	held := heap() - before
	t.Logf("%d KiB are held", held>>10)
	require.Less(t, held, 4<<20)
	p.session.reports.mu.Lock()
	defer p.session.reports.mu.Unlock()
	require.Len(t, p.session.reports.nacks, wire.MaxRelayedNacks)
}

// TestAllowancesAreSmall measures what is remembered of as many identities as there may be.
func TestAllowancesAreSmall(t *testing.T) {
	const worst = 32 << 20
	before := heap()
	all := make([]*allowance, maxIdentities)
	for i := range all {
		all[i] = newAllowance(identity{node: fmt.Sprint("node-", i)})
		all[i].lend().giveBack()
		all[i].nacksLogged.Do(func() {})
	}
	turns := newTurns(1 << 30)
	for i := range maxIdentities + 1000 {
		turns.ask(identity{node: strings.Repeat("n", maxNodeName-8) + fmt.Sprint(i)}, 1<<30).end()
	}
	require.Equal(t, maxIdentities, turns.lately.Len())
	require.Less(t, heap()-before, worst)
	runtime.KeepAlive(all)
}
