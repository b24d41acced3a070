// This test proves that Slicecast and a real kube-proxy serve different Services on one node: each
// Service is served by exactly one of them, also while it moves between them, and each is restarted
// and removed without affecting the other. A real API server and real packets are used, with
// kube-proxy in the modes iptables and nftables.
package beside

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

const (
	settleTimeout = time.Minute
	label         = "service.kubernetes.io/service-proxy-name"
	port          = 8080
)

// world is a cluster with two nodes. Both run Slicecast; one runs kube-proxy in mode iptables, the
// other one in mode nftables.
type world struct {
	t       *testing.T
	api     kubernetes.Interface
	outside *testenv.Client
	nodes   []*node
}

// createService creates a NodePort Service with the given service-proxy-name; empty means that
// kube-proxy serves it.
func (w *world) createService(name, proxy string, backends ...*testenv.Pod) *corev1.Service {
	w.t.Helper()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(port)}},
		},
	}
	if proxy != "" {
		s.Labels = map[string]string{label: proxy}
	}
	s, err := w.api.CoreV1().Services("default").Create(w.t.Context(), s, metav1.CreateOptions{})
	require.NoError(w.t, err)
	_, err = w.api.DiscoveryV1().EndpointSlices("default").Create(w.t.Context(), slice(name, backends), metav1.CreateOptions{})
	require.NoError(w.t, err)
	return s
}

func slice(service string, backends []*testenv.Pod) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: service + "-1", Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](port)}},
	}
	for _, b := range backends {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{b.IPv4.String()}, NodeName: &b.Node.Name, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
		})
	}
	return s
}

// setBackends replaces the endpoints of a Service.
func (w *world) setBackends(service string, backends ...*testenv.Pod) {
	w.t.Helper()
	_, err := w.api.DiscoveryV1().EndpointSlices("default").Update(w.t.Context(), slice(service, backends), metav1.UpdateOptions{})
	require.NoError(w.t, err)
}

// setProxy changes the service-proxy-name of a Service; empty removes it, so that kube-proxy serves
// the Service.
func (w *world) setProxy(service, proxy string) {
	w.t.Helper()
	value := "null"
	if proxy != "" {
		value = `"` + proxy + `"`
	}
	_, err := w.api.CoreV1().Services("default").Patch(w.t.Context(), service, types.MergePatchType,
		fmt.Appendf(nil, `{"metadata": {"labels": {%q: %s}}}`, label, value), metav1.PatchOptions{})
	require.NoError(w.t, err)
}

// requireServed waits until on all nodes the given proxy, and no other one, serves a Service.
func (w *world) requireServed(s *corev1.Service, by string, backends ...*testenv.Pod) {
	w.t.Helper()
	var names []string
	for _, b := range backends {
		names = append(names, b.Name)
	}
	for _, n := range w.nodes {
		testenv.Eventually(w.t, settleTimeout, func() error {
			if who := n.servedBy(netip.MustParseAddr(s.Spec.ClusterIP)); who != by {
				return fmt.Errorf("on %s, %s is served by %q, want %q", n.Name, s.Name, who, by)
			}
			return n.serves(s, w.outside, names)
		})
	}
}

func TestBesideKubeProxy(t *testing.T) {
	network := testenv.NewNetwork(t)
	control := controlplane.Start(t, controlplane.Options{Address: network.World.IPv4})
	w := &world{t: t, api: control.Client(), outside: network.AddClient("outside")}
	var pods []*testenv.Pod
	for name, mode := range map[string]string{"node-iptables": "iptables", "node-nftables": "nftables"} {
		n := newNode(t, network, control, name, mode)
		w.nodes = append(w.nodes, n)
		pod := n.AddPod("web-" + mode)
		pod.Serve(testenv.TCP, port)
		pods = append(pods, pod)
	}
	theirs, ours := w.createService("theirs", "", pods...), w.createService("ours", proxyName, pods...)
	toggled := w.createService("toggled", "", pods...)

	for _, n := range w.nodes {
		n.proxy = n.startProxy()
	}
	w.requireServed(theirs, "kube-proxy", pods...)
	w.requireServed(toggled, "kube-proxy", pods...)
	alone := make(map[*node][]string)
	for _, n := range w.nodes {
		require.Empty(t, n.servedBy(netip.MustParseAddr(ours.Spec.ClusterIP)))
		alone[n], _ = n.rules()
	}

	// Slicecast starts and serves its own Services.
	for _, n := range w.nodes {
		n.agent = n.startAgent()
	}
	w.requireServed(ours, "slicecast", pods...)
	w.requireServed(theirs, "kube-proxy", pods...)
	for _, n := range w.nodes {
		proxys, _ := n.rules()
		require.Equal(t, alone[n], proxys, "kube-proxy's rules have changed")
	}

	// A Service moves between the proxies, and its endpoints change in between.
	w.setProxy("toggled", proxyName)
	w.requireServed(toggled, "slicecast", pods...)
	w.setBackends("toggled", pods[0])
	w.requireServed(toggled, "slicecast", pods[0])
	w.setProxy("toggled", "")
	w.requireServed(toggled, "kube-proxy", pods[0])
	w.setBackends("toggled", pods...)
	w.requireServed(toggled, "kube-proxy", pods...)
	w.setProxy("toggled", "somebody-else")
	for _, n := range w.nodes {
		testenv.Eventually(t, settleTimeout, func() error {
			if who := n.servedBy(netip.MustParseAddr(toggled.Spec.ClusterIP)); who != "" {
				return fmt.Errorf("on %s it is served by %s", n.Name, who)
			}
			return nil
		})
	}
	w.setProxy("toggled", "")
	w.requireServed(toggled, "kube-proxy", pods...)
	w.requireServed(theirs, "kube-proxy", pods...)
	w.requireServed(ours, "slicecast", pods...)

	// Each proxy is restarted without affecting the other one.
	for _, n := range w.nodes {
		proxys, slicecasts := n.rules()
		require.NoError(t, n.agent.Stop())
		n.agent = n.startAgent()
		require.NoError(t, n.proxy.Stop())
		n.proxy = n.startProxy()
		w.requireServed(theirs, "kube-proxy", pods...)
		w.requireServed(ours, "slicecast", pods...)
		again, slicecastsAgain := n.rules()
		require.Equal(t, proxys, again)
		require.Equal(t, slicecasts, slicecastsAgain)
	}

	// Each proxy removes its own rules and no others.
	for _, n := range w.nodes {
		proxys, _ := n.rules()
		require.NoError(t, n.agent.Stop())
		n.cleanUp()
		again, slicecasts := n.rules()
		require.Equal(t, proxys, again)
		require.Empty(t, slicecasts)
		n.agent = n.startAgent()
	}
	w.requireServed(ours, "slicecast", pods...)
	for _, n := range w.nodes {
		_, slicecasts := n.rules()
		require.NoError(t, n.proxy.Stop())
		require.NoError(t, n.startProxy("--cleanup").Wait(settleTimeout))
		proxys, again := n.rules()
		require.Equal(t, slicecasts, again)
		for _, rule := range proxys { // kube-proxy leaves chains that other programs may use
			require.False(t, strings.Contains(rule, theirs.Spec.ClusterIP), rule)
		}
		require.NoError(t, n.serves(ours, w.outside, []string{pods[0].Name, pods[1].Name}))
	}
}
