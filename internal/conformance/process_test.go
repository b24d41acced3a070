package conformance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

// stopTimeout is how long a command may take to end.
const stopTimeout = 15 * time.Second

// process is a command on a host, which can be stopped and started again, also with other arguments.
type process struct {
	name    string
	host    *testenv.Host
	logPath string

	cmd *testenv.Cmd
	// ended is closed after the process has ended.
	ended chan struct{}
}

// newProcess makes a process that has not started, and has t stop it.
func newProcess(t *testing.T, host *testenv.Host, name string) *process {
	t.Helper()
	p := &process{name: name, host: host, logPath: filepath.Join(t.TempDir(), "log")}
	t.Cleanup(func() {
		require.NoError(t, p.Stop())
		if t.Failed() {
			t.Logf("---- the end of the log of %s:\n%s", name, p.LogTail())
		}
	})
	return p
}

// Start starts the command, with settings of its environment besides the test's own.
func (p *process) Start(env []string, path string, args ...string) error {
	if p.Running() {
		return fmt.Errorf("%s runs already", p.name)
	}
	log, err := os.OpenFile(p.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	// It ends when the test says so, not when a test's context does.
	cmd := p.host.Command(context.Background(), path, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	ended := make(chan struct{})
	p.cmd, p.ended = cmd, ended
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(ended)
	}()
	return nil
}

// Running tells whether it has been started and has not ended.
func (p *process) Running() bool {
	if p.cmd == nil {
		return false
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Check returns an error, with the end of the log, if it does not run.
func (p *process) Check() error {
	if !p.Running() {
		return fmt.Errorf("%s has ended; the end of its log:\n%s", p.name, p.LogTail())
	}
	return nil
}

// Stop ends the process as an update would. It does nothing if the process does not run.
func (p *process) Stop() error {
	if !p.Running() {
		return nil
	}
	// The process may end at this moment.
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
		return nil
	case <-time.After(stopTimeout):
		_ = p.cmd.Process.Kill()
		<-p.ended
		return fmt.Errorf("%s still ran %s after SIGTERM", p.name, stopTimeout)
	}
}

// LogTail is the end of what it has logged, in all its lives.
func (p *process) LogTail() string {
	log, err := os.ReadFile(p.logPath)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	return strings.Join(lines[max(0, len(lines)-60):], "\n")
}
