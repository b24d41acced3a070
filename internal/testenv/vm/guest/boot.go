package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv/vm/spec"
)

// mount is a call of mount(2). The target directory is created first.
type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.source, m.target, err)
	}
	return nil
}

func mountAll(mounts ...mount) error {
	for _, m := range mounts {
		if err := m.do(); err != nil {
			return err
		}
	}
	return nil
}

func boot() error {
	var s spec.Spec
	text, err := os.ReadFile("/" + spec.File)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("read %s: %w", spec.File, err)
	}
	for _, m := range s.Boot {
		if err := load("/" + filepath.Base(m)); err != nil {
			return err
		}
	}
	if err := mountRoot(); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/kernel/modprobe", []byte(spec.KeptAt+"/bin/modprobe"), 0); err != nil {
		return err
	}
	if err := setUp("lo"); err != nil {
		return err
	}
	if len(s.Ports) > 0 {
		if err := openHost(s.Ports); err != nil {
			return fmt.Errorf("forward ports of the host: %w", err)
		}
	}
	return runAll(s)
}

// mountRoot mounts the host's file system below a writable layer, and makes it the root.
func mountRoot() error {
	if err := mountAll(
		mount{"host", "/host", "9p", unix.MS_RDONLY, "trans=virtio,version=9p2000.L,cache=loose,msize=512000,access=any"},
		mount{"layer", "/layer", "tmpfs", 0, ""},
	); err != nil {
		return err
	}
	for _, dir := range []string{"/layer/upper", "/layer/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := mountAll(
		mount{"root", "/root", "overlay", 0, "lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work"},
		mount{"proc", "/root/proc", "proc", 0, ""},
		mount{"sys", "/root/sys", "sysfs", 0, ""},
		mount{"dev", "/root/dev", "devtmpfs", 0, ""},
		mount{"pts", "/root/dev/pts", "devpts", 0, ""},
		mount{"shm", "/root/dev/shm", "tmpfs", 0, ""},
		mount{"run", "/root/run", "tmpfs", 0, "mode=0755"},
		mount{"/", "/root" + spec.KeptAt, "", unix.MS_BIND, ""},
	); err != nil {
		return err
	}
	if err := unix.Chroot("/root"); err != nil {
		return fmt.Errorf("chroot to the host's file system: %w", err)
	}
	return nil
}

func runAll(s spec.Spec) error {
	ports, err := openPorts()
	if err != nil {
		return err
	}
	results := json.NewEncoder(ports[spec.ResultPort])
	for i, r := range s.Runs {
		if i > 0 {
			if _, err := ports[spec.StdoutPort].WriteString(spec.NextRun); err != nil {
				return err
			}
		}
		cmd := exec.Command(r.Program, r.Args...)
		cmd.Dir = r.Dir
		cmd.Env = r.Env
		cmd.Stdout, cmd.Stderr = ports[spec.StdoutPort], ports[spec.StderrPort]
		result := spec.Result{}
		err := cmd.Run()
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			result.Code = exit.ExitCode()
			if status := exit.Sys().(syscall.WaitStatus); status.Signaled() {
				result.Code = 128 + int(status.Signal())
			}
		} else if err != nil {
			result.Error = err.Error()
		}
		if err := results.Encode(result); err != nil {
			return fmt.Errorf("report to the host how %s ended: %w", r.Program, err)
		}
	}
	return nil
}

// openPorts opens the virtio ports to the host and returns them by name.
func openPorts() (map[string]*os.File, error) {
	ports := map[string]*os.File{}
	names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
	if err != nil {
		return nil, err
	}
	for _, file := range names {
		name, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		device := filepath.Join("/dev", filepath.Base(filepath.Dir(file)))
		// os.OpenFile would make Go poll the port, and polling reports it as ready only once the
		// other end reads. Plain writes block until then, as they should.
		fd, err := unix.Open(device, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", device, err)
		}
		ports[string(bytes.TrimSpace(name))] = os.NewFile(uintptr(fd), device)
	}
	for _, name := range []string{spec.StdoutPort, spec.StderrPort, spec.ResultPort} {
		if ports[name] == nil {
			return nil, fmt.Errorf("no virtio port %q among %s", name, strings.Join(names, " "))
		}
	}
	return ports, nil
}
