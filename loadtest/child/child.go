// Package child runs parts of a load test as processes of their own, whose CPU time and memory the operating system tells
// apart: servers, and nodes by the thousand. A child is this very program with other arguments. Parent and child speak net/rpc
// over the child's standard input and output; the child ends when its input does, and with its parent, whatever end that
// comes to.
package child

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/rpc"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"syscall"
	"time"
)

// serviceName is what net/rpc calls the child's methods by.
const serviceName = "Child"

// endTimeout is how long a child may take to end by itself.
const endTimeout = 10 * time.Second

// ErrEnded is what calls fail with when the process has ended.
var ErrEnded = errors.New("the process has ended; what it said is above")

// Process is a child, seen by its parent.
type Process struct {
	name    string
	command *exec.Cmd
	client  *rpc.Client
	ended   chan struct{}
	err     error // why it ended; readable when ended is closed
}

// Start starts this program with other arguments, with which it has to call Serve. The name is for errors. What the child says on
// standard error is written to said.
func Start(name string, said io.Writer, arguments ...string) (*Process, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &Process{name: name, command: exec.Command(executable, arguments...), ended: make(chan struct{})}
	// A terminal's ^C goes to whole process groups; this process ends when its parent has done with it.
	p.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	input, err := p.command.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, err := p.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	reports, report, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.command.Stderr = report
	started := make(chan error, 1)
	go p.run(started, reports, said)
	err = errors.Join(<-started, report.Close()) // the child has its own
	if err != nil {
		return nil, fmt.Errorf("start the %s: %w", name, err)
	}
	// Nobody but who reads the output knows when it may be closed.
	p.client = rpc.NewClient(pipes{untilEnd{output, func() { output.Close() }}, input})
	return p, nil
}

// run starts the process and waits for its end, both on one thread: the kernel sends the death signal when the thread that
// started the process ends. Meanwhile it passes on what the process reports.
func (p *Process) run(started chan<- error, reports *os.File, said io.Writer) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer reports.Close()
	if err := p.command.Start(); err != nil {
		started <- err
		return
	}
	started <- nil
	passed := make(chan struct{})
	go func() {
		defer close(passed)
		_, _ = io.Copy(said, reports) // who reads it has no other way to hear
	}()
	// Not Command.Wait: it closes the pipe of the output under whoever reads it.
	state, err := p.command.Process.Wait()
	if err == nil && !state.Success() {
		err = &exec.ExitError{ProcessState: state}
	}
	// All that it said is there by now, unless another process holds the pipe open.
	_ = reports.SetReadDeadline(time.Now().Add(time.Second))
	<-passed
	p.err = err
	close(p.ended)
}

// pipes are both ends' way to each other.
type pipes struct {
	io.Reader
	io.WriteCloser
}

// Call calls a method of what the child serves. Its arguments and reply are as net/rpc has them; the reply is as it was if there is an error.
func (p *Process) Call(ctx context.Context, method string, args, reply any) error {
	// A reply that nobody waits for any more may still come.
	own := reflect.New(reflect.TypeOf(reply).Elem())
	call := p.client.Go(serviceName+"."+method, args, own.Interface(), make(chan *rpc.Call, 1))
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-call.Done:
	}
	if failed := rpc.ServerError(""); call.Error != nil && !errors.As(call.Error, &failed) {
		return fmt.Errorf("%s: %w", p.name, ErrEnded)
	}
	if call.Error != nil {
		return fmt.Errorf("%s: %w", p.name, call.Error)
	}
	reflect.ValueOf(reply).Elem().Set(own.Elem())
	return nil
}

// PID of the process.
func (p *Process) PID() int { return p.command.Process.Pid }

// Ended is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Kill ends the process with SIGKILL and waits for that.
func (p *Process) Kill() error {
	err := p.command.Process.Kill()
	<-p.ended
	_ = p.client.Close() // the other end is gone
	return err
}

// Close ends the process and waits for that. The error is the one that it ended with.
func (p *Process) Close() error {
	_ = p.client.Close() // closes its input; if that fails, the timeout is next
	hurry := time.AfterFunc(endTimeout, func() { _ = p.command.Process.Kill() })
	defer hurry.Stop()
	<-p.ended
	if p.err != nil {
		return fmt.Errorf("the %s's process: %w", p.name, p.err)
	}
	return nil
}

// Serve is the child's side: it answers the calls of the parent with the methods of a service, until there is no parent. The
// service's context ends then too.
func Serve(ctx context.Context, in io.Reader, out io.WriteCloser, service func(context.Context) any) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server := rpc.NewServer()
	if err := server.RegisterName(serviceName, service(ctx)); err != nil {
		return err
	}
	served := make(chan struct{})
	// Reading can't be interrupted, so this goroutine may outlive the call; the process then ends.
	go func() {
		defer close(served)
		server.ServeConn(pipes{untilEnd{in, cancel}, out})
	}()
	select {
	case <-served:
	case <-ctx.Done():
	}
	return nil
}

// untilEnd does something when a reader has come to its end.
type untilEnd struct {
	io.Reader
	end func()
}

// Read implements io.Reader.
func (u untilEnd) Read(b []byte) (int, error) {
	n, err := u.Reader.Read(b)
	if err != nil {
		u.end()
	}
	return n, err
}
