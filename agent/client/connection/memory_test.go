// These tests measure the heap that the bounds on numbers allow a server, or a relay's nodes, to
// fill, with the longest of everything.
package connection

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// requireHeap requires that build brings at most that much of the heap into use.
func requireHeap(t *testing.T, most int, build func() (kept any)) {
	t.Helper()
	heap := func() int {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	before := heap()
	kept := build()
	held := heap() - before
	runtime.KeepAlive(kept)
	t.Logf("%d KiB are held", held>>10)
	require.LessOrEqual(t, held, most)
	require.Greater(t, held, most/4, "the bound is not reached")
}

// long returns a name of the longest that servers may use.
func long(i int) string { return fmt.Sprint(strings.Repeat("n", 246), 1_000_000+i) }

// says passes a message of a server to a stream, as it comes from the wire.
func (s *stream) says(t *testing.T, r *pb.StreamResponse) error {
	t.Helper()
	f, err := wire.Encode(r)
	require.NoError(t, err)
	return s.receive(f)
}

// TestHeapOfUnfitObjects fills a cache, and the reports about it, with as many objects as may not
// decode, or be missing.
func TestHeapOfUnfitObjects(t *testing.T) {
	version := make([]byte, model.HashSize)
	version[0] = 1
	for name, c := range map[string]struct {
		most int
		add  func(u *pb.ShardUpdate, i int)
	}{
		"Services that do not decode": {128 << 20, func(u *pb.ShardUpdate, i int) {
			u.Services = append(u.Services, &pb.Service{
				Namespace: long(0), Name: long(i), Version: version, ClusterIps: []string{strings.Repeat("\x01", 300)},
			})
		}},
		"slices that are missing": {48 << 20, func(u *pb.ShardUpdate, i int) {
			u.SliceDeltas = append(u.SliceDeltas, &pb.SliceDelta{
				Namespace: long(0)[183:246], Name: long(i), Version: version, Removed: []string{"10.0.0.1"},
			})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			requireHeap(t, c.most, func() any {
				s := welcomedStream(t, 1)
				const each = 1024
				for n := range cache.MaxUnfit / each {
					u := &pb.ShardUpdate{FromSequence: uint64(n), Sequence: uint64(n) + 1}
					for i := range each {
						c.add(u, n*each+i)
					}
					require.NoError(t, s.says(t, &pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: u}}))
				}
				return s
			})
		})
	}
}

// TestHeapOfNodesOfARelay fills what a relay notes of Nodes before it is in sync.
func TestHeapOfNodesOfARelay(t *testing.T) {
	requireHeap(t, 64<<20, func() any {
		s := testStream(cache.New(), &Relay{Check: func([]uint64, uint32) error { return nil }, Node: func(string, *model.Node, uint64) {}})
		require.NoError(t, s.handle(welcomeMessage(1)))
		for i := range maxNodes {
			require.NoError(t, s.says(t, &pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{
				Name: long(i), Node: &pb.Node{Name: long(i), Addresses: []string{"none"}},
			}}}))
		}
		return s
	})
}

// TestHeapOfRelayedNacks fills what a relay passes on, and what waits to be sent, with what the
// relay accepts of its nodes.
func TestHeapOfRelayedNacks(t *testing.T) {
	requireHeap(t, 4<<20, func() any {
		o := testOutbox()
		o.newStream()
		for i := range wire.MaxRelayedNacks {
			b, err := proto.Marshal(&pb.Nack{
				Key:      &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Namespace: long(0)[183:246], Name: long(i)},
				NodeName: long(i), Reason: strings.Repeat("r", 64<<10),
			})
			require.NoError(t, err)
			n := &pb.Nack{}
			require.NoError(t, proto.Unmarshal(b, n))
			require.True(t, o.Report(n))
		}
		return o
	})
}
