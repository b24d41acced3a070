// This test proves that a kube-proxy that comes back by itself is noticed within a minute and named
// in the agents' status, the servers' metrics and an Event, while no connection fails. It also
// proves that the plain manifests remove kube-proxy, and Slicecast itself, as the chart does.
package adopt

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/cluster"
)

const (
	// noticed bounds the time in which a kube-proxy that programs a node is noticed everywhere.
	noticed = time.Minute
	// kubeProxyWarning is what the status of an agent says then.
	kubeProxyWarning = "kube-proxy runs on this node"
)

func init() { paths["kube-proxy-returns"] = kubeProxyReturns }

// kubeProxyReturns installs kube-proxy again, as kubeadm upgrade does, and removes it again. At the
// end kube-proxy is there to stay, and Slicecast goes.
func kubeProxyReturns(t *testing.T) {
	w := start(t, cluster.Options{Nodes: 2, Proxy: cluster.Slicecast}, 2)
	l := w.load()
	w.installKubeProxy()
	began := time.Now()
	for _, node := range w.Nodes {
		testenv.Eventually(t, noticed, func() error {
			if status := w.agentStatus(node); !strings.Contains(status, kubeProxyWarning) {
				return fmt.Errorf("status of %s: %s", node.Name, status)
			}
			return nil
		})
		testenv.Eventually(t, noticed, func() error {
			events, err := w.Client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{
				FieldSelector: "reason=KubeProxyRunning,involvedObject.name=" + node.Name,
			})
			if err == nil && len(events.Items) == 0 {
				err = fmt.Errorf("no Event about %s", node.Name)
			}
			return err
		})
	}
	w.awaitWarnedNodes(len(w.Nodes))
	require.Less(t, time.Since(began), noticed)
	w.logf("kube-proxy is noticed on all nodes after %s", time.Since(began).Round(time.Second))
	w.requireFollows("")
	l.requireSome()
	w.deleteKubeProxy()
	w.runOnNodes("slicecast-cleanup-kube-proxy", "kubernetes", "cleanup-kube-proxy")
	w.awaitWarnedNodes(0)
	for _, node := range w.Nodes {
		w.requireOnly(node, slicecasts)
	}
	w.requireFollows("")
	l.requireSome()
	w.installKubeProxy()
	w.uninstall()
	w.requireUninstalled()
	w.requireFollows("")
	l.requireNoFailure("kube-proxy came back")
}

// agentStatus returns the status of a node's agent.
func (w *walk) agentStatus(node *cluster.Node) string {
	w.t.Helper()
	agent := w.awaitPod(node, cluster.AgentNamespace, agentPods)
	return w.kubectl("--namespace="+cluster.AgentNamespace, "exec", agent, "--", "slicecast-agent", "status")
}

// awaitWarnedNodes waits until the metrics of all servers count as many nodes with a kube-proxy.
// They are read as an observer, with a certificate of the CA that the servers have made.
func (w *walk) awaitWarnedNodes(want int) {
	w.t.Helper()
	secrets := w.Client.CoreV1().Secrets(cluster.ServerNamespace)
	secret, err := secrets.Get(w.t.Context(), "slicecast-server-tls", metav1.GetOptions{})
	require.NoError(w.t, err)
	ca, err := testca.Parse(secret.Data["ca.crt"], secret.Data["ca.key"])
	require.NoError(w.t, err)
	observer, err := ca.Client("observer", "slicecast:observers")
	require.NoError(w.t, err)
	client := &http.Client{Transport: &http.Transport{
		DialContext: w.Nodes[0].DialContext,
		TLSClientConfig: &tls.Config{
			RootCAs: ca.Pool(), Certificates: []tls.Certificate{observer},
			ServerName: "slicecast-server." + cluster.ServerNamespace + ".svc",
		},
	}}
	defer client.CloseIdleConnections()
	testenv.Eventually(w.t, noticed, func() error {
		warned, err := w.warnedNodes(client)
		if err == nil && warned != want {
			err = fmt.Errorf("metrics of the servers: %d nodes with a kube-proxy, want %d", warned, want)
		}
		return err
	})
}

// warnedNodes returns the sum of the metrics of all servers.
func (w *walk) warnedNodes(client *http.Client) (sum int, err error) {
	servers, err := w.Client.CoreV1().Pods(cluster.ServerNamespace).List(w.t.Context(),
		metav1.ListOptions{LabelSelector: serverPods})
	if err != nil {
		return 0, err
	}
	for _, server := range servers.Items {
		request, err := http.NewRequestWithContext(w.t.Context(), http.MethodGet,
			"https://"+server.Status.PodIP+":8474/metrics", http.NoBody)
		if err != nil {
			return 0, err
		}
		response, err := client.Do(request)
		if err != nil {
			return 0, err
		}
		metrics, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			return 0, err
		}
		_, after, found := strings.Cut(string(metrics), "\nslicecast_server_node_warnings{warning=\"kube_proxy\"} ")
		if !found {
			return 0, fmt.Errorf("metrics of %s: no slicecast_server_node_warnings", server.Name)
		}
		var nodes int
		if _, err := fmt.Sscan(after, &nodes); err != nil {
			return 0, err
		}
		sum += nodes
	}
	return sum, nil
}
