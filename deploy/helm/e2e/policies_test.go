// This test proves that the chart's NetworkPolicies let agents, kubelets and chosen scrapers reach
// the servers, and nobody else anything in the servers' namespace. kube-router enforces them, over
// IPv4 only: kube-router 2.1.0 refers to its sets of IPv6 addresses by wrong names.
package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

func init() {
	installs["network-policies"] = networkPolicies
	tools["network-policies"] = []string{"sh", "-ec", `internal/tools/packages.sh ipset:ipset >&2
		internal/tools/build.sh internal/testenv/kuberouter github.com/cloudnativelabs/kube-router/v2/cmd/kube-router`}
}

// peer is a DaemonSet whose pods listen at peerPort. The arguments are its namespace and its name.
const peer = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: %[2]s, namespace: %[1]s}
spec:
  selector: {matchLabels: {app: %[2]s}}
  template:
    metadata: {labels: {app: %[2]s}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {runAsNonRoot: true, runAsUser: 65534, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: peer
        image: ` + cluster.AgnhostImage + `
        args: [netexec]
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`

// The ports of a server, and that of a peer.
const grpcPort, healthPort, metricsPort, peerPort = 8472, 8473, 8474, 8080

func networkPolicies(t *testing.T) {
	i := start(t)
	for _, node := range i.Nodes {
		i.startKubeRouter(node)
	}
	i.helm("install", "slicecast", "../slicecast",
		"--set-json=networkPolicies.metricsFrom=[{\"namespaceSelector\":{\"matchLabels\":{\"kubernetes.io/metadata.name\":\"monitoring\"}}}]")
	i.rollout(servers, "deployment/slicecast-server")
	i.rollout(agents, "daemonset/slicecast-agent")
	i.requireService()
	i.requireStatus()

	i.kubectl("create", "namespace", "monitoring")
	scrapers, strangers, bystanders := i.peers("monitoring", "scraper"), i.peers("default", "stranger"), i.peers(servers, "bystander")
	var targets []pod
	for _, address := range i.serverAddresses() {
		targets = append(targets, pod{address: address})
	}
	i.requireReach(scrapers, targets, metricsPort, true)
	i.requireReach(strangers, targets, metricsPort, false)
	i.requireReach(bystanders, targets, metricsPort, false)
	i.requireReach(strangers, bystanders, peerPort, false)
	i.requireReach(bystanders, strangers, peerPort, false)
	i.requireReach(strangers, scrapers, peerPort, true)
	// Anybody may try to connect as an agent; the servers authenticate them.
	i.requireReach(strangers, targets, grpcPort, true)
	i.requireReach(strangers, targets, healthPort, true)
	i.scrape(scrapers, targets)

	// Agents that start now reach the servers.
	i.kubectl("--namespace="+agents, "rollout", "restart", "daemonset/slicecast-agent")
	i.rollout(agents, "daemonset/slicecast-agent")
	i.requireService()
	i.requireStatus()

	// It is the policies that close ports.
	i.helm("upgrade", "slicecast", "../slicecast", "--reuse-values", "--set=networkPolicies.enabled=false")
	i.requireReach(strangers, targets, metricsPort, true)
	i.requireReach(strangers, bystanders, peerPort, true)
	i.requireReach(bystanders, strangers, peerPort, true)
}

// startKubeRouter starts kube-router on a node, for nothing but NetworkPolicies.
func (i install) startKubeRouter(node *cluster.Node) {
	i.Helper()
	const program, config = "/usr/local/bin/kube-router", "/etc/kubernetes/kube-router"
	for path, source := range map[string]string{program: tool("network-policies"), config: i.Kubeconfig} {
		content, err := os.Open(source)
		require.NoError(i, err)
		defer content.Close()
		copied := node.Command(i.Context(), "install", "-D", "-m", "700", "/dev/stdin", path)
		copied.Stdin = content
		out, err := copied.CombinedOutput()
		require.NoError(i, err, string(out))
	}
	router := node.Command(i.Context(), program, "--kubeconfig="+config, "--hostname-override="+node.Name,
		"--run-firewall", "--run-router=false", "--run-service-proxy=false",
		"--service-cluster-ip-range="+testenv.ServiceCIDRs()[0].String())
	i.startUntilEnd(router, "kube-router on "+node.Name)
	testenv.Eventually(i.T, patience, func() error {
		rules, err := node.Command(i.Context(), "iptables-save", "-t", "filter").CombinedOutput()
		if err == nil && !strings.Contains(string(rules), "-A FORWARD -m comment --comment \"kube-router netpol") {
			err = fmt.Errorf("kube-router on %s: %s", node.Name, rules)
		}
		return err
	})
}

// pod is a pod that others connect to, or from which connections are made.
type pod struct{ namespace, name, address string }

// peers creates the peers of a name, one on each node.
func (i install) peers(namespace, name string) (peers []pod) {
	i.Helper()
	i.apply(fmt.Sprintf(peer, namespace, name))
	i.rollout(namespace, "daemonset/"+name)
	list, err := i.Client.CoreV1().Pods(namespace).List(i.Context(), metav1.ListOptions{LabelSelector: "app=" + name})
	require.NoError(i, err)
	for _, p := range list.Items {
		peers = append(peers, pod{namespace, p.Name, p.Status.PodIP})
	}
	require.Len(i, peers, len(i.Nodes))
	return peers
}

// requireReach requires that each of some pods connects to a port of each of others, or that none
// does. Policies apply a moment after they or the pods have changed.
func (i install) requireReach(from, to []pod, port int, want bool) {
	i.Helper()
	for _, f := range from {
		for _, t := range to {
			target := fmt.Sprintf("%s:%d", t.address, port)
			testenv.Eventually(i.T, patience, func() error {
				out, err := i.Kubectl(i.Context(), "", "--namespace="+f.namespace, "exec", f.name, "--",
					"/agnhost", "connect", "--timeout=2s", target)
				if want {
					return err
				}
				if err == nil {
					return fmt.Errorf("%s/%s reaches %s", f.namespace, f.name, target)
				}
				if !strings.Contains(out, "REFUSED") && !strings.Contains(out, "TIMEOUT") {
					return err
				}
				return nil
			})
		}
	}
}

// scrape requires that pods read the metrics of servers with an observer's certificate.
func (i install) scrape(from, to []pod) {
	i.Helper()
	dir := i.TempDir()
	i.run(dir, [2]string{"docs/configuration.md", "client-certificate"})
	for _, f := range from {
		for _, file := range []string{"ca.crt", "observer.crt", "observer.key"} {
			content, err := os.ReadFile(filepath.Join(dir, file))
			require.NoError(i, err)
			_, err = i.Kubectl(i.Context(), string(content), "--namespace="+f.namespace, "exec", "--stdin", f.name, "--",
				"sh", "-c", "cat >/tmp/"+file)
			require.NoError(i, err)
		}
		for _, t := range to {
			metrics := i.kubectl("--namespace="+f.namespace, "exec", f.name, "--", "curl", "-sS", "-m5",
				"--cacert", "/tmp/ca.crt", "--cert", "/tmp/observer.crt", "--key", "/tmp/observer.key",
				"--connect-to", serverName+":8474:"+t.address+":8474", "https://"+serverName+":8474/metrics")
			require.Contains(i, metrics, "\nslicecast_server_streams ")
		}
	}
}
