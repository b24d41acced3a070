package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// stageVariable is the environment variable that tells a re-executed binary which process of
// [Isolate] it is: process 1 of the new namespaces, or the program. It is unset in the process
// outside.
const (
	stageVariable = "SLICECAST_TESTENV_STAGE"
	stageInit     = "init"
	stageProgram  = "program"
)

// isolated reports whether this process runs in the namespaces that [Isolate] creates.
var isolated bool

// init keeps the main thread with the main goroutine, so that it never enters the network namespace
// of a host. Programs that search for processes in their network namespace, such as
// "slicecast-agent cleanup", would otherwise find this process there at times.
func init() {
	if os.Getenv(stageVariable) == stageProgram {
		runtime.LockOSThread()
	}
}

// Main runs the tests of m inside new namespaces, then looks for leaked goroutines and exits. It is
// the whole body of a TestMain. The functions in before run first and outside, where there is still
// a network to fetch things from.
func Main(m *testing.M, before ...func() error) {
	Isolate(before...)
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintf(os.Stderr, "goleak: after all tests: %v\n", err)
			code = 1
		}
	}
	os.Exit(code)
}

// Isolate returns in a new process that runs the same binary, with the same arguments, environment
// and standard files, inside new namespaces; see the package documentation. It never returns in the
// calling process. That process runs the functions in before, forwards SIGINT, SIGTERM, SIGHUP and
// SIGQUIT to the new process and exits with the exit code of the new process. Call Isolate before
// anything has side effects, because code before the call runs more than once.
//
// If the kernel does not allow the namespaces, Isolate prints what is missing and exits with code
// 1.
func Isolate(before ...func() error) {
	stage := os.Getenv(stageVariable)
	// Processes that this one starts later, possibly from the same binary, are not stages of
	// Isolate.
	if err := os.Unsetenv(stageVariable); err != nil {
		exit(err)
	}
	switch stage {
	case stageProgram:
		isolated = true
	case stageInit:
		code, err := runInit()
		if err != nil {
			exit(err)
		}
		os.Exit(code)
	default:
		for _, f := range before {
			if err := f(); err != nil {
				exit(err)
			}
		}
		code, err := runOutside()
		if err != nil {
			exit(err)
		}
		os.Exit(code)
	}
}

func exit(err error) {
	fmt.Fprintf(os.Stderr, "testenv: %v\n", err)
	os.Exit(1)
}

// runOutside starts process 1 of the new namespaces, waits for it and returns its exit code.
func runOutside() (int, error) {
	// The kernel sends the parent-death signal when the starting thread ends, so the thread must
	// live as long as the process.
	runtime.LockOSThread()
	attr := &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID,
		Pdeathsig:  unix.SIGKILL,
		// Outside the foreground process group of the terminal, so that Ctrl-C reaches only this
		// process, which forwards it once.
		Setpgid: true,
	}
	process, err := startStage(stageInit, attr)
	if errors.Is(err, unix.EPERM) {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
		process, err = startStage(stageInit, attr)
	}
	if err != nil {
		return 0, fmt.Errorf("network namespaces need root, or a kernel that allows user namespaces to other users: %w\n"+
			"Run as root, or allow user namespaces: sysctl user.max_user_namespaces and user.max_net_namespaces must not be 0; "+
			"if they exist, kernel.unprivileged_userns_clone (Debian) must be 1 and kernel.apparmor_restrict_unprivileged_userns (Ubuntu) must be 0; "+
			"a container must be privileged", err)
	}
	forwardSignals(process.Pid)
	state, err := process.Wait()
	if err != nil {
		return 0, fmt.Errorf("wait for the isolated process: %w", err)
	}
	return exitCode(state.Sys().(syscall.WaitStatus)), nil
}

// runInit is process 1 of the new namespaces. It prepares the namespaces, starts the program, reaps
// orphans and returns the program's exit code. When process 1 exits, the kernel kills all remaining
// processes of its namespace.
func runInit() (int, error) {
	if err := prepareNamespaces(); err != nil {
		return 0, err
	}
	process, err := startStage(stageProgram, nil)
	if err != nil {
		return 0, fmt.Errorf("start the isolated program: %w", err)
	}
	forwardSignals(process.Pid)
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 0, fmt.Errorf("wait for the isolated program: %w", err)
		case pid == process.Pid && (status.Exited() || status.Signaled()):
			return exitCode(status), nil
		}
	}
}

// prepareNamespaces sets up what programs expect in the new namespaces: a /proc of the PID
// namespace, an empty /run without locks and sockets of other programs (iptables-legacy locks
// /run/xtables.lock), and a loopback interface that is up.
func prepareNamespaces() error {
	const hint = "%w; a container must be privileged"
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: "+hint, err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: "+hint, err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs on /run: "+hint, err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return setSysctls(hostSysctls)
}

func startStage(stage string, attr *syscall.SysProcAttr) (*os.Process, error) {
	return os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{
		Env:   append(os.Environ(), stageVariable+"="+stage),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Sys:   attr,
	})
}

// forwardSignals forwards the signals that ask a program to stop, until this process exits.
func forwardSignals(pid int) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT)
	go func() {
		for s := range signals {
			if number, ok := s.(syscall.Signal); ok {
				// An error means that the process has ended, which the goroutine that waits for it
				// sees.
				_ = syscall.Kill(pid, number)
			}
		}
	}()
}

// exitCode returns the exit code that a shell would report.
func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}
