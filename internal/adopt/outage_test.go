// These tests prove that Services go on working while parts of a cluster with Slicecast are gone:
// all servers, the API server, a node, or the recent data of etcd. The cluster and its kubelets are
// real.
package adopt

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

var outage = flag.Duration("adopt.outage", time.Minute, "how long servers and the API server are gone")

// churn are pods that come and go. Their names begin like those of web, as clients expect.
const churn = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web-churn}
spec:
  replicas: 1
  selector: {matchLabels: {app: churn}}
  template:
    metadata: {labels: {app: churn}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: churn
        image: ` + cluster.AgnhostImage + `
        args: [netexec]
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1, timeoutSeconds: 20}
`

// churnInterval is the time between two changes of the number of pods.
const churnInterval = 5 * time.Second

func init() {
	paths["servers-gone"] = serversGone
	paths["api-server-gone"] = apiServerGone
	paths["etcd-restored"] = etcdRestored
	paths["server-node-dies"] = serverNodeDies
	paths["new-node"] = newNode
	paths["reboots-alone"] = rebootsAlone
}

// serversGone stops all servers while pods come and go.
func serversGone(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.Slicecast}, 2)
	w.apply(churn)
	w.apply(strings.ReplaceAll(fmt.Sprintf(webService, "churn", ""), "app: web", "app: churn"))
	w.awaitReached("churn")
	l := w.load()
	w.scaleServers(0)
	replicas := 1
	w.during(churnInterval, func() {
		replicas = 6 - replicas // one or five
		w.kubectl("scale", "deployment/web-churn", fmt.Sprintf("--replicas=%d", replicas))
		l.requireSome()
	})
	w.rollout("default", "deployment/web-churn")
	w.scaleServers(2)
	w.requireFollows("")
	startLoad(t, w.clients.ways(t, w.Cluster, "churn")).requireNoFailure("all nodes know the pods that came")
	l.requireNoFailure(fmt.Sprintf("all servers gone for %s", *outage))
}

// apiServerGone stops the API server of a cluster in which node-1 has Slicecast and node-2 has
// kube-proxy, and compares when they follow changes afterwards.
func apiServerGone(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.KubeProxy}, 2)
	w.installNodeByNode()
	w.moveNode(w.Nodes[0])
	w.requireOnly(w.Nodes[0], slicecasts)
	w.requireOnly(w.Nodes[1], kubeProxys)
	l := w.load()
	require.NoError(t, w.ControlPlane.StopAPI())
	w.during(churnInterval, l.requireSome)
	require.NoError(t, w.ControlPlane.StartAPI(t.Context()))
	w.requireFollowsSlices()
	require.NoError(t, w.AwaitNodes(t.Context()))
	l.requireNoFailure(fmt.Sprintf("API server gone for %s", *outage))
}

// followTime is how soon Slicecast must program a new Service once its slices have endpoints. The
// servers wait 7.5 seconds at most before they ask an API server again that has failed.
const followTime = 15 * time.Second

// requireFollowsSlices requires that a node with Slicecast serves a new Service soon after its
// slices exist. The controller that makes them may itself wait for more than a minute before it
// asks the API server again.
func (w *walk) requireFollowsSlices() {
	w.t.Helper()
	began := time.Now()
	w.apply(fmt.Sprintf(webService, "changed", ""))
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	var waits errgroup.Group
	var took [3]time.Duration
	for i, wait := range []func() error{
		func() error { return w.waitForSlices(ctx, "changed") },
		func() error { return waitForTCP(ctx, w.Nodes[0], w.clients.ways(w.t, w.Cluster, "changed")) },
		func() error { return waitForTCP(ctx, w.Nodes[1], w.clients.ways(w.t, w.Cluster, "changed")) },
	} {
		waits.Go(func() error {
			err := wait()
			took[i] = time.Since(began).Round(time.Millisecond)
			return err
		})
	}
	require.NoError(w.t, waits.Wait())
	w.logf("a new Service has slices after %s; Slicecast serves it after %s, kube-proxy after %s",
		took[0], took[1], took[2])
	require.Less(w.t, took[1]-took[0], followTime)
	w.awaitReached("changed")
	w.kubectl("delete", "service", "changed")
}

// waitForSlices waits until a Service has endpoints of both IP families.
func (w *walk) waitForSlices(ctx context.Context, service string) error {
	watch, err := w.Client.DiscoveryV1().EndpointSlices("default").Watch(ctx,
		metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=" + service})
	if err != nil {
		return err
	}
	defer watch.Stop()
	families := map[discoveryv1.AddressType]bool{}
	for event := range watch.ResultChan() {
		if slice, ok := event.Object.(*discoveryv1.EndpointSlice); ok && len(slice.Endpoints) > 0 {
			families[slice.AddressType] = true
		}
		if len(families) == 2 {
			return nil
		}
	}
	return fmt.Errorf("Service %s: families with endpoints before the watch ended: %v", service, families)
}

// waitForTCP waits until a node itself reaches the Service of ways over TCP.
func waitForTCP(ctx context.Context, node *cluster.Node, ways []way) error {
	for _, way := range ways {
		if way.from != node.Host || way.proto != testenv.TCP {
			continue
		}
		err := testenv.WaitFor(ctx, func() error {
			short, cancel := context.WithTimeout(ctx, time.Second) // before there are rules, nothing answers
			defer cancel()
			return way.try(short)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", way, err)
		}
	}
	return nil
}

// during calls f now and then until the time of an outage has passed.
func (w *walk) during(interval time.Duration, f func()) {
	w.t.Helper()
	over, ticker := time.After(*outage), time.NewTicker(interval)
	defer ticker.Stop()
	logged := time.Now()
	for {
		select {
		case <-over:
			return
		case <-ticker.C:
			f()
		}
		if time.Since(logged) > time.Minute {
			logged = time.Now()
			w.logf("no request has failed in the outage")
		}
	}
}

func (w *walk) scaleServers(replicas int) {
	w.t.Helper()
	w.kubectl("--namespace="+cluster.ServerNamespace, "scale", "deployment/slicecast-server",
		fmt.Sprintf("--replicas=%d", replicas))
	if replicas == 0 {
		w.awaitGone(cluster.ServerNamespace, serverPods)
	} else {
		w.rollout(cluster.ServerNamespace, "deployment/slicecast-server")
	}
}

// etcdRestored restores etcd from a backup, which a Service is newer than.
func etcdRestored(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.Slicecast}, 2)
	l := w.load()
	backup, err := w.ControlPlane.BackUpEtcd(t.Context())
	require.NoError(t, err)
	w.apply(fmt.Sprintf(webService, "lost", ""))
	w.awaitReached("lost")
	lost := w.clients.ways(t, w.Cluster, "lost")
	require.NoError(t, w.ControlPlane.RestoreEtcd(t.Context(), backup))
	w.requireFollows("")
	testenv.Eventually(t, patience, func() error {
		if lost[0].try(t.Context()) == nil {
			return fmt.Errorf("%s: answered, although the backup does not have the Service", lost[0])
		}
		return nil
	})
	l.requireNoFailure("etcd restored from a backup")
}

// serverNodeDies stops a node on which a server runs.
func serverNodeDies(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 3}, 1)
	w.kubectl("cordon", "node-1")
	require.NoError(t, w.InstallSlicecast(t.Context(), w.deploy("kubernetes"), nil))
	w.awaitReached("web")
	for _, node := range w.Nodes[1:] {
		w.awaitPod(node, cluster.ServerNamespace, serverPods)
	}
	l := w.load()
	require.NoError(t, w.Nodes[2].Stop())
	w.logf("node-3 with a server has died")
	w.requireFollows("")
	require.NoError(t, w.Nodes[1].Stop())
	w.logf("node-2 with the other server has died")
	l.requireSome()
	require.NoError(t, w.Nodes[2].Start(t.Context()))
	w.requireFollows("")
	l.requireNoFailure("nodes with servers die")
}

// newNode lets agents start on a node whose pod network is not ready, with servers on a node that
// has no agent.
func newNode(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2}, 1)
	old, joins := w.Nodes[0], w.Nodes[1]
	const network, aside = "/etc/kubernetes/cni/pods.conflist", "/etc/kubernetes/pods.conflist"
	w.onNode(joins, "mv", network, aside)
	require.NoError(t, joins.Stop())
	require.NoError(t, joins.Start(t.Context()))
	w.awaitReady(joins, false)
	w.kubectl("cordon", joins.Name)
	w.label(joins, "slicecast")
	require.NoError(t, w.InstallSlicecast(t.Context(), w.deploy("node-by-node"), nil))
	w.awaitReady(joins, false)
	require.Empty(t, w.rules(old, slicecasts), "servers are ready on a node without an agent")
	w.clients = newClients(w.Cluster, joins)
	w.awaitReached("web")
	l := w.load()
	w.logf("the node serves, although its pod network is not ready")
	w.label(old, "slicecast")
	w.rollout(cluster.AgentNamespace, "daemonset/slicecast-agent")
	w.onNode(joins, "cp", aside, network) // containerd does not notice a file that is moved there
	w.awaitReady(joins, true)
	w.requireFollows("")
	l.requireNoFailure("a node joins")
}

// onNode runs a command on a node, which must succeed, and returns what it prints.
func (w *walk) onNode(node *cluster.Node, name string, args ...string) string {
	w.t.Helper()
	out, err := node.Command(w.t.Context(), name, args...).CombinedOutput()
	require.NoError(w.t, err, string(out))
	return string(out)
}

// awaitReady waits until the API says of a node that it is ready, or that it is not.
func (w *walk) awaitReady(node *cluster.Node, ready bool) {
	w.t.Helper()
	w.kubectl("wait", "node", node.Name, fmt.Sprintf("--for=condition=Ready=%t", ready), "--timeout="+patience.String())
}

// hostAgent is the configuration of an agent that systemd runs; see deploy/systemd.
const hostAgent = `
apiVersion: slicecast.io/v1beta1
kind: AgentConfiguration
nodeName: %s
servers: [203.0.113.77:8472]
tls:
  caFile: /etc/slicecast/ca.crt
  serverName: slicecast-server.slicecast-system.svc
  tokenFile: /etc/slicecast/token
clusterCIDR: %s
programmer: %s
checkpoint: /var/lib/slicecast/checkpoint
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`

// installHostAgent does what deploy/README.md says for systemd, except for the unit.
func (w *walk) installHostAgent(node *cluster.Node) {
	w.t.Helper()
	binary, err := os.ReadFile(filepath.Join(w.Dir, "bin", "slicecast-agent"))
	require.NoError(w.t, err)
	namespace := "--namespace=" + cluster.AgentNamespace
	ca := w.kubectl(namespace, "get", "configmap", "slicecast-ca", `--output=jsonpath={.data.ca\.crt}`)
	for path, content := range map[string]string{
		"/usr/local/bin/slicecast-agent": string(binary),
		"/etc/slicecast/agent.yaml":      fmt.Sprintf(hostAgent, node.Name, cluster.PodCIDRs, *programmer),
		"/etc/slicecast/ca.crt":          ca,
		"/etc/slicecast/token":           w.kubectl(namespace, "create", "token", "slicecast-agent", "--audience=slicecast"),
	} {
		install := node.Command(w.t.Context(), "install", "-D", "-m", "700", "/dev/stdin", path)
		install.Stdin = strings.NewReader(content)
		out, err := install.CombinedOutput()
		require.NoError(w.t, err, string(out))
	}
}

// rebootsAlone reboots a node while no server, no API server and no DNS can be reached. An agent
// that the node starts by itself programs it from the checkpoint.
func rebootsAlone(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.Slicecast}, 1)
	node := w.Nodes[1]
	w.installHostAgent(node)
	testenv.Eventually(t, patience, func() error {
		return node.Command(t.Context(), "test", "-s", "/var/lib/slicecast/checkpoint").Run()
	})

	l := w.load()
	ways := w.clients.ways(t, w.Cluster, "web")
	w.kubectl("--namespace=kube-system", "scale", "deployment/coredns", "--replicas=0")
	w.scaleServers(0)
	require.NoError(t, w.ControlPlane.StopAPI())
	require.NoError(t, node.Stop())
	require.NoError(t, node.Start(t.Context()))
	require.Empty(t, w.rules(node, slicecasts))
	w.logf("%s has rebooted", node.Name)
	agent := node.Command(t.Context(), "sh", "-c",
		"echo $$ >/run/agent.pid; exec slicecast-agent --config=/etc/slicecast/agent.yaml")
	agent.Stdout, agent.Stderr = t.Output(), t.Output()
	began := time.Now()
	require.NoError(t, agent.Start())
	for _, way := range ways {
		if way.to.Port() == 80 || way.to.Port() == 90 {
			way.from = node.Host
		} else {
			way.to = netip.AddrPortFrom(node.Addr(way.to.Addr().Is6()), way.to.Port())
		}
		testenv.Eventually(t, patience, func() error { return way.try(t.Context()) })
	}
	w.logf("%s serves from its checkpoint after %s", node.Name, time.Since(began).Round(time.Millisecond))
	l.requireSome()

	require.NoError(t, w.ControlPlane.StartAPI(t.Context()))
	w.onNode(node, "sh", "-c", "kill $(cat /run/agent.pid)")
	require.NoError(t, agent.Wait())
	w.scaleServers(2)
	require.NoError(t, w.AwaitSlicecast(t.Context()))
	w.clients = newClients(w.Cluster, node)
	w.requireFollows("")
	l.requireNoFailure("a node reboots alone")
}
