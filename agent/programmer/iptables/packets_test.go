// These tests prove what happens to real packets to Services of each kind, and that connections are
// spread evenly over backends.
package iptables

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// set makes these Service ports the cluster's state.
func (c *cluster) set(ports ...*view.ServicePort) {
	for _, p := range ports {
		c.state.Ports[p.ID] = p
	}
}

// loopback returns a family's loopback address.
func loopback(family model.Family) netip.Addr {
	if family == model.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// each runs a test for each family and transport. probe makes connections.
func (c *cluster) each(t *testing.T, test func(t *testing.T, family model.Family, tr transport, probe func(from *testenv.Host, to netip.Addr, port uint16, n int) testenv.Result)) {
	eachFamily(t, func(t *testing.T, family model.Family) {
		for _, tr := range transports {
			t.Run(string(tr.probe), func(t *testing.T) {
				test(t, family, tr, func(from *testenv.Host, to netip.Addr, port uint16, n int) testenv.Result {
					return from.Probe(t.Context(), tr.probe, netip.AddrPortFrom(to, port), n, patient)
				})
			})
		}
	})
}

// TestPackets asserts what happens to real packets to Services of each kind.
func TestPackets(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for _, family := range families {
			for _, tr := range transports {
				c.set(
					&view.ServicePort{
						ID:        serviceID("web", tr.protocol, family),
						Frontends: []view.Frontend{clusterIP(vip(family, 1)), external(vip(family, 101)), nodePort(30001)},
						Cluster:   c.backends(family, tr.port, 0, 1, 2, 3),
					},
					&view.ServicePort{
						ID:        serviceID("own", tr.protocol, family),
						Frontends: []view.Frontend{clusterIP(vip(family, 2))},
						Cluster:   c.backends(family, tr.port, 0),
					},
					&view.ServicePort{
						ID:        serviceID("none", tr.protocol, family),
						Frontends: []view.Frontend{rejected(clusterIP(vip(family, 3))), rejected(external(vip(family, 103))), rejected(nodePort(30003))},
					})
			}
		}
		// A nodePort hides what listens on the same port of the node, except on loopback addresses.
		c.a.Serve(testenv.TCP, 30001)
		c.a.Serve(testenv.UDP, 30001)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		all := map[string]*testenv.Host{"pod": c.pods[0].Host, "node": c.a.Host, "client": c.client.Host}

		c.each(t, func(t *testing.T, family model.Family, tr transport, probe func(*testenv.Host, netip.Addr, uint16, int) testenv.Result) {
			ip := func(h *testenv.Host) netip.Addr { return h.Addr(family == model.IPv6) }
			kept := []netip.Addr{ip(c.pods[0].Host)}
			for name, from := range all {
				// The probability of missing one of four backends is 4 × 0.75^60, about 1e-7.
				viaVIP := probe(from, vip(family, 1), servicePort, 60)
				require.Len(t, viaVIP.Backends(), 4, "%s: %v", name, viaVIP)
				viaNode := probe(from, ip(c.a.Host), 30001, 60)
				require.Len(t, viaNode.Backends(), 4, "%s: %v", name, viaNode)
				viaExternal := probe(from, vip(family, 101), servicePort, 60)
				require.Len(t, viaExternal.Backends(), 4, "%s: %v", name, viaExternal)
				for i, pod := range c.pods {
					if from != c.a.Host { // masquerading uses the node's own address
						require.NotContains(t, viaNode.Clients(pod.Name), ip(from), "%s to %s by nodePort: %v", name, pod.Name, viaNode)
						require.NotContains(t, viaExternal.Clients(pod.Name), ip(from), "%s to %s by external IP: %v", name, pod.Name, viaExternal)
					}
					switch {
					case from != c.pods[0].Host && i >= 2:
						require.Equal(t, []netip.Addr{ip(c.a.Host)}, viaVIP.Clients(pod.Name), "%s to %s: %v", name, pod.Name, viaVIP)
					case from == c.client.Host || i == 0 && from == c.pods[0].Host:
						require.NotContains(t, viaVIP.Clients(pod.Name), ip(from), "%s to %s: %v", name, pod.Name, viaVIP)
					case from == c.pods[0].Host:
						require.Equal(t, kept, viaVIP.Clients(pod.Name), "%s to %s: %v", name, pod.Name, viaVIP)
					}
				}
				for _, rejected := range []netip.AddrPort{
					netip.AddrPortFrom(vip(family, 3), servicePort), netip.AddrPortFrom(vip(family, 103), servicePort), netip.AddrPortFrom(ip(c.a.Host), 30003),
				} {
					r := probe(from, rejected.Addr(), rejected.Port(), 3)
					if tr.probe == testenv.UDP && name == "node" && rejected.Port() == servicePort {
						// The sender receives two errors, one from its system call (EPERM) and one by ICMP.
						require.Equal(t, 3, r.Count(testenv.Denied)+r.Count(testenv.Refused), "%v", r)
						continue
					}
					require.True(t, r.All(testenv.Refused), "%s to %v: %v", name, rejected, r)
				}
			}
			// The router has no route to this address, and over IPv6 its error comes too early for a TCP
			// client.
			r := c.client.Probe(t.Context(), tr.probe, netip.AddrPortFrom(vip(family, 1), servicePort+1), 1, testenv.ProbeOptions{Timeout: 200 * time.Millisecond})
			require.Equal(t, 1, r.Count(testenv.Unreachable)+r.Count(testenv.TimedOut), "another port of a cluster IP is left alone: %v", r)

			r = probe(c.pods[0].Host, vip(family, 2), servicePort, 5)
			require.True(t, r.All(testenv.Answered), "hairpin: %v", r)
			require.NotContains(t, r.Clients(c.pods[0].Name), kept[0], "hairpin: %v", r)

			r = probe(c.a.Host, loopback(family), 30001, 5)
			require.Equal(t, map[string]int{"a": 5}, r.Backends(), "loopback is left alone: %v", r)
		})
	})
}

// TestUniformChoice counts where connections go, for a Service port with plain backends and for one
// with groups.
func TestUniformChoice(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		var ports []uint16
		for i := range maxPlain/2 + 8 {
			ports = append(ports, uint16(9000+i))
		}
		c.pods[0].Serve(testenv.UDP, ports...)
		c.pods[2].Serve(testenv.UDP, ports...)
		for i, n := range []int{5, len(ports)} {
			port := &view.ServicePort{
				ID:        serviceID(string('a'+rune(i)), model.UDP, model.IPv4),
				Frontends: []view.Frontend{clusterIP(vip(model.IPv4, byte(i)))},
			}
			for _, pod := range []int{0, 2} {
				for _, p := range ports[:n] {
					port.Cluster = view.NewBackends(append(port.Cluster.List(), c.backends(model.IPv4, p, pod).List()...)...)
				}
			}
			c.set(port)
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			// Each backend expects 25 connections. The probability that one of 80 gets none or 60 is about
			// 1e-7.
			r := c.client.Probe(t.Context(), testenv.UDP, netip.AddrPortFrom(vip(model.IPv4, byte(i)), servicePort), 25*2*n, patient)
			require.True(t, r.All(testenv.Answered), "%v", r)
			require.Len(t, r.Servers(), 2*n)
			for server, count := range r.Servers() {
				require.Less(t, count, 60, "%v", server)
			}
		}
	})
}
