package client

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// scripted is a server that does what a test says, and keeps what it is told.
type scripted struct {
	pb.UnimplementedDistributionServiceServer
	// play sends, after the Hello; the stream goes on until the client leaves, or ends with play's error.
	play func(g pb.DistributionService_StreamServer) error

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
		s.mu.Lock()
		if first {
			s.hellos = append(s.hellos, r.GetHello())
		} else {
			s.requests = append(s.requests, r)
		}
		s.mu.Unlock()
		if !first {
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

// says makes a script that sends these messages; a wire.Frame goes out as it is.
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

// Whatever a server says: what makes no sense changes nothing, the client tries again, and finds the good server.
func TestServerThatLies(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 20)
	key := web(func(*model.Slice) {}).ServiceKey()
	right := key.Shard(s.Shards())
	wrong := (right + 1) % s.Shards()
	hello := welcome(&pb.Welcome{Epoch: s.Epoch(), ShardCount: s.Shards()})
	object := wire.UpdateToProto(&model.Update{Slices: []*model.Slice{web(unready(1))}}).GetSlices()
	removed := []*pb.ObjectKey{wire.KeyToProto(web(func(*model.Slice) {}).Key())}

	for name, script := range map[string][]any{
		"garbage":                   {hello, wire.Frame("\xff\xff\xff")},
		"garbage at once":           {wire.Frame("GET / HTTP/1.1")},
		"three shards":              {welcome(&pb.Welcome{Epoch: 1, ShardCount: 3})},
		"no shards":                 {welcome(&pb.Welcome{Epoch: 1})},
		"a million shards":          {welcome(&pb.Welcome{Epoch: 1, ShardCount: 1 << 20})},
		"no epoch":                  {welcome(&pb.Welcome{ShardCount: 8})},
		"an update before welcome":  {update(&pb.ShardUpdate{Shard: right, Full: true})},
		"in sync before welcome":    {inSync(make([]uint64, 8)...)},
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
			p := newProxy(t, good.address)
			cache := NewCache()
			a := connect(t, id, cache, nil, p.address())
			a.waitInSync(t, 1)
			_, before := cache.Digests()

			p.target.Store(&bad.address)
			p.cut()
			require.Eventually(t, func() bool { hellos, _ := liar.seen(); return len(hellos) >= 2 }, patience, tick)
			_, now := cache.Digests()
			require.Equal(t, before, now)
			hellos, _ := liar.seen()
			require.Equal(t, "node-1", hellos[0].GetNodeName())
			require.Equal(t, before, hellos[0].GetDigests())
			require.Equal(t, s.Epoch(), hellos[0].GetEpoch())

			p.target.Store(&good.address)
			p.cut()
			a.waitInSync(t, 2)
			waitHolds(t, cache, s)
			require.GreaterOrEqual(t, testutil.ToFloat64(a.metrics.disconnects), 2.0)
		})
	}
}

// An object that does not decode stays as it was, also when it is in a whole shard, and the server hears of it.
func TestObjectThatDoesNotDecode(t *testing.T) {
	id := newIdentity(t)
	old := web(func(*model.Slice) {})
	whole := wire.UpdateToProto(&model.Update{To: 1, Full: true, Slices: []*model.Slice{old, named("other", "web", 3)}})
	broken := proto.CloneOf(whole)
	broken.Sequence = 2
	broken.Slices[0].AddressType = 99
	broken.Slices[1] = wire.UpdateToProto(&model.Update{Slices: []*model.Slice{named("other", "web", 4)}}).GetSlices()[0]
	beat := &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{Sequences: []uint64{2}, Digests: []uint64{7}}}}
	server := &scripted{play: says(welcome(&pb.Welcome{Epoch: 5, ShardCount: 1}), update(whole), update(broken), inSync(2), beat, beat)}
	cache := NewCache()
	connect(t, id, cache, nil, serve(t, id, server, fanout.ServerOption()).address)

	require.Eventually(t, func() bool { _, requests := server.seen(); return len(requests) >= 2 }, patience, tick)
	require.True(t, cacheHas(cache, old))
	require.True(t, cacheHas(cache, named("other", "web", 4)))
	_, requests := server.seen()
	require.Len(t, requests, 2, "the digest can't agree: the shard is asked for once, not with every heartbeat")
	nack := requests[0].GetNack()
	require.Equal(t, old.Name, nack.GetKey().GetName())
	require.EqualValues(t, 2, nack.GetSequence())
	require.Contains(t, nack.GetReason(), "address_type: unknown value 99")
	require.Empty(t, requests[1].GetResync().GetKeys())
}

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
	cache := NewCache()
	a := connect(t, id, cache, nil, serve(t, id, server, fanout.ServerOption()).address)
	require.Eventually(t, func() bool { return cache.currentEpoch() == 5 }, patience, tick)
	// Two acks become one; one of another epoch means nothing here; a nack is for its Service's shard.
	a.Ack(4, map[uint32]uint64{0: 99, 1: 99})
	a.Ack(5, map[uint32]uint64{0: 2, 1: 4})
	a.Ack(5, map[uint32]uint64{0: 3})
	service := model.ServiceKey{Namespace: "default", Name: "web"}
	a.Nack(service, "no room")
	_, requests := server.seen()
	require.Empty(t, requests, "not in sync yet")
	close(ready)

	require.Eventually(t, func() bool { _, requests := server.seen(); return len(requests) == 2 }, patience, tick)
	_, requests = server.seen()
	require.True(t, proto.Equal(&pb.Nack{
		Shard: service.Shard(2), Sequence: requests[0].GetNack().GetSequence(), Reason: "no room",
		Key: &pb.ObjectKey{Kind: pb.ObjectKind_OBJECT_KIND_SERVICE, Namespace: "default", Name: "web"},
	}, requests[0].GetNack()))
	positions := map[uint32]uint64{}
	for _, p := range requests[1].GetAck().GetPositions() {
		positions[p.GetShard()] = p.GetSequence()
	}
	require.Equal(t, map[uint32]uint64{0: 3, 1: 4}, positions)
	require.EqualValues(t, 1, testutil.ToFloat64(a.metrics.connected))
}

// Without a server there is nothing to do but to wait and try again, and to end when told.
func TestNoServer(t *testing.T) {
	id := newIdentity(t)
	asked := make(chan struct{}, 100)
	cache := NewCache()
	c := New(Options{
		Logger: slog.New(slog.DiscardHandler),
		Servers: func(context.Context) ([]string, error) {
			select {
			case asked <- struct{}{}:
			default:
			}
			return nil, errors.New("no such host")
		},
		DialOptions: id.client, Cache: cache,
	})
	c.minBackoff, c.maxBackoff = tick, tick
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
