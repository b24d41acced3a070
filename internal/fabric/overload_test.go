package fabric

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/app"
)

// greedy is a client that asks for everything, and does not take it.
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

// end takes what comes, and gives the stream's status.
func (g *greedy) end() *status.Status {
	for {
		if _, err := g.stream.Recv(); err != nil {
			return status.Convert(err)
		}
	}
}

// Clients that hold nothing wait for each other, and are told to come back where that takes too long; those that hold
// something are served meanwhile.
func TestOverload(t *testing.T) {
	t.Parallel()
	c := newLargeCluster(t)
	s := serve(t, &watch{cluster: c}, quietServer, func(c *app.Config) { c.MaxColdSyncBytes = 1 }) // one at a time
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

	// Whoever does not take what it asked for does not hold up the others forever: the second one's turn comes, and as that does
	// no better, the third one waits too long.
	require.True(t, eventually(func() bool { return s.metric(t, "slicecast_server_stream_starts_total", "refused") == 1 }))
	end := third.end()
	require.Equal(t, codes.ResourceExhausted, end.Code(), end.Message())
	require.Len(t, end.Details(), 1)
	hint, ok := end.Details()[0].(*errdetails.RetryInfo)
	require.True(t, ok)
	require.Positive(t, hint.GetRetryDelay().AsDuration())
	require.Contains(t, end.Message(), "try again in")

	first.cancel()
	second.cancel()
	late := follow(t, agentOptions{node: nodes[3], servers: []string{s.address()}})
	late.waitEquals(t, c)
}
