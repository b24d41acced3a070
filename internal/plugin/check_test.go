// These tests prove that check finds what is wrong with a cluster, an installation and the rights
// of the user, and that what it says to read exists.
package plugin

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func TestCheckBefore(t *testing.T) {
	e := newEnvironment(t)
	admin := plane.Kubeconfig(t, plane.AdminConfig())
	r := runAs(t.Context(), admin, "check", "--pre", "-o", "wide")
	require.Regexp(t, `ports +- +no Pod in the network of its node and no DaemonSet says that it uses 8475, 10256 or 10249`, r.out)
	require.Equal(t, wrong, r.code, r.out+r.errors)
	require.Regexp(t, `API version +- +Kubernetes v1\.`, r.out)
	require.Regexp(t, `kernel +node-0 +Linux 6.12.1, amd64`, r.out)
	require.Regexp(t, `RBAC +- +you may create`, r.out)
	require.Contains(t, r.out, "FAILED: pod ranges: nothing says which addresses pods have")
	require.Contains(t, r.out, "set podCIDRs to the ranges of all pods")

	// What is wrong is found, with what to do.
	e.nodeWith("old", corev1.NodeSystemInfo{OperatingSystem: "linux", Architecture: "amd64", KernelVersion: "4.19.0-27-amd64"})
	e.nodeWith("mainframe", corev1.NodeSystemInfo{OperatingSystem: "linux", Architecture: "s390x", KernelVersion: "6.1.0"})
	e.lease("old", time.Now().Add(time.Minute))
	e.lease("mainframe", time.Now().Add(-150*time.Second))
	config := plane.Client().CoreV1().ConfigMaps(metav1.NamespaceSystem)
	_, err := config.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm-config"},
		Data:       map[string]string{"ClusterConfiguration": "networking:\n  podSubnet: 10.244.0.0/16\n"},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	defer func() {
		require.NoError(t, config.Delete(context.Background(), "kubeadm-config", metav1.DeleteOptions{}))
	}()
	e.hostPod("kube-proxy-1", "old", 10256, map[string]string{"k8s-app": "kube-proxy"})
	e.hostPod("other", "old", 8475, nil)
	e.hostPod("pages", "old", 10249, nil)
	e.hostPod("kube-proxy-2", "old", 10249, map[string]string{"k8s-app": "kube-proxy"})
	e.hostPortSet("port-mapped", 10256, 1)
	e.hostPortSet("only-written", 10249, 0)
	e.nodeWith("no-lease", corev1.NodeSystemInfo{OperatingSystem: "linux", Architecture: "arm64", KernelVersion: "6.1.0"})
	e.pod(agentNamespace, "outside", "default", "none", "node-0", nil, corev1.PodRunning)
	r = runAs(t.Context(), admin, "check", "--pre")
	require.Equal(t, wrong, r.code, r.out+r.errors)
	for _, text := range []string{
		"WARNING: kernel: old: Linux 4.19.0-27-amd64 is older than what nftables needs",
		"FAILED: kernel: mainframe: there are no images for s390x",
		"FAILED: clock: old: its clock is ",
		"FAILED: clock: mainframe: the node is ready, but its Lease is 2m",
		"FAILED: pod ranges: slicecast-agents/outside: pods have addresses outside of what the chart would use (podSubnet of kubeadm-config)",
		"FAILED: ports: slicecast-agents/other: the port 8475 of its node is taken",
		"FAILED: ports: slicecast-agents/pages: the port 10249 of its node is taken",
		"give the agents another one with agent.config.metricsBindAddress",
		"FAILED: ports: slicecast-agents/port-mapped: the port 10256 of its node is taken",
		"WARNING: clock: node-0: its clock is unknown, because the node is not ready",
		"WARNING: clock: no-lease: its clock is unknown, because its kubelet renews no Lease",
		"WARNING: other proxies: old: a kube-proxy runs",
		"https://github.com/slicecast/slicecast/blob/main/deploy/README.md#ports",
	} {
		require.Contains(t, r.out, text)
	}

	require.NotContains(t, r.out, "kube-proxy-2: the port", "agents wait for it")

	r = runAs(t.Context(), plane.Kubeconfig(t, plane.ConfigFor("nobody")), "check", "--pre")
	require.Equal(t, incomplete, r.code)
	require.Contains(t, r.out, "FAILED: RBAC: you may not create namespaces")
	require.Contains(t, r.out, `NOT CHECKED: kernel: nodes is forbidden: User "nobody"`)
}

// TestCheckWaits checks that check waits for no answer longer than --timeout, and what it advises
// after that and after other failures.
func TestCheckWaits(t *testing.T) {
	newEnvironment(t)
	g := newGate(t)
	kubeconfig := plane.Kubeconfig(t, &rest.Config{Host: g.url})
	ended := make(chan struct{})
	defer close(ended)
	g.answer("/version", func(http.ResponseWriter) { <-ended })
	g.answer("/api/v1/nodes", func(http.ResponseWriter) { <-ended })
	g.answer("/apis/apps/v1/daemonsets", func(w http.ResponseWriter) { http.Error(w, "out of order", http.StatusInternalServerError) })
	g.answer("/.well-known/openid-configuration", func(w http.ResponseWriter) { http.Error(w, "who?", http.StatusUnauthorized) })
	began := time.Now()
	r := runAs(t.Context(), kubeconfig, "check", "--pre", "--timeout=1s")
	require.Less(t, time.Since(began), patience)
	require.Equal(t, incomplete, r.code)
	for _, text := range []string{
		"NOT CHECKED: API version: ask the API server for its version: no answer within 1s (--timeout)",
		"NOT CHECKED: kernel: no answer within 1s (--timeout)\n  do   check again with a longer --timeout",
		"NOT CHECKED: ports: an error on the server",
		"do   check again; if that does not help, look at the API server",
		"NOT CHECKED: token issuer: ",
		"do   log in again",
	} {
		require.Contains(t, r.out, text)
	}
	require.NotContains(t, r.out, "get the rights")
}

func TestCheck(t *testing.T) {
	e := newEnvironment(t)
	r := e.run("check")
	require.Equal(t, wrong, r.code, r.errors)
	require.Contains(t, r.out, "FAILED: servers: no servers")

	address := e.server("server-1")
	a := e.agent("node-a", address)
	e.hostPod("agent-node-0", "node-0", 8475, nil) // not an agent that counts
	e.lease("node-a", time.Now())
	r = e.eventually(fine, []string{"2 warnings"}, "check", "-o", "wide")
	require.Contains(t, r.out, "WARNING: clock: node-0: its clock is unknown")
	require.Contains(t, r.out, "WARNING: nodes: node-0: the node has no agent")
	for _, text := range []string{
		`certificates +slicecast-system/server-1 +until 20`, `clock +slicecast-system/server-1 +within`, `clock +node-a +at most 5s ahead of the API server's, and at most 1m0s behind it`, `nodes +node-a +programmed, nftables`,
		`programmer +- +nftables on 1 node`, `versions +- +everything is devel`, `RBAC +slicecast-system/slicecast-server +the servers' ServiceAccount has its rights`,
		`other proxies +- +no Pod of kube-proxy runs, .* no others were looked for`, `token issuer +- +the API server publishes the keys of https://`,
	} {
		require.Regexp(t, text, r.out)
	}

	a.nack("default/web", "no such table")
	e.eventually(wrong, []string{"FAILED: nodes: node-a: it cannot program Service default/web: no such table"}, "check")
	a.stop()
	e.eventually(wrong, []string{"FAILED: nodes: node-a: its agent follows no server"}, "check")
	e.pod(serverNamespace, "pending", "slicecast-server", "server", "", serverArgs(), corev1.PodPending)
	e.eventually(incomplete, []string{"NOT CHECKED: servers: slicecast-system/pending: the Pod is Pending"}, "check")
}

// TestNodesThatTakeLong checks that a node may be in another state than programmed for a moment
// only.
func TestNodesThatTakeLong(t *testing.T) {
	now := time.Now()
	for _, test := range []struct {
		state   string
		agent   *pb.AgentStatus
		lasting func(*node, time.Duration)
	}{
		{"syncing", &pb.AgentStatus{}, connectedFor},
		{"programming", &pb.AgentStatus{Synced: true}, connectedFor},
		{"behind", &pb.AgentStatus{Synced: true, Programmed: true, LagSequences: 1}, func(n *node, d time.Duration) { n.agent.Lag = durationpb.New(d) }},
		{stale, &pb.AgentStatus{Synced: true, Programmed: true}, func(n *node, d time.Duration) { n.stale = d }},
	} {
		for lasting, want := range map[time.Duration]string{slowChange: passed, slowChange + time.Second: failed} {
			n := node{Node: "node-a", State: test.state, agent: test.agent, now: now}
			n.agent.Since = timestamppb.New(now.Add(-time.Second))
			test.lasting(&n, lasting)
			out := &checks{}
			checkConnections(&nodesReport{nodes: []node{n}}, &cluster{}, out)
			require.Len(t, out.list, 1, test.state)
			require.Equal(t, want, out.list[0].Result, "%s for %v", test.state, lasting)
			require.Contains(t, out.list[0].Found, test.state)
		}
	}
	programmedFor := node{Node: "node-a", State: programmed, agent: &pb.AgentStatus{Synced: true, Programmed: true}, now: now}
	connectedFor(&programmedFor, time.Hour)
	require.Zero(t, programmedFor.lasting())
}

func connectedFor(n *node, d time.Duration) { n.agent.Since = timestamppb.New(n.now.Add(-d)) }

// TestLinks checks that each page and heading that check names exists.
func TestLinks(t *testing.T) {
	for _, file := range []string{"check.go", "check_cluster.go", "check_fleet.go", "check_proxies.go"} {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		links := regexp.MustCompile(`\.begin\("[^"]+", "([^"#]+)#([^"]+)"\)`).FindAllStringSubmatch(string(source), -1)
		require.NotEmpty(t, links)
		for _, link := range links {
			page, err := os.ReadFile(filepath.Join("../..", link[1]))
			require.NoError(t, err)
			var anchors []string
			for _, heading := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(string(page), -1) {
				kept := regexp.MustCompile(`[^a-z0-9 _-]`).ReplaceAllString(strings.ToLower(heading[1]), "")
				anchors = append(anchors, strings.ReplaceAll(kept, " ", "-"))
			}
			require.Contains(t, anchors, link[2], link[1])
		}
	}
}
