// This test proves that a server that stops hands its agents to another one, and that the move
// costs them only a few bytes.
package fabric

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/server/app"
)

// farewell bounds the bytes at the end of a stream: the last acknowledgements, Drain, the status,
// and the end of TLS.
const farewell = 512

// TestDrain checks that a server that stops sends its agents to another one, which has nothing to
// send them.
func TestDrain(t *testing.T) {
	c := newLargeCluster(t)
	gentle := func(c *app.Config) { c.DrainWindow, c.GracePeriod = 200*time.Millisecond, patience }
	first := serve(t, &watch{cluster: c}, quietServer, gentle)
	second := serve(t, &watch{cluster: c}, quietServer)
	agents := make(map[string]*agent)
	for _, node := range nodes {
		agents[node] = follow(t, agentOptions{node: node, servers: []string{first.address(), second.address()}, count: true})
	}
	for _, a := range agents {
		a.waitEquals(t, c)
	}
	starts := func(s *server, kind string) int {
		return int(s.metric(t, "slicecast_server_stream_starts_total", kind))
	}
	moved := starts(first, "cold")
	require.Equal(t, len(agents), moved+starts(second, "cold"))
	for _, a := range agents {
		a.traffic.reset()
	}

	first.stop()
	require.Eventually(t, func() bool { return int(second.metric(t, "slicecast_server_nodes")) == len(agents) }, patience, tick)
	require.Equal(t, moved, starts(second, "resume"))
	require.Equal(t, len(agents)-moved, starts(second, "cold"))
	for node, a := range agents {
		a.waitEquals(t, c)
		require.LessOrEqual(t, a.traffic.bytes(), int64(resumeCost+farewell), node)
	}
	require.NotContains(t, first.logs.String(), "cut off")
}
