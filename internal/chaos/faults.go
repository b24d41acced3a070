package chaos

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

// Fault is a kind of faults.
type Fault struct {
	Name string
	// About describes the fault for readers of reports. "the proxy" is Slicecast's agent, or
	// kube-proxy.
	About string
	// SlicecastOnly faults hit parts that clusters with kube-proxy do not have. There, the time of
	// such a fault passes without one.
	SlicecastOnly bool
	// begin causes the fault. It returns what it has hit, and a function that ends the fault, or nil
	// if there is nothing to end.
	begin func(ctx context.Context, r *run, target int) (hit string, end func() error, err error)
}

// Faults are all faults.
var Faults = []Fault{
	{"kill-proxy", "SIGKILL of the proxy of a node", false, proxy(killed)},
	{"stop-proxy", "SIGSTOP of the proxy of a node, and SIGCONT", false, proxy(stopped)},
	{"kill-server", "SIGKILL of a server", true, server(killed)},
	{"stop-server", "SIGSTOP of a server, and SIGCONT", true, server(stopped)},
	{"kill-servers", "SIGKILL of all servers at once", true, killServers},
	{"full-disk", "the file system of a node's checkpoint is full", true, fullDisk},
	{"loss", "30 % of the packets between a node and the servers and API server are lost", false,
		filter(bothWays, "tcp sport %[1]s numgen random mod 100 < 30 drop", "tcp dport %[1]s numgen random mod 100 < 30 drop")},
	{"cut", "no packets between a node and the servers and API server", false,
		filter(bothWays, "tcp sport %[1]s drop", "tcp dport %[1]s drop")},
	{"deaf", "a node receives nothing from the servers and API server", false, filter(incoming, "tcp sport %[1]s drop")},
	{"mute", "a node can send nothing to the servers and API server", false, filter(outgoing, "tcp dport %[1]s drop")},
	{"deaf-server", "a server receives nothing from the API server", true, deafServer},
	{"link-down", "a node sends and receives nothing at all", false, filter(bothWays, `iifname "eth0" drop`, `oifname "eth0" drop`)},
	{"files-proxy", "the proxy of a node can open no more files", false, proxy(filesLimited)},
	{"files-server", "a server can open no more files", true, server(filesLimited)},
	{"oom-proxy", "the kernel kills the proxy of a node for its memory", false, proxy(outOfMemory)},
	{"oom-server", "the kernel kills a server for its memory", true, server(outOfMemory)},
	{"tight-proxy", "the proxy of a node may use 1 MiB more memory than it does", false, proxy(tight)},
	{"flush", "nft flush ruleset on a node", false, flush},
	{"flush-table", "the proxy's table for IPv4 is gone on a node; with iptables, `iptables -t nat -F`", false, flushTable},
	{"kill-api", "SIGKILL of the API server, the controllers and the scheduler, which start again", false, killAPI},
	{"stop-api", "SIGSTOP of the API server, and SIGCONT", false, stopAPI},
	{"compact", "etcd forgets all earlier revisions, and the API server is killed", false, compact},
	{"restore", "etcd goes back to a copy of its data from the begin of the fault", false, restore},
}

// faultNamed returns a fault of [Faults].
func faultNamed(name string) *Fault {
	i := slices.IndexFunc(Faults, func(f Fault) bool { return f.Name == name })
	return &Faults[i]
}

type beginFunc = func(ctx context.Context, r *run, target int) (string, func() error, error)

// on does something to a process. It returns a function that ends it, or nil.
type on func(ctx context.Context, p process) (func() error, error)

func killed(ctx context.Context, p process) (func() error, error) { return nil, p.kill(ctx) }

func stopped(_ context.Context, p process) (func() error, error) {
	return func() error {
		if !p.running() {
			return nil // the kubelet has lost patience
		}
		return p.signal(syscall.SIGCONT)
	}, p.signal(syscall.SIGSTOP)
}

func filesLimited(ctx context.Context, p process) (func() error, error) { return p.limitFiles(ctx) }

func outOfMemory(ctx context.Context, p process) (func() error, error) {
	m, err := p.memory()
	if err != nil {
		return nil, err
	}
	restore, err := m.lower(8 << 20)
	if err != nil {
		return nil, err
	}
	if err := m.fill(ctx); err != nil {
		return nil, errors.Join(err, restore())
	}
	return nil, errors.Join(p.awaitEnd(ctx), restore())
}

func tight(_ context.Context, p process) (func() error, error) {
	m, err := p.memory()
	if err != nil {
		return nil, err
	}
	return m.lower(1 << 20)
}

// node returns the node that a step hits.
func (r *run) node(target int) *cluster.Node { return r.Nodes[target%len(r.Nodes)] }

// proxy does something to the proxy of a node.
func proxy(do on) beginFunc {
	return func(ctx context.Context, r *run, target int) (string, func() error, error) {
		node := r.node(target)
		found, err := r.awaitProcesses(ctx, []*cluster.Node{node}, r.proxyCommand(), 1)
		if err != nil {
			return node.Name, nil, err
		}
		end, err := do(ctx, found[0])
		return node.Name, end, err
	}
}

// proxyCommand returns the beginning of the command line of the nodes' proxies.
func (r *run) proxyCommand() string {
	if r.options.Proxy == cluster.KubeProxy {
		return kubeProxyCommand
	}
	return agentCommand
}

// server does something to a server.
func server(do on) beginFunc {
	return func(ctx context.Context, r *run, target int) (string, func() error, error) {
		found, err := r.awaitProcesses(ctx, r.Nodes, serverCommand, servers)
		if err != nil {
			return "", nil, err
		}
		p := found[target%len(found)]
		end, err := do(ctx, p)
		return "the server on " + p.node.Name, end, err
	}
}

func killServers(ctx context.Context, r *run, _ int) (string, func() error, error) {
	found, err := r.awaitProcesses(ctx, r.Nodes, serverCommand, servers)
	for _, p := range found {
		err = errors.Join(err, p.kill(ctx))
	}
	return fmt.Sprintf("%d servers", len(found)), nil, err
}

// The file system of checkpoints.
const (
	stateDir  = "/var/lib/slicecast"
	stateSize = "8m"
)

// mountState mounts a small file system for the checkpoint on a node.
func mountState(ctx context.Context, node *cluster.Node) error {
	return onNode(ctx, node, "sh", "-c", fmt.Sprintf("mkdir -p %[1]s && mount -t tmpfs -o size=%[2]s tmpfs %[1]s", stateDir, stateSize))
}

// onNode runs a command in the namespaces of a node.
func onNode(ctx context.Context, node *cluster.Node, name string, args ...string) error {
	if out, err := node.Command(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %s %s: %w\n%s", node.Name, name, strings.Join(args, " "), err, out)
	}
	return nil
}

func fullDisk(ctx context.Context, r *run, target int) (string, func() error, error) {
	node := r.node(target)
	// dd ends with an error, as it fills everything.
	err := onNode(ctx, node, "sh", "-c", fmt.Sprintf("dd if=/dev/zero of=%[1]s/filler bs=4k 2>/dev/null; test -s %[1]s/filler", stateDir))
	return node.Name, func() error { return onNode(context.WithoutCancel(ctx), node, "rm", stateDir+"/filler") }, err
}

// The chains of filters, by the way of the packets.
const (
	incoming = "chain in { type filter hook prerouting priority -350; %s; };"
	outgoing = "chain out { type filter hook postrouting priority 350; %s; };"
	bothWays = incoming + " " + outgoing
)

// filter adds rules to a node. In a rule, %[1]s is the set of the ports of servers and API server.
func filter(chains string, rules ...string) beginFunc {
	return func(ctx context.Context, r *run, target int) (string, func() error, error) {
		node := r.node(target)
		ports := fmt.Sprintf("{ 8472, %d }", r.ControlPlane.Port())
		filled := make([]any, len(rules))
		for i, rule := range rules {
			filled[i] = strings.ReplaceAll(rule, "%[1]s", ports)
		}
		end, err := r.addFilter(ctx, node, fmt.Sprintf(chains, filled...))
		return node.Name, end, err
	}
}

// addFilter adds a table with chains to a node. It returns the function that removes the table.
func (r *run) addFilter(ctx context.Context, node *cluster.Node, chains string) (func() error, error) {
	_, err := node.Run(ctx, "nft", "table inet chaos { "+chains+" }")
	return func() error {
		_, err := node.Run(context.WithoutCancel(ctx), "nft", "delete table inet chaos")
		return err
	}, err
}

func deafServer(ctx context.Context, r *run, target int) (string, func() error, error) {
	pods, err := r.Client.CoreV1().Pods(cluster.ServerNamespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=slicecast-server"})
	if err != nil {
		return "", nil, err
	}
	if len(pods.Items) == 0 {
		return "", nil, errors.New("there is no server")
	}
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Spec.NodeName+a.Name, b.Spec.NodeName+b.Name) })
	pod := pods.Items[target%len(pods.Items)]
	address, err := netip.ParseAddr(pod.Status.PodIP)
	if err != nil {
		return "", nil, fmt.Errorf("address of Pod %s: %w", pod.Name, err)
	}
	end, err := r.addFilter(ctx, r.Cluster.Node(pod.Spec.NodeName), fmt.Sprintf(
		"chain forward { type filter hook forward priority 10; ip daddr %s tcp sport %d drop; };", address, r.ControlPlane.Port()))
	return "the server on " + pod.Spec.NodeName, end, err
}

func flush(ctx context.Context, r *run, target int) (string, func() error, error) {
	node := r.node(target)
	_, err := node.Run(ctx, "nft", "flush ruleset")
	return node.Name, nil, err
}

func flushTable(ctx context.Context, r *run, target int) (string, func() error, error) {
	node := r.node(target)
	var err error
	if r.options.Programmer == "iptables" {
		_, err = node.Run(ctx, "iptables-nft", "-t", "nat", "-F")
	} else {
		_, err = node.Run(ctx, "nft", "delete", "table", "ip", string(r.options.Proxy))
	}
	return node.Name, nil, err
}

func killAPI(ctx context.Context, r *run, _ int) (string, func() error, error) {
	return "", func() error { return r.ControlPlane.StartAPI(ctx) }, r.ControlPlane.StopAPI()
}

func stopAPI(_ context.Context, r *run, _ int) (string, func() error, error) {
	return "", r.ControlPlane.APIServer.Resume, r.ControlPlane.APIServer.Pause()
}

// compact also kills the API server, whose cache would serve watches from before the compaction.
func compact(ctx context.Context, r *run, _ int) (string, func() error, error) {
	return "", func() error { return r.ControlPlane.StartAPI(ctx) },
		errors.Join(r.ControlPlane.CompactEtcd(ctx), r.ControlPlane.StopAPI())
}

// killKubelet ends a node's kubelet, which starts again.
const killKubelet = "kill -9 $(grep -la '^[^ ]*/kubelet' /proc/[0-9]*/cmdline | cut -d/ -f3)"

// restore copies etcd's data at the begin, and restores the copy at the end. What was written in
// between is then lost, so the churn writes everything again. As Kubernetes' documentation says of
// a restore, the kubelets start again. The proxies do not.
func restore(ctx context.Context, r *run, _ int) (string, func() error, error) {
	backup, err := r.ControlPlane.BackUpEtcd(ctx)
	return "", func() error {
		if err := r.ControlPlane.RestoreEtcd(ctx, backup); err != nil {
			return err
		}
		for _, node := range r.Nodes {
			if err := onNode(ctx, node, "sh", "-c", killKubelet); err != nil {
				return err
			}
		}
		r.churn.renewAll()
		return nil
	}, err
}
