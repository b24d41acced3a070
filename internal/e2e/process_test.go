package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

const (
	// startTimeout is for a command that starts on a busy machine; one that has nothing to wait for takes a second.
	startTimeout = 30 * time.Second
	stopTimeout  = 15 * time.Second
)

// process is one of our commands, which can be started, killed and started again.
type process struct {
	t       *testing.T
	name    string
	host    *testenv.Host
	path    string
	args    []string
	logPath string
	// health is where it serves /readyz, as the host sees it.
	health string

	cmd *testenv.Cmd
	// begin is the size of the log when it was started last.
	begin int
	// ended is closed after the process has ended, which set err.
	ended chan struct{}
	err   error
}

func newProcess(t *testing.T, host *testenv.Host, command, name, health string, args []string) *process {
	t.Helper()
	p := &process{
		t: t, name: name, host: host, path: filepath.Join(binaries, command), health: health,
		args:    append([]string{"--healthz-bind-address=" + health, "--log-level=debug"}, args...),
		logPath: filepath.Join(t.TempDir(), "log"),
	}
	t.Cleanup(func() {
		if p.running() {
			p.Terminate()
		}
		if strings.Contains(p.Log(), "DATA RACE") {
			t.Errorf("%s has a data race", name)
		}
		if t.Failed() {
			t.Logf("---- the end of the log of %s:\n%s", name, tail(p.Log(), 100))
		}
	})
	return p
}

// Start starts the process and returns while it may not be ready yet.
func (p *process) Start() {
	p.t.Helper()
	require.False(p.t, p.running(), "%s runs already", p.name)
	begin := len(p.Log())
	log, err := os.OpenFile(p.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(p.t, err)
	defer log.Close()
	// It ends when this test says so, not when the test's context does.
	cmd := p.host.Command(context.Background(), p.path, p.args...)
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(p.t, cmd.Start())
	ended := make(chan struct{})
	p.cmd, p.ended, p.begin = cmd, ended, begin
	go func() {
		p.err = cmd.Wait()
		close(ended)
	}()
}

// AwaitReady waits until /readyz says so.
func (p *process) AwaitReady() {
	p.t.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: p.host.DialContext, DisableKeepAlives: true}}
	testenv.Eventually(p.t, startTimeout, func() error {
		require.True(p.t, p.running(), "%s has ended: %v", p.name, p.err)
		request, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "http://"+p.health+"/readyz", nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err == nil && response.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s is not ready: %s", p.name, body)
		}
		return err
	})
}

func (p *process) running() bool {
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

// Kill ends the process as a crash would.
func (p *process) Kill() {
	p.t.Helper()
	p.end(syscall.SIGKILL)
}

// Terminate ends the process as an update would, and requires that it calls that a success.
func (p *process) Terminate() {
	p.t.Helper()
	p.end(syscall.SIGTERM)
	require.NoError(p.t, p.err, "%s ends", p.name)
}

func (p *process) end(signal syscall.Signal) {
	p.t.Helper()
	require.True(p.t, p.running(), "%s has ended: %v", p.name, p.err)
	require.NoError(p.t, p.cmd.Process.Signal(signal))
	select {
	case <-p.ended:
	case <-time.After(stopTimeout):
		require.NoError(p.t, p.cmd.Process.Kill())
		<-p.ended
		require.Fail(p.t, "does not end", "%s still ran %s after %s", p.name, stopTimeout, signal)
	}
}

// Log is what it has logged, in all its lives.
func (p *process) Log() string {
	p.t.Helper()
	log, err := os.ReadFile(p.logPath)
	if os.IsNotExist(err) {
		return ""
	}
	require.NoError(p.t, err)
	return string(log)
}

// AwaitLine waits until it has logged the text since it was started last.
func (p *process) AwaitLine(text string) {
	p.t.Helper()
	testenv.Eventually(p.t, startTimeout, func() error {
		if !strings.Contains(p.Log()[p.begin:], text) {
			return fmt.Errorf("%s has not logged %q", p.name, text)
		}
		return nil
	})
}

func tail(text string, lines int) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
