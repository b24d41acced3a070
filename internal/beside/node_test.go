// This file runs a node with a real kube-proxy and slicecast-agent, and reads from the kernel's
// rules which of the two serves an address.
package beside

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// proxyName is the service-proxy-name of Slicecast.
const proxyName = "slicecast"

const clusterCIDRs = "10.180.0.0/16,fd00:10:180::/48"

// node is a node with kube-proxy and Slicecast.
type node struct {
	*testenv.Node
	t          *testing.T
	mode       string // the mode of kube-proxy
	kubeconfig string
	client     *testenv.Pod
	proxy      *command.Command
	agent      *command.Command
}

// newNode adds a node with a pod to the network and creates its Node object.
func newNode(t *testing.T, network *testenv.Network, control *controlplane.ControlPlane, name, mode string) *node {
	t.Helper()
	n := &node{Node: network.AddNode(name), t: t, mode: mode, kubeconfig: control.Kubeconfig(t, control.AdminConfig())}
	n.client = n.AddPod("client-" + name)
	_, err := control.Client().CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: n.IPv4.String()}, {Type: corev1.NodeInternalIP, Address: n.IPv6.String()},
		}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	return n
}

// startProxy starts kube-proxy with additional flags.
func (n *node) startProxy(more ...string) *command.Command {
	n.t.Helper()
	binary, err := controlplane.KubernetesBinary(n.t.Context(), "kube-proxy")
	require.NoError(n.t, err)
	config, err := json.Marshal(map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
		"mode": n.mode, "hostnameOverride": n.Name, "clusterCIDR": clusterCIDRs,
		"clientConnection": map[string]any{"kubeconfig": n.kubeconfig},
		// Only the initial network namespace may change these settings.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
		// Shorter than the defaults, so that kube-proxy often has a chance to change rules of
		// Slicecast.
		n.mode: map[string]any{"minSyncPeriod": "10ms", "syncPeriod": "1s"},
	})
	require.NoError(n.t, err)
	file := filepath.Join(n.t.TempDir(), "config")
	require.NoError(n.t, os.WriteFile(file, config, 0o600))
	return start(n.t, n.Host, "kube-proxy on "+n.Name, []string{"PATH=" + nftCommands(n.t) + ":" + os.Getenv("PATH")}, binary,
		append(more, "--config="+file, "--v=2")...)
}

// nftCommands returns a folder for PATH in which iptables is the nft variant.
func nftCommands(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, command := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			require.NoError(t, os.Symlink("/usr/sbin/"+command+"-nft"+suffix, filepath.Join(dir, command+suffix)))
		}
	}
	return dir
}

// startAgent starts slicecast-agent with additional flags.
func (n *node) startAgent(more ...string) *command.Command {
	n.t.Helper()
	return start(n.t, n.Host, "slicecast-agent on "+n.Name, []string{agentVariable + "=1"}, "/proc/self/exe",
		append([]string{
			"--node-name=" + n.Name, "--source=kube", "--kubeconfig=" + n.kubeconfig, "--service-proxy-name=" + proxyName,
			"--programmer=iptables", "--iptables-variant=nft", "--cluster-cidr=" + clusterCIDRs, "--log-level=debug",
		}, more...)...)
}

// cleanUp runs "slicecast-agent cleanup".
func (n *node) cleanUp() {
	n.t.Helper()
	c := n.Command(n.t.Context(), "/proc/self/exe", "cleanup")
	c.Env = append(os.Environ(), agentVariable+"=1")
	out, err := c.CombinedOutput()
	require.NoError(n.t, err, "%s", out)
}

// rules returns the rules of kube-proxy and of Slicecast as sorted lines.
func (n *node) rules() (proxys, slicecasts []string) {
	n.t.Helper()
	run := func(name string, args ...string) []string {
		out, err := n.Run(n.t.Context(), name, args...)
		require.NoError(n.t, err)
		return strings.Split(out, "\n")
	}
	for _, command := range []string{"iptables", "ip6tables"} {
		for _, table := range []string{"raw", "mangle", "nat", "filter"} {
			for _, line := range run(command+"-nft-save", "-t", table) {
				line, _, _ = strings.Cut(line, " [") // remove the counters of chains
				line = command + " " + table + ": " + line
				switch {
				case strings.Contains(line, "KUBE-"):
					proxys = append(proxys, line)
				case strings.Contains(line, "SLICECAST-"):
					slicecasts = append(slicecasts, line)
				}
			}
		}
	}
	for _, line := range run("nft", "list", "tables") {
		if family, ok := strings.CutSuffix(line, " kube-proxy"); ok {
			for _, rule := range run("nft", append([]string{"-s", "list"}, strings.Fields(family+" kube-proxy")...)...) {
				proxys = append(proxys, line+": "+rule)
			}
		}
	}
	slices.Sort(proxys)
	slices.Sort(slicecasts)
	return proxys, slicecasts
}

// servedBy returns which proxies have rules for an address: "kube-proxy", "slicecast", "kube-proxy
// and slicecast" or "".
func (n *node) servedBy(address netip.Addr) string {
	n.t.Helper()
	proxys, slicecasts := n.rules()
	has := func(rules []string) bool {
		return slices.ContainsFunc(rules, func(rule string) bool {
			return slices.Contains(strings.FieldsFunc(rule, func(r rune) bool { return strings.ContainsRune(" /,{}", r) }), address.String())
		})
	}
	var who []string
	if has(proxys) {
		who = append(who, "kube-proxy")
	}
	if has(slicecasts) {
		who = append(who, "slicecast")
	}
	return strings.Join(who, " and ")
}

// way is how clients reach a Service.
type way struct {
	from *testenv.Host
	to   netip.AddrPort
}

// ways returns those of a pod and the node, to the cluster IP, and of a client outside, to the node
// port.
func (n *node) ways(s *corev1.Service, outside *testenv.Client) []way {
	cluster := netip.AddrPortFrom(netip.MustParseAddr(s.Spec.ClusterIP), uint16(s.Spec.Ports[0].Port))
	nodePort := netip.AddrPortFrom(n.IPv4, uint16(s.Spec.Ports[0].NodePort))
	return []way{{n.client.Host, cluster}, {n.Host, cluster}, {outside.Host, nodePort}}
}

// serves returns an error unless the backends of a Service answer a pod and the node at the cluster
// IP, and a client outside at the node port. Connections from the pod must keep its address;
// connections from outside must be masqueraded.
func (n *node) serves(s *corev1.Service, outside *testenv.Client, backends []string) error {
	ctx := n.t.Context()
	for _, way := range n.ways(s, outside) {
		result := way.from.Probe(ctx, testenv.TCP, way.to, 20, testenv.ProbeOptions{})
		if !result.All(testenv.Answered) || len(result.Backends()) != len(backends) {
			return fmt.Errorf("on %s: %s from %s to %s: %v", n.Name, s.Name, way.from.Name, way.to, result)
		}
		for _, backend := range backends {
			for _, client := range result.Clients(backend) {
				if masqueraded := client != way.from.IPv4; masqueraded != (way.from == outside.Host) && way.from != n.Host {
					return fmt.Errorf("on %s: %s from %s to %s came from %s", n.Name, s.Name, way.from.Name, way.to, client)
				}
			}
		}
	}
	return nil
}
