// This test proves that a real kube-proxy that comes back is noticed within a minute, and named by
// the agents, the server and Events, while connections go on and follow changes. That holds
// although agents have its ports, and also if agents do not see its process, as in another
// container. It is over once kube-proxy and its rules are gone.
package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// noticeTimeout is how soon a kube-proxy must be noticed.
const noticeTimeout = time.Minute

// startKubeProxy starts a kube-proxy on a node, as a process with the given name and with the
// node's variant of iptables.
func (c *cluster) startKubeProxy(n *node, mode, name string) *command.Command {
	c.t.Helper()
	binary, err := controlplane.KubernetesBinary(c.t.Context(), "kube-proxy")
	require.NoError(c.t, err)
	config, err := json.Marshal(map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
		"mode": mode, "hostnameOverride": n.Name, "clusterCIDR": clusterCIDRs, "nodePortAddresses": []string{"0.0.0.0/0", "::/0"},
		"clientConnection": map[string]any{"kubeconfig": c.cp.Kubeconfig(c.t, c.cp.AdminConfig())},
		// Only the initial network namespace may change these settings.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	})
	require.NoError(c.t, err)
	commands := c.t.TempDir()
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			require.NoError(c.t, os.Symlink("/usr/sbin/"+name+"-"+n.variant+suffix, filepath.Join(commands, name+suffix)))
		}
	}
	require.NoError(c.t, os.Symlink(binary, filepath.Join(commands, name)))
	proxy := command.New(c.t, n.Host, "kube-proxy on "+n.Name)
	require.NoError(c.t, proxy.Start([]string{"PATH=" + commands + ":" + os.Getenv("PATH")}, filepath.Join(commands, name),
		"--config="+writeFile(c.t, c.t.TempDir(), "config", config)))
	return proxy
}

// setAddresses writes the addresses of a Node, for which kube-proxy waits.
func (c *cluster) setAddresses(n *node) {
	c.t.Helper()
	node, err := c.api.CoreV1().Nodes().Get(c.t.Context(), n.Name, metav1.GetOptions{})
	require.NoError(c.t, err)
	for _, a := range []netip.Addr{n.IPv4, n.IPv6} {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	_, err = c.api.CoreV1().Nodes().UpdateStatus(c.t.Context(), node, metav1.UpdateOptions{})
	require.NoError(c.t, err)
}

func TestKubeProxyComesBack(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 4)
	web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort()), udp("udp", 80, onPodPort())))
	c.RequireAnswers(web, 80, pods...)
	status := func() string {
		t.Helper()
		out, err := c.a.Run(t.Context(), filepath.Join(binaries, serverCommand), "status", "--debug-socket="+c.debugSocket)
		require.NoError(t, err)
		return out
	}
	require.NotContains(t, status(), "kube_proxy")
	for _, n := range c.nodes() {
		c.setAddresses(n)
	}
	connections, prober := c.Connect(web, 80), c.ProbeAllTheTime(web, 80)

	started := time.Now()
	proxies := []*command.Command{c.startKubeProxy(c.a, "iptables", "kube-proxy"), c.startKubeProxy(c.b, "nftables", "hidden")}
	testenv.Eventually(t, noticeTimeout, func() error {
		if out := status(); !strings.Contains(out, "kube_proxy on 2 nodes") {
			return fmt.Errorf("not noticed: %s", out)
		}
		return nil
	})
	for _, n := range c.nodes() {
		require.Contains(t, n.agent.Log(), "kube-proxy runs on this node")
		testenv.Eventually(t, noticeTimeout-time.Since(started), func() error {
			events, err := c.api.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{
				FieldSelector: "reason=KubeProxyRunning,involvedObject.kind=Node,involvedObject.name=" + n.Name,
			})
			if err == nil && len(events.Items) == 0 {
				err = fmt.Errorf("no Event about %s", n.Name)
			}
			return err
		})
	}

	require.Contains(t, c.a.agent.Log(), "kube-proxy runs on this node (process ")
	require.Contains(t, c.b.agent.Log(), "it has made rules: the IPv4 chain nat-prerouting in table kube-proxy")

	// kube-proxy programs the same Services, so both have to follow what happens now.
	c.awaitKubeProxy(web)
	c.SetReady(pods[0], false)
	testenv.Eventually(t, settleTimeout, func() error {
		for _, w := range c.ways(web, 80) {
			if result := w.try(t.Context()); result.Backends()[pods[0].Name] > 0 {
				return fmt.Errorf("%s: a pod answers that is not ready", w)
			}
		}
		return nil
	})
	c.SetReady(pods[0], true)
	for _, p := range proxies {
		require.NoError(t, p.Stop())
	}
	for _, n := range c.nodes() {
		out, err := n.Run(t.Context(), filepath.Join(binaries, agentCommand), "cleanup", "--kube-proxy")
		require.NoError(t, err, out)
	}
	connections.RequireAlive()
	prober.RequireNoFailure()
	testenv.Eventually(t, noticeTimeout, func() error {
		if out := status(); strings.Contains(out, "kube_proxy") {
			return fmt.Errorf("still noticed: %s", out)
		}
		return nil
	})
	c.RequireAnswers(web, 80, pods...)
}

// awaitKubeProxy waits until the kube-proxies on both nodes have programmed a Service.
func (c *cluster) awaitKubeProxy(s *service) {
	c.t.Helper()
	testenv.Eventually(c.t, settleTimeout, func() error {
		chains, err := c.a.Run(c.t.Context(), "iptables-nft-save", "-t", "nat")
		if err != nil {
			return err
		}
		table, err := c.b.Run(c.t.Context(), "nft", "list", "table", "ip", "kube-proxy")
		if err != nil {
			return err
		}
		if !strings.Contains(chains, "-A KUBE-SERVICES -d "+s.Spec.ClusterIP) || !strings.Contains(table, s.Spec.ClusterIP) {
			return fmt.Errorf("kube-proxy does not have %s yet", s.Spec.ClusterIP)
		}
		return nil
	})
}
