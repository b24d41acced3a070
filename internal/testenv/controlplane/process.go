package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// readyTimeout leaves time for a small machine that runs and builds other tests at the same
	// time.
	readyTimeout = 5 * time.Minute
	// stopTimeout bounds the time that a component takes to end after SIGTERM.
	stopTimeout = 30 * time.Second
	logTailSize = 4096
)

var errNotRunning = errors.New("not running")

// Process is one component of a control plane. Its methods are safe for concurrent use.
type Process struct {
	name, binary, dir string
	args              []string
	ready             func(context.Context) error
	spawner           *spawner
	logf              func(format string, args ...any)

	mu   sync.Mutex // guards cmd and done
	cmd  *exec.Cmd
	done chan struct{} // closed when cmd has ended
}

// Name returns the name of the program.
func (p *Process) Name() string { return p.name }

// Start runs the component on its previous port and data, and waits until it is ready.
func (p *Process) Start(ctx context.Context) error {
	began := time.Now()
	done, err := p.launch()
	if err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		err := p.ready(ctx)
		if err == nil {
			p.logf("%s ready after %s", p.name, time.Since(began).Round(time.Millisecond))
			return nil
		}
		select {
		case <-done:
			return fmt.Errorf("%s ended before it was ready; end of its log:\n%s", p.name, p.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w; end of its log:\n%s", p.name, err, p.LogTail())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (p *Process) launch() (<-chan struct{}, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.runningLocked() {
		return nil, errors.New("already running")
	}
	log, err := os.OpenFile(p.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(p.binary, p.args...)
	cmd.Dir = p.dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{
		// The component ends with the test process, even if that is killed.
		Pdeathsig: syscall.SIGKILL,
		// Ctrl-C reaches only the test process, which ends the component when it is done.
		Setpgid: true,
	}
	if err := p.spawner.do(cmd.Start); err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the log says how it ended
		close(done)
	}()
	p.cmd, p.done = cmd, done
	return done, nil
}

// PID returns the process ID of the component, which must have been started.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

// Running reports whether the component's process exists. A paused process exists.
func (p *Process) Running() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.runningLocked()
}

func (p *Process) runningLocked() bool {
	if p.cmd == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Stop ends the component with SIGTERM and waits for its end.
func (p *Process) Stop() error { return p.end(syscall.SIGTERM) }

// Kill ends the component with SIGKILL and waits for its end.
func (p *Process) Kill() error { return p.end(syscall.SIGKILL) }

// Pause halts the component with SIGSTOP and waits until all its threads have halted. Its
// connections stay open, but it does not answer.
func (p *Process) Pause() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.signalLocked(syscall.SIGSTOP); err != nil {
		return err
	}
	deadline := time.After(stopTimeout)
	for {
		halted, err := allThreadsHalted(p.cmd.Process.Pid)
		if halted || err != nil {
			return err
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s: %w", p.name, errNotRunning)
		case <-deadline:
			return fmt.Errorf("%s does not halt within %s", p.name, stopTimeout)
		case <-time.After(time.Millisecond):
		}
	}
}

// Resume continues a paused component.
func (p *Process) Resume() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.signalLocked(syscall.SIGCONT)
}

// allThreadsHalted reports whether SIGSTOP has reached every thread. The kernel stops threads one
// by one.
func allThreadsHalted(pid int) (bool, error) {
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false, err
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // the thread has ended
		}
		if err != nil {
			return false, err
		}
		// The state follows the name, which is in parentheses.
		if _, state, _ := strings.Cut(string(stat), ") "); !strings.HasPrefix(state, "T") {
			return false, nil
		}
	}
	return len(stats) > 0, nil
}

func (p *Process) signalLocked(signal syscall.Signal) error {
	if !p.runningLocked() {
		return fmt.Errorf("%s: %w", p.name, errNotRunning)
	}
	if err := p.cmd.Process.Signal(signal); err != nil {
		return fmt.Errorf("send %s to %s: %w", signal, p.name, err)
	}
	return nil
}

func (p *Process) end(signal syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.signalLocked(signal); err != nil {
		return err
	}
	if err := p.signalLocked(syscall.SIGCONT); err != nil && !errors.Is(err, errNotRunning) && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(stopTimeout):
		return fmt.Errorf("%s still runs %s after signal %q", p.name, stopTimeout, signal)
	}
}

func (p *Process) logPath() string { return filepath.Join(p.dir, p.name+".log") }

// LogTail returns the end of the component's log, which covers all its runs.
func (p *Process) LogTail() string {
	log, err := os.ReadFile(p.logPath())
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(log[max(0, len(log)-logTailSize):]))
}

func (p *Process) portTaken() bool {
	return strings.Contains(p.LogTail(), "address already in use")
}

// spawner starts processes from one thread that lives as long as they do. The kernel sends the
// parent-death signal when the thread that started a process ends, and Go may end any other thread
// at any time.
type spawner struct {
	calls chan func()
	ended chan struct{}
}

func newSpawner() *spawner {
	s := &spawner{calls: make(chan func()), ended: make(chan struct{})}
	go func() {
		defer close(s.ended)
		runtime.LockOSThread() // never unlocked, so that the thread ends with this function
		for call := range s.calls {
			call()
		}
	}()
	return s
}

func (s *spawner) do(start func() error) error {
	result := make(chan error, 1)
	s.calls <- func() { result <- start() }
	return <-result
}

// close ends the thread, and with it every process that the thread started and that still runs.
func (s *spawner) close() {
	close(s.calls)
	<-s.ended
}
