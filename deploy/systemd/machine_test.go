// This file starts a systemd of its own as process 1 of a machine: a node's network, namespaces for
// everything else, an overlay of this machine's files, and a cgroup that disappears even if the
// tests are killed.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
)

// patience bounds the time of a single step on a slow machine.
const patience = time.Minute

// The variables tell the tests, which run in namespaces, what prepare has made outside.
const (
	cgroupVariable   = "SLICECAST_SYSTEMD_CGROUP"
	binariesVariable = "SLICECAST_SYSTEMD_BINARIES"
)

// dir holds the files of the tests, on a tmpfs that disappears with their namespaces.
const dir = "/run/slicecast-systemd"

func TestMain(m *testing.M) {
	testenv.Isolate(prepare)
	if err := takeBinaries(); err != nil {
		fmt.Fprintln(os.Stderr, "systemd:", err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// prepare builds the commands and makes a cgroup.
func prepare() error {
	if os.Geteuid() != 0 {
		return errors.New("run these tests as root: a systemd needs a cgroup")
	}
	to, err := os.MkdirTemp("", "slicecast-systemd-")
	if err != nil {
		return err
	}
	if err := makeCgroup(to); err != nil {
		return err
	}
	build := exec.Command("go", "build", "-o", to+"/", "./server", "./agent")
	build.Dir, build.Stderr = filepath.Join("..", ".."), os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build the commands: %w", err)
	}
	return os.Setenv(binariesVariable, to)
}

// takeBinaries moves the commands to dir, under the names that they are installed with.
func takeBinaries() error {
	from := os.Getenv(binariesVariable)
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		return err
	}
	for _, name := range []string{"server", "agent"} {
		content, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "bin", "slicecast-"+name), content, 0o755); err != nil {
			return err
		}
	}
	return os.RemoveAll(from)
}

// makeCgroup makes a cgroup for the machine. It starts a process that removes the cgroup, and the
// folder of the commands, once this process has ended for whatever reason: its pipe then has no
// writer any more.
func makeCgroup(binaries string) error {
	mount, err := exec.Command("findmnt", "--noheadings", "--first-only", "--types=cgroup2", "--output=TARGET").Output()
	if err != nil {
		return fmt.Errorf("find the mount of cgroup2: %w: mount one on /sys/fs/cgroup/unified", err)
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	parent := "/"
	for line := range strings.Lines(string(own)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			parent = path
		}
	}
	cgroup, err := os.MkdirTemp(filepath.Join(strings.TrimSpace(string(mount)), parent), "slicecast-systemd-")
	if err != nil {
		return err
	}
	pipe, _, err := os.Pipe()
	if err != nil {
		return err
	}
	remover := exec.Command("sh", "-c", `cat; until grep -q "populated 0" "$0/cgroup.events"; do sleep 0.1; done
		rm -rf "$1"; find "$0" -depth -type d -exec rmdir {} +`, cgroup, binaries)
	remover.Stdin = pipe
	remover.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return errors.Join(remover.Start(), pipe.Close(), os.Setenv(cgroupVariable, cgroup))
}

// boot makes the machine's files and executes systemd. The arguments are its cgroup, a folder for
// mounts, the folder with this package, dir and source, to which it copies the package. The machine
// has none of the units of this one, and targets that only exist.
const boot = `
set -e
cgroup=$1 root=$2 package=$3 dir=$4 source=$5
echo $$ >"$cgroup/cgroup.procs"
exec unshare --cgroup --mount --uts --ipc --pid --fork --kill-child sh -e -c '
	root=$0 package=$1 dir=$2 source=$3
	mount --make-rprivate /
	mount -t tmpfs tmpfs "$root"
	mkdir "$root/upper" "$root/work" "$root/all"
	mount -t overlay overlay -o "lowerdir=/,upperdir=$root/upper,workdir=$root/work" "$root/all"
	root=$root/all
	for bind in /sys /dev; do mount --rbind "$bind" "$root$bind"; done
	mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
	mount -t proc proc "$root/proc"
	for empty in /run /tmp /home /etc/systemd /usr/lib/systemd/system /usr/lib/systemd/system-generators; do
		mkdir -p "$root$empty"
		mount -t tmpfs -o mode=755 tmpfs "$root$empty"
	done
	rm -rf "$root/etc/slicecast" "$root/etc/slicecast-server" "$root/var/lib/slicecast"
	mkdir -p "$root/etc/systemd/system" "$root/usr/local/bin"
	cp "$dir"/bin/* "$root/usr/local/bin"
	mkdir -p "$root$source/deploy"
	cp -r "$package" "$root$source/deploy/systemd"
	cp "$package"/*.service "$root/etc/systemd/system"
	cp -r "$dir/etc/." "$root/etc"
	for target in sysinit basic shutdown network network-online; do
		printf "[Unit]\nDefaultDependencies=no\n" >"$root/etc/systemd/system/$target.target"
	done
	systemd-sysusers --root="$root" "$package/slicecast-server.sysusers"
	chown -R slicecast-server "$root/etc/slicecast-server" 2>/dev/null ||
		chroot "$root" chown -R slicecast-server /etc/slicecast-server
	exec env -i container=slicecast PATH=/usr/sbin:/usr/bin:/sbin:/bin \
		unshare --root="$root" /usr/lib/systemd/systemd --system --unit=basic.target --show-status=no --log-target=console
' "$root" "$package" "$dir" "$source"
`

// machine is a running systemd.
type machine struct {
	node   *testenv.Node
	cgroup string
	init   string // the process ID of its process 1, as the tests see it
}

// start boots a machine on a node. The files in dir/etc are its settings.
func start(t *testing.T, node *testenv.Node) *machine {
	t.Helper()
	root := filepath.Join(dir, "root")
	require.NoError(t, os.MkdirAll(root, 0o755))
	pkg, err := os.Getwd()
	require.NoError(t, err)
	for _, file := range []string{"slicecast-agent.service", "slicecast-server.service", "slicecast-server.sysusers"} {
		_, err := os.ReadFile(file) // go test has to know that the tests depend on what boot copies
		require.NoError(t, err)
	}
	m := &machine{node: node, cgroup: os.Getenv(cgroupVariable)}
	systemd := command.New(t, node.Host, "systemd")
	require.NoError(t, systemd.Start(nil, "sh", "-c", boot, "sh", m.cgroup, root, pkg, dir, source))
	t.Cleanup(func() { require.NoError(t, systemd.Kill()) })
	testenv.Eventually(t, patience, func() error {
		if err := systemd.Check(); err != nil {
			return err
		}
		processes, err := os.ReadFile(filepath.Join(m.cgroup, "init.scope/cgroup.procs"))
		if err != nil {
			return err
		}
		m.init, _, _ = strings.Cut(strings.TrimSpace(string(processes)), "\n")
		_, err = m.systemctl(t.Context(), "is-active", "basic.target")
		return err
	})
	return m
}

// run runs a command on the machine, outside of its units.
func (m *machine) run(ctx context.Context, args ...string) (string, error) {
	enter := []string{"--target=" + m.init, "--mount", "--pid", "--root", "--wd"}
	return m.node.Run(ctx, "nsenter", append(enter, args...)...)
}

func (m *machine) systemctl(ctx context.Context, args ...string) (string, error) {
	return m.run(ctx, append([]string{"systemctl"}, args...)...)
}

// main returns the process ID of a unit, as the tests see it.
func (m *machine) main(t *testing.T, unit string) string {
	t.Helper()
	processes, err := os.ReadFile(filepath.Join(m.cgroup, "system.slice", unit, "cgroup.procs"))
	require.NoError(t, err)
	all := strings.Fields(string(processes))
	require.Len(t, all, 1, "processes of %s", unit)
	return all[0]
}

// touch creates or changes a file as a process sees the machine's files, and returns the error.
func (m *machine) touch(ctx context.Context, pid, path string) error {
	_, err := m.node.Run(ctx, "nsenter", "--target="+pid, "--mount", "--root", "--wd=/", "touch", path)
	return err
}

// status returns a field of /proc/PID/status.
func status(t *testing.T, pid, field string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	require.NoError(t, err)
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("process %s has no field %s", pid, field)
	return ""
}

// capabilities returns the capabilities in a field of /proc/PID/status.
func capabilities(t *testing.T, pid, field string) uint64 {
	t.Helper()
	value, err := strconv.ParseUint(status(t, pid, field), 16, 64)
	require.NoError(t, err)
	return value
}

// copyFile copies a file of this package.
func copyFile(t *testing.T, to, from string, change func(string) string) {
	t.Helper()
	f, err := os.Open(from)
	require.NoError(t, err)
	defer f.Close()
	content, err := io.ReadAll(f)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, []byte(change(string(content))), 0o600))
}
