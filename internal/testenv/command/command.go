// Package command runs a program on a host of testenv's for as long as a test says: it can be stopped, killed and started again, also with
// other arguments; its log is kept through all its lives, and shown when the test fails.
package command

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/slicecast/slicecast/internal/testenv"
)

const (
	// stopTimeout is how long a program may take to end.
	stopTimeout = 30 * time.Second
	// requestTimeout is for one request to a program that runs.
	requestTimeout = 5 * time.Second
	// tailLines is how much of the log is shown.
	tailLines = 100
)

// Command is a program on a host.
type Command struct {
	name    string
	host    *testenv.Host
	logPath string

	cmd *testenv.Cmd
	// begin is the size of the log when it was started last.
	begin int
	// ended is closed after the process has ended, which set err.
	ended chan struct{}
	err   error
}

// New gives a program that has not started, and has t stop it at its end. The name is for messages.
func New(t testing.TB, host *testenv.Host, name string) *Command {
	t.Helper()
	c := &Command{name: name, host: host, logPath: filepath.Join(t.TempDir(), "log")}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
		if strings.Contains(c.Log(), "DATA RACE") {
			t.Errorf("%s has a data race", name)
		}
		if t.Failed() {
			t.Logf("---- the end of the log of %s:\n%s", name, c.Tail())
		}
	})
	return c
}

// Start starts it, with settings of its environment besides the test's own. It runs until it is stopped.
func (c *Command) Start(env []string, path string, args ...string) error {
	if c.Running() {
		return fmt.Errorf("%s runs already", c.name)
	}
	begin := len(c.Log())
	log, err := os.OpenFile(c.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := c.host.Command(context.Background(), path, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", c.name, err)
	}
	ended := make(chan struct{})
	c.cmd, c.begin, c.ended = cmd, begin, ended
	go func() {
		c.err = cmd.Wait()
		close(ended)
	}()
	return nil
}

// Name is for messages.
func (c *Command) Name() string { return c.name }

// Pid is that of the process that was started last.
func (c *Command) Pid() int { return c.cmd.Process.Pid }

// Running tells whether it has been started and has not ended.
func (c *Command) Running() bool {
	if c.cmd == nil {
		return false
	}
	select {
	case <-c.ended:
		return false
	default:
		return true
	}
}

// Check gives an error with the end of the log if it does not run.
func (c *Command) Check() error {
	if c.Running() {
		return nil
	}
	return fmt.Errorf("%s has ended; the end of its log:\n%s", c.name, c.Tail())
}

// Wait waits for its end and gives how it ended. It must have been started.
func (c *Command) Wait(timeout time.Duration) error {
	select {
	case <-c.ended:
		return c.err
	case <-time.After(timeout):
		return fmt.Errorf("%s still runs after %v", c.name, timeout)
	}
}

// Stop ends it as an update does, and requires that it ends well. It does nothing if it does not run.
func (c *Command) Stop() error { return c.end(syscall.SIGTERM) }

// Kill ends it as a crash does. It does nothing if it does not run.
func (c *Command) Kill() error { return c.end(syscall.SIGKILL) }

func (c *Command) end(signal syscall.Signal) error {
	if !c.Running() {
		return nil
	}
	if err := c.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end %s: %w", c.name, err)
	}
	select {
	case <-c.ended:
	case <-time.After(stopTimeout):
		_ = c.cmd.Process.Kill() // it may end at this moment
		<-c.ended
		return fmt.Errorf("%s still ran %v after %v", c.name, stopTimeout, signal)
	}
	if c.err != nil && signal != syscall.SIGKILL && c.cmd.ProcessState.ExitCode() >= 0 { // else it has no handler for the signal
		return fmt.Errorf("%s ends with an error: %w", c.name, c.err)
	}
	return nil
}

// AwaitOK waits until a URL of it answers with 200.
func (c *Command) AwaitOK(t testing.TB, timeout time.Duration, url string) {
	t.Helper()
	client := http.Client{
		Timeout:   requestTimeout,
		Transport: &http.Transport{DialContext: c.host.DialContext, DisableKeepAlives: true},
	}
	testenv.Eventually(t, timeout, func() error {
		if !c.Running() {
			t.Fatal(c.Check())
		}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s of %s: %s", url, c.name, response.Status)
		}
		return nil
	})
}

// AwaitLine waits until it has logged the text since it was started last.
func (c *Command) AwaitLine(t testing.TB, timeout time.Duration, text string) {
	t.Helper()
	testenv.Eventually(t, timeout, func() error {
		if !strings.Contains(c.Log()[c.begin:], text) {
			return fmt.Errorf("%s has not logged %q", c.name, text)
		}
		return nil
	})
}

// Log is what it has written, in all its lives.
func (c *Command) Log() string {
	log, err := os.ReadFile(c.logPath)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err.Error()
	}
	return string(log)
}

// Tail is the end of the log.
func (c *Command) Tail() string {
	lines := strings.Split(strings.TrimSpace(c.Log()), "\n")
	return strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
}
