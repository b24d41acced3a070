// These tests prove that a node comes up in a cluster that is not whole: after a reboot with no
// server, no API server and no DNS in reach, and before its network plugin has connected its pods.
package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/testenv"
)

// TestReboot reboots a node, which loses its rules, while nothing of the cluster but other nodes is
// in reach. The agent programs its checkpoint, whichever way it looks for servers.
func TestReboot(t *testing.T) {
	c := newCluster(t)
	checkpoint := filepath.Join(c.dir, "checkpoint")
	args := slices.Concat(c.agentArgs(c.a), []string{"--checkpoint=" + checkpoint})
	servers := slices.Index(args, fmt.Sprintf("--servers=%s:%d", network.World.IPv4, serverPort))
	start := func(looks ...string) {
		t.Helper()
		all := slices.Concat(args[:servers], args[servers+1:], looks)
		c.a.agent = newProcess(t, c.a.Host, agentCommand, "agent on a", "127.0.0.1:10256", all)
		c.a.agent.Start()
		c.a.agent.AwaitReady()
	}
	c.a.agent.Terminate()
	start(args[servers])
	pods := []*pod{c.Pod("web-0", "web", c.b), c.Pod("web-1", "web", c.b)}
	web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort()), udp("udp", 80, onPodPort())))
	c.RequireAnswers(web, 80, pods...)
	c.a.agent.Terminate() // as a machine that shuts down does
	require.FileExists(t, checkpoint)
	serverName, kubeconfig := "--server-name="+network.World.IPv4.String(), c.cp.Kubeconfig(t, c.cp.AdminConfig())
	c.server.Kill()
	require.NoError(t, c.cp.APIServer.Kill())

	for name, looks := range map[string][]string{
		"by name":    {"--servers=slicecast-server.example.com:8472", serverName},
		"in the API": {"--server-service=slicecast-system/slicecast-server", "--kubeconfig=" + kubeconfig, serverName},
	} {
		t.Run(name, func(t *testing.T) {
			c.a.Reboot()
			c.a.client = c.a.AddPod("client-a")
			rules, err := c.a.Run(t.Context(), "iptables-nft-save")
			require.NoError(t, err)
			require.NotContains(t, rules, "SLICECAST")
			start(looks...)
			for _, w := range c.ways(web, 80) {
				if w.from == c.a.Host || w.from == c.a.client.Host {
					require.True(t, w.try(t.Context()).All(testenv.Answered), w)
				}
			}
			c.a.agent.Kill()
		})
	}

	require.NoError(t, c.cp.APIServer.Start(t.Context()))
	c.server.Start()
	start(args[servers])
	c.SetReady(pods[1], false)
	c.RequireAnswers(web, 80, pods[0])
}

// TestKilledBeforeACheckpoint kills an agent that has programmed a change and has not saved it, and
// starts another one while no server is in reach. The change stays in the kernel. Once others have
// removed the rules, the checkpoint is programmed, because old rules are better than none.
func TestKilledBeforeACheckpoint(t *testing.T) {
	for programmer, flush := range map[string][]string{
		"nftables": {"nft", "flush", "table", "ip", "slicecast"},
		"iptables": {"iptables-nft", "-t", "nat", "-F"},
	} {
		t.Run(programmer, func(t *testing.T) {
			c := newCluster(t)
			dir := filepath.Join(c.dir, "checkpoints")
			require.NoError(t, os.Mkdir(dir, 0o700))
			args := append(c.agentArgs(c.a), "--programmer="+programmer, "--checkpoint="+filepath.Join(dir, "checkpoint"))
			c.a.agent.Terminate()
			c.a.agent = newProcess(t, c.a.Host, agentCommand, "agent on a", "127.0.0.1:10256", args)
			c.a.agent.Start()
			c.a.agent.AwaitReady()
			pods := []*pod{c.Pod("web-0", "web", c.b), c.Pod("web-1", "web", c.b)}
			web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort())))
			// leadsTo returns an error unless node a leads to no other pods.
			leadsTo := func(pods ...*pod) error {
				for _, w := range c.ways(web, 80) {
					for range 10 {
						if w.from != c.a.Host && w.from != c.a.client.Host {
							continue
						}
						result := w.try(t.Context())
						if !result.All(testenv.Answered) {
							return fmt.Errorf("%s: %s", w, result)
						}
						for name := range result.Backends() {
							if !slices.Contains(names(pods), name) {
								return fmt.Errorf("%s: %s", w, result)
							}
						}
					}
				}
				return nil
			}
			await := func(pods ...*pod) {
				t.Helper()
				testenv.Eventually(t, settleTimeout, func() error { return leadsTo(pods...) })
			}
			c.AwaitAPI(web, 80, pods)
			await(pods...)
			c.a.agent.Terminate() // writes a checkpoint
			c.a.agent.Start()
			c.a.agent.AwaitReady()
			require.NoError(t, os.Rename(dir, dir+"-away")) // so that no other one is written
			c.SetReady(pods[1], false)
			await(pods[0])
			c.server.Kill()
			c.a.agent.Kill()
			require.NoError(t, os.Rename(dir+"-away", dir))

			c.a.agent.Start()
			c.a.agent.AwaitReady()
			require.NoError(t, leadsTo(pods[0]))
			c.a.agent.AwaitLine("Keeping the rules of the last agent")

			_, err := c.a.Run(t.Context(), flush[0], flush[1:]...)
			require.NoError(t, err)
			c.a.agent.AwaitLine("programming the checkpoint")
			await(pods...)
			require.Error(t, leadsTo(pods[0]), "old rules are better than none")
			c.server.Start()
			await(pods[0])
		})
	}
}

// TestNodeWithoutNetwork adds a node whose network plugin is not ready: it has no pods, no podCIDRs
// and no routes to pods of other nodes. If the servers are in the nodes' network, the agent
// programs the node nevertheless. If they are in pods, it does so once there are routes.
func TestNodeWithoutNetwork(t *testing.T) {
	for _, feed := range []feed{fromServer, fromReplicas} {
		t.Run(string(feed), func(t *testing.T) {
			c := startCluster(t, shared, feed)
			pods := c.Deployment("web", 3)
			web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort())))
			c.RequireAnswers(web, 80, pods...)

			n := &node{Node: network.AddNode("late"), variant: "nft"}
			t.Cleanup(n.Delete)
			routes := func(verb string) {
				t.Helper()
				for _, dst := range []string{"10.180.0.0/16", "fd00:10:180::/48"} {
					_, err := n.Run(t.Context(), "ip", "route", verb, "unreachable", dst)
					require.NoError(t, err)
				}
			}
			routes("add")
			nodes := c.api.CoreV1().Nodes()
			_, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}, metav1.CreateOptions{})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, nodes.Delete(context.Background(), n.Name, metav1.DeleteOptions{})) })
			n.agent = newProcess(t, n.Host, agentCommand, "agent on late", "127.0.0.1:10256", c.agentArgs(n))
			n.agent.Start()
			if feed == fromServer {
				n.agent.AwaitReady()
			} else {
				n.agent.AwaitLine("Cannot reach the server")
				require.NotContains(t, n.agent.Log(), "The node is programmed")
			}

			routes("del")
			patch := fmt.Appendf(nil, `{"spec": {"podCIDR": %q, "podCIDRs": [%q, %q]}}`, n.PodCIDR4, n.PodCIDR4, n.PodCIDR6)
			_, err = nodes.Patch(t.Context(), n.Name, types.MergePatchType, patch, metav1.PatchOptions{})
			require.NoError(t, err)
			n.client = n.AddPod("client-late")
			n.agent.AwaitReady()
			for _, f := range web.frontends(web.Spec.Ports[0]) {
				if f.Address.IsUnspecified() {
					continue
				}
				for _, from := range []*testenv.Host{n.client.Host, n.Host} {
					w := way{from, testenv.TCP, netip.AddrPortFrom(f.Address, f.Port)}
					require.True(t, w.try(t.Context()).All(testenv.Answered), w)
				}
			}
		})
	}
}
