// These tests prove the protocol of a stream from the initial state to the drain, with raw clients
// of a real hub behind grpc-go: what is sent at once, what is refused, and how clients resume.
package fanout

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func TestInitialState(t *testing.T) {
	s := filled(t, 10)
	f := start(t, s)
	welcome, updates, inSync := f.hello(&pb.Hello{}).inSync()
	require.Equal(t, s.Epoch(), welcome.GetEpoch())
	require.EqualValues(t, 2, welcome.GetShardCount())
	require.Equal(t, "server-1", welcome.GetServerName())
	require.Equal(t, "v1", welcome.GetServerVersion())
	require.EqualValues(t, 1000, welcome.GetHeartbeatIntervalMs())
	require.Len(t, updates, 2)
	n := 0
	for _, u := range updates {
		require.True(t, u.GetFull())
		n += len(u.GetServices()) + len(u.GetSlices())
	}
	require.Equal(t, 20, n)
	require.Equal(t, []uint64{1, 1}, inSync.GetSequences())
	require.EqualValues(t, 2, inSync.GetResourceVersions().GetSlices())
}

func TestRefusals(t *testing.T) {
	s := filled(t, 1)
	f := start(t, s)
	hello := func(h *pb.Hello) *pb.StreamRequest {
		return &pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: h}}
	}
	ack := func(shard uint32, sequence uint64) *pb.StreamRequest {
		return &pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{
			Positions: []*pb.ShardPosition{{Shard: shard, Sequence: sequence}},
		}}}
	}
	resync := func(r *pb.Resync) *pb.StreamRequest {
		return &pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: r}}
	}
	for name, c := range map[string]struct {
		requests []*pb.StreamRequest
		code     codes.Code
		message  string
	}{
		"no hello":               {[]*pb.StreamRequest{ack(0, 0)}, codes.InvalidArgument, "must be Hello"},
		"an empty one":           {[]*pb.StreamRequest{{}}, codes.InvalidArgument, "must be Hello"},
		"two":                    {[]*pb.StreamRequest{hello(&pb.Hello{}), hello(&pb.Hello{})}, codes.InvalidArgument, "second Hello"},
		"too many":               {[]*pb.StreamRequest{hello(&pb.Hello{Sequences: make([]uint64, 5000)})}, codes.InvalidArgument, "5000"},
		"half of a digest":       {[]*pb.StreamRequest{hello(&pb.Hello{Sequences: []uint64{1}, Digest: []byte{1}})}, codes.InvalidArgument, "the digest has 1 bytes"},
		"digests of half":        {[]*pb.StreamRequest{hello(&pb.Hello{}), {Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: []byte{1}}}}}, codes.InvalidArgument, "invalid Digests: 1 bytes"},
		"digests unasked":        {[]*pb.StreamRequest{hello(&pb.Hello{}), {Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: modeltest.Digests(1, 2)}}}}, codes.InvalidArgument, "only to answer a DigestQuery"},
		"an agent of no node":    {[]*pb.StreamRequest{hello(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_AGENT})}, codes.InvalidArgument, "kind"},
		"a relay that is a node": {[]*pb.StreamRequest{hello(&pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY, NodeName: "n"})}, codes.InvalidArgument, "kind"},
		"a stranger":             {[]*pb.StreamRequest{hello(&pb.Hello{NodeName: "stranger"})}, codes.PermissionDenied, "who are you?"},
		"ack of the future":      {[]*pb.StreamRequest{hello(&pb.Hello{}), ack(0, 99)}, codes.InvalidArgument, "never sent"},
		"ack of no shard":        {[]*pb.StreamRequest{hello(&pb.Hello{}), ack(2, 0)}, codes.InvalidArgument, "never sent"},
		"resync of no shard":     {[]*pb.StreamRequest{hello(&pb.Hello{}), resync(&pb.Resync{Shard: 2})}, codes.InvalidArgument, "the server has 2 shards"},
		"resync of no object":    {[]*pb.StreamRequest{hello(&pb.Hello{}), resync(&pb.Resync{Keys: []*pb.ObjectKey{{Name: "x"}}})}, codes.InvalidArgument, "unknown kind"},
	} {
		t.Run(name, func(t *testing.T) {
			f.t = t
			call := f.open()
			for i, r := range c.requests {
				if i > 0 {
					require.NotNil(t, call.recv().GetWelcome())
				}
				call.send(r)
			}
			end := call.ends()
			require.Equal(t, c.code, end.Code(), end)
			require.Contains(t, end.Message(), c.message)
		})
	}
}

func TestNobodyIsServedBeforeTheSourceHasSynced(t *testing.T) {
	s, err := store.New(store.Options{Shards: 2})
	require.NoError(t, err)
	s.Upsert(service(1), 1)
	f := start(t, s)
	require.Equal(t, codes.Unavailable, f.hello(&pb.Hello{}).ends().Code())
	s.Synced()
	// An agent that was served an empty state now would remove what it has.
	require.Equal(t, codes.Unavailable, f.hello(&pb.Hello{}).ends().Code())
	f.publish()
	_, updates, _ := f.hello(&pb.Hello{}).inSync()
	require.Len(t, updates, 1)
}

func TestChangesFollow(t *testing.T) {
	s := filled(t, 3)
	f := start(t, s)
	a, b := f.hello(&pb.Hello{}), f.hello(&pb.Hello{})
	a.inSync()
	b.inSync()

	s.Upsert(slice(1, 4), 7)
	f.publish()
	u := a.update()
	require.True(t, proto.Equal(u, b.update()))
	require.Zero(t, u.GetFromSequence(), "it follows what was before")
	require.EqualValues(t, 2, u.GetSequence())
	require.EqualValues(t, 7, u.GetSlicesResourceVersion())
	require.Zero(t, u.GetServicesResourceVersion())
	require.Len(t, u.GetSliceDeltas(), 1)
	require.Len(t, u.GetSliceDeltas()[0].GetEndpoints(), 1)

	s.Remove(service(1).Key(), 8)
	f.publish()
	require.Len(t, a.update().GetRemoved(), 1)
	require.Len(t, b.update().GetRemoved(), 1)

	f.beat()
	beat := a.recv().GetHeartbeat()
	digest, sequences := s.Digest()
	require.Equal(t, sequences[0]+sequences[1], beat.GetSequenceSum())
	require.Equal(t, digest[:], beat.GetDigest())
	b.recv()
	full := &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{SequenceSum: 1 << 62, Digest: digest[:]}}}
	const framed = 5 + 9 + 22 // the prefix of gRPC, the header of HTTP/2, and a record of TLS 1.3
	require.LessOrEqual(t, proto.Size(full)+framed, 100, "bytes of a heartbeat: what an idle node costs")

	// A client with another digest asks for the digests of the shards.
	b.send(&pb.StreamRequest{Message: &pb.StreamRequest_DigestQuery{DigestQuery: &pb.DigestQuery{}}})
	answer := b.recv().GetDigests()
	require.Equal(t, holding(s).GetSequences(), answer.GetSequences())
	require.Equal(t, model.JoinDigests(digestsOf(s)), answer.GetDigests())
}

// TestClientThatOnlyListens checks that a client that closes its sending side, as grpcurl does,
// goes on receiving.
func TestClientThatOnlyListens(t *testing.T) {
	s := filled(t, 3)
	f := start(t, s)
	c := f.hello(&pb.Hello{})
	require.NoError(t, c.CloseSend())
	c.inSync()
	s.Upsert(slice(1, 4), 7)
	f.publish()
	require.Len(t, c.update().GetSliceDeltas(), 1)
}

func TestNodesGetTheirOwnNode(t *testing.T) {
	s := filled(t, 1)
	s.Upsert(&model.Node{Name: "a", Labels: map[string]string{"zone": "1"}}, 1)
	s.Publish()
	f := start(t, s)
	node := func(c *call) *pb.NodeUpdate {
		u := c.recv().GetNodeUpdate()
		require.NotNil(t, u)
		return u
	}
	a, b, observer := f.hello(&pb.Hello{NodeName: "a"}), f.hello(&pb.Hello{NodeName: "b"}), f.hello(&pb.Hello{})
	for _, c := range []*call{a, b, observer} {
		require.NotNil(t, c.recv().GetWelcome())
	}
	require.Equal(t, "1", node(a).GetNode().GetLabels()["zone"])
	require.Nil(t, node(b).GetNode(), "there is none")
	for _, c := range []*call{a, b, observer} {
		require.True(t, c.update().GetFull(), "an observer has no Node")
		require.NotNil(t, c.recv().GetInSync())
	}

	s.Upsert(&model.Node{Name: "b"}, 2)
	f.publish()
	require.Equal(t, "b", node(b).GetNode().GetName())
	s.Remove(model.Key{Kind: model.KindNode, Name: "a"}, 3)
	f.publish()
	require.Nil(t, node(a).GetNode())
	// The other clients were sent nothing.
	f.beat()
	for _, c := range []*call{a, b, observer} {
		require.NotNil(t, c.recv().GetHeartbeat())
	}
}

func TestResume(t *testing.T) {
	s := filled(t, 10)
	f := start(t, s)
	shard := slice(1, 3).ServiceKey().Shard(2)
	resume := func(t *testing.T, h *pb.Hello) []*pb.ShardUpdate {
		f.t = t
		c := f.hello(h)
		c.digests = digestsOf(s)
		c.digests[shard] = model.Digest{1}
		c.buckets = func(uint32) []model.Digest { return slices.Repeat([]model.Digest{{1}}, model.Buckets) }
		_, updates, inSync := c.inSync()
		require.Equal(t, holding(s).GetSequences(), inSync.GetSequences())
		return updates
	}
	before := holding(s)
	s.Upsert(slice(1, 4), 3)
	f.publish()

	t.Run("by sequence: what changed", func(t *testing.T) {
		updates := resume(t, before)
		require.Len(t, updates, 1)
		require.False(t, updates[0].GetFull())
		require.Equal(t, shard, updates[0].GetShard())
		require.Len(t, updates[0].GetSliceDeltas(), 1, "as the server still has what the client holds")
		require.Empty(t, updates[0].GetSlices())
		require.Empty(t, updates[0].GetServices())
	})
	t.Run("at the same place: nothing", func(t *testing.T) { require.Empty(t, resume(t, holding(s))) })
	t.Run("by digest, from another server: nothing", func(t *testing.T) {
		h := holding(s)
		h.Epoch, h.Sequences = 1, []uint64{99, 0}
		require.Empty(t, resume(t, h))
	})
	t.Run("by digest, one shard differs: that shard", func(t *testing.T) {
		h := holding(s)
		h.Epoch, h.Capabilities = 1, []pb.Capability{pb.Capability_CAPABILITY_BUCKETS}
		h.Digest[0]++
		updates := resume(t, h)
		require.Len(t, updates, 1)
		require.Equal(t, shard, updates[0].GetShard())
		require.True(t, updates[0].GetFull())
	})
	t.Run("other shards: everything", func(t *testing.T) {
		h := &pb.Hello{Epoch: 1, Sequences: make([]uint64, 4), Digest: modeltest.Digests(1)}
		require.Len(t, resume(t, h), 2)
	})
	t.Run("the right position with another digest: nothing, until the client asks after a heartbeat", func(t *testing.T) {
		h := holding(s)
		h.Digest[0]++
		require.Empty(t, resume(t, h))
	})
	t.Run("a position that never was: that shard", func(t *testing.T) {
		h := holding(s)
		h.Sequences[shard] = 99
		h.Digest[0]++
		require.True(t, resume(t, h)[0].GetFull())
	})
}

// TestResumeOfAClientThatWasCutOffBeforeItsState checks a client that was cut off between Welcome
// and its state. It has the new epoch at position 0 and still holds the old state.
func TestResumeOfAClientThatWasCutOffBeforeItsState(t *testing.T) {
	s, err := store.New(store.Options{Shards: 2})
	require.NoError(t, err)
	s.Synced()
	s.Publish()
	f := start(t, s)
	_, updates, _ := f.hello(&pb.Hello{Epoch: s.Epoch(), Sequences: []uint64{0, 0}, Digest: modeltest.Digests(77)}).inSync()
	require.Len(t, updates, 2, "they are empty here, and not there")
	require.True(t, updates[0].GetFull())

	s.Upsert(service(1), 1)
	f.publish()
	h := holding(s)
	h.Sequences = []uint64{0, 0}
	_, updates, _ = f.hello(h).inSync()
	require.Empty(t, updates, "it has all of it already")
}

func TestResync(t *testing.T) {
	s := filled(t, 4)
	f := start(t, s)
	c := f.hello(&pb.Hello{})
	c.inSync()
	shard := slice(1, 3).ServiceKey().Shard(2)
	gone := &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: "default", Name: "gone"}
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: &pb.Resync{
		Shard: shard, Keys: []*pb.ObjectKey{wire.KeyToProto(slice(1, 3).Key()), gone},
	}}})
	u := c.update()
	require.False(t, u.GetFull())
	require.Equal(t, u.GetFromSequence(), u.GetSequence())
	require.Len(t, u.GetSlices(), 1)
	require.Len(t, u.GetSlices()[0].GetEndpoints(), 3)
	require.True(t, proto.Equal(gone, u.GetRemoved()[0]))

	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: &pb.Resync{Shard: shard}}})
	u = c.update()
	require.True(t, u.GetFull())
	require.Equal(t, shard, u.GetShard())
	require.EqualValues(t, 2, testutil.ToFloat64(f.metrics.resyncs))
}

func TestReportsArrive(t *testing.T) {
	s := filled(t, 2)
	f := start(t, s)
	c := f.hello(&pb.Hello{NodeName: "a"})
	c.inSync()
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Positions: []*pb.ShardPosition{
		{Shard: service(1).ServiceKey().Shard(2), Sequence: 1},
	}}}})
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{Reason: "no room", Key: wire.KeyToProto(service(1).Key())}}})
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{}}})
	c.send(&pb.StreamRequest{}) // from a newer client
	require.Eventually(t, func() bool { return testutil.ToFloat64(f.metrics.nacks) == 2 }, patience, tick)
	require.EqualValues(t, 1, testutil.ToFloat64(f.metrics.acks))
	require.EqualValues(t, 1, float64(len(f.Agents(nil))))
	require.NoError(t, c.CloseSend())
}

func TestDrain(t *testing.T) {
	s := filled(t, 2)
	f := start(t, s)
	listening, waiting := f.hello(&pb.Hello{}), f.hello(&pb.Hello{NodeName: "a"})
	listening.inSync()
	waiting.inSync()
	f.Drain()
	f.Drain()
	for _, c := range []*call{listening, waiting} {
		require.EqualValues(t, 10, c.recv().GetDrain().GetReconnectWithinMs())
		end := c.ends()
		require.Equal(t, codes.Unavailable, end.Code())
		require.Contains(t, end.Message(), "draining")
	}
	require.Equal(t, codes.Unavailable, f.hello(&pb.Hello{}).ends().Code())
	f.server.GracefulStop()
}

// TestSlowReaderIsCaughtUp checks that a client that stops reading delays no other client, and that
// it is caught up without every intermediate state once it reads again.
func TestSlowReaderIsCaughtUp(t *testing.T) {
	s := filled(t, 2)
	f := start(t, s)
	slow := f.hello(&pb.Hello{})
	slow.inSync()
	var published uint64 = 1
	// As long as a stream is sent something, it accepts more, and the ring may still have the rest.
	for sent := -1.0; sent != testutil.ToFloat64(f.metrics.sentFrames); {
		sent = testutil.ToFloat64(f.metrics.sentFrames)
		for range ringEntries + 1 {
			// Adding or removing 20 endpoints takes about a kilobyte.
			s.Upsert(slice(1, 20+int(published)%2*20), 0)
			f.publish()
			published++
		}
	}
	other := f.hello(&pb.Hello{})
	other.inSync()
	s.Upsert(slice(1, 3), 0)
	f.publish()
	require.Equal(t, published+1, other.update().GetSequence())
	published++

	received := 0
	for at := uint64(1); at < published; received++ {
		u := slow.update()
		if u.GetFromSequence() != 0 {
			require.LessOrEqual(t, u.GetFromSequence(), at, "no gap")
		} else {
			require.Equal(t, at+1, u.GetSequence(), "no gap")
		}
		at = u.GetSequence()
	}
	require.Less(t, received, ringEntries)
	require.NotZero(t, testutil.ToFloat64(f.metrics.lapped))
	s.Upsert(slice(1, 4), 0)
	f.publish()
	require.Equal(t, published+1, slow.update().GetSequence(), "and it follows again")
}

func TestFrameCache(t *testing.T) {
	c := newFrameCache(100 + 2*entryBytes)
	built := 0
	get := func(to uint64, size int) {
		t.Helper()
		f, err := c.get(frameKey{to: to}, func() ([]wire.Frame, error) { built++; return []wire.Frame{make(wire.Frame, size)}, nil })
		require.NoError(t, err)
		require.Equal(t, size, wire.Bytes(f))
	}
	get(1, 40)
	get(2, 40)
	get(1, 40)
	require.Equal(t, 2, built)
	get(3, 40) // 2 is the least recently used
	get(1, 40)
	require.Equal(t, 3, built)
	get(2, 40)
	require.Equal(t, 4, built)
	require.Equal(t, 80+2*entryBytes, c.bytes)
	// A frame larger than the limit evicts all others, and is cached itself.
	get(4, 5000)
	get(4, 5000)
	require.Equal(t, 5, built)
	require.Equal(t, 5000+entryBytes, c.bytes)
	get(5, 60)
	require.Equal(t, 60+entryBytes, c.bytes)

	broken := errors.New("broken")
	_, err := c.get(frameKey{to: 6}, func() ([]wire.Frame, error) { return nil, broken })
	require.ErrorIs(t, err, broken)
	get(6, 10)
	require.Equal(t, 70+2*entryBytes, c.bytes)
}

// TestSmallFramesAreBounded checks that the memory of a cache with many small frames stays near its
// limit.
func TestSmallFramesAreBounded(t *testing.T) {
	heap := func() int {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	before := heap()
	const limit = 8 << 20
	c := newFrameCache(limit)
	for n := range uint64(200_000) {
		_, err := c.get(frameKey{shard: uint32(n % 64), from: n, to: n + 2}, func() ([]wire.Frame, error) { return []wire.Frame{make(wire.Frame, 120)}, nil })
		require.NoError(t, err)
	}
	require.Less(t, heap()-before, 3*limit/2)
	runtime.KeepAlive(c)
}

func TestFrameIsBuiltOnceForManyStreams(t *testing.T) {
	c := newFrameCache(1 << 20)
	var wg sync.WaitGroup
	building := make(chan struct{})
	built := 0 // by one goroutine only; otherwise the race detector reports it
	for range 16 {
		wg.Go(func() {
			f, err := c.get(frameKey{to: 1}, func() ([]wire.Frame, error) {
				built++
				<-building
				return []wire.Frame{wire.Frame("frame")}, nil
			})
			if err != nil || len(f) != 1 || string(f[0]) != "frame" {
				panic(fmt.Sprint(f, err))
			}
		})
	}
	close(building)
	wg.Wait()
	require.Equal(t, 1, built)
}
