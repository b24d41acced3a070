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
	root, err := repositoryRoot()
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
	files, err := m.kernel.firstFiles(m.guest, ports, runs)
	if err != nil {
		return nil, err
	}
	initrd := filepath.Join(m.temp, "initrd")
	if err := os.WriteFile(initrd, files, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, emulator,
		"-accel", "tcg,thread=single", "-cpu", "max", "-smp", "2", "-m", memory,
		"-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio",
		"-kernel", m.kernel.image, "-initrd", initrd,
		"-append", "console=ttyS0 quiet panic=-1 oops=panic softlockup_panic=1 watchdog_thresh=60 mitigations=off random.trust_cpu=on",
		"-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
		"-device", "virtio-serial-pci",
	)
	if len(ports) > 0 {
		cmd.Args = append(cmd.Args, "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=")
	}
	var console, result tail
	var copying sync.WaitGroup
	var pipes []*os.File
	for _, port := range []struct {
		name string
		to   io.Writer
	}{{spec.StdoutPort, stdout}, {spec.StderrPort, stderr}, {spec.ResultPort, &result}} {
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		defer read.Close()
		pipes = append(pipes, write)
		cmd.ExtraFiles = append(cmd.ExtraFiles, write)
		cmd.Args = append(cmd.Args,
			"-chardev", fmt.Sprintf("file,id=%s,path=/dev/fd/%d", port.name, 2+len(cmd.ExtraFiles)),
			"-device", fmt.Sprintf("virtserialport,chardev=%s,name=%s", port.name, port.name))
		copying.Go(func() {
			// A write error loses output, as it would without a machine.
			_, _ = io.Copy(port.to, read)
		})
	}
	cmd.Stdout, cmd.Stderr = &console, &console
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	// The kernel sends the parent-death signal when the starting thread ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Start()
	for _, p := range pipes {
		err = errors.Join(err, p.Close())
	}
	if err == nil {
		err = cmd.Wait()
	}
	copying.Wait()
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

// tail keeps the last maxTail bytes that are written to it.
type tail struct{ bytes.Buffer }

const maxTail = 64 << 10

func (t *tail) Write(p []byte) (int, error) {
	if more := t.Len() + len(p) - maxTail; more > 0 {
		t.Next(more)
	}
	return t.Buffer.Write(p)
}
