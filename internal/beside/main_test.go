// Package beside tests that Slicecast serves chosen Services on nodes where a real kube-proxy serves all others: both program
// the same kernel, and neither touches what is the other's.
package beside

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agent "github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// agentVariable has the test binary be slicecast-agent.
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

// process is a command on a node, that runs until the end of the test.
type process struct {
	t    *testing.T
	cmd  *testenv.Cmd
	done chan struct{} // closed at its end
}

func start(t *testing.T, host *testenv.Host, name string, env []string, path string, args ...string) *process {
	t.Helper()
	file := filepath.Join(t.TempDir(), "log")
	log, err := os.Create(file)
	require.NoError(t, err)
	defer log.Close()
	p := &process{t: t, cmd: host.Command(context.Background(), path, args...), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // how it ended is in its log
	}()
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			content, _ := os.ReadFile(file) // a log that can't be read is no further failure
			lines := strings.Split(string(content), "\n")
			t.Logf("---- the end of the log of %s:\n%s", name, strings.Join(lines[max(0, len(lines)-40):], "\n"))
		}
	})
	return p
}

// stop ends the process as an update does. It may have ended.
func (p *process) stop() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		require.NoError(p.t, err)
	}
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
		p.t.Errorf("it does not end: %s", p.cmd)
	}
}
