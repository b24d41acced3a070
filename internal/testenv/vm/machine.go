package vm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv/repository"
	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

const (
	emulator = "qemu-system-x86_64"
	// memory is the size of the machine's memory. The host allocates only what the machine uses.
	memory = "4096M"
)

// machine boots kernels.
type machine struct {
	kernel *kernel
	guest  string // the path of the built guest program
	temp   string // a folder for the files of a boot
}

// newMachine finds what a boot needs and builds the guest program in temp.
func newMachine(ctx context.Context, temp string) (*machine, error) {
	if _, err := exec.LookPath(emulator); err != nil {
		return nil, fmt.Errorf("%w: these tests run on another kernel in a virtual machine; install qemu, on Debian with 'apt-get install qemu-system-x86'", err)
	}
	root, err := repository.Root()
	if err != nil {
		return nil, err
	}
	k, err := findKernel(ctx, root)
	if err != nil {
		return nil, err
	}
	m := &machine{kernel: k, guest: filepath.Join(temp, "guest"), temp: temp}
	return m, goBuild(ctx, "build", "-o", m.guest, filepath.Join(root, "internal/testenv/vm/guest"))
}

// goBuild runs the go command such that the binaries that it builds run in the machine.
func goBuild(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %v: %w\n%s", args, err, out)
	}
	return nil
}

// run boots the machine, runs the programs in it one after the other and turns the machine off. The
// programs can reach the given TCP ports of the host's loopback address. run returns a result for
// each program, or an error that contains the kernel's console output.
func (m *machine) run(ctx context.Context, stdout, stderr io.Writer, ports []uint16, runs ...spec.Run) ([]spec.Result, error) {
	cmd, err := m.command(ctx, ports, runs)
	if err != nil {
		return nil, err
	}
	var console, result tail
	cmd.Stdout, cmd.Stderr = &console, &console
	err = start(cmd, map[string]io.Writer{spec.StdoutPort: stdout, spec.StderrPort: stderr, spec.ResultPort: &result})
	var results []spec.Result
	for d := json.NewDecoder(&result.Buffer); ; {
		var r spec.Result
		if d.Decode(&r) != nil {
			break // end of the results, or an incomplete result of a machine that died
		}
		results = append(results, r)
	}
	if len(results) < len(runs) {
		return results, fmt.Errorf("the virtual machine ended early (%w); its console:\n%s", errors.Join(err, context.Cause(ctx)), console.String())
	}
	return results, nil
}

func (m *machine) command(ctx context.Context, ports []uint16, runs []spec.Run) (*exec.Cmd, error) {
	files, err := m.kernel.firstFiles(m.guest, ports, runs)
	if err != nil {
		return nil, err
	}
	initrd := filepath.Join(m.temp, "initrd")
	if err := os.WriteFile(initrd, files, 0o600); err != nil {
		return nil, err
	}
	// The kernel checks early that its timer ticks, for a time that it measures in loops. On a busy
	// host, the emulator may not tick meanwhile, and the kernel would panic. no_timer_check skips it.
	cmd := exec.CommandContext(ctx, emulator,
		"-accel", "tcg,thread=single", "-cpu", "max", "-smp", "2", "-m", memory,
		"-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio",
		"-kernel", m.kernel.image, "-initrd", initrd,
		"-append", "console=ttyS0 quiet panic=-1 oops=panic softlockup_panic=1 watchdog_thresh=60 mitigations=off random.trust_cpu=on no_timer_check",
		"-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
		"-device", "virtio-serial-pci",
	)
	if len(ports) > 0 {
		cmd.Args = append(cmd.Args, "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=")
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return cmd, nil
}

// start runs the emulator to its end. What the machine writes to a virtual serial port goes to the
// writer with the port's name.
func start(cmd *exec.Cmd, serial map[string]io.Writer) error {
	var copying sync.WaitGroup
	defer copying.Wait()
	var pipes []*os.File
	closePipes := func(err error) error {
		for _, p := range pipes {
			err = errors.Join(err, p.Close())
		}
		return err
	}
	for name, to := range serial {
		read, write, err := os.Pipe()
		if err != nil {
			return closePipes(err)
		}
		pipes = append(pipes, write)
		cmd.ExtraFiles = append(cmd.ExtraFiles, write)
		cmd.Args = append(cmd.Args,
			"-chardev", fmt.Sprintf("file,id=%s,path=/dev/fd/%d", name, 2+len(cmd.ExtraFiles)),
			"-device", fmt.Sprintf("virtserialport,chardev=%s,name=%s", name, name))
		copying.Go(func() {
			defer read.Close()
			// A write error loses output, as it would without a machine.
			_, _ = io.Copy(to, read)
		})
	}
	// The kernel sends the parent-death signal when the starting thread ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := closePipes(cmd.Start()); err != nil {
		return err
	}
	return cmd.Wait()
}

// tail keeps the last maxTail bytes that are written to it.
type tail struct{ bytes.Buffer }

const maxTail = 64 << 10

func (t *tail) Write(p []byte) (int, error) {
	if more := t.Len() + len(p) - maxTail; more > 0 {
		t.Next(more)
	}
	return t.Buffer.Write(p)
}
