// This test proves that cleanup, verify and explain take no other command for the node's agent.
package app

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestIsAgent checks each command of the program, so that one that is added later is not taken for
// an agent either.
func TestIsAgent(t *testing.T) {
	for _, c := range NewCommand().Commands() {
		require.False(t, isAgent([]string{c.Name()}, false), c.Name())
		require.False(t, isAgent([]string{"--v=2", c.Name(), "ns/name", "--objects=-", "--", "--node-name=n"}, false), c.Name())
	}
	for line, want := range map[string]struct{ agent, programs bool }{
		"":                                   {true, true},
		"--node-name=verify --servers=a:1":   {true, true},
		"--node-name status --servers a:1":   {true, true},
		"--config=/etc/slicecast/agent.yaml": {true, true},
		"--flag-of-another-version=x":        {true, true},
		"--init-only --config=agent.yaml":    {false, false},
		"--migrate-config=kube-proxy.yaml":   {false, false},
		"--programmer=shadow":                {true, false},
		"--programmer printer":               {true, false},
		"--programmer=iptables":              {true, true},
		"probe wait":                         {false, false},
		"--help":                             {false, false},
	} {
		require.Equal(t, want.agent, isAgent(strings.Fields(line), false), line)
		require.Equal(t, want.programs, isAgent(strings.Fields(line), true), line)
	}
}
