// This file starts two nodes with agents, which get their state from a server, from replicas, from
// the API server or from files.
package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

const (
	// settleTimeout bounds the time that a change takes from the API to the kernel of every node,
	// on a busy machine.
	settleTimeout = 60 * time.Second
	// clusterCIDRs are the address ranges of pods on all nodes.
	clusterCIDRs = "10.180.0.0/16,fd00:10:180::/48"
	serverPort   = 8472
)

// feed is where the agents of a cluster get their state from.
type feed string

const (
	fromServer   feed = "server"   // a slicecast-server that watches the API server
	fromReplicas feed = "replicas" // several slicecast-servers in pods of a Service; see replicas
	fromKube     feed = "kube"     // the API server, without a slicecast-server
	fromFile     feed = "file"     // a folder of manifests, without a server; see exporter
)

// cluster is two nodes with an agent each, and a Kubernetes namespace for the objects of one test.
//
// Node a's agent uses the nft variant of iptables and node b's agent the legacy variant. Traffic
// through both nodes therefore tests both variants.
type cluster struct {
	t         *testing.T
	cp        *controlplane.ControlPlane
	api       kubernetes.Interface
	namespace string
	a, b      *node

	feed feed
	// dir holds the cluster's files.
	dir string
	// server and the socket for observers; set if feed is fromServer.
	server      *process
	debugSocket string
	serverCA    string
	// replicas is set if feed is fromReplicas.
	replicas *replicas
	// export is set if feed is fromFile.
	export *exporter
}

// node is a node with an agent, and with a pod that belongs to no Service.
type node struct {
	*testenv.Node
	// variant is the variant of iptables: nft or legacy.
	variant string
	agent   *process
	client  *testenv.Pod
}

// newCluster starts a cluster whose agents follow a server.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	return startCluster(t, shared, fromServer)
}

// startCluster starts a cluster whose agents follow the given feed.
func startCluster(t *testing.T, cp *controlplane.ControlPlane, feed feed) *cluster {
	t.Helper()
	c := &cluster{t: t, cp: cp, api: cp.Client(), namespace: cp.Namespace(t), feed: feed, dir: t.TempDir()}
	t.Cleanup(c.deleteServicesAndPods)

	c.a, c.b = c.addNode("a", "nft"), c.addNode("b", "legacy")
	outside.RouteVia(c.a.Node, testenv.ServiceCIDRs()...)
	switch feed {
	case fromServer:
		c.startServer()
	case fromReplicas:
		c.replicas = newReplicas(c)
	case fromFile:
		c.export = newExporter(c)
	}
	for _, n := range c.nodes() {
		n.agent = newProcess(t, n.Host, agentCommand, "agent on "+n.Name, "127.0.0.1:10256", c.agentArgs(n))
		n.agent.Start()
	}
	for _, n := range c.nodes() {
		n.agent.AwaitReady()
	}
	return c
}

func (c *cluster) nodes() []*node { return []*node{c.a, c.b} }

func (c *cluster) addNode(name, variant string) *node {
	c.t.Helper()
	n := &node{Node: network.AddNode(name), variant: variant}
	c.t.Cleanup(n.Delete)
	n.client = n.AddPod("client-" + name)
	nodes := c.api.CoreV1().Nodes()
	_, err := nodes.Create(c.t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.NodeSpec{
			PodCIDR: n.PodCIDR4.String(), PodCIDRs: []string{n.PodCIDR4.String(), n.PodCIDR6.String()},
		},
	}, metav1.CreateOptions{})
	require.NoError(c.t, err)
	c.t.Cleanup(func() { require.NoError(c.t, nodes.Delete(context.Background(), name, metav1.DeleteOptions{})) })
	return n
}

func (c *cluster) startServer() {
	c.t.Helper()
	world := network.World.IPv4
	ca, cert, key := writeServingCertificate(c.t, c.dir, world.String())
	c.serverCA, c.debugSocket = ca, filepath.Join(c.dir, "debug.sock")
	c.server = newProcess(c.t, network.World, serverCommand, "server", "127.0.0.1:8473", []string{
		"--kubeconfig=" + c.cp.Kubeconfig(c.t, c.cp.AdminConfig()),
		fmt.Sprintf("--bind-address=%s:%d", world, serverPort),
		"--tls-cert-file=" + cert,
		"--tls-private-key-file=" + key,
		// Agents present certificates like those of kubelets.
		"--client-ca-file=" + writeFile(c.t, c.dir, "clients.crt", c.cp.AdminConfig().CAData),
		"--debug-socket=" + c.debugSocket,
		"--drain-window=100ms",
		// Frequent heartbeats reveal a node that holds something other than the server.
		"--heartbeat-interval=2s",
	})
	c.t.Cleanup(func() {
		require.NotContains(c.t, c.server.Log(), "A node asks for state again", "a node held other state than the server")
	})
	c.server.Start()
	c.server.AwaitReady()
}

func (c *cluster) agentArgs(n *node) []string {
	args := []string{
		"--node-name=" + n.Name, "--programmer=iptables", "--iptables-variant=" + n.variant, "--cluster-cidr=" + clusterCIDRs, "--nodeport-addresses=0.0.0.0/0,::/0",
	}
	switch c.feed {
	case fromReplicas:
		cert, key := writeClientCertificate(c.t, c.dir, n.Name, c.cp.ConfigFor("system:node:"+n.Name, "system:nodes"))
		args = append(args, "--server-service="+c.replicas.service(), "--server-name="+replicaName, "--kubeconfig="+c.replicas.kubeconfig(),
			"--ca-file="+c.serverCA, "--client-cert-file="+cert, "--client-key-file="+key)
	case fromServer:
		cert, key := writeClientCertificate(c.t, c.dir, n.Name, c.cp.ConfigFor("system:node:"+n.Name, "system:nodes"))
		args = append(args, fmt.Sprintf("--servers=%s:%d", network.World.IPv4, serverPort),
			"--ca-file="+c.serverCA, "--client-cert-file="+cert, "--client-key-file="+key)
	case fromKube:
		args = append(args, "--source=kube", "--kubeconfig="+c.cp.Kubeconfig(c.t, c.cp.AdminConfig()))
	case fromFile:
		args = append(args, "--source=file", "--manifests="+c.export.dir)
	}
	return args
}

// deleteServicesAndPods deletes Services and Pods at once. The deletion of the namespace would
// delete them only later, and until then agents of other tests would program them.
func (c *cluster) deleteServicesAndPods() {
	ctx := context.Background()
	services, err := c.api.CoreV1().Services(c.namespace).List(ctx, metav1.ListOptions{})
	require.NoError(c.t, err)
	for i := range services.Items {
		require.NoError(c.t, c.api.CoreV1().Services(c.namespace).Delete(ctx, services.Items[i].Name, metav1.DeleteOptions{}))
	}
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
	require.NoError(c.t, c.api.CoreV1().Pods(c.namespace).DeleteCollection(ctx, now, metav1.ListOptions{}))
}
