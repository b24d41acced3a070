package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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
	// readyTimeout is generous for a small machine that runs and builds other tests meanwhile.
	readyTimeout = 5 * time.Minute
	// stopTimeout is how long a component may take to end in order.
	stopTimeout = 30 * time.Second
	logTailSize = 4096
)

var errNotRunning = errors.New("not running")

// Process is one component. Its methods may be called from any goroutine.
type Process struct {
	name, binary, dir string
	args              []string
	ready             func(context.Context) error
	spawner           *spawner
	logf              func(format string, args ...any)

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{} // closed when cmd has ended
}

// Name of the program.
func (p *Process) Name() string { return p.name }

// Start runs the component, with the port and data it had before, and waits until it is ready.
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
			return fmt.Errorf("%s ended before it was ready; the end of its log:\n%s", p.name, p.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w; the end of its log:\n%s", p.name, err, p.LogTail())
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
		// Ends with the test process, even one that is killed.
		Pdeathsig: syscall.SIGKILL,
		// Ctrl-C is for the test process, which then ends this one when it wants to.
		Setpgid: true,
	}
	if err := p.spawner.do(cmd.Start); err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(done)
	}()
	p.cmd, p.done = cmd, done
	return done, nil
}

// PID of the component, which must have been started.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

// Running says whether the component's process exists; a paused one does.
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

// Stop ends the component in order (SIGTERM) and waits for its end.
func (p *Process) Stop() error { return p.end(syscall.SIGTERM) }

// Kill ends the component at once (SIGKILL) and waits for its end.
func (p *Process) Kill() error { return p.end(syscall.SIGKILL) }

// Pause halts the component (SIGSTOP) and waits until it stands: its connections stay open and
// nobody answers.
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

// allThreadsHalted says whether SIGSTOP has reached every thread, which it does one by one.
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
		return fmt.Errorf("%s still runs %s after %s", p.name, stopTimeout, signal)
	}
}

func (p *Process) logPath() string { return filepath.Join(p.dir, p.name+".log") }

// LogTail is the end of the component's log, over all its runs.
func (p *Process) LogTail() string {
	log, err := os.Open(p.logPath())
	if err != nil {
		return err.Error()
	}
	defer log.Close()
	if info, err := log.Stat(); err == nil && info.Size() > logTailSize {
		if _, err := log.Seek(-logTailSize, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	tail, err := io.ReadAll(log)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(tail))
}

func (p *Process) portTaken() bool {
	return strings.Contains(p.LogTail(), "address already in use")
}

// spawner starts processes from one thread that lives as long as they do: the kernel delivers
// the parent death signal when the thread that started a process ends, and Go ends threads at will.
type spawner struct {
	calls chan func()
	ended chan struct{}
}

func newSpawner() *spawner {
	s := &spawner{calls: make(chan func()), ended: make(chan struct{})}
	go func() {
		defer close(s.ended)
		runtime.LockOSThread() // and never unlocked: the thread ends with this function
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

// close ends the thread, and with it every process that it started and that still runs.
func (s *spawner) close() {
	close(s.calls)
	<-s.ended
}
