// This test proves that a relay counts as behind until all shards of a publish have arrived. A
// scripted server feeds a real relay.
package relay_test

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// speaker is a server whose streams send what the test passes to it.
type speaker struct {
	pb.UnimplementedDistributionServiceServer
	says chan *pb.StreamResponse
}

func (s *speaker) Stream(g pb.DistributionService_StreamServer) error {
	for {
		select {
		case r := <-s.says:
			if err := g.Send(r); err != nil {
				return err
			}
		case <-g.Context().Done():
			return g.Context().Err()
		}
	}
}

func (s *speaker) serve(t *testing.T) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	pb.RegisterDistributionServiceServer(server, s)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-served)
	})
	return l.Addr().String()
}

// TestARelayIsBehindUntilAllShardsHaveCome checks that a relay is behind an agent that has seen a
// whole publish while the relay has only one shard of it. That holds whatever resource versions
// that shard's update has.
func TestARelayIsBehindUntilAllShardsHaveCome(t *testing.T) {
	const shards = 64
	slice := func(service string, endpoints int) *model.Slice {
		s := modeltest.WebSlice(endpoints)
		s.Name, s.Service = service, service
		return model.NewSlice(s)
	}
	shardOf := func(service string) uint32 { return slice(service, 1).ServiceKey().Shard(shards) }
	require.NotEqual(t, shardOf("a"), shardOf("b"))
	root := &speaker{says: make(chan *pb.StreamResponse)}
	update := func(service string, endpoints int, to, version uint64) {
		root.says <- &pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: wire.UpdateToProto(&model.Update{
			Shard: shardOf(service), Full: true, To: to, Slices: []*model.Slice{slice(service, endpoints)},
			ResourceVersions: model.ResourceVersions{Slices: version},
		})}}
	}
	reached := func(version uint64) {
		root.says <- &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{
			ResourceVersions: &pb.ResourceVersions{Slices: version},
		}}}
	}
	relay := serve(t, "127.0.0.1:0", nil, root.serve(t))
	root.says <- &pb.StreamResponse{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{Epoch: 7, ShardCount: shards, Path: []uint64{7}}}}
	update("a", 1, 1, 10)
	update("b", 1, 1, 10)
	reached(10)
	root.says <- &pb.StreamResponse{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: make([]uint64, shards)}}}
	published := func(updates float64) {
		t.Helper()
		require.Eventually(t, func() bool { return relay.metric("slicecast_server_updates_total") == updates }, patience, time.Millisecond)
	}
	published(2)
	update("a", 2, 2, 20)
	published(3)
	hello := &pb.Hello{
		NodeName: "node-1", Kind: pb.ClientKind_CLIENT_KIND_AGENT, Epoch: 8, ResourceVersions: &pb.ResourceVersions{Slices: 20},
		Sequences: make([]uint64, shards),
	}
	held := make([]model.Digest, shards)
	for _, name := range []string{"a", "b"} {
		held[shardOf(name)] = modeltest.ShardDigest(slice(name, 2))
	}
	digest := model.StateDigest(held)
	hello.Digest = digest[:]
	conn, err := grpc.NewClient(relay.address, plaintext...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	agent, err := pb.NewDistributionServiceClient(conn).Stream(t.Context())
	require.NoError(t, err)
	require.NoError(t, agent.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: hello}}))
	require.Eventually(t, func() bool { return relay.metric("slicecast_server_stream_starts_total") == 1 }, patience, time.Millisecond)

	update("b", 2, 2, 20)
	reached(20)
	for {
		r, err := agent.Recv()
		require.NoError(t, err)
		require.Nil(t, r.GetShardUpdate(), "it had all of it")
		if r.GetInSync() != nil {
			break
		}
	}
}
