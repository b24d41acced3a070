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

// The test binary starts itself again as a container runtime does: first as the process that sets the container up
// (containerVariable), then, by exec, as what the image holds (imageVariable).
const (
	containerVariable = "SLICECAST_TEST_CONTAINER"
	imageVariable     = "SLICECAST_TEST_IMAGE"
)

// images holds the commands that stand for the images.
var images = map[string]func() *cobra.Command{
	"slicecast-server": server.NewCommand,
	"slicecast-agent":  agent.NewCommand,
}

// container is how a process is confined. It starts in a mount namespace of its own.
type container struct {
	Mounts   []mount
	UID, GID int
	FSGroup  int
	// Privileged: with all capabilities, and a /proc/sys that is writable.
	Privileged   bool
	Capabilities []string
	NoNewPrivs   bool
}

// mount puts a file or directory where the container sees it.
type mount struct {
	Source, Target string
	ReadOnly       bool
}

// runContainer confines this process and makes it the image's.
func runContainer() {
	runtime.LockOSThread() // capabilities are the thread's, and exec takes this one's
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

// runImage is the command that stands for the image.
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
		fmt.Fprintln(os.Stderr, "container: this user namespace has one user, so the process keeps it")
		return nil
	}
	return err
}

// mount mounts what the container has and makes the rest of the file system read-only, /proc/sys too unless it is privileged.
func (c *container) mount() error {
	for _, m := range c.Mounts {
		// As container runtimes do: one volume may be mounted below another.
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

// capabilities by the names that manifests give them.
var capabilities = map[string]int{"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW}

// dropCapabilities leaves only the container's in the bounding set, which is what root gets at exec.
func (c *container) dropCapabilities() error {
	keep := map[int]bool{}
	for _, name := range c.Capabilities {
		number, ok := capabilities[name]
		if !ok {
			return fmt.Errorf("capability %s is not in this test's table: add it", name)
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
