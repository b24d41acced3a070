// This file runs Slicecast's commands as processes that a test kills, terminates and starts again.
package e2e

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
)

// startTimeout bounds the start of a command on a busy machine. A command that waits for nothing
// starts within a second.
const startTimeout = 30 * time.Second

// process is one of Slicecast's commands with its arguments.
type process struct {
	*command.Command

	t    *testing.T
	path string
	args []string
	// health is the address of /readyz, as seen from the host.
	health string
}

func newProcess(t *testing.T, host *testenv.Host, binary, name, health string, args []string) *process {
	t.Helper()
	return &process{
		Command: command.New(t, host, name), t: t, path: filepath.Join(binaries, binary), health: health,
		args: append([]string{"--healthz-bind-address=" + health, "--log-level=debug"}, args...),
	}
}

// Start starts the process. It does not wait until the process is ready.
func (p *process) Start() {
	p.t.Helper()
	require.NoError(p.t, p.Command.Start(nil, p.path, p.args...))
}

// AwaitReady waits until the process is ready.
func (p *process) AwaitReady() {
	p.t.Helper()
	p.AwaitOK(p.t, startTimeout, "http://"+p.health+"/readyz")
}

// Kill ends the process like a crash.
func (p *process) Kill() {
	p.t.Helper()
	require.NoError(p.t, p.Check())
	require.NoError(p.t, p.Command.Kill())
}

// Terminate ends the process like an update, and requires that it ends successfully.
func (p *process) Terminate() {
	p.t.Helper()
	require.NoError(p.t, p.Check())
	require.NoError(p.t, p.Stop())
}

// AwaitLine waits until the process has logged text since its last start.
func (p *process) AwaitLine(text string) {
	p.t.Helper()
	p.Command.AwaitLine(p.t, startTimeout, text)
}
