package e2e

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
)

// startTimeout is for a command that starts on a busy machine; one that has nothing to wait for takes a second.
const startTimeout = 30 * time.Second

// process is one of our commands, with its arguments.
type process struct {
	*command.Command

	t    *testing.T
	path string
	args []string
	// health is where it serves /readyz, as the host sees it.
	health string
}

func newProcess(t *testing.T, host *testenv.Host, binary, name, health string, args []string) *process {
	t.Helper()
	return &process{
		Command: command.New(t, host, name), t: t, path: filepath.Join(binaries, binary), health: health,
		args: append([]string{"--healthz-bind-address=" + health, "--log-level=debug"}, args...),
	}
}

// Start starts the process and returns while it may not be ready yet.
func (p *process) Start() {
	p.t.Helper()
	require.NoError(p.t, p.Command.Start(nil, p.path, p.args...))
}

// AwaitReady waits until /readyz says so.
func (p *process) AwaitReady() {
	p.t.Helper()
	p.AwaitOK(p.t, startTimeout, "http://"+p.health+"/readyz")
}

// Kill ends the process as a crash would.
func (p *process) Kill() {
	p.t.Helper()
	require.NoError(p.t, p.Check())
	require.NoError(p.t, p.Command.Kill())
}

// Terminate ends the process as an update would, and requires that it calls that a success.
func (p *process) Terminate() {
	p.t.Helper()
	require.NoError(p.t, p.Check())
	require.NoError(p.t, p.Stop())
}

// AwaitLine waits until it has logged the text since it was started last.
func (p *process) AwaitLine(text string) {
	p.t.Helper()
	p.Command.AwaitLine(p.t, startTimeout, text)
}
