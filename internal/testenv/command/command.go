// Package command runs a program on a host of testenv for a test. The test can stop and kill the
// program and start it again, also with other arguments. The log covers all runs and is shown when
// the test fails.
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
	// stopTimeout bounds the time that a program takes to end.
	stopTimeout = 30 * time.Second
	// requestTimeout bounds the time of one request to a running program.
	requestTimeout = 5 * time.Second
	// tailLines is the number of lines of the log that are shown.
	tailLines = 100
)

// Command is a program on a host. Only one goroutine may use it.
type Command struct {
	name    string
	host    *testenv.Host
	logPath string

	cmd *testenv.Cmd
	// begin is the size of the log, in bytes, at the last start.
	begin int
	// ended is closed when the process has ended and err is set.
	ended chan struct{}
	err   error
}

// New returns a program that is not started yet. At its end, t stops the program and fails if the
// log reports a data race. The name appears in messages.
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
			t.Logf("---- end of the log of %s:\n%s", name, c.Tail())
		}
	})
	return c
}

// Start starts the program with additional environment variables. It runs until it is stopped.
func (c *Command) Start(env []string, path string, args ...string) error {
	if c.Running() {
		return fmt.Errorf("%s is running already", c.name)
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

// Name returns the name for messages.
func (c *Command) Name() string { return c.name }

// Pid returns the ID of the process that was started last.
func (c *Command) Pid() int { return c.cmd.Process.Pid }

// Running reports whether the program has been started and has not ended.
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

// Check returns an error with the end of the log if the program is not running.
func (c *Command) Check() error {
	if c.Running() {
		return nil
	}
	return fmt.Errorf("%s has ended; end of its log:\n%s", c.name, c.Tail())
}

// Wait waits for the end of the program and returns its error. The program must have been started.
func (c *Command) Wait(timeout time.Duration) error {
	select {
	case <-c.ended:
		return c.err
	case <-time.After(timeout):
		return fmt.Errorf("%s is still running after %v", c.name, timeout)
	}
}

// Stop ends the program with SIGTERM, as an update does. It returns an error if the program ends
// with one. It has no effect if the program is not running.
func (c *Command) Stop() error { return c.end(syscall.SIGTERM) }

// Kill ends the program with SIGKILL, like a crash. It has no effect if the program is not running.
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
		_ = c.cmd.Process.Kill() // an error means that it has just ended
		<-c.ended
		return fmt.Errorf("%s was still running %v after signal %q", c.name, stopTimeout, signal)
	}
	// A negative exit code means that the program does not handle the signal.
	if c.err != nil && signal != syscall.SIGKILL && c.cmd.ProcessState.ExitCode() >= 0 {
		return fmt.Errorf("%s ended with an error: %w", c.name, c.err)
	}
	return nil
}

// AwaitOK waits until the program answers a request for url with status 200.
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

// AwaitLine waits until the program has logged text since its last start.
func (c *Command) AwaitLine(t testing.TB, timeout time.Duration, text string) {
	t.Helper()
	testenv.Eventually(t, timeout, func() error {
		if !strings.Contains(c.Log()[c.begin:], text) {
			return fmt.Errorf("%s has not logged %q", c.name, text)
		}
		return nil
	})
}

// Log returns what the program has written in all runs.
func (c *Command) Log() string {
	log, err := os.ReadFile(c.logPath)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err.Error()
	}
	return string(log)
}

// Tail returns the end of the log.
func (c *Command) Tail() string {
	lines := strings.Split(strings.TrimSpace(c.Log()), "\n")
	return strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
}
