package target

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/slicecast/slicecast/loadtest/floor"
	"github.com/slicecast/slicecast/loadtest/generate"
)

// endTimeout is how long the process may take to end by itself.
const endTimeout = gracePeriod + 5*time.Second

// Process is a running server's, seen by its parent.
type Process struct {
	// Address that it serves gRPC on.
	Address string

	command *exec.Cmd
	input   io.WriteCloser
	answers chan answer
	ended   chan struct{}
	err     error // why it ended; readable when ended is closed
}

// Start starts the server: this very program with other arguments, which has to call Serve then. It ends with its parent,
// whatever end that comes to.
func Start(ctx context.Context, arguments []string, setup Setup) (*Process, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &Process{command: exec.Command(executable, arguments...), answers: make(chan answer, 1), ended: make(chan struct{})}
	// A terminal's ^C goes to whole process groups; this process ends when its parent has done with it.
	p.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.command.Stderr = os.Stderr
	if p.input, err = p.command.StdinPipe(); err != nil {
		return nil, err
	}
	output, err := p.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	started := make(chan error, 1)
	go p.run(started, output)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the server: %w", err)
	}
	a, err := p.ask(ctx, request{Setup: &setup})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the server: %w", err), p.Close())
	}
	p.Address = a.Address
	return p, nil
}

// run starts the process and waits for its end, both on one thread: the kernel sends the death signal when the thread that
// started the process ends.
func (p *Process) run(started chan<- error, output io.Reader) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := p.command.Start(); err != nil {
		started <- err
		return
	}
	started <- nil
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(p.answers)
		for d := json.NewDecoder(output); ; {
			var a answer
			if d.Decode(&a) != nil {
				return // the process ends, or has lost its way and is ended
			}
			p.answers <- a
		}
	})
	reading.Wait()
	p.err = p.command.Wait()
	close(p.ended)
}

// PID of the process.
func (p *Process) PID() int { return p.command.Process.Pid }

// Ended is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Churn has a plan carried out and tells how that went, when it is done. One at a time.
func (p *Process) Churn(ctx context.Context, plan generate.Plan) (generate.Lag, error) {
	return ask(ctx, p, "churn", request{Churn: &plan}, func(a answer) *generate.Lag { return a.Lag })
}

// Memory has the process collect its garbage, and counts what is left.
func (p *Process) Memory(ctx context.Context) (Memory, error) {
	return ask(ctx, p, "memory of the server", request{Memory: &struct{}{}}, func(a answer) *Memory { return a.Memory })
}

// Listen has the process listen as a floor.Server, and gives its address.
func (p *Process) Listen(ctx context.Context) (string, error) {
	return ask(ctx, p, "raw TLS", request{Listen: &struct{}{}}, func(a answer) *string { return &a.Address })
}

// Write has the floor.Server write.
func (p *Process) Write(ctx context.Context, w floor.Writes) (generate.Lag, error) {
	return ask(ctx, p, "raw TLS", request{Write: &w}, func(a answer) *generate.Lag { return a.Lag })
}

// ask gives the part of the answer that answers the request.
func ask[T any](ctx context.Context, p *Process, what string, r request, part func(answer) *T) (out T, err error) {
	a, err := p.ask(ctx, r)
	if err != nil {
		return out, fmt.Errorf("%s: %w", what, err)
	}
	v := part(a)
	if v == nil {
		return out, fmt.Errorf("%s: the server's answer is another question's", what)
	}
	return *v, nil
}

func (p *Process) ask(ctx context.Context, r request) (answer, error) {
	if err := json.NewEncoder(p.input).Encode(r); err != nil {
		return answer{}, fmt.Errorf("the server's process takes no input: %w", err)
	}
	select {
	case <-ctx.Done():
		return answer{}, ctx.Err()
	case a, ok := <-p.answers:
		if !ok {
			return answer{}, errors.New("the server's process has ended; what it said is above")
		}
		if a.Error != "" {
			return answer{}, errors.New(a.Error)
		}
		return a, nil
	}
}

// Kill ends the process with SIGKILL and waits for that.
func (p *Process) Kill() error {
	err := p.command.Process.Kill()
	<-p.ended
	_ = p.input.Close() // the other end is gone
	return err
}

// Close ends the process and waits for that. The error is the one that it ended with.
func (p *Process) Close() error {
	_ = p.input.Close() // if that fails, the timeout is next
	hurry := time.AfterFunc(endTimeout, func() { _ = p.command.Process.Kill() })
	defer hurry.Stop()
	<-p.ended
	if p.err != nil {
		return fmt.Errorf("the server's process: %w", p.err)
	}
	return nil
}
