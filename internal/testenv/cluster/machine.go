package cluster

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// nodeVariable is the environment variable that makes this binary process 1 of a node. It holds a
// machine.
const nodeVariable = "SLICECAST_CLUSTER_NODE"

// machine is what process 1 of a node needs to know.
type machine struct {
	Name string
	// Disk is the folder with what the node writes; see the package documentation.
	Disk string
	// Logs is the folder of the logs of containerd and kubelet.
	Logs string
	// Kubelet is kubelet's command line.
	Kubelet []string
}

const (
	containerdSocket = "/run/containerd/containerd.sock"
	// socketPatience bounds the time in which containerd opens its socket.
	socketPatience = time.Minute
)

// volumes are folders on the node's disk without anything of the machine. Containerd makes overlays
// in the first one, which the kernel allows only on other file systems.
var volumes = []string{"/var/lib/containerd", "/var/lib/kubelet"}

// sysctls are the settings that kubelet would otherwise make for the whole machine, with the values
// that it wants. On a node they are files.
var sysctls = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// runNode is process 1 of a node. It starts containerd, says so on standard output, and keeps
// kubelet running once it has read a line from standard input. It returns when containerd ends.
func runNode(setting string) error {
	var m machine
	if err := json.Unmarshal([]byte(setting), &m); err != nil {
		return err
	}
	// What it starts may be this binary, too.
	err := errors.Join(os.Unsetenv(nodeVariable), os.Setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), unix.Sethostname([]byte(m.Name)))
	if err != nil {
		return err
	}
	logs := map[string]*os.File{}
	for _, name := range []string{"containerd", "kubelet"} {
		if logs[name], err = os.OpenFile(filepath.Join(m.Logs, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err != nil {
			return err
		}
	}
	if err := m.mount(); err != nil {
		return err
	}
	containerd, err := start(logs["containerd"], "containerd", "--config=/etc/kubernetes/containerd.toml")
	if err != nil {
		return err
	}
	if err := awaitSocket(); err != nil {
		return err
	}
	fmt.Println("containerd serves")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return fmt.Errorf("the cluster is gone: %w", err)
	}
	return m.keepKubelet(containerd, logs["kubelet"])
}

// kubeletPause is the time between the end of kubelet and its next start.
const kubeletPause = time.Second

// keepKubelet starts kubelet again whenever it ends. Kubelet relies on that: for example, it ends
// if its first look at the file systems takes long. It also reaps the node's orphans.
func (m *machine) keepKubelet(containerd int, log *os.File) error {
	for {
		kubelet, err := start(log, m.Kubelet[0], m.Kubelet[1:]...)
		if err != nil {
			return err
		}
		var status unix.WaitStatus
		for ended := 0; ended != kubelet; {
			ended, err = unix.Wait4(-1, &status, 0, nil)
			if ended == containerd {
				return errors.New("containerd has ended; see its log")
			}
			if err != nil && !errors.Is(err, unix.EINTR) {
				return err
			}
		}
		fmt.Fprintf(os.Stderr, "kubelet has ended with status %d; see its log. It is started again.\n", status.ExitStatus())
		<-time.After(kubeletPause)
	}
}

// start starts a program of the node and returns its process ID. runNode waits for it.
func start(log *os.File, name string, args ...string) (int, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return 0, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	process, err := os.StartProcess(path, append([]string{name}, args...), &os.ProcAttr{Files: []*os.File{null, log, log}})
	if err != nil {
		return 0, err
	}
	return process.Pid, nil
}

func awaitSocket() error {
	deadline := time.After(socketPatience)
	for {
		conn, err := net.Dial("unix", containerdSocket)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-deadline:
			return fmt.Errorf("containerd does not serve within %s; see its log: %w", socketPatience, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// mount changes the root of the node to one of its own: an overlay of the machine's, whose changes
// are on the disk.
func (m *machine) mount() error {
	root, work := filepath.Join(m.Disk, "root"), filepath.Join(m.Disk, "work")
	if err := errors.Join(os.MkdirAll(root, 0o755), os.MkdirAll(work, 0o755)); err != nil {
		return err
	}
	// The overlay is mounted over its upper layer, where nothing looks for that.
	options := fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", root, work)
	if err := unix.Mount("overlay", root, "overlay", 0, options); err != nil {
		return fmt.Errorf("mount an overlay of /; the kernel must have the file system overlay: %w", err)
	}
	// The folder of kubelet may be on another file system than /.
	binaries := filepath.Dir(m.Kubelet[0])
	mounts := map[string]string{"/sys": "/sys", "/dev": "/dev", binaries: binaries}
	for _, dir := range volumes {
		mounts[dir] = filepath.Join(m.Disk, "volumes", filepath.Base(dir))
	}
	for target, source := range mounts {
		target = filepath.Join(root, target)
		if err := errors.Join(os.MkdirAll(source, 0o755), os.MkdirAll(target, 0o755), bind(source, target)); err != nil {
			return err
		}
	}
	if err := unix.Mount("proc", filepath.Join(root, "proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := m.hideSysctls(root); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", filepath.Join(root, "run"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs on /run: %w", err)
	}
	return enter(root)
}

// enter makes dir the root of the mount namespace, and shares mounts with those of containers.
func enter(dir string) error {
	if err := os.Chdir(dir); err != nil {
		return err
	}
	// The old root is then mounted over the new one, from where it is unmounted.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root to %s: %w", dir, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the old root: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share mounts with containers: %w", err)
	}
	return os.Chdir("/")
}

func (m *machine) hideSysctls(root string) error {
	dir := filepath.Join(m.Disk, "sysctls")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, value := range sysctls {
		path := filepath.Join(dir, strings.ReplaceAll(name, "/", "."))
		if err := errors.Join(os.WriteFile(path, []byte(value+"\n"), 0o644), bind(path, filepath.Join(root, "proc/sys", name))); err != nil {
			return err
		}
	}
	return nil
}

func bind(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, target, err)
	}
	return nil
}

// nodeProcess is the attribute of process 1 of a node: new namespaces but that of the network.
func nodeProcess() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		// Ctrl-C reaches only the program.
		Setpgid: true,
	}
}
