// These tests prove that clients without any state are served in turns, while clients with state
// are served at once. Nodes that break the rules of a cold start do not keep others from getting in
// sync.
package fabric

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"

	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/generate"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/app"
)

// greedy is a client that requests everything and accepts nothing.
type greedy struct {
	stream pb.DistributionService_StreamClient
	cancel context.CancelFunc
}

func newGreedy(t *testing.T, s *server, node string) *greedy {
	t.Helper()
	conn, err := grpc.NewClient(s.address(), append((&traffic{}).dialOptions(node), grpc.WithStaticStreamWindowSize(slowWindow))...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	stream, err := pb.NewDistributionServiceClient(conn).Stream(ctx)
	require.NoError(t, err)
	require.NoError(t, stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{
		Hello: &pb.Hello{NodeName: node, Kind: pb.ClientKind_CLIENT_KIND_AGENT},
	}}))
	return &greedy{stream, cancel}
}

// TestOverload checks that clients without any state wait for each other, and are told to come back
// if that takes too long. Clients with state are served meanwhile.
func TestOverload(t *testing.T) {
	t.Parallel()
	c := newLargeCluster(t)
	// One at a time.
	s := serve(t, &watch{cluster: c}, quietServer, func(c *app.Config) { c.MaxColdSyncBytes = 1 })
	waiting := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool {
			return s.metric(t, "slicecast_server_admission_waiting_streams") == float64(n) &&
				s.metric(t, "slicecast_server_stream_starts_total", "cold") > float64(n)
		}, patience, tick)
	}
	r := newResumer(t, c, s.address())
	first := newGreedy(t, s, nodes[1])
	require.Eventually(t, func() bool { return s.metric(t, "slicecast_server_streams") == 2 }, patience, tick)
	waiting(0)
	second := newGreedy(t, s, nodes[2])
	waiting(1)
	third := newGreedy(t, s, nodes[3])
	waiting(2)

	r.leave()
	c.flip(c.some(3))
	r.backTo("while others wait", s, false)
	waiting(2)
	require.Zero(t, s.metric(t, "slicecast_server_stream_starts_total", "refused"))

	// A client that does not accept what it requested loses its turn. So each of them gets a turn,
	// and none is refused.
	require.True(t, eventually(func() bool { return s.metric(t, "slicecast_server_admission_stalled_turns_total") == 3 }))
	require.Zero(t, s.metric(t, "slicecast_server_stream_starts_total", "refused"))

	first.cancel()
	second.cancel()
	third.cancel()
	late := follow(t, agentOptions{node: nodes[3], servers: []string{s.address()}})
	late.waitEquals(t, c)
}

// hostile runs a node's client that repeatedly breaks the rules of a cold start, until the test
// ends.
func hostile(t *testing.T, s *server, node string, protocol string, attack func(stream pb.DistributionService_StreamClient, shards int)) {
	t.Helper()
	config := &tls.Config{
		RootCAs: identities.ca.Pool(), Certificates: []tls.Certificate{identities.client(node)}, MinVersion: tls.VersionTLS13,
		NextProtos: []string{protocol},
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() {
		for ctx.Err() == nil {
			conn, err := grpc.NewClient(s.address(), grpc.WithTransportCredentials(credentials.NewTLS(config)), grpc.WithStaticStreamWindowSize(slowWindow))
			if err != nil {
				panic(err) // the options are wrong
			}
			if stream, err := pb.NewDistributionServiceClient(conn).Stream(ctx); err == nil {
				hello := &pb.Hello{NodeName: node, Kind: pb.ClientKind_CLIENT_KIND_AGENT, Capabilities: []pb.Capability{pb.Capability_CAPABILITY_BUCKETS}}
				hello.Sequences, hello.Digest = make([]uint64, 64), modeltest.Digests(1)
				_ = stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: hello}})
				for {
					r, err := stream.Recv()
					if err != nil {
						break
					}
					if r.GetDigestQuery() != nil {
						made := bytes.Repeat(modeltest.Digests(1), store.DefaultShards)
						_ = stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: made}}})
					}
					if q := r.GetBucketQuery(); q != nil {
						attack(stream, len(q.GetShards()))
						<-stream.Context().Done() // it reads nothing more
						break
					}
				}
			}
			_ = conn.Close()
		}
	})
}

// TestHostileNodesDoNotHoldUpColdStarts checks, on both transports, two nodes that request more
// than they may, or do not accept what they request. All other nodes get in sync as without them,
// and none is refused.
func TestHostileNodesDoNotHoldUpColdStarts(t *testing.T) {
	// This is several times the window of a client that does not read, and little work for clients
	// that do.
	g, err := generate.New(generate.Config{Nodes: 10, Services: []generate.Group{{Count: 200, Least: 20, Most: 20}}, Change: generate.Flip})
	require.NoError(t, err)
	var objects []model.Keyed
	for _, o := range g.Objects() {
		objects = append(objects, o)
	}
	digests := bytes.Repeat(modeltest.Digests(7), model.Buckets) // all buckets differ
	answer := func(stream pb.DistributionService_StreamClient, shard int) {
		_ = stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: &pb.Resync{Shard: uint32(shard), BucketDigests: digests}}})
	}
	for name, attack := range map[string]func(pb.DistributionService_StreamClient, int){
		"": nil,
		"more than one answer": func(s pb.DistributionService_StreamClient, shards int) {
			for range 300 {
				answer(s, 0)
			}
			for shard := range shards {
				answer(s, shard)
			}
		},
		"answers that it does not take": func(s pb.DistributionService_StreamClient, shards int) {
			for shard := range shards {
				answer(s, shard)
			}
		},
	} {
		for _, protocol := range []string{wire.Protocol, "h2"} {
			t.Run(name+" "+protocol, func(t *testing.T) {
				c := newCluster(objects...)
				s := serve(t, &watch{cluster: c}, quietServer, func(c *app.Config) { c.MaxColdSyncBytes = 64 << 10 })
				ready(t, c, s.address(), s.acks(t))
				if attack != nil {
					for n := range 2 {
						hostile(t, s, fmt.Sprint("hostile-", n), protocol, attack)
					}
					require.True(t, eventually(func() bool { return s.metric(t, "slicecast_server_stream_starts_total", "resume") >= 2 }))
				}
				begin := time.Now()
				var honest []*agent
				for n := range 25 {
					honest = append(honest, follow(t, agentOptions{node: fmt.Sprint("honest-", n), servers: []string{s.address()}}))
				}
				for _, a := range honest {
					require.True(t, eventually(func() bool { return a.inSyncs.Load() > 0 }))
				}
				t.Logf("25 nodes are in sync after %v", time.Since(begin))
				require.Zero(t, s.metric(t, "slicecast_server_stream_starts_total", "refused"))
				require.Equal(t, 26.0, s.metric(t, "slicecast_server_stream_starts_total", "cold"), "each of them at its first attempt")
			})
		}
	}
}
