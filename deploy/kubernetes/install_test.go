// This test proves that the steps in deploy/README.md install a Slicecast that serves, and that its
// cleanup removes everything. The API server, the commands, their confinement and the traffic are
// real; the test stands for the kubelet and the container runtime.
package kubernetes

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/testenv"
)

// TestInstall follows deploy/README.md, with this process in place of the kubelet and the container
// runtime. Nothing but Slicecast programs Services on the node, not even that of the API server.
func TestInstall(t *testing.T) {
	ctx, client := t.Context(), cluster.Client().CoreV1()
	node := network.AddNode("install-node")
	t.Cleanup(node.Delete)
	_, err := client.Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: node.Name},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: node.IPv4.String()}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)

	_, objects := load(t, ".")
	apply(t, objects)
	editSettings(t, node.PodCIDR4.String()+","+node.PodCIDR6.String())

	// Agents may start before the servers have published their CA, and have no file of it for a minute
	// or more: here for ever.
	for _, left := range []string{serverNamespace, agentNamespace} { // by servers that ran before
		err := client.ConfigMaps(left).Delete(ctx, "slicecast-ca", metav1.DeleteOptions{})
		require.True(t, err == nil || apierrors.IsNotFound(err), err)
	}
	agentPod := newPod(t, template(t, objects, "DaemonSet"), "slicecast-agent-0", node.Name, node.Host)
	sysctls := agentPod.start(agentPod.Spec.InitContainers[0])
	require.NoError(t, sysctls.wait())
	require.Contains(t, sysctls.logs.String(), "nf_conntrack_tcp_timeout_established")
	agent := agentPod.start(agentPod.Spec.Containers[0])
	serverPod := newPod(t, template(t, objects, "Deployment"), "slicecast-server-0", node.Name, network.World)
	server := serverPod.start(serverPod.Spec.Containers[0])
	server.awaitReady()
	serverPod.setReady()
	agent.awaitReady()
	require.NotContains(t, agent.logs.String(), "sysctl", "the agent still needs a setting that it may not change")

	address := createService(t, node.AddPod("web"))
	requireReach(t, node, address)
	t.Run("metrics", func(t *testing.T) { requireMetrics(t) })
	t.Run("status", func(t *testing.T) { requireStatus(t, node.Name) })

	// The cleanup removes what kube-proxy may have left, and the Service keeps working.
	_, err = node.Run(ctx, "iptables-nft", "-t", "nat", "-N", "KUBE-SERVICES")
	require.NoError(t, err)
	_, cleanupProxy := load(t, "cleanup-kube-proxy")
	proxyPod := newPod(t, template(t, cleanupProxy, "DaemonSet"), "slicecast-cleanup-kube-proxy-0", node.Name, node.Host)
	require.NoError(t, proxyPod.start(proxyPod.Spec.InitContainers[0]).wait())
	rules, err := node.Run(ctx, "nft", "list", "ruleset")
	require.NoError(t, err)
	require.NotContains(t, rules, "KUBE-")
	require.Contains(t, rules, "table ip slicecast {")

	// The rules and the checkpoint outlive the agent until they are cleaned up.
	require.NoError(t, agent.terminate())
	require.FileExists(t, filepath.Join(hostDir(node.Name, "/var/lib/slicecast"), "checkpoint"))
	result := node.Probe(ctx, testenv.TCP, address, 1, testenv.ProbeOptions{})
	require.True(t, result.All(testenv.Answered), result)
	_, cleanup := load(t, "cleanup")
	cleanupPod := newPod(t, template(t, cleanup, "DaemonSet"), "slicecast-agent-1", node.Name, node.Host)
	require.NoError(t, cleanupPod.start(cleanupPod.Spec.InitContainers[0]).wait())
	left, err := os.ReadDir(hostDir(node.Name, "/var/lib/slicecast"))
	require.NoError(t, err)
	require.Empty(t, left)
	rules, err = node.Run(ctx, "nft", "list", "ruleset")
	require.NoError(t, err)
	require.NotContains(t, strings.ToLower(rules), "slicecast")
	require.NoError(t, server.terminate())
	require.Contains(t, server.logs.String(), "Server stopped")
}

// editSettings sets what README.md says is to be edited.
func editSettings(t *testing.T, ranges string) {
	t.Helper()
	ctx, client := t.Context(), cluster.Client().CoreV1()
	endpoint := netip.MustParseAddrPort(cluster.URL()[len("https://"):])
	const pods = "clusterCIDR: EDIT-THE-POD-RANGES"
	for _, in := range []string{serverNamespace, agentNamespace} {
		settings, err := client.ConfigMaps(in).Get(ctx, "slicecast-config", metav1.GetOptions{})
		require.NoError(t, err)
		settings.Data["apiServerHost"] = endpoint.Addr().String()
		settings.Data["apiServerPort"] = fmt.Sprint(endpoint.Port())
		if in == agentNamespace {
			require.Contains(t, settings.Data["agent.yaml"], pods)
			settings.Data["agent.yaml"] = strings.ReplaceAll(settings.Data["agent.yaml"], pods,
				"clusterCIDR: "+ranges)
		}
		_, err = client.ConfigMaps(in).Update(ctx, settings, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
}

// requireReach requires that the node and a pod reach the Service.
func requireReach(t *testing.T, node *testenv.Node, address netip.AddrPort) {
	t.Helper()
	ctx := t.Context()
	testenv.Eventually(t, deadline, func() error {
		if r := node.Probe(ctx, testenv.TCP, address, 1, testenv.ProbeOptions{}); !r.All(testenv.Answered) {
			return fmt.Errorf("from the node: %v", r)
		}
		return nil
	})
	result := node.AddPod("client").Probe(ctx, testenv.TCP, address, 10, testenv.ProbeOptions{})
	require.Equal(t, map[string]int{"web": 10}, result.Backends(), result)
}

// requireStatus queries the server and the agent through the sockets in their Pods.
func requireStatus(t *testing.T, node string) {
	t.Helper()
	for command, c := range map[string]struct{ socket, says string }{
		"slicecast-server": {"--debug-socket=" + filepath.Join(volumesDir, "slicecast-server-0", "debug", "server.sock"), node},
		"slicecast-agent":  {"--status-socket=" + filepath.Join(volumesDir, "slicecast-agent-0", "run", "agent.sock"), "nftables: --programmer=auto"},
	} {
		testenv.Eventually(t, deadline, func() error {
			var out bytes.Buffer
			status := images[command]()
			status.SetArgs([]string{"status", c.socket})
			status.SetOut(&out)
			if err := status.ExecuteContext(t.Context()); err != nil {
				return err
			}
			if !strings.Contains(out.String(), c.says) || !strings.Contains(out.String(), "programmed") {
				return errors.New(out.String())
			}
			return nil
		})
	}
}

// createService creates a Service without a selector and a slice that leads to a pod. It returns
// the Service's virtual address.
func createService(t *testing.T, backend *testenv.Pod) netip.AddrPort {
	t.Helper()
	const port, targetPort = 80, 8080
	backend.Serve(testenv.TCP, targetPort)
	ctx, client := t.Context(), cluster.Client()
	service, err := client.CoreV1().Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: port}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, client.CoreV1().Services("default").Delete(context.Background(), "web", metav1.DeleteOptions{}))
	})
	_, err = client.DiscoveryV1().EndpointSlices("default").Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Port: ptr.To(int32(targetPort)), Protocol: ptr.To(corev1.ProtocolTCP)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{backend.IPv4.String()}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	return netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), port)
}

// requireMetrics reads the server's metrics with an observer's certificate, made as the README
// says.
func requireMetrics(t *testing.T) {
	t.Helper()
	certificates := t.TempDir()
	secret, err := cluster.Client().CoreV1().Secrets(serverNamespace).Get(t.Context(), "slicecast-server-tls", metav1.GetOptions{})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(certificates, "ca.crt"), secret.Data["ca.crt"], 0o600))
	t.Setenv("CA_KEY", string(secret.Data["ca.key"]))
	shell(t, certificates, "ca_key() { echo \"$CA_KEY\"; }\n"+snippet(t, "observer"))
	observer, err := tls.LoadX509KeyPair(filepath.Join(certificates, "observer.crt"), filepath.Join(certificates, "observer.key"))
	require.NoError(t, err)
	ca, err := os.ReadFile(filepath.Join(certificates, "ca.crt"))
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca))
	transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
		RootCAs: roots, Certificates: []tls.Certificate{observer}, ServerName: "slicecast-server.slicecast-system.svc",
	}}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
		fmt.Sprintf("https://%s/metrics", netip.AddrPortFrom(network.World.IPv4, 8474)), nil)
	require.NoError(t, err)
	response, err := transport.RoundTrip(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode, string(body))
	require.Contains(t, string(body), "slicecast_server_streams 1")
}
