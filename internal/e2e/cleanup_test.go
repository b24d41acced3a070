// This test proves that the cleanup command removes everything that an agent has put into the
// kernel, and nothing that other programs have.
package e2e

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCleanup(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 2)
	web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort())))
	c.Service("empty", withoutSelector(tcp("tcp", 81, onPodPort())))
	c.RequireAnswers(web, 80, pods...)

	for _, n := range c.nodes() {
		// The cleanup must not remove rules of other programs.
		_, err := n.Run(t.Context(), "iptables-"+n.variant, "-t", "nat", "-A", "PREROUTING", "-j", "ACCEPT")
		require.NoError(t, err)
		before := n.Saved(t)
		_, err = n.Run(t.Context(), filepath.Join(binaries, agentCommand), "cleanup")
		require.ErrorContains(t, err, "an agent runs on this node")
		require.Equal(t, before, n.Saved(t))
		n.agent.Terminate()
		require.Greater(t, len(n.Saved(t)), 20, "the agent removed its rules when it ended")

		_, err = n.Run(t.Context(), filepath.Join(binaries, agentCommand), "cleanup")
		require.NoError(t, err)
		for _, variant := range []string{"nft", "legacy"} {
			rules, err := n.saved(t.Context(), variant)
			require.NoError(t, err)
			if variant == n.variant {
				require.Equal(t, []string{"iptables -A PREROUTING -j ACCEPT"}, rules)
			} else {
				require.Empty(t, rules)
			}
		}
		// A second cleanup finds nothing to remove.
		_, err = n.Run(t.Context(), filepath.Join(binaries, agentCommand), "cleanup")
		require.NoError(t, err)
	}

	for _, n := range c.nodes() {
		n.agent.Start()
		n.agent.AwaitReady()
	}
	c.RequireAnswers(web, 80, pods...)
}
