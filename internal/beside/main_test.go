// Package beside tests that Slicecast serves chosen Services on nodes where a real kube-proxy
// serves all others. Both program the same kernel, and neither changes the rules of the other.
package beside

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	agent "github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// agentVariable is the name of an environment variable that makes the test binary run as
// slicecast-agent.
const agentVariable = "SLICECAST_TEST_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(agentVariable) != "" {
		runAgent()
	}
	testenv.Main(m, controlplane.Prepare, func() error {
		_, err := controlplane.KubernetesBinary(context.Background(), "kube-proxy")
		return err
	})
}

func runAgent() {
	ctx, stop := daemon.SignalContext(context.Background())
	err := agent.NewCommand().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// start starts a command on a node. It runs until the end of the test.
func start(t *testing.T, host *testenv.Host, name string, env []string, path string, args ...string) *command.Command {
	t.Helper()
	c := command.New(t, host, name)
	require.NoError(t, c.Start(env, path, args...))
	return c
}
