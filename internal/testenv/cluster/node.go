package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// Node is a node of a cluster. Its network namespace can be used as that of any [testenv.Node].
type Node struct {
	*testenv.Node
	// Zone is its topology.kubernetes.io/zone.
	Zone string

	cluster *Cluster
	disk    string // see machine
	booted  bool   // whether it has been started before
	process *exec.Cmd
	ended   chan struct{} // closed once process has ended
}

// cgroup returns the name of the cgroup of the node's pods.
func (n *Node) cgroup() string { return filepath.Base(n.cluster.Dir) + "/" + n.Name }

// logs returns the folder of the node's logs.
func (n *Node) logs() string { return filepath.Join(n.cluster.Dir, logsDir, n.Name) }

// register creates the object of the node, so that it has pod CIDRs before it starts.
func (n *Node) register(ctx context.Context) error {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: map[string]string{corev1.LabelTopologyZone: n.Zone}},
		Spec:       corev1.NodeSpec{PodCIDR: n.PodCIDR4.String(), PodCIDRs: []string{n.PodCIDR4.String(), n.PodCIDR6.String()}},
	}
	_, err := n.cluster.Client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	return err
}

// writeFiles writes the node's configuration to its disk.
func (n *Node) writeFiles() error {
	config := n.cluster.ControlPlane.ConfigFor("system:node:"+n.Name, "system:nodes")
	etc := filepath.Join(n.disk, "root", "etc", "kubernetes")
	if err := errors.Join(os.MkdirAll(filepath.Join(etc, "cni"), 0o755), os.MkdirAll(n.logs(), 0o755)); err != nil {
		return err
	}
	values := map[string]any{"Cgroup": n.cgroup(), "PodCIDR4": n.PodCIDR4, "PodCIDR6": n.PodCIDR6, "DNS": dnsAddresses, "Socket": containerdSocket}
	for name, path := range map[string]string{
		"kubelet.yaml": "kubelet.yaml", "containerd.toml": "containerd.toml", "cni.json": "cni/pods.conflist",
	} {
		content, err := render(name, values)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(etc, path), []byte(content), 0o600); err != nil {
			return err
		}
	}
	hosts := fmt.Sprintf("127.0.0.1 localhost\n::1 localhost\n%s %s\n%s %s\n", n.IPv4, n.Name, n.IPv6, n.Name)
	return errors.Join(
		n.cluster.ControlPlane.WriteKubeconfig(filepath.Join(etc, "kubeconfig"), config),
		os.WriteFile(filepath.Join(etc, "ca.crt"), config.CAData, 0o644),
		os.WriteFile(filepath.Join(n.disk, "root", "etc", "hosts"), []byte(hosts), 0o644),
		os.WriteFile(filepath.Join(n.disk, "root", "etc", "resolv.conf"), []byte("# nothing outside of the cluster has a name\n"), 0o644),
	)
}

// Start boots the node, and returns when kubelet runs. A node that has run before has its disk, but
// new namespaces: no rules, processes or pods.
func (n *Node) Start(ctx context.Context) error {
	if n.process != nil {
		return fmt.Errorf("node %s is running", n.Name)
	}
	if n.booted {
		n.Reboot()
	} else if err := n.writeFiles(); err != nil {
		return err
	}
	if err := createCgroup(n.cgroup()); err != nil {
		return err
	}
	if err := n.boot(ctx); err != nil {
		return fmt.Errorf("start node %s: %w", n.Name, errors.Join(err, n.Stop()))
	}
	n.booted = true
	return nil
}

func (n *Node) boot(ctx context.Context) error {
	kubelet, err := controlplane.KubernetesBinary(ctx, "kubelet")
	if err != nil {
		return err
	}
	setting, err := json.Marshal(machine{Name: n.Name, Disk: n.disk, Logs: n.logs(), Kubelet: []string{
		kubelet, "--config=/etc/kubernetes/kubelet.yaml", "--kubeconfig=/etc/kubernetes/kubeconfig",
		"--hostname-override=" + n.Name, "--node-ip=" + n.IPv4.String() + "," + n.IPv6.String(),
	}})
	if err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(n.logs(), "node.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	// Not with ctx, which ends with the start.
	cmd := exec.Command("/proc/self/exe")
	cmd.Args[0] = "slicecast-node " + n.cgroup()
	cmd.Env = append(os.Environ(), nodeVariable+"="+string(setting))
	cmd.Stderr, cmd.SysProcAttr = log, nodeProcess()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := n.Do(cmd.Start); err != nil {
		return err
	}
	n.process, n.ended = cmd, make(chan struct{})
	_, readErr := bufio.NewReader(stdout).ReadString('\n')
	go func() {
		_ = cmd.Wait() // the log says how it ended
		close(n.ended)
	}()
	if readErr != nil {
		return fmt.Errorf("it ended; see its logs in %s\n%s", n.logs(), n.logTails())
	}
	if !n.booted {
		if err := n.Import(ctx, n.cluster.images); err != nil {
			return err
		}
	}
	_, err = io.WriteString(stdin, "\n")
	return err
}

// Stop ends the node at once, like a power failure. Its object stays.
func (n *Node) Stop() error {
	if n.process == nil {
		return nil
	}
	if err := n.process.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop node %s: %w", n.Name, err)
	}
	<-n.ended
	n.process = nil
	_, err := n.Run(context.Background(), "ip", "link", "set", "eth0", "down")
	return errors.Join(err, removeCgroup(n.cgroup()))
}

// Command is [exec.CommandContext] in all namespaces of the node, which must be running.
func (n *Node) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	enter := []string{"--target=" + strconv.Itoa(n.process.Process.Pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--", name}
	return exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
}

// Import loads the images of a file, such as that of [WriteImages], into the node's containerd.
func (n *Node) Import(ctx context.Context, path string) error {
	images, err := os.Open(path)
	if err != nil {
		return err
	}
	defer images.Close()
	cmd := n.Command(ctx, "ctr", "--address="+containerdSocket, "--namespace=k8s.io", "images", "import", "-")
	cmd.Stdin = images
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("import %s on %s: %w\n%s", path, n.Name, err, out)
	}
	return nil
}

// logTails returns the ends of the node's logs: those of its process 1, containerd and kubelet.
func (n *Node) logTails() string {
	const lines = 20
	var tails strings.Builder
	for _, name := range []string{"node", "containerd", "kubelet"} {
		content, err := os.ReadFile(filepath.Join(n.logs(), name+".log"))
		if err != nil {
			content = []byte(err.Error())
		}
		all := strings.Split(strings.TrimSpace(string(content)), "\n")
		fmt.Fprintf(&tails, "---- end of the log of %s of %s:\n%s\n", name, n.Name, strings.Join(all[max(0, len(all)-lines):], "\n"))
	}
	return tails.String()
}

// render fills in a file of the folder manifests.
func render(name string, values any) (string, error) {
	parsed, err := template.ParseFS(manifests, "manifests/"+name)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	err = parsed.Option("missingkey=error").Execute(&out, values)
	return out.String(), err
}
