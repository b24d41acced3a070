package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

// The environment variables by which a process hands what Isolate has prepared to the isolated one.
const (
	// dirVariable holds the folder that is visible outside. Its base is the name of the cgroup.
	dirVariable = "SLICECAST_CLUSTER_DIR"
	// listenerVariable holds the number of the descriptor of a listener outside.
	listenerVariable = "SLICECAST_CLUSTER_LISTENER"
	// watchVariable makes this binary the watcher of a folder.
	watchVariable = "SLICECAST_CLUSTER_WATCH"
)

const (
	dirPrefix = "slicecast-cluster-"
	lockName  = "lock"
	// binariesDir and logsDir are folders in the one that is visible outside: of what this module
	// builds, and of the logs of nodes.
	binariesDir = "bin"
	logsDir     = "logs"
)

// init runs the processes that this binary also is: the watcher, and process 1 of a node.
func init() {
	var err error
	switch {
	case os.Getenv(watchVariable) != "":
		err = watch(os.Getenv(watchVariable))
	case os.Getenv(nodeVariable) != "":
		err = runNode(os.Getenv(nodeVariable))
	default:
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Main is [testenv.Main] for tests with clusters. It calls before outside of the namespaces.
func Main(m *testing.M, before ...func() error) { testenv.Main(m, append(before, prepare)...) }

// Isolate is [testenv.Isolate] for programs with clusters. It calls before outside of the
// namespaces. The API server of the cluster can be reached from outside, at a port of loopback.
func Isolate(before ...func() error) { testenv.Isolate(append(before, prepare, listenOutside)...) }

// prepare builds what a cluster consists of and starts the watcher, outside of the namespaces.
func prepare() error {
	if os.Getuid() != 0 {
		return errors.New("a cluster needs root, because containerd does: run it as root")
	}
	removeStale()
	dir, err := makeDir()
	if err != nil {
		return err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	// The watcher sees the end of this process as the end of its standard input. The descriptors
	// stay open until then, without a reference that could be collected.
	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	held = []*os.File{lock, writer}
	watcher := exec.Command("/proc/self/exe")
	watcher.Args[0] = "slicecast-cluster-watcher"
	watcher.Env = append(os.Environ(), watchVariable+"="+dir)
	watcher.Stdin, watcher.Stderr = reader, os.Stderr
	watcher.ExtraFiles = []*os.File{lock}
	// Signals of the terminal do not reach it.
	watcher.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := watcher.Start(); err != nil {
		return fmt.Errorf("start the watcher: %w", err)
	}
	if err := errors.Join(reader.Close(), os.Setenv(dirVariable, dir)); err != nil {
		return err
	}
	return build(context.Background(), filepath.Join(dir, binariesDir))
}

// held is what prepare keeps open until the end of the process.
var held []*os.File

// watch waits for the end of the process that started it, and removes what that left.
func watch(dir string) error {
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return removeTraces(dir)
}

func removeTraces(dir string) error {
	return errors.Join(removeCgroup(filepath.Base(dir)), os.RemoveAll(dir))
}

// removeStale removes what clusters have left whose watchers were killed, too. A watcher and the
// process that started it hold a lock.
func removeStale() {
	stale, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*")) // the pattern is valid
	for _, dir := range stale {
		lock, err := os.Open(filepath.Join(dir, lockName))
		if err != nil {
			continue // just made or just removed by another process
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			if err := removeTraces(dir); err != nil {
				fmt.Fprintf(os.Stderr, "cluster: what an earlier cluster left in %s stays: %v\n", dir, err)
			}
		}
		lock.Close()
	}
}

// makeDir creates the folder that is visible outside.
func makeDir() (string, error) { return os.MkdirTemp("", dirPrefix) }

// lockDir locks a new folder. The lock gets its name once it is held.
func lockDir(dir string) (*os.File, error) {
	lock, err := os.CreateTemp(dir, lockName)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	return lock, os.Rename(lock.Name(), filepath.Join(dir, lockName))
}

// listenOutside opens a listener for the isolated process. A socket stays in the network namespace
// in which it was opened.
func listenOutside() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	held = append(held, file)
	// The copy survives exec, unlike the descriptors that Go opens.
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD, 100)
	if err != nil {
		return fmt.Errorf("duplicate a listener: %w", err)
	}
	return errors.Join(listener.Close(), os.Setenv(listenerVariable, strconv.Itoa(fd)))
}

// outsideListener returns the listener of listenOutside, or nil if there is none.
func outsideListener() (net.Listener, error) {
	number := os.Getenv(listenerVariable)
	if number == "" {
		return nil, nil
	}
	fd, err := strconv.Atoi(number)
	if err != nil {
		return nil, fmt.Errorf("$%s: %w", listenerVariable, err)
	}
	if err := os.Unsetenv(listenerVariable); err != nil {
		return nil, err
	}
	unix.CloseOnExec(fd)
	file := os.NewFile(uintptr(fd), "listener")
	defer file.Close()
	return net.FileListener(file)
}

// components are the programs of Kubernetes that a cluster consists of.
var components = []string{
	"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "kube-proxy", "agnhost",
}

// packages are the commands that nodes and images need, with their Debian packages.
var packages = []string{
	"containerd:containerd", "runc:runc", "/usr/lib/cni/ptp:containernetworking-plugins",
	"iptables:iptables", "nft:nftables", protocols + ":netbase", "conntrack:conntrack", "ip:iproute2", "openssl:openssl",
	"curl:curl", "nc:netcat-openbsd", "dig:bind9-dnsutils",
}

// build installs and builds everything, which takes minutes on a new machine and reports what it
// does on standard error. What this module builds goes to dir.
func build(ctx context.Context, dir string) error {
	root, err := repository.Root()
	if err != nil {
		return err
	}
	if err := run(ctx, root, "internal/tools/packages.sh", packages...); err != nil {
		return err
	}
	for _, component := range components {
		if _, err := controlplane.KubernetesBinary(ctx, component); err != nil {
			return err
		}
	}
	if _, err := CoreDNSBinary(ctx); err != nil {
		return err
	}
	for name, source := range map[string]string{"pause": "./internal/testenv/cluster/pause", "slicecast-server": "./server", "slicecast-agent": "./agent"} {
		if err := run(ctx, root, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(dir, name), source); err != nil {
			return err
		}
	}
	return nil
}

// CoreDNSBinary returns the path of CoreDNS in the version that internal/testenv/coredns pins.
func CoreDNSBinary(ctx context.Context) (string, error) {
	root, err := repository.Root()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "internal/tools/build.sh", "internal/testenv/coredns", "github.com/coredns/coredns")
	cmd.Dir, cmd.Stderr = root, os.Stderr
	path, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("build CoreDNS (see its output): %w", err)
	}
	return strings.TrimSpace(string(path)), nil
}

func run(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // images have no C library
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s (see its output): %w", name, strings.Join(args, " "), err)
	}
	return nil
}
