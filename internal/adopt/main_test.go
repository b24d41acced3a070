// This file has what all paths share: the list of paths, and the steps that operators take.
package adopt

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
	"github.com/slicecast/slicecast/internal/testenv/repository"
)

var (
	chosen     = flag.String("adopt.paths", "whole-cluster", "paths of docs/adopt.md, separated by commas; all means all")
	programmer = flag.String("adopt.programmer", "nftables",
		"how kube-proxy and Slicecast program the nodes: nftables or iptables")
)

func TestMain(m *testing.M) {
	flag.Parse()
	cluster.Main(m, buildPrevious, buildHelm)
}

// paths are all paths by their names. The files of the tests add theirs.
var paths = map[string]func(*testing.T){}

// TestPaths walks the chosen paths, each in a cluster of its own.
func TestPaths(t *testing.T) {
	for _, name := range chosenPaths() {
		path := paths[name]
		require.NotNil(t, path, "path %s: choose from %s", name, slices.Sorted(maps.Keys(paths)))
		t.Run(name, path)
	}
}

// chosenPaths returns the names of the chosen paths.
func chosenPaths() []string {
	if *chosen == "all" {
		return slices.Sorted(maps.Keys(paths))
	}
	return strings.Split(*chosen, ",")
}

// walk is a cluster on a path.
type walk struct {
	*cluster.Cluster
	t       *testing.T
	began   time.Time
	clients clients
}

// start starts a cluster with the Service web, whose pods are on the first nodes, and waits until
// clients on the same nodes reach the Service.
func start(t *testing.T, options cluster.Options, servers int) *walk {
	t.Helper()
	w := &walk{t: t, began: time.Now()}
	options.Logf, options.Programmer = w.logf, *programmer
	var err error
	w.Cluster, err = cluster.Start(t.Context(), options)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			w.describe()
		}
		require.NoError(t, w.Stop())
	})
	nodes := w.Nodes[:servers]
	var names []string
	for _, node := range nodes {
		names = append(names, node.Name)
	}
	w.apply(fmt.Sprintf(webPods, strings.Join(names, ", ")))
	w.apply(fmt.Sprintf(webService, "web", ""))
	require.NoError(t, w.AwaitRollout(t.Context(), "default", "daemonset/web"))
	w.clients = newClients(w.Cluster, nodes...)
	if options.Proxy != "" {
		w.awaitReached("web")
	}
	return w
}

// logf logs a line with the time since the start of the path.
func (w *walk) logf(format string, args ...any) {
	w.t.Logf("%5.1fs  %s", time.Since(w.began).Seconds(), fmt.Sprintf(format, args...))
}

// describe logs the state of a cluster in which a path has failed.
func (w *walk) describe() {
	ctx := context.Background()
	for _, args := range [][]string{{"get", "pods", "--all-namespaces", "--output=wide"}, {"events"}} {
		out, err := w.Kubectl(ctx, "", args...)
		w.t.Log(out, err)
	}
	for namespace, selector := range map[string]string{
		cluster.ServerNamespace: "app.kubernetes.io/part-of=slicecast",
		cluster.AgentNamespace:  "app.kubernetes.io/part-of=slicecast",
		"kube-system":           kubeProxyPods,
	} {
		logs, err := w.Kubectl(ctx, "", "--namespace="+namespace, "logs",
			"--selector="+selector, "--tail=40", "--all-containers", "--prefix")
		w.t.Log(logs, err)
	}
}

// kubectl runs kubectl, which must succeed, and returns what it prints.
func (w *walk) kubectl(args ...string) string {
	w.t.Helper()
	out, err := w.Kubectl(w.t.Context(), "", args...)
	require.NoError(w.t, err)
	return out
}

func (w *walk) apply(manifest string) {
	w.t.Helper()
	_, err := w.Kubectl(w.t.Context(), manifest, "apply", "--server-side", "--force-conflicts", "-f", "-")
	require.NoError(w.t, err)
}

// deploy returns the path of a folder in deploy.
func (w *walk) deploy(folder ...string) string {
	w.t.Helper()
	root, err := repository.Root()
	require.NoError(w.t, err)
	return filepath.Join(append([]string{root, "deploy"}, folder...)...)
}

// manifest returns the manifest of a folder in deploy for this cluster.
func (w *walk) manifest(folder ...string) string {
	w.t.Helper()
	manifest, err := w.SlicecastManifest(w.t.Context(), w.deploy(folder...))
	require.NoError(w.t, err)
	return manifest
}

func (w *walk) rollout(namespace, name string) {
	w.t.Helper()
	require.NoError(w.t, w.AwaitRollout(w.t.Context(), namespace, name))
}

// load starts a load on the Service web.
func (w *walk) load() *load {
	w.t.Helper()
	return startLoad(w.t, w.clients.ways(w.t, w.Cluster, "web"))
}

// awaitReached waits until all clients reach a Service.
func (w *walk) awaitReached(service string) {
	w.t.Helper()
	began := time.Now()
	for _, way := range w.clients.ways(w.t, w.Cluster, service) {
		testenv.Eventually(w.t, patience, func() error {
			if err := way.try(w.t.Context()); err != nil {
				return fmt.Errorf("%s: %w", way, err)
			}
			return nil
		})
	}
	w.logf("Service %s is reached after %s", service, time.Since(began).Round(time.Millisecond))
}

// requireFollows requires that a new Service is reached, and deletes it.
func (w *walk) requireFollows(labels string) {
	w.t.Helper()
	w.apply(fmt.Sprintf(webService, "changed", labels))
	w.awaitReached("changed")
	w.kubectl("delete", "service", "changed")
}

// awaitGone waits until a DaemonSet that was deleted has no pods.
func (w *walk) awaitGone(namespace, selector string) {
	w.t.Helper()
	w.kubectl("--namespace="+namespace, "wait", "--for=delete", "pods", "--selector="+selector,
		"--timeout="+patience.String())
}

const (
	kubeProxyPods = "k8s-app=kube-proxy"
	serverPods    = "app.kubernetes.io/name=slicecast-server"
	agentPods     = "app.kubernetes.io/name=slicecast-agent"
)

// deleteKubeProxy deletes kube-proxy, which leaves its rules.
func (w *walk) deleteKubeProxy() {
	w.t.Helper()
	w.kubectl("--namespace=kube-system", "delete", "daemonset", "kube-proxy")
	w.awaitGone("kube-system", kubeProxyPods)
}

// installKubeProxy installs kube-proxy, and waits until it has programmed all nodes.
func (w *walk) installKubeProxy() {
	w.t.Helper()
	require.NoError(w.t, w.InstallKubeProxy(w.t.Context()))
	w.rollout("kube-system", "daemonset/kube-proxy")
	for _, node := range w.Nodes {
		w.awaitRules(node, kubeProxys)
	}
}

// runOnNodes applies a folder with a DaemonSet, and deletes it once it is ready.
func (w *walk) runOnNodes(daemonSet string, folder ...string) {
	w.t.Helper()
	manifest := w.manifest(folder...)
	w.apply(manifest)
	w.rollout(cluster.AgentNamespace, "daemonset/"+daemonSet)
	_, err := w.Kubectl(w.t.Context(), manifest, "delete", "-f", "-")
	require.NoError(w.t, err)
}

// owner is a proxy, as rules name it.
type owner string

// The owners of rules.
const (
	kubeProxys owner = "kube-proxy"
	slicecasts owner = "slicecast"
)

// rules returns the lines of a node's rules that are of an owner.
func (w *walk) rules(node *cluster.Node, of owner) []string {
	w.t.Helper()
	marks := map[owner][]string{
		kubeProxys: {
			"table ip kube-proxy", "table ip6 kube-proxy", "KUBE-SVC", "KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-MARK-MASQ",
		},
		slicecasts: {"table ip slicecast", "table ip6 slicecast", "SLICECAST", ": slicecast"},
	}
	out, err := node.Command(w.t.Context(), "sh", "-c",
		"nft list ruleset; iptables-legacy-save; ip6tables-legacy-save; ipset list -n 2>/dev/null; ip -o link").Output()
	require.NoError(w.t, err)
	var found []string
	for line := range strings.Lines(string(out)) {
		if slices.ContainsFunc(marks[of], func(mark string) bool { return strings.Contains(line, mark) }) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// awaitRules waits until a node has rules of an owner.
func (w *walk) awaitRules(node *cluster.Node, of owner) {
	w.t.Helper()
	testenv.Eventually(w.t, patience, func() error {
		if len(w.rules(node, of)) == 0 {
			return fmt.Errorf("%s has no rules of %s", node.Name, of)
		}
		return nil
	})
}

// requireOnly requires that a node has rules of one of both proxies only.
func (w *walk) requireOnly(node *cluster.Node, of owner) {
	w.t.Helper()
	other := map[owner]owner{kubeProxys: slicecasts, slicecasts: kubeProxys}[of]
	require.NotEmpty(w.t, w.rules(node, of), node.Name)
	require.Empty(w.t, w.rules(node, other), node.Name)
}

// requireUninstalled requires that the API and the nodes have nothing of Slicecast.
func (w *walk) requireUninstalled() {
	w.t.Helper()
	resources := w.kubectl("api-resources", "--verbs=list", "--output=name")
	require.NotContains(w.t, resources, "slicecast")
	kinds := strings.Fields(resources)
	kinds = slices.DeleteFunc(kinds, func(kind string) bool { return strings.HasPrefix(kind, "events") })
	testenv.Eventually(w.t, patience, func() error {
		found := ""
		all := w.kubectl("get", strings.Join(kinds, ","), "--all-namespaces", "--output=name")
		for line := range strings.Lines(all) {
			if strings.Contains(line, "slicecast") {
				found += line
			}
		}
		if found != "" {
			return errors.New("left in the API: " + found)
		}
		return nil
	})
	for _, node := range w.Nodes {
		find := "find /var/lib/slicecast /run/slicecast -type f 2>/dev/null; true"
		out, err := node.Command(w.t.Context(), "sh", "-c", find).Output()
		require.NoError(w.t, err)
		require.Empty(w.t, string(out), "files on %s", node.Name)
		require.Empty(w.t, w.rules(node, slicecasts), node.Name)
	}
}

// uninstall removes the agents with their rules, and then everything else of Slicecast, without
// Helm.
func (w *walk) uninstall() {
	w.t.Helper()
	w.apply(w.manifest("kubernetes", "cleanup"))
	w.rollout(cluster.AgentNamespace, "daemonset/slicecast-agent")
	_, err := w.Kubectl(w.t.Context(), w.manifest("kubernetes"), "delete", "--ignore-not-found", "-f", "-")
	require.NoError(w.t, err)
}
