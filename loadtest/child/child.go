// Package child runs parts of a load test, such as servers and thousands of nodes, in processes of
// their own, so that the operating system accounts for the CPU time and memory of each separately.
// A child is this program with other arguments. Parent and child use net/rpc over the child's
// standard input and output. The child ends when its input ends, and with its parent, however the
// parent ends.
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
	"strings"
	"syscall"
	"time"
)

// serviceName is the net/rpc name of the child's service.
const serviceName = "Child"

// endTimeout is how long a child may take to end by itself.
const endTimeout = 10 * time.Second

// ErrEnded is the error of calls after the process has ended.
var ErrEnded = errors.New("the process has ended; its output is above")

// Process is the parent's handle on a child.
type Process struct {
	name    string
	command *exec.Cmd
	client  *rpc.Client
	ended   chan struct{}
	err     error // why the process ended; set before ended is closed
}

// Start starts this program with other arguments, which must lead to a call of Serve, and calls
// setup. The name is used in errors. The standard error of the child is copied to said.
func Start[S, A any](
	ctx context.Context, name string, said io.Writer, arguments []string, setup func(*S, A, *None) error, args A,
) (*Process, error) {
	p, err := start(name, said, arguments)
	if err != nil {
		return nil, fmt.Errorf("start the %s: %w", name, err)
	}
	if _, err := Call(ctx, p, setup, args); err != nil {
		_ = p.Kill() // the error of the call says more
		return nil, err
	}
	return p, nil
}

func start(name string, said io.Writer, arguments []string) (*Process, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &Process{name: name, command: exec.Command(executable, arguments...), ended: make(chan struct{})}
	// The child has a process group of its own, because a terminal sends ^C to the whole group. The
	// child has to run until the parent no longer needs it.
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
	if err := errors.Join(<-started, report.Close()); err != nil { // the child has its own descriptor
		return nil, err
	}
	// The output must stay open until its reader has reached the end, so the reader closes it.
	p.client = rpc.NewClient(pipes{untilEnd{output, func() { output.Close() }}, input})
	return p, nil
}

// run starts the process and waits for its end, both on the same thread, because the kernel sends
// Pdeathsig when the thread that started the process ends. Meanwhile it copies the standard error
// of the process.
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
		_, _ = io.Copy(said, reports) // there is no other place to report the error
	}()
	// Command.Wait would close the output pipe while the RPC client may still read from it.
	state, err := p.command.Process.Wait()
	if err == nil && !state.Success() {
		err = &exec.ExitError{ProcessState: state}
	}
	// All output has been written by now. The deadline is for other processes that keep the pipe
	// open.
	_ = reports.SetReadDeadline(time.Now().Add(time.Second))
	<-passed
	p.err = err
	close(p.ended)
}

type pipes struct {
	io.Reader
	io.WriteCloser
}

// None is the type of arguments and replies that methods of a child do not need.
type None = struct{}

// Call calls a method of the child's service, which is of type S. The method is passed as a method
// expression, such as (*Service).Method.
func Call[S, A, R any](ctx context.Context, p *Process, method func(*S, A, *R) error, args A) (R, error) {
	name := runtime.FuncForPC(reflect.ValueOf(method).Pointer()).Name()
	name = name[strings.LastIndexByte(name, '.')+1:]
	// After the context has ended, the answer may still arrive, so it has a variable of its own.
	reply, none := new(R), *new(R)
	call := p.client.Go(serviceName+"."+name, args, reply, make(chan *rpc.Call, 1))
	select {
	case <-ctx.Done():
		return none, ctx.Err()
	case <-call.Done:
	}
	if failed := rpc.ServerError(""); call.Error != nil && !errors.As(call.Error, &failed) {
		return none, fmt.Errorf("%s: %w", p.name, ErrEnded)
	}
	if call.Error != nil {
		return none, fmt.Errorf("%s: %w", p.name, call.Error)
	}
	return *reply, nil
}

// PID returns the process ID.
func (p *Process) PID() int { return p.command.Process.Pid }

// Ended returns a channel that is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Kill ends the process with SIGKILL and waits for its end.
func (p *Process) Kill() error {
	err := p.command.Process.Kill()
	<-p.ended
	_ = p.client.Close() // the process is gone
	return err
}

// Close ends the process and waits for its end. It returns the error with which the process ended.
func (p *Process) Close() error {
	_ = p.client.Close() // closes the input of the process; if that fails, the timeout ends it
	hurry := time.AfterFunc(endTimeout, func() { _ = p.command.Process.Kill() })
	defer hurry.Stop()
	<-p.ended
	if p.err != nil {
		return fmt.Errorf("the %s's process: %w", p.name, p.err)
	}
	return nil
}

// Serve runs the child's side. It answers the parent's calls with the methods of a service until
// the parent is gone or the context ends. The context of the service then ends, too.
func Serve(ctx context.Context, in io.Reader, out io.WriteCloser, service func(context.Context) any) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server := rpc.NewServer()
	if err := server.RegisterName(serviceName, service(ctx)); err != nil {
		return err
	}
	served := make(chan struct{})
	// Reading cannot be interrupted, so this goroutine may outlive the call. The process ends soon
	// after.
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

// untilEnd calls a function when a reader returns an error, such as at its end.
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
