// These tests prove what single messages of a server make a stream do, and that it is bounded.
package connection

import (
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const epoch = 7

// testConnection returns the Connection of a client that knows no server.
func testConnection(c *cache.Cache, relay *Relay) *Connection {
	log := slog.New(slog.DiscardHandler)
	choice := discovery.New(discovery.Options{Cache: c, Times: discovery.DefaultTimes, Logger: log})
	return New(Options{Cache: c, Relay: relay, Logger: log}, choice, "")
}

// testStream returns a stream before its Welcome. Nothing is sent on it.
func testStream(c *cache.Cache, relay *Relay) *stream {
	return newStream(testConnection(c, relay), discovery.Server{}, func(error) {})
}

func welcomeMessage(shards uint32) *wire.Response {
	return &wire.Response{Welcome: &pb.Welcome{Epoch: epoch, ShardCount: shards}}
}

// welcomedStream returns a stream with an empty cache after its Welcome.
func welcomedStream(t *testing.T, shards uint32) *stream {
	t.Helper()
	s := testStream(cache.New(), nil)
	require.NoError(t, s.handle(welcomeMessage(shards)))
	return s
}

// TestBytesOfAHello checks that a client which is in sync sends few bytes to resume.
func TestBytesOfAHello(t *testing.T) {
	s := welcomedStream(t, store.DefaultShards)
	for shard := range uint32(store.DefaultShards) {
		_, err := s.cache.Apply(&model.Update{Shard: shard, Full: true, To: 1 << 40})
		require.NoError(t, err)
	}
	s.options.NodeName, s.options.Version, s.options.Programmer = strings.Repeat("n", 253), "v1.2.3", "nftables"
	h := s.hello()
	require.Len(t, h.GetSequences(), store.DefaultShards)
	require.LessOrEqual(t, proto.Size(h), 1<<10)
}

// largeSlices returns slices of one shard that need several frames.
func largeSlices(n int) (objects []model.Object) {
	for i := range n {
		s := *modeltest.NamedSlice(fmt.Sprint("slice-", i), "web", 1000)
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
	old := modeltest.NamedSlice("old", "web", 3)
	s := welcomedStream(t, 1)
	c := s.cache
	require.NoError(t, s.handle(&wire.Response{Update: &model.Update{To: 100, Full: true, Slices: []*model.Slice{old}}}))
	require.NoError(t, c.InSync([]uint64{100}, model.ResourceVersions{}))
	_, ok := c.Take()
	require.True(t, ok)
	u := &model.Update{From: 100, To: 101, Removed: []model.Key{old.Key()}}
	for _, o := range largeSlices(8) {
		u.Slices = append(u.Slices, o.(*model.Slice))
	}
	parts := decodedParts(t, u)
	apply := func(parts []*wire.Response) {
		t.Helper()
		for _, r := range parts {
			require.NoError(t, s.handle(r))
		}
	}
	untouched := func() {
		t.Helper()
		changes, ok := c.Take()
		require.True(t, ok)
		require.Empty(t, changes.Services)
		require.Empty(t, changes.Positions)
		_, list := c.Service(old.ServiceKey())
		require.Len(t, list, 1)
		require.EqualValues(t, 100, c.Sequence(0))
	}
	apply(parts[:len(parts)-1])
	untouched()
	require.ErrorContains(t, s.handle(&wire.Response{InSync: &pb.InSync{Sequences: []uint64{101}}}), "before the last part")
	untouched()
	s = testStream(c.Cache, nil)
	require.NoError(t, s.handle(welcomeMessage(1)))
	apply(parts[:1])
	untouched()
	apply(parts[1:])
	changes, ok := c.Take()
	require.True(t, ok)
	require.Equal(t, map[uint32]uint64{0: 101}, changes.Positions)
	_, list := c.Service(old.ServiceKey())
	require.Len(t, list, 8)
}

// TestSeenVersions checks that a heartbeat of a server that has given up sets the resource versions
// that the client has seen, and that no other heartbeat does.
func TestSeenVersions(t *testing.T) {
	s := welcomedStream(t, 1)
	high, low := &pb.ResourceVersions{Services: 9, Slices: 9}, &pb.ResourceVersions{Services: 3, Slices: 4}
	require.NoError(t, s.handle(&wire.Response{InSync: &pb.InSync{Sequences: []uint64{1}, ResourceVersions: high}}))
	for _, c := range []struct {
		beat *pb.Heartbeat
		want *pb.ResourceVersions
	}{{&pb.Heartbeat{ResourceVersions: low}, high}, {&pb.Heartbeat{}, high}, {&pb.Heartbeat{SeenVersions: low}, low}} {
		require.NoError(t, s.handle(&wire.Response{Heartbeat: c.beat}))
		require.Equal(t, c.want.String(), wire.ResourceVersionsToProto(s.cache.Status().ResourceVersions).String())
	}
}

// TestHeartbeatsOncePerMonth checks that a server cannot make a client wait long for its next
// heartbeat.
func TestHeartbeatsOncePerMonth(t *testing.T) {
	s := testStream(cache.New(), nil)
	require.NoError(t, s.handle(&wire.Response{Welcome: &pb.Welcome{Epoch: 1, ShardCount: 1, HeartbeatIntervalMs: math.MaxUint32}}))
	require.LessOrEqual(t, s.silence, silentBeats*discovery.MaxRetryDelay)
}

// TestBucketsAreAskedForOnce checks that a BucketQuery costs one answer per shard, whatever else it
// names.
func TestBucketsAreAskedForOnce(t *testing.T) {
	s := welcomedStream(t, 4)
	require.NoError(t, s.handle(&wire.Response{BucketQuery: &pb.BucketQuery{Shards: []uint32{0, 3}}}))
	require.NoError(t, s.handle(&wire.Response{BucketQuery: &pb.BucketQuery{Shards: []uint32{2}}}))
	require.ErrorIs(t, s.handle(&wire.Response{BucketQuery: &pb.BucketQuery{Shards: make([]uint32, 1<<20)}}), cache.ErrProtocol)
	require.ErrorIs(t, s.handle(&wire.Response{BucketQuery: &pb.BucketQuery{Shards: []uint32{3}}}), cache.ErrProtocol)
	require.Equal(t, 3, len(s.Outbox.requests.others))
}

// TestHeartbeatsDoNotPileUpRequests checks that consecutive heartbeats ask only once for objects
// that did not decode and have changed.
func TestHeartbeatsDoNotPileUpRequests(t *testing.T) {
	s := welcomedStream(t, 1)
	key := modeltest.NamedSlice("b", "a", 1).Key()
	for i, delta := range []bool{false, true} {
		_, err := s.cache.Apply(&model.Update{From: uint64(i), To: uint64(i + 1), Unreadable: []model.Unreadable{
			{Key: key, Version: model.Version{1}, Delta: delta},
		}})
		require.NoError(t, err)
	}
	s.synced = true
	for range 10_000 {
		require.NoError(t, s.handle(&wire.Response{Heartbeat: &pb.Heartbeat{}}))
	}
	require.Len(t, s.Outbox.requests.resyncs, 1)
	require.Len(t, s.Outbox.requests.resyncs[0].GetKeys(), 1)
}

// TestNodesOfARelayAreBounded checks that a server cannot make a relay remember an unbounded number
// of Node names.
func TestNodesOfARelayAreBounded(t *testing.T) {
	s := testStream(cache.New(), &Relay{Check: func([]uint64, uint32) error { return nil }, Node: func(string, *model.Node, uint64) {}})
	require.NoError(t, s.handle(welcomeMessage(1)))
	exists := func(i int) error {
		return s.handle(&wire.Response{Node: &wire.NodeUpdate{Name: fmt.Sprint("n-", i), Unreadable: true}})
	}
	for i := range maxNodes {
		require.NoError(t, exists(i))
	}
	require.NoError(t, exists(0), "a Node that is known counts once")
	require.ErrorIs(t, exists(maxNodes), cache.ErrProtocol)
}

// TestUnreadableObjectsAreBounded checks that a server cannot make a client remember an unbounded
// number of objects that do not decode.
func TestUnreadableObjectsAreBounded(t *testing.T) {
	s := welcomedStream(t, 1)
	unreadable := func(sequence uint64, names ...string) error {
		r := &wire.Response{Update: &model.Update{From: sequence - 1, To: sequence}}
		for _, name := range names {
			r.Update.Unreadable = append(r.Update.Unreadable, model.Unreadable{
				Key: model.Key{Kind: model.KindService, Namespace: "default", Name: name}, Version: model.Version{1},
			})
			r.Problems = append(r.Problems, wire.Problem{Err: errSilent})
		}
		return s.handle(r)
	}
	var names []string
	for i := range cache.MaxUnfit {
		names = append(names, fmt.Sprint("s-", i))
	}
	require.NoError(t, unreadable(1, names...))
	require.NoError(t, unreadable(2, names[0]))
	require.ErrorIs(t, unreadable(3, "one-more"), cache.ErrProtocol)
	require.Equal(t, cache.MaxUnfit, s.Outbox.failures())
}

// TestDrainsAreBounded checks that a server cannot make a client wait for long before it comes
// back.
func TestDrainsAreBounded(t *testing.T) {
	s := welcomedStream(t, 1)
	require.NoError(t, s.handle(&wire.Response{Drain: &pb.Drain{ReconnectWithinMs: math.MaxUint32}}))
	require.Equal(t, discovery.MaxRetryDelay, s.drained)
}
