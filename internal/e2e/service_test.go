// These tests prove that traffic reaches exactly the ready endpoints of a Service, with the right
// source address, for Services of controllers, mirrored Endpoints and hand-written slices. Agents
// follow a server, the API server or files.
package e2e

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestReadyPodsAnswer(t *testing.T) {
	for _, feed := range []feed{fromServer, fromKube, fromFile} {
		t.Run(string(feed), func(t *testing.T) {
			c := startCluster(t, shared, feed)
			pods := c.Deployment("web", 3)
			web := c.Service("web", selecting("web", tcp("tcp", 8091, onPodPort()), udp("udp", 8091, onPodPort())))
			c.RequireAnswers(web, 8091, pods...)

			c.SetReady(pods[0], false)
			c.RequireAnswers(web, 8091, pods[1:]...)

			c.SetReady(pods[0], true)
			c.RequireAnswers(web, 8091, pods...)

			c.DeletePod("web-1", 600)
			c.RequireAnswers(web, 8091, pods[0], pods[2])
		})
	}
}

func TestMirroredEndpoints(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 3)
	external := c.Service("external", withoutSelector(tcp("http", 8092, onPodPort()), udp("udp", 8092, onPodPort())))
	c.RequireRejected(external, 8092)

	ports := []corev1.EndpointPort{
		{Name: "http", Port: podPort, Protocol: corev1.ProtocolTCP}, {Name: "udp", Port: podPort, Protocol: corev1.ProtocolUDP},
	}
	c.Endpoints(external, ports, pods, nil)
	c.RequireAnswers(external, 8092, pods...)

	c.Endpoints(external, ports, pods[:2], pods[2:])
	c.RequireAnswers(external, 8092, pods[:2]...)
}

func TestHandWrittenSlice(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 2)
	// No pod serves the target port.
	written := c.Service("written", withoutSelector(tcp("http", 8093, intstr.FromInt32(1)), tcp("other", 8094, onPodPort())))
	c.Slices("by-hand", written, []discoveryv1.EndpointPort{tcpSlicePort("http", podPort), tcpSlicePort("admin", 1)}, pods...)
	c.RequireAnswers(written, 8093, pods...)
	c.RequireRejected(written, 8094)
}

func tcpSlicePort(name string, port int32) discoveryv1.EndpointPort {
	return discoveryv1.EndpointPort{Name: &name, Protocol: new(corev1.ProtocolTCP), Port: &port}
}

func TestPorts(t *testing.T) {
	c := newCluster(t)
	// The same port name stands for different numbers in the two pods.
	web := c.Pod("web-0", "web", c.a, corev1.ContainerPort{Name: "http", ContainerPort: 8081})
	other := c.Pod("web-1", "web", c.b, corev1.ContainerPort{Name: "http", ContainerPort: 8082})

	unnamed := c.Service("unnamed", selecting("web", tcp("", 80, onPodPort())))
	several := c.Service("several", selecting("web", tcp("by-name", 80, intstr.FromString("http")), tcp("by-number", 81, onPodPort())))
	dns := c.Service("dns", selecting("web", tcp("dns-tcp", 53, onPodPort()), udp("dns", 53, onPodPort())))

	c.RequireAnswers(unnamed, 80, web, other)
	c.RequireAnswers(several, 80, web, other)
	c.RequireAnswers(several, 81, web, other)
	c.RequireAnswers(dns, 53, web, other)

	to := c.ways(several, 80)[0]
	servers := c.a.client.Probe(t.Context(), to.proto, to.to, 40, testenv.ProbeOptions{}).Servers()
	require.Contains(t, servers, netip.AddrPortFrom(web.IPv4, 8081))
	require.Contains(t, servers, netip.AddrPortFrom(other.IPv4, 8082))
	require.Len(t, servers, 2)
}

func TestServiceWithoutEndpointsIsRejected(t *testing.T) {
	c := newCluster(t)
	web := c.Service("web", selecting("web", tcp("tcp", 80, onPodPort()), udp("udp", 80, onPodPort())))
	c.RequireRejected(web, 80)
	pods := c.Deployment("web", 1)
	c.RequireAnswers(web, 80, pods...)
	c.SetReady(pods[0], false)
	c.RequireRejected(web, 80)

	c.DeleteService(web)
	c.AwaitTruth()
	for _, w := range c.ways(web, 80) {
		// An address that no host has is unreachable. The addresses of the nodes still belong to
		// the nodes, which refuse.
		want := testenv.Unreachable
		if to := w.to.Addr(); to == c.a.IPv4 || to == c.a.IPv6 || to == c.b.IPv4 || to == c.b.IPv6 {
			want = testenv.Refused
		}
		result := w.try(t.Context())
		require.True(t, result.All(want), "%s: %s", w, result)
	}
}

// TestSourceAddresses requires that backends see a pod's own address as the source, unless the pod
// connects to itself. Connections from other hosts are masqueraded by the node at which they
// arrive.
func TestSourceAddresses(t *testing.T) {
	c := newCluster(t)
	for _, n := range c.nodes() {
		single := c.Pod("single-"+n.Name, "single-"+n.Name, n)
		s := c.Service("single-"+n.Name, selecting("single-"+n.Name, tcp("tcp", 80, onPodPort()), udp("udp", 80, onPodPort())))
		c.RequireAnswers(s, 80, single)
		for _, w := range c.ways(s, 80) {
			ipv6 := w.to.Addr().Is6()
			seen := func(from *testenv.Host) netip.Addr {
				result := way{from, w.proto, w.to}.try(t.Context())
				require.True(t, result.All(testenv.Answered), "%s from %s: %s", w, from.Name, result)
				return result.Clients(single.Name)[0]
			}
			switch w.from {
			// the address of a node port belongs to the node at which the connection arrives
			case outside.Host:
				entered := c.a
				if w.to.Addr() == c.b.Addr(ipv6) {
					entered = c.b
				}
				require.Equal(t, entered.Addr(ipv6), seen(w.from), "%s", w)
			case c.a.client.Host, c.b.client.Host:
				require.Equal(t, w.from.Addr(ipv6), seen(w.from), "%s", w)
				require.Equal(t, n.Addr(ipv6), seen(single.Host), "hairpin to %s", w.to)
				require.Equal(t, c.a.Addr(ipv6), seen(outside.Host), "%s from outside by way of node a", w.to)
			default:
				require.Equal(t, w.from.Addr(ipv6), seen(w.from), "%s", w)
			}
		}
	}
}

func TestWhatNodesDoNotServeMakesNoRules(t *testing.T) {
	c := newCluster(t)
	pods := c.Deployment("web", 2)
	named := c.Service("names", withoutSelector(tcp("http", 80, onPodPort())))
	c.RequireRejected(named, 80)
	before := map[*node][]string{c.a: c.a.Saved(t), c.b: c.b.Saved(t)}

	headless := selecting("web", tcp("http", 80, onPodPort()))
	headless.Type, headless.ClusterIP = corev1.ServiceTypeClusterIP, corev1.ClusterIPNone
	c.Service("headless", headless)
	c.Service("elsewhere", corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.com"})
	c.FQDNSlice("names", named, tcpSlicePort("http", podPort), "example.com")

	// Once a later Service was added and removed, the agents have seen the earlier ones.
	later := c.Service("later", selecting("web", tcp("http", 80, onPodPort())))
	c.RequireAnswers(later, 80, pods...)
	c.DeleteService(later)
	c.AwaitTruth()
	for n, rules := range before {
		require.Equal(t, rules, n.Saved(t))
	}
	c.RequireRejected(named, 80)
}
