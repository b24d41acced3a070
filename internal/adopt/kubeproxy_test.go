// These tests prove that a cluster moves from a kube-proxy DaemonSet to Slicecast and back, whole
// and node by node and Service by Service, and that no connection fails meanwhile. The cluster, its
// kubelets and both proxies are real.
package adopt

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

func init() {
	paths["whole-cluster"] = wholeCluster
	paths["node-by-node"] = nodeByNode
	paths["chosen-services"] = chosenServices
}

// wholeCluster moves all nodes at once, goes back, and uninstalls Slicecast.
func wholeCluster(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.KubeProxy}, 2)

	// What kube-proxy itself does to connections when it is rolled is the measure.
	l := w.load()
	w.kubectl("--namespace=kube-system", "rollout", "restart", "daemonset/kube-proxy")
	w.rollout("kube-system", "daemonset/kube-proxy")
	l.requireNoFailure("kube-proxy rolled")

	l = w.load()
	w.install()
	w.logf("Slicecast is ready beside kube-proxy")
	l.requireSome()
	w.removeKubeProxy()
	w.logf("kube-proxy and its rules are gone")
	for _, node := range w.Nodes {
		w.requireOnly(node, slicecasts)
	}
	w.requireFollows("")
	l.requireSome()

	began := time.Now()
	w.installKubeProxy()
	l.requireSome()
	w.removeAgents()
	w.logf("back with kube-proxy after %s", time.Since(began).Round(time.Second))
	for _, node := range w.Nodes {
		w.requireOnly(node, kubeProxys)
	}
	w.requireFollows("")
	w.helm("uninstall", "--wait")
	w.requireUninstalled()
	w.requireFollows("")
	l.requireNoFailure("to Slicecast and back")
}

// nodeByNode moves one node after the other by a label, and goes back from each step.
func nodeByNode(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.KubeProxy}, 2)
	l := w.load()
	w.installNodeByNode()
	l.requireSome()
	for _, node := range w.Nodes {
		w.requireOnly(node, kubeProxys)
	}
	first, second := w.Nodes[0], w.Nodes[1]
	for _, step := range []struct {
		node *cluster.Node
		move func(*cluster.Node)
		then map[*cluster.Node]owner
	}{
		{first, w.moveNode, map[*cluster.Node]owner{first: slicecasts, second: kubeProxys}},
		{first, w.returnNode, map[*cluster.Node]owner{first: kubeProxys, second: kubeProxys}},
		{first, w.moveNode, map[*cluster.Node]owner{first: slicecasts, second: kubeProxys}},
		{second, w.moveNode, map[*cluster.Node]owner{first: slicecasts, second: slicecasts}},
		{second, w.returnNode, map[*cluster.Node]owner{first: slicecasts, second: kubeProxys}},
		{first, w.returnNode, map[*cluster.Node]owner{first: kubeProxys, second: kubeProxys}},
	} {
		began := time.Now()
		step.move(step.node)
		w.logf("%s moved to %s in %s", step.node.Name, step.then[step.node], time.Since(began).Round(time.Second))
		for node, proxy := range step.then {
			w.requireOnly(node, proxy)
		}
		w.requireFollows("")
		l.requireSome()
	}
	w.helm("uninstall", "--wait")
	w.kubectl("--namespace=kube-system", "patch", "daemonset", "kube-proxy", "--type=merge",
		`--patch={"spec":{"template":{"spec":{"affinity":null}}}}`)
	w.rollout("kube-system", "daemonset/kube-proxy")
	l.requireSome()
	w.requireUninstalled()
	w.requireFollows("")
	l.requireNoFailure("node by node to Slicecast and back")
}

// installNodeByNode lets labels of nodes say what programs them.
func (w *walk) installNodeByNode() {
	w.t.Helper()
	w.kubectl("--namespace=kube-system", "patch", "daemonset", "kube-proxy",
		"--patch-file="+w.deploy("node-by-node", "kube-proxy.yaml"))
	w.rollout("kube-system", "daemonset/kube-proxy")
	w.install("--values=" + w.deploy("node-by-node", "values.yaml"))
}

// label sets the label slicecast.io/proxy of a node.
func (w *walk) label(node *cluster.Node, value string) {
	w.t.Helper()
	w.kubectl("label", "--overwrite", "node", node.Name, "slicecast.io/proxy="+value)
}

// moveNode moves a node from kube-proxy to Slicecast.
func (w *walk) moveNode(node *cluster.Node) {
	w.t.Helper()
	w.label(node, "both")
	agent := w.awaitPod(node, cluster.AgentNamespace, agentPods)
	w.label(node, "slicecast")
	w.waitOn(node, "kube-system", kubeProxyPods, "delete")
	w.kubectl("--namespace="+cluster.AgentNamespace, "exec", agent, "--",
		"slicecast-agent", "cleanup", "--kube-proxy")
}

// returnNode moves a node from Slicecast to kube-proxy.
func (w *walk) returnNode(node *cluster.Node) {
	w.t.Helper()
	w.label(node, "both")
	w.awaitPod(node, "kube-system", kubeProxyPods)
	w.label(node, "cleanup")
	w.waitOn(node, cluster.AgentNamespace, agentPods, "delete")
	w.awaitRules(node, kubeProxys)
	w.runOnNodes("slicecast-cleanup", "node-by-node", "cleanup")
	w.kubectl("label", "node", node.Name, "slicecast.io/proxy-")
}

// waitOn waits until the pods of a node are in a state: create, condition=Ready or delete.
func (w *walk) waitOn(node *cluster.Node, namespace, selector, state string) {
	w.t.Helper()
	w.kubectl("--namespace="+namespace, "wait", "pods", "--for="+state, "--selector="+selector,
		"--field-selector=spec.nodeName="+node.Name, "--timeout="+patience.String())
}

// awaitPod waits until a node has a ready pod, and returns it as kubectl names it.
func (w *walk) awaitPod(node *cluster.Node, namespace, selector string) string {
	w.t.Helper()
	w.waitOn(node, namespace, selector, "create")
	w.waitOn(node, namespace, selector, "condition=Ready")
	return strings.TrimSpace(w.kubectl("--namespace="+namespace, "get", "pods", "--output=name",
		"--selector="+selector, "--field-selector=spec.nodeName="+node.Name))
}

const (
	// proxyLabel is the label of Services that kube-proxy leaves to another proxy, and proxyName is
	// its value for Slicecast.
	proxyLabel = "service.kubernetes.io/service-proxy-name"
	proxyName  = "slicecast"
)

// handovers is the number of times that a Service changes hands in each direction.
const handovers = 5

// chosenServices lets Slicecast serve a chosen Service beside kube-proxy, and goes back.
func chosenServices(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.KubeProxy}, 2)
	l := w.load()

	// What kube-proxy alone does when it is given a Service is the measure.
	for range handovers {
		w.kubectl("label", "service", "web", proxyLabel+"="+proxyName)
		w.awaitServes("web", kubeProxys, false)
		w.handOver(l, "", kubeProxys)
	}

	values := filepath.Join(t.TempDir(), "values.yaml")
	require.NoError(t, os.WriteFile(values, []byte(w.besideValues()), 0o600))
	w.install("--values=" + values)
	l.requireSome()
	w.requireFollows(fmt.Sprintf("%s: %s", proxyLabel, proxyName))
	w.requireFollows("")
	for range handovers {
		w.handOver(l, kubeProxys, slicecasts)
		w.awaitServes("web", kubeProxys, false)
		w.handOver(l, slicecasts, kubeProxys)
		w.awaitServes("web", slicecasts, false)
	}
	for _, node := range w.Nodes {
		require.NotContains(t, w.agentStatus(node), kubeProxyWarning)
	}
	w.removeAgents()
	w.helm("uninstall", "--wait")
	w.requireUninstalled()
	w.requireFollows("")
	l.requireNoFailure("a chosen Service to Slicecast and back")
}

// handOver changes the label of the Service web, and waits until the new owner serves it. No
// request may fail once all clients reach it. An empty owner means that no proxy has served it.
func (w *walk) handOver(l *load, from, to owner) {
	w.t.Helper()
	label := map[owner]string{slicecasts: proxyLabel + "=" + proxyName, kubeProxys: proxyLabel + "-"}[to]
	changed := time.Now()
	w.kubectl("label", "service", "web", label)
	w.awaitServes("web", to, true)
	w.awaitReached("web")
	failed, gap := l.passHandover(changed)
	w.logf("from %q to %q: %d requests failed, the last one began %s after the change of the label", from, to, failed, gap)
}

// besideValues returns the chart's values from docs/adopt.md for chosen Services.
func (w *walk) besideValues() string {
	w.t.Helper()
	page, err := os.ReadFile(filepath.Join(w.deploy(), "..", "docs", "adopt.md"))
	require.NoError(w.t, err)
	_, after, found := strings.Cut(string(page), "```yaml\n# beside.yaml\n")
	require.True(w.t, found, "docs/adopt.md has no beside.yaml")
	values, _, found := strings.Cut(after, "```")
	require.True(w.t, found)
	return values
}

// awaitServes waits until a proxy serves a Service on all nodes, or on none.
func (w *walk) awaitServes(service string, proxy owner, want bool) {
	w.t.Helper()
	found, err := w.Client.CoreV1().Services("default").Get(w.t.Context(), service, metav1.GetOptions{})
	require.NoError(w.t, err)
	for _, node := range w.Nodes {
		testenv.Eventually(w.t, patience, func() error {
			serves, err := w.serves(node, proxy, found.Spec.ClusterIP)
			if err == nil && serves != want {
				err = fmt.Errorf("%s on %s serves %s: %t", proxy, node.Name, service, serves)
			}
			return err
		})
	}
}

// serves reports whether the rules of a proxy on a node contain an IPv4 address.
func (w *walk) serves(node *cluster.Node, proxy owner, address string) (bool, error) {
	list, prefix, match := []string{"nft", "list", "table", "ip", string(proxy)}, "", address+" "
	if *programmer == "iptables" {
		chains := map[owner]string{kubeProxys: "-A KUBE-", slicecasts: "-A SLICECAST-"}
		list, prefix, match = []string{"iptables-save"}, chains[proxy], "-d "+address+"/32 "
	}
	rules, err := node.Command(w.t.Context(), list[0], list[1:]...).CombinedOutput()
	if err != nil {
		return false, fmt.Errorf("rules of %s on %s: %w: %s", proxy, node.Name, err, rules)
	}
	for line := range strings.Lines(string(rules)) {
		if strings.HasPrefix(line, prefix) && strings.Contains(line, match) {
			return true, nil
		}
	}
	return false, nil
}
