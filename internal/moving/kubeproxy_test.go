// TestFromKubeProxy proves that Slicecast takes over a node from a real kube-proxy without a
// refused connection, and that kube-proxy's rules then go, and a kubelet's stay.
package moving

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// TestFromKubeProxy lets Slicecast take over a node from a real kube-proxy and remove kube-proxy's
// rules, during a stream of connections.
func TestFromKubeProxy(t *testing.T) {
	for pair := range strings.SplitSeq(*kubeProxies, ",") {
		mode, programmer, _ := strings.Cut(pair, ":")
		t.Run(mode+" to "+programmer, func(t *testing.T) { takeOver(t, mode, programmer) })
	}
}

// cluster is a world with an API server.
type cluster struct {
	*world
	control *controlplane.ControlPlane
	api     kubernetes.Interface
	proxy   *command.Command
	// mode is kube-proxy's mode. variant is the variant of iptables if the mode is iptables.
	mode, variant string
}

func takeOver(t *testing.T, mode, programmer string) {
	w := newWorld(t)
	c := &cluster{world: w, control: controlplane.Start(t, controlplane.Options{Address: w.network.World.IPv4})}
	c.mode, c.variant, _ = strings.Cut(mode, "-")
	c.api, c.proxy = c.control.Client(), command.New(t, w.node.Host, "kube-proxy")
	_, err := c.api.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: w.node.Name},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: w.node.IPv4.String()}, {Type: corev1.NodeInternalIP, Address: w.node.IPv6.String()},
		}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(c.clear)
	web, sticky := c.create("web", 1, "", w.pods...), c.create("sticky", 2, corev1.ServiceAffinityClientIP, w.pods...)
	changed := c.create("changed", 3, "", w.pods...)
	c.addKubelets()
	kubelets := c.rules(isKubelets)
	require.Len(t, kubelets, 12)

	c.startProxy()
	all := append(w.ways(web), w.ways(sticky)...)
	for _, way := range append(all, w.ways(changed)...) {
		testenv.Eventually(t, settleTimeout, func() error {
			if r := way.try(t.Context()); !r.All(testenv.Answered) {
				return fmt.Errorf("%s: %s", way, r)
			}
			return nil
		})
	}
	out, err := c.cleanup()
	require.Error(t, err, out)
	require.Contains(t, out, "kube-proxy runs on this node (process ")

	require.NoError(t, c.proxy.Stop())
	left := c.rules(isKubeProxys)
	require.NotEmpty(t, left)
	var o open
	defer o.close()
	o.openAll(t, w.ways(web))
	s := startStream(t, all)
	w.start(programmer, "--node-name="+w.node.Name, "--source=kube", "--kubeconfig="+c.control.Kubeconfig(t, c.control.AdminConfig()))
	s.RequireSome()
	require.Equal(t, left, c.rules(isKubeProxys), "the agent removed rules without being asked to")
	o.requireAlive(t, testenv.TCP)
	o.requireAlive(t, testenv.UDP)

	out, err = c.cleanup()
	require.NoError(t, err, out)
	require.Empty(t, c.rules(isKubeProxys))
	require.Equal(t, kubelets, c.rules(isKubelets))
	s.RequireSome()
	if c.mode == "ipvs" {
		if programmer != "ipvs" {
			// Their source was the Service's address, which kube-proxy's interface had and the node
			// no longer has.
			o.forget(func(w way) bool { return w.from == c.node.Host && w.to.Port() == 80 })
		}
		o.requireSettled(t)
	} else {
		o.requireAlive(t, testenv.TCP)
	}
	o.requireAlive(t, testenv.UDP)
	out, err = c.cleanup()
	require.NoError(t, err, "cleanup fails if there is nothing to remove: %s", out)

	// Slicecast serves the Services, and no other rules are left.
	require.Equal(t, []string{programmer}, w.left())
	c.setPods(changed, w.pods[1])
	for _, way := range w.ways(changed) {
		testenv.Eventually(t, settleTimeout, func() error {
			for range 5 {
				if r := way.try(t.Context()); r.Backends()[w.pods[1].Name] != 1 {
					return fmt.Errorf("%s: %s", way, r)
				}
			}
			return nil
		})
	}
	s.RequireNoFailure()
}

// clear deletes the test's objects, because other tests may use the same API server.
func (c *cluster) clear() {
	ctx := context.Background()
	all, now := metav1.ListOptions{LabelSelector: ours}, metav1.DeleteOptions{}
	require.NoError(c.t, c.api.CoreV1().Nodes().Delete(ctx, c.node.Name, now))
	services, err := c.api.CoreV1().Services("default").List(ctx, all)
	require.NoError(c.t, err)
	for i := range services.Items {
		require.NoError(c.t, c.api.CoreV1().Services("default").Delete(ctx, services.Items[i].Name, now))
	}
	require.NoError(c.t, c.api.DiscoveryV1().EndpointSlices("default").DeleteCollection(ctx, now, all))
}

// ours is a label of all Services and slices of these tests.
const ours = "slicecast.io/moving"

// create creates a NodePort Service with endpoints.
func (c *cluster) create(name string, number uint16, affinity corev1.ServiceAffinity, pods ...*testenv.Pod) service {
	c.t.Helper()
	s := newService(name, number, pods...)
	both := corev1.IPFamilyPolicyRequireDualStack
	created := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{ours: ""}},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, IPFamilyPolicy: &both, SessionAffinity: affinity, Ports: []corev1.ServicePort{
			{Name: "tcp", Port: 80, NodePort: int32(s.NodePort)}, {Name: "udp", Port: 80, NodePort: int32(s.NodePort), Protocol: corev1.ProtocolUDP},
		}},
	}
	created, err := c.api.CoreV1().Services("default").Create(c.t.Context(), created, metav1.CreateOptions{})
	require.NoError(c.t, err)
	s.ClusterIPs = created.Spec.ClusterIPs
	for _, ipv6 := range []bool{false, true} {
		_, err := c.api.DiscoveryV1().EndpointSlices("default").Create(c.t.Context(), slice(s, ipv6, pods), metav1.CreateOptions{})
		require.NoError(c.t, err)
	}
	return s
}

func slice(s service, ipv6 bool, pods []*testenv.Pod) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-%t", s.Name, ipv6), Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: s.Name, ours: ""},
		},
		AddressType: map[bool]discoveryv1.AddressType{false: discoveryv1.AddressTypeIPv4, true: discoveryv1.AddressTypeIPv6}[ipv6],
		Ports: []discoveryv1.EndpointPort{
			{Name: ptr.To("tcp"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](podPort)},
			{Name: ptr.To("udp"), Protocol: ptr.To(corev1.ProtocolUDP), Port: ptr.To[int32](podPort)},
		},
	}
	for _, p := range pods {
		out.Endpoints = append(out.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{p.Addr(ipv6).String()}, NodeName: &p.Node.Name, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
		})
	}
	return out
}

// setPods replaces the endpoints of a Service.
func (c *cluster) setPods(s service, pods ...*testenv.Pod) {
	c.t.Helper()
	for _, ipv6 := range []bool{false, true} {
		_, err := c.api.DiscoveryV1().EndpointSlices("default").Update(c.t.Context(), slice(s, ipv6, pods), metav1.UpdateOptions{})
		require.NoError(c.t, err)
	}
}

// startProxy starts kube-proxy.
func (c *cluster) startProxy() {
	c.t.Helper()
	binary, err := controlplane.KubernetesBinary(c.t.Context(), "kube-proxy")
	require.NoError(c.t, err)
	config, err := json.Marshal(map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
		"mode": c.mode, "hostnameOverride": c.node.Name, "clusterCIDR": clusterCIDRs,
		"nodePortAddresses": []string{c.node.IPv4.String() + "/32", c.node.IPv6.String() + "/128"},
		"clientConnection":  map[string]any{"kubeconfig": c.control.Kubeconfig(c.t, c.control.AdminConfig())},
		// Only the initial network namespace may change these settings.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	})
	require.NoError(c.t, err)
	dir := c.t.TempDir()
	file := filepath.Join(dir, "config")
	require.NoError(c.t, os.WriteFile(file, config, 0o600))
	variant := c.variant
	if variant == "" {
		variant = "nft"
	}
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			path, err := exec.LookPath(name + "-" + variant + suffix)
			require.NoError(c.t, err)
			require.NoError(c.t, os.Symlink(path, filepath.Join(dir, name+suffix)))
		}
	}
	require.NoError(c.t, c.proxy.Start([]string{"PATH=" + dir + ":" + os.Getenv("PATH")}, binary, "--config="+file, "--v=2"))
}

// cleanup runs "slicecast-agent cleanup --kube-proxy".
func (c *cluster) cleanup() (string, error) {
	cmd := c.node.Command(c.t.Context(), "/proc/self/exe", "cleanup", "--kube-proxy")
	cmd.Env = append(os.Environ(), agentVariable+"=1")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// addKubelets adds the chains and rules of a kubelet in the variant of kube-proxy's iptables.
func (c *cluster) addKubelets() {
	c.t.Helper()
	variant := c.variant
	if variant == "" {
		variant = "nft"
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, rule := range []string{
			"-t mangle -N KUBE-KUBELET-CANARY", "-t nat -N KUBE-KUBELET-CANARY", "-t filter -N KUBE-KUBELET-CANARY",
			"-t filter -N KUBE-FIREWALL", "-t filter -I INPUT -j KUBE-FIREWALL", "-t filter -I OUTPUT -j KUBE-FIREWALL",
		} {
			_, err := c.node.Run(c.t.Context(), family+"-"+variant, strings.Fields(rule)...)
			require.NoError(c.t, err)
		}
	}
}

// rules returns all lines about rules, chains, sets, links and virtual services for which f is
// true, sorted.
func (c *cluster) rules(f func(string) bool) []string {
	c.t.Helper()
	var found []string
	for _, list := range [][]string{
		{"iptables-nft-save"}, {"ip6tables-nft-save"}, {"iptables-legacy-save"}, {"ip6tables-legacy-save"},
		{"nft", "list", "tables"}, {"ip", "-o", "link"}, {"cat", "/proc/net/ip_vs"},
	} {
		out, err := c.node.Run(c.t.Context(), list[0], list[1:]...)
		if list[0] != "cat" { // the kernel may not have IPVS
			require.NoError(c.t, err)
		}
		table := ""
		for line := range strings.Lines(out) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), " [") // remove the counters of chains
			if strings.HasPrefix(line, "*") {
				table = line
			}
			if f(line) {
				found = append(found, fmt.Sprint(list[0], table, " ", line))
			}
		}
	}
	slices.Sort(found)
	return found
}

// isKubelets reports whether a line is about a chain or rule of a kubelet.
func isKubelets(line string) bool {
	return strings.Contains(line, "KUBE-FIREWALL") && !strings.Contains(line, "block incoming") || strings.Contains(line, "KUBE-KUBELET-CANARY")
}

// isKubeProxys reports whether a line is about something that only kube-proxy creates. Virtual
// services do not count, because they may be Slicecast's.
func isKubeProxys(line string) bool {
	return strings.Contains(line, "KUBE-") && !strings.Contains(line, "KUBE-FIREWALL") && !strings.Contains(line, "KUBE-KUBELET-CANARY") ||
		strings.HasSuffix(line, " kube-proxy") || strings.Contains(line, "kube-ipvs0")
}
