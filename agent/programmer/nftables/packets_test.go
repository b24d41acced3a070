// These tests prove what happens to real packets to Services of each kind, and that connections are
// spread evenly over backends.
package nftables

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// probe makes connections and waits for answers.
type probe func(from *testenv.Host, to netip.Addr, port uint16, n int) testenv.Result

// each runs a test for each family and transport.
func (c *testCluster) each(t *testing.T, test func(t *testing.T, family model.Family, tr transport, probe probe)) {
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

func loopback(family model.Family) netip.Addr { return newDialect(family, 1).Loopback().Addr() }

// requireRefused asserts that every connection was refused at once.
func requireRefused(t *testing.T, r testenv.Result) {
	t.Helper()
	// If a process on the node sends a datagram, its system call may fail as well (EPERM).
	require.Equal(t, len(r.Attempts), r.Count(testenv.Denied)+r.Count(testenv.Refused), "%v", r)
	require.NotEmpty(t, r.Attempts)
}

// TestPackets asserts what happens to real packets to Services of each kind.
func TestPackets(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
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
					ID: serviceID("none", tr.protocol, family),
					Frontends: []view.Frontend{
						everyone(clusterIP(vip(family, 3)), toReject), everyone(external(vip(family, 103)), toReject), everyone(nodePort(30003), toReject),
					},
				})
		}
	}
	// A nodePort hides what listens on the same port of the node, except on loopback addresses.
	c.a.Serve(testenv.TCP, 30001)
	c.a.Serve(testenv.UDP, 30001)
	c.replace(t)
	all := map[string]*testenv.Host{"pod": c.pods[0].Host, "node": c.a.Host, "client": c.client.Host}

	c.each(t, func(t *testing.T, family model.Family, tr transport, probe probe) {
		ip := func(h *testenv.Host) netip.Addr { return h.Addr(family == model.IPv6) }
		for name, from := range all {
			// The probability of missing one of four backends is 4 × 0.75^60, about 1e-7.
			ways := map[string]testenv.Result{
				"cluster IP": probe(from, vip(family, 1), servicePort, 60),
				"nodePort":   probe(from, ip(c.a.Host), 30001, 60),
				"external":   probe(from, vip(family, 101), servicePort, 60),
			}
			for way, r := range ways {
				require.Len(t, r.Backends(), 4, "%s by %s: %v", name, way, r)
				for i, pod := range c.pods {
					kept := way == "cluster IP" && from == c.pods[0].Host && i != 0
					if from == c.a.Host { // masquerading uses the node's own address
						require.Len(t, r.Clients(pod.Name), 1)
						continue
					}
					require.Equal(t, kept, r.Clients(pod.Name)[0] == ip(from), "%s to %s by %s: %v", name, pod.Name, way, r)
				}
			}
			for _, to := range []netip.AddrPort{
				netip.AddrPortFrom(vip(family, 3), servicePort), netip.AddrPortFrom(vip(family, 103), servicePort),
				netip.AddrPortFrom(ip(c.a.Host), 30003), netip.AddrPortFrom(vip(family, 1), servicePort+1),
			} {
				t.Run(fmt.Sprint(name, " ", to), func(t *testing.T) { requireRefused(t, probe(from, to.Addr(), to.Port(), 3)) })
			}
		}
		r := c.client.Probe(t.Context(), tr.probe, netip.AddrPortFrom(vip(family, 101), servicePort+1), 1, brief)
		require.Equal(t, 1, r.Count(testenv.Unreachable)+r.Count(testenv.TimedOut), "another port of an external IP is left alone: %v", r)

		r = probe(c.pods[0].Host, vip(family, 2), servicePort, 5)
		require.True(t, r.All(testenv.Answered), "hairpin: %v", r)
		require.NotContains(t, r.Clients(c.pods[0].Name), ip(c.pods[0].Host), "hairpin: %v", r)

		r = probe(c.a.Host, loopback(family), 30001, 5)
		require.Equal(t, map[string]int{"a": 5}, r.Backends(), "loopback is left alone: %v", r)
	})
}

// TestUniformChoice counts where connections go, for sets whose size is exact and for larger ones.
func TestUniformChoice(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var ports []uint16
	for i := range uint16(21) {
		ports = append(ports, 9000+i)
	}
	c.pods[0].Serve(testenv.UDP, ports...)
	c.pods[2].Serve(testenv.UDP, ports...)
	for i, n := range []int{3, 5, 21} {
		port := &view.ServicePort{
			ID:        serviceID(fmt.Sprint("s", i), model.UDP, model.IPv4),
			Frontends: []view.Frontend{clusterIP(vip(model.IPv4, byte(i))), nodePort(30000 + uint16(i))},
		}
		for _, pod := range []int{0, 2} {
			for _, p := range ports[:n] {
				port.Cluster = view.NewBackends(append(port.Cluster.List(), c.backends(model.IPv4, p, pod).List()...)...)
			}
		}
		c.set(port)
		c.replace(t)
		for _, to := range []netip.AddrPort{netip.AddrPortFrom(vip(model.IPv4, byte(i)), servicePort), netip.AddrPortFrom(c.a.IPv4, 30000+uint16(i))} {
			// Each backend expects 25 connections. The probability that one of 42 gets none or 60 is about
			// 1e-7.
			r := c.client.Probe(t.Context(), testenv.UDP, to, 25*2*n, patient)
			require.True(t, r.All(testenv.Answered), "%v", r)
			require.Len(t, r.Servers(), 2*n)
			for server, count := range r.Servers() {
				require.Less(t, count, 60, "%v", server)
			}
		}
	}
}
