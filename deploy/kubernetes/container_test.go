// This file stands for a container runtime: it confines a process as a manifest says, with its
// mounts, its capabilities and a read-only file system, and then executes the image's command.
package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	agent "github.com/slicecast/slicecast/agent/app"
	"github.com/slicecast/slicecast/internal/daemon"
	server "github.com/slicecast/slicecast/server/app"
)

// The test binary runs itself again, like a container runtime: first as the process that sets up
// the container (containerVariable), then, by exec, as the image's command (imageVariable).
const (
	containerVariable = "SLICECAST_TEST_CONTAINER"
	imageVariable     = "SLICECAST_TEST_IMAGE"
)

// images holds the commands that stand for the images, by their names.
var images = map[string]func() *cobra.Command{
	"slicecast-server": server.NewCommand,
	"slicecast-agent":  agent.NewCommand,
}

// container describes how a process is confined. The process starts in its own mount namespace.
type container struct {
	Mounts   []mount
	UID, GID int
	FSGroup  int
	// Privileged means that the process has all capabilities and a writable /proc/sys.
	Privileged   bool
	Capabilities []string
	NoNewPrivs   bool
}

// mount is a file or directory of the machine that is visible at a path in the container.
type mount struct {
	Source, Target string
	ReadOnly       bool
}

// runContainer confines this process and then executes the image's command.
func runContainer() {
	// capabilities belong to a thread, and exec keeps those of the calling thread
	runtime.LockOSThread()
	var c container
	err := json.Unmarshal([]byte(os.Getenv(containerVariable)), &c)
	if err == nil {
		err = c.confine()
	}
	if err == nil {
		err = errors.Join(os.Unsetenv(containerVariable), unix.Exec("/proc/self/exe", os.Args, os.Environ()))
	}
	fmt.Fprintln(os.Stderr, "container:", err)
	os.Exit(1)
}

// runImage runs the command that stands for the image.
func runImage() {
	ctx, stop := daemon.SignalContext(context.Background())
	err := images[os.Getenv(imageVariable)]().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// confine applies the container's restrictions to this process.
func (c *container) confine() error {
	if err := c.mount(); err != nil {
		return err
	}
	if c.Privileged {
		return nil
	}
	if err := c.dropCapabilities(); err != nil {
		return err
	}
	if c.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("no_new_privs: %w", err)
		}
	}
	if c.UID == 0 {
		return nil
	}
	err := errors.Join(syscall.Setgroups([]int{c.FSGroup}), syscall.Setgid(c.GID), syscall.Setuid(c.UID))
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) {
		fmt.Fprintln(os.Stderr, "container: this user namespace has only one user, so the process keeps it")
		return nil
	}
	return err
}

// mount mounts the container's mounts and makes the rest of the file system read-only. Unless the
// container is privileged, that includes /proc/sys.
func (c *container) mount() error {
	for _, m := range c.Mounts {
		// Like container runtimes, create the target, because a volume may be mounted below another
		// one.
		if info, err := os.Stat(m.Source); err != nil {
			return err
		} else if info.IsDir() {
			if err := os.MkdirAll(m.Target, 0o755); err != nil {
				return err
			}
		}
		if err := unix.Mount(m.Source, m.Target, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.Source, m.Target, err)
		}
	}
	readOnly := []string{"/", "/run"}
	if !c.Privileged {
		readOnly = append(readOnly, "/proc/sys")
		if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount /proc/sys: %w", err)
		}
	}
	for _, m := range c.Mounts {
		if m.ReadOnly {
			readOnly = append(readOnly, m.Target)
		}
	}
	for _, path := range readOnly {
		if err := unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("make %s read-only: %w", path, err)
		}
	}
	return nil
}

// capabilities maps the names of capabilities in manifests to their numbers.
var capabilities = map[string]int{"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW}

// dropCapabilities removes all capabilities except the container's from the bounding set. At exec,
// root receives the capabilities in this set.
func (c *container) dropCapabilities() error {
	keep := map[int]bool{}
	for _, name := range c.Capabilities {
		number, ok := capabilities[name]
		if !ok {
			return fmt.Errorf("capability %s is missing in this test's table: add it", name)
		}
		keep[number] = true
	}
	last, err := os.ReadFile("/proc/sys/kernel/cap_last_cap")
	if err != nil {
		return err
	}
	end, err := strconv.Atoi(strings.TrimSpace(string(last)))
	if err != nil {
		return err
	}
	for number := 0; number <= end; number++ {
		if keep[number] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", number, err)
		}
	}
	return nil
}
