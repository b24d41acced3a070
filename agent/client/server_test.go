// These tests prove that a client survives servers that lie, and that what it reports reaches them.
package client

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// scripted is a server that follows a test's script and records the requests it receives.
type scripted struct {
	pb.UnimplementedDistributionServiceServer
	// play sends messages after the Hello. If it returns an error, the stream ends with it.
	// Otherwise, the stream goes on until the client leaves.
	play func(g pb.DistributionService_StreamServer) error
	// answer, if set, answers each later request.
	answer func(g pb.DistributionService_StreamServer, r *pb.StreamRequest) error
	// probed answers probes. nil means a Welcome that all clients accept.
	probed *pb.Welcome
	// stale makes the server answer probes as a stale one.
	stale atomic.Bool
	// probes counts the probes, which are no streams otherwise.
	probes atomic.Int64

	mu       sync.Mutex
	hellos   []*pb.Hello
	requests []*pb.StreamRequest
}

var errEnd = errors.New("the script ends")

func (s *scripted) Stream(g pb.DistributionService_StreamServer) error {
	for first := true; ; first = false {
		r, err := g.Recv()
		if err != nil {
			return err
		}
		if r.GetHello().GetProbe() {
			s.probes.Add(1)
			w := s.probed
			if w == nil {
				w = &pb.Welcome{Epoch: 9, ShardCount: 1}
			}
			if s.stale.Load() {
				w.StaleMs = 1
			}
			return g.SendMsg(welcome(w))
		}
		s.mu.Lock()
		if first {
			s.hellos = append(s.hellos, r.GetHello())
		} else {
			s.requests = append(s.requests, r)
		}
		s.mu.Unlock()
		if !first {
			if s.answer != nil {
				if err := s.answer(g, r); err != nil {
					return err
				}
			}
			continue
		}
		switch err := s.play(g); {
		case errors.Is(err, errEnd):
			return nil
		case err != nil:
			return err
		}
	}
}

func (s *scripted) seen() (hellos []*pb.Hello, requests []*pb.StreamRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append(hellos, s.hellos...), append(requests, s.requests...)
}

// says returns a script that sends these messages. A wire.Frame is sent as it is.
func says(messages ...any) func(pb.DistributionService_StreamServer) error {
	return func(g pb.DistributionService_StreamServer) error {
		for _, m := range messages {
			if err, ok := m.(error); ok {
				return err
			}
			if err := g.SendMsg(m); err != nil {
				return err
			}
		}
		return nil
	}
}

func welcome(w *pb.Welcome) *pb.StreamResponse {
	return &pb.StreamResponse{Message: &pb.StreamResponse_Welcome{Welcome: w}}
}

func update(u *pb.ShardUpdate) *pb.StreamResponse {
	return &pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: u}}
}

func inSync(sequences ...uint64) *pb.StreamResponse {
	return &pb.StreamResponse{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: sequences}}}
}

// TestServerThatLies checks that messages which make no sense change nothing, and that the client
// then finds the good server.
func TestServerThatLies(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 20)
	key := web(func(*model.Slice) {}).ServiceKey()
	right := key.Shard(s.Shards())
	wrong := (right + 1) % s.Shards()
	hello := welcome(&pb.Welcome{Epoch: s.Epoch(), ShardCount: s.Shards()})
	object := wire.UpdateToProto(&model.Update{Slices: []*model.Slice{web(unready(1))}}).GetSlices()
	removed := []*pb.ObjectKey{wire.KeyToProto(web(func(*model.Slice) {}).Key())}
	_, sequences := s.Digest()

	for name, script := range map[string][]any{
		"garbage":                    {hello, wire.Frame("\xff\xff\xff")},
		"garbage at once":            {wire.Frame("GET / HTTP/1.1")},
		"three shards":               {welcome(&pb.Welcome{Epoch: 1, ShardCount: 3})},
		"no shards":                  {welcome(&pb.Welcome{Epoch: 1})},
		"a million shards":           {welcome(&pb.Welcome{Epoch: 1, ShardCount: 1 << 20})},
		"no epoch":                   {welcome(&pb.Welcome{ShardCount: 8})},
		"an update before welcome":   {update(&pb.ShardUpdate{Shard: right, Full: true})},
		"in sync before welcome":     {inSync(make([]uint64, 8)...)},
		"a second welcome":           {hello, hello},
		"a bucket that is not there": {hello, update(&pb.ShardUpdate{Shard: right, Sequence: 2, FullBuckets: []uint32{model.Buckets}})},
		"digests before welcome":     {&pb.StreamResponse{Message: &pb.StreamResponse_Digests{Digests: &pb.Digests{}}}},
		"buckets of a shard that is not there": {hello,
			&pb.StreamResponse{Message: &pb.StreamResponse_BucketQuery{BucketQuery: &pb.BucketQuery{Shards: []uint32{8}}}}},
		"a shard that is not there": {hello, update(&pb.ShardUpdate{Shard: 8, Full: true})},
		"a gap":                     {hello, update(&pb.ShardUpdate{Shard: right, FromSequence: 5, Sequence: 6, Removed: removed})},
		"the past":                  {hello, update(&pb.ShardUpdate{Shard: right, FromSequence: 0, Sequence: 0, Removed: removed})},
		"an object in a wrong shard": {hello, update(&pb.ShardUpdate{Shard: wrong, FromSequence: 1, Sequence: 2, Slices: object,
			Removed: []*pb.ObjectKey{{Kind: pb.ObjectKind_OBJECT_KIND_SLICE, Namespace: "default", Name: "slice-1"}}})},
		"a whole shard of wrong objects": {hello, update(&pb.ShardUpdate{Shard: wrong, Sequence: 2, Full: true, Slices: object})},
		"parts that do not fit": {hello,
			update(&pb.ShardUpdate{Shard: right, FromSequence: 1, Sequence: 2, Removed: removed, More: true}),
			update(&pb.ShardUpdate{Shard: right, FromSequence: 2, Sequence: 3})},
		"a part, and the end":     {hello, update(&pb.ShardUpdate{Shard: right, Sequence: 2, Full: true, More: true}), errEnd},
		"in sync in three shards": {hello, inSync(1, 1, 1)},
		"in sync twice":           {hello, inSync(sequences...), inSync(sequences...)},
		"a node without sense": {hello, &pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{
			Node: &pb.Node{Name: "node-1", PodCidrs: []string{"x"}}}}}, errEnd},
		"nothing any more":  {welcome(&pb.Welcome{Epoch: s.Epoch(), ShardCount: s.Shards(), HeartbeatIntervalMs: 5})},
		"goodbye":           {errEnd},
		"an error":          {hello, status.Error(codes.Internal, "out of order")},
		"no entry":          {status.Error(codes.PermissionDenied, "not this node")},
		"drain and the end": {hello, &pb.StreamResponse{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{}}}, errEnd},
	} {
		t.Run(name, func(t *testing.T) {
			liar := &scripted{play: says(script...)}
			bad := serve(t, id, liar, fanout.ServerOption())
			good := serveStore(t, id, s, noHeartbeat)
			p := proxytest.New(t, good.address)
			cache := NewCache()
			a := connect(t, id, cache, nil, p.Address())
			a.waitInSync(t, 1)
			_, before := cache.Digests()

			p.Lead(bad.address)
			p.Cut()
			require.Eventually(t, func() bool { hellos, _ := liar.seen(); return len(hellos) >= 2 }, patience, tick)
			_, now := cache.Digests()
			require.Equal(t, before, now)
			hellos, _ := liar.seen()
			require.Equal(t, "node-1", hellos[0].GetNodeName())
			require.Equal(t, stateDigest(before...), hellos[0].GetDigest())
			require.Equal(t, s.Epoch(), hellos[0].GetEpoch())

			p.Lead(good.address)
			p.Cut()
			a.waitInSync(t, 2)
			waitHolds(t, cache, s)
			require.GreaterOrEqual(t, a.metric(t, "disconnects_total"), 2.0)
		})
	}
}

// heartbeat returns the heartbeat of a server with one shard at sequence 2.
func heartbeat(shard model.Digest) *pb.StreamResponse { return heartbeatAt(2, shard) }

func heartbeatAt(sequence uint64, shard model.Digest) *pb.StreamResponse {
	digest := model.StateDigest([]model.Digest{shard})
	return &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{SequenceSum: sequence, Digest: digest[:]}}}
}

// digestsOf returns the Digests of a server with one shard at sequence 2.
func digestsOf(shard model.Digest) *pb.StreamResponse {
	return &pb.StreamResponse{Message: &pb.StreamResponse_Digests{Digests: &pb.Digests{Sequences: []uint64{2}, Digests: shard[:]}}}
}

// waitRequests waits until a server has received n requests and returns them.
func (s *scripted) waitRequests(t *testing.T, n int) []*pb.StreamRequest {
	t.Helper()
	require.Eventually(t, func() bool { _, requests := s.seen(); return len(requests) >= n }, patience, tick)
	_, requests := s.seen()
	require.Len(t, requests, n)
	return requests
}

// TestObjectThatDoesNotDecode checks that an object which does not decode stays as it was, even in
// a full Update. The server receives a Nack, and its resolution once a good version has arrived.
// The digest always equals the server's. The client notes changes of the object and asks for it
// only at the next heartbeat.
func TestObjectThatDoesNotDecode(t *testing.T) {
	id := newIdentity(t)
	old, other := web(func(*model.Slice) {}), named("other", "web", 4)
	whole := wire.UpdateToProto(&model.Update{To: 1, Full: true, Slices: []*model.Slice{old, named("other", "web", 3)}})
	broken := wire.UpdateToProto(&model.Update{To: 2, Full: true, Slices: []*model.Slice{web(unready(1)), other}})
	broken.Slices[0].AddressType = 99
	digest := modeltest.ShardDigest(web(unready(1)), other)
	c := web(func(s *model.Slice) { unready(1)(s); unready(2)(s); unready(3)(s) })
	server := &scripted{play: says(welcome(&pb.Welcome{Epoch: 5, ShardCount: 1}), update(whole), update(broken), inSync(2),
		heartbeat(digest), heartbeat(model.Digest{1}), heartbeat(model.Digest{1}))}
	server.answer = func(g pb.DistributionService_StreamServer, r *pb.StreamRequest) error {
		switch {
		case r.GetDigestQuery() != nil:
			return says(digestsOf(model.Digest{1}), digestsOf(model.Digest{1}))(g)
		case len(r.GetResync().GetKeys()) > 0: // a request for the object, which now decodes
			return g.Send(update(wire.UpdateToProto(&model.Update{From: 4, To: 4, Slices: []*model.Slice{c}})))
		case r.GetResync() != nil: // deltas that the client cannot apply to what it holds
			a, b := web(unready(1)), web(func(s *model.Slice) { unready(1)(s); unready(3)(s) })
			delta := func(to uint64, old, now *model.Slice) *pb.StreamResponse {
				return update(wire.UpdateToProto(&model.Update{From: to - 1, To: to, Deltas: []*model.SliceDelta{model.Diff(old, now)}}))
			}
			return says(delta(3, a, b), delta(4, b, c), heartbeatAt(4, modeltest.ShardDigest(c, other)))(g)
		}
		return nil
	}
	cache := NewCache()
	a := connect(t, id, cache, nil, serve(t, id, server, fanout.ServerOption()).address)

	requests := server.waitRequests(t, 5)
	require.True(t, cacheHas(cache, c))
	require.True(t, cacheHas(cache, other))
	var nacks []*pb.Nack
	var resyncs []*pb.Resync
	questions := 0
	for _, r := range requests {
		switch {
		case r.GetNack() != nil:
			nacks = append(nacks, r.GetNack())
		case r.GetResync() != nil:
			resyncs = append(resyncs, r.GetResync())
		case r.GetDigestQuery() != nil:
			questions++
		}
	}
	require.Equal(t, 1, questions, "once for a digest")
	require.Len(t, nacks, 2)
	for i, sequence := range []uint64{2, 4} {
		require.Equal(t, old.Name, nacks[i].GetKey().GetName())
		require.Equal(t, sequence, nacks[i].GetSequence())
		require.Equal(t, i == 1, nacks[i].GetResolved())
	}
	require.Contains(t, nacks[0].GetReason(), "address_type: unknown value 99")
	require.Len(t, resyncs, 2, "the shard once for its digest, and the object once for its changes")
	require.Empty(t, resyncs[0].GetKeys())
	require.Len(t, resyncs[1].GetKeys(), 1)
	require.EqualValues(t, 1, a.metric(t, "nacks_total"))
}

// maxReason is the length of the longest reason of a Nack, in bytes.
const maxReason = 1024

func TestReportsReachTheServer(t *testing.T) {
	id := newIdentity(t)
	ready := make(chan struct{})
	server := &scripted{}
	server.play = func(g pb.DistributionService_StreamServer) error {
		if err := says(welcome(&pb.Welcome{Epoch: 5, ShardCount: 2}))(g); err != nil {
			return err
		}
		<-ready
		return says(inSync(3, 4))(g)
	}
	i := serve(t, id, server, fanout.ServerOption())
	p := proxytest.New(t, i.address)
	cache := NewCache()
	a := connect(t, id, cache, nil, p.Address())
	require.Eventually(t, func() bool { return cache.Epoch() == 5 }, patience, tick)
	// Three acks become one. An ack of another epoch has no effect. A nack has its Service's shard
	// and is sent once.
	a.Ack(4, map[uint32]uint64{0: 99, 1: 99})
	a.Ack(5, map[uint32]uint64{1: 4})
	a.AckSince(5, map[uint32]uint64{0: 2}, time.Now().Add(-2*time.Minute), "")
	a.AckSince(5, map[uint32]uint64{0: 3}, time.Now().Add(-time.Minute), "")
	nacked, fixed := model.ServiceKey{Namespace: "default", Name: "web"}, model.ServiceKey{Namespace: "default", Name: "fixed"}
	a.Nack(fixed, "never told")
	a.Resolve(fixed)
	a.Resolve(fixed)
	a.Nack(nacked, "no room\xff"+strings.Repeat(".", 2*maxReason))
	_, requests := server.seen()
	require.Empty(t, requests, "not in sync yet")
	close(ready)

	requests = server.waitRequests(t, 2)
	nack := &pb.Nack{
		Shard: nacked.Shard(2), Sequence: uint64(3 + nacked.Shard(2)), Reason: "no room" + strings.Repeat(".", maxReason-8),
		Key: &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: "default", Name: "web"},
	}
	require.Empty(t, cmp.Diff(nack, requests[0].GetNack(), protocmp.Transform()))
	positions, ages := map[uint32]uint64{}, map[uint32]uint32{}
	for _, p := range requests[1].GetAck().GetPositions() {
		positions[p.GetShard()], ages[p.GetShard()] = p.GetSequence(), p.GetAgeMs()
	}
	require.Equal(t, map[uint32]uint64{0: 3, 1: 4}, positions)
	require.InDelta(t, 60_000, ages[0], 50_000)
	require.Less(t, ages[1], uint32(50_000))
	require.EqualValues(t, 1, a.metric(t, "connected"))

	// Repeating the nack has no effect. Another server must receive it.
	a.Nack(nacked, nack.GetReason())
	p.Cut()
	requests = server.waitRequests(t, 3)
	require.Empty(t, cmp.Diff(nack, requests[2].GetNack(), protocmp.Transform()))
	a.Resolve(nacked)
	requests = server.waitRequests(t, 4)
	require.True(t, requests[3].GetNack().GetResolved())
	require.True(t, a.Report(&pb.Nack{NodeName: "node-7", Reason: nack.GetReason(), Key: nack.GetKey()}))
	requests = server.waitRequests(t, 5)
	nack.NodeName = "node-7"
	require.Empty(t, cmp.Diff(nack, requests[4].GetNack(), protocmp.Transform()))
	a.SetNodes(7)
	requests = server.waitRequests(t, 6)
	require.True(t, proto.Equal(&pb.Ack{Nodes: 7}, requests[5].GetAck()))

	a.NackNode("nothing of IPv4 is programmed")
	a.NackNode("nothing of IPv4 is programmed")
	requests = server.waitRequests(t, 7)
	key := &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_NODE, Name: "node-1"}
	require.Empty(t, cmp.Diff(key, requests[6].GetNack().GetKey(), protocmp.Transform()))
	require.Equal(t, "nothing of IPv4 is programmed", requests[6].GetNack().GetReason())
	a.ResolveNode()
	requests = server.waitRequests(t, 8)
	require.Empty(t, cmp.Diff(key, requests[7].GetNack().GetKey(), protocmp.Transform()))
	require.True(t, requests[7].GetNack().GetResolved())

	// A warning is not the node's failure: each is reported and withdrawn by itself.
	warning := &pb.Nack{Key: key, Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, Reason: "kube-proxy runs"}
	position := cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == `["shard"]` || p.Last().String() == `["sequence"]` },
		cmp.Ignore())
	a.Warn(warning.GetWarning(), warning.GetReason())
	a.Warn(warning.GetWarning(), warning.GetReason())
	requests = server.waitRequests(t, 9)
	require.Empty(t, cmp.Diff(warning, requests[8].GetNack(), protocmp.Transform(), position))
	a.NackNode("nothing of IPv4 is programmed")
	requests = server.waitRequests(t, 10)
	require.Zero(t, requests[9].GetNack().GetWarning())
	a.Warn(warning.GetWarning(), "")
	requests = server.waitRequests(t, 11)
	warning.Resolved, warning.Reason = true, ""
	require.Empty(t, cmp.Diff(warning, requests[10].GetNack(), protocmp.Transform(), position))
}

// TestNoServer checks that a client without servers waits, tries again, and stops when its context
// ends.
func TestNoServer(t *testing.T) {
	id := newIdentity(t)
	asked := make(chan struct{}, 100)
	cache := NewCache()
	times := discovery.DefaultTimes
	times.MinBackoff, times.MaxBackoff = tick, tick
	c := newClient(Options{
		Logger: slog.New(slog.DiscardHandler),
		Servers: func(context.Context) ([]Server, error) {
			select {
			case asked <- struct{}{}:
			default:
			}
			return nil, errors.New("no such host")
		},
		DialOptions: id.client, Cache: cache,
	}, times)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	for range 3 {
		<-asked
	}
	cancel()
	require.NoError(t, <-done)
	_, ok := cache.Take()
	require.False(t, ok)
}
