// This test proves that a relay whose connection broke acks again what all of its nodes have
// programmed, over a real connection that the test cuts.
package relay_test

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/proxytest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestARelayThatIsBackLacksNothing checks that a relay whose connection broke acks again what all
// of its nodes have programmed.
func TestARelayThatIsBackLacksNothing(t *testing.T) {
	c := newCluster()
	root := serve(t, "127.0.0.1:0", c)
	proxy := proxytest.New(t, root.address)
	relay := serve(t, "127.0.0.1:0", nil, proxy.Address())
	<-c.ready
	join(t, "node-1", nil, relay.address).ackAll()
	join(t, "node-2", nil, root.address).ackAll()
	conn, err := grpc.NewClient(root.address, plaintext...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	lacking := func() (n int) {
		s, err := pb.NewDebugServiceClient(conn).ListAgents(t.Context(), &pb.ListAgentsRequest{Lacks: &pb.ServiceName{Namespace: "default", Name: "service-3"}})
		require.NoError(t, err)
		for {
			_, err := s.Recv()
			if errors.Is(err, io.EOF) {
				return n
			}
			require.NoError(t, err)
			n++
		}
	}
	awaitNodes := func(n float64) {
		require.Eventually(t, func() bool { return root.metric("slicecast_server_nodes") == n }, patience, time.Millisecond)
	}
	awaitNodes(2)
	require.Eventually(t, func() bool { return lacking() == 0 }, patience, 10*time.Millisecond)
	proxy.Lead(proxytest.Nowhere)
	proxy.Cut()
	awaitNodes(1)
	proxy.Lead(root.address)
	awaitNodes(2)
	require.Eventually(t, func() bool { return lacking() == 0 }, patience, 10*time.Millisecond)
}
