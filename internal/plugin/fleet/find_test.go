// This test proves which Pod is a node's agent if there are several, such as during a rollout.
package fleet

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAgentOn(t *testing.T) {
	old, first, second := &Agent{Node: "a", Missing: "the Pod is Failed"}, &Agent{Node: "a"}, &Agent{Node: "a"}
	agents := []*Agent{{Node: "b"}, old, first, second}
	got, err := AgentOn(agents, "a")
	require.NoError(t, err)
	require.Same(t, first, got)
	got, err = AgentOn(agents[:2], "a")
	require.ErrorContains(t, err, "does not run: the Pod is Failed")
	require.Same(t, old, got)
	got, err = AgentOn(agents, "c")
	require.ErrorContains(t, err, "no Pod of an agent is on the node")
	require.Nil(t, got)
}
