// These tests prove what happens to real packets to Services of each kind, also if another
// programmer has translated and marked them.
package ipvs

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestPackets asserts what happens to real packets to Services of each kind.
func TestPackets(t *testing.T) {
	c := newCluster(t, Options{})
	for _, family := range families {
		for _, tr := range transports {
			c.set(
				&view.ServicePort{
					ID:        serviceID("web", tr.protocol, family),
					Frontends: []view.Frontend{clusterIP(vip(family, 1)), nodePort(30001)},
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
						everywhere(view.Frontend{Kind: view.ClusterIP, Address: vip(family, 3), Port: servicePort}, view.Reject, false),
						everywhere(view.Frontend{Kind: view.NodePort, Port: 30003}, view.Reject, true),
					},
				},
				&view.ServicePort{
					ID: serviceID("local", tr.protocol, family),
					Frontends: []view.Frontend{
						localPolicy(view.Frontend{Kind: view.LoadBalancer, Address: ingress(family, 4), Port: servicePort}, view.Local),
						localPolicy(view.Frontend{Kind: view.NodePort, Port: 30004}, view.Local),
					},
					Cluster: c.backends(family, tr.port, 0, 2), Local: c.backends(family, tr.port, 0),
				},
				&view.ServicePort{
					ID: serviceID("nolocal", tr.protocol, family),
					Frontends: []view.Frontend{
						localPolicy(view.Frontend{Kind: view.LoadBalancer, Address: ingress(family, 5), Port: servicePort}, view.Drop),
					},
					Cluster: c.backends(family, tr.port, 2),
				},
			)
		}
	}
	c.state.Node.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/24"), netip.MustParsePrefix("fd00:10:96::/112")}
	// Another proxy refuses connections to its Service, at the priority of kube-proxy's chains. Of
	// chains with the same priority, the kernel would call its own last, because they are older.
	for _, family := range families {
		table := map[model.Family]string{model.IPv4: "ip", model.IPv6: "ip6"}[family]
		for _, hook := range []string{"forward", "output"} {
			_, err := c.a.Run(t.Context(), "nft", fmt.Sprintf("add table %[1]s other; add chain %[1]s other %[2]s { type filter hook %[2]s priority 0; }; "+
				"add rule %[1]s other %[2]s %[1]s daddr %[3]v meta l4proto tcp reject with tcp reset; add rule %[1]s other %[2]s %[1]s daddr %[3]v reject",
				table, hook, vip(family, 98)))
			require.NoError(t, err)
		}
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	all := map[string]*testenv.Host{"local pod": c.pods[0].Host, "remote pod": c.pods[2].Host, "node": c.a.Host, "client": c.client.Host}

	each(t, func(t *testing.T, family model.Family, tr transport, probe func(*testenv.Host, netip.Addr, uint16, int) testenv.Result) {
		ip := func(h *testenv.Host) netip.Addr { return h.Addr(family == model.IPv6) }
		for name, from := range all {
			if name == "remote pod" {
				continue // node b has no Services and sends to nodePorts only
			}
			viaVIP := probe(from, vip(family, 1), servicePort, 8)
			require.Len(t, viaVIP.Backends(), 4, "%s: %v", name, viaVIP)
			for i, pod := range c.pods {
				clients := viaVIP.Clients(pod.Name)
				switch {
				case name == "client", name == "node" && i >= 2:
					require.NotContains(t, clients, ip(c.client.Host), "%s to %s: %v", name, pod.Name, viaVIP)
					require.NotContains(t, clients, vip(family, 1), "%s to %s: %v", name, pod.Name, viaVIP)
				case name == "local pod" && i > 0:
					require.Equal(t, []netip.Addr{ip(from)}, clients, "%s to %s: %v", name, pod.Name, viaVIP)
				case name == "local pod":
					require.NotContains(t, clients, ip(from), "hairpin: %v", viaVIP)
				}
			}
			for _, rejected := range []netip.AddrPort{
				netip.AddrPortFrom(vip(family, 3), servicePort), netip.AddrPortFrom(ip(c.a.Host), 30003), netip.AddrPortFrom(vip(family, 1), servicePort+1),
				netip.AddrPortFrom(vip(family, 98), servicePort),
			} {
				r := probe(from, rejected.Addr(), rejected.Port(), 2)
				require.Equal(t, 2, r.Count(testenv.Refused)+r.Count(testenv.Denied), "%s to %v: %v", name, rejected, r)
			}
		}
		for name, from := range all {
			viaNode := probe(from, ip(c.a.Host), 30001, 8)
			require.Len(t, viaNode.Backends(), 4, "%s: %v", name, viaNode)
			if name != "node" {
				for _, pod := range c.pods {
					require.NotContains(t, viaNode.Clients(pod.Name), ip(from), "%s: %v", name, viaNode)
				}
			}
			if name == "remote pod" {
				continue // pods on its own node would reply to it without passing node a
			}
			viaNode = probe(from, ip(c.a.Host), 30004, 4)
			switch name {
			case "client":
				require.Equal(t, map[string]int{"pod0": 4}, viaNode.Backends(), "%s: %v", name, viaNode)
				require.Equal(t, []netip.Addr{ip(from)}, viaNode.Clients("pod0"), "%s: %v", name, viaNode)
			default:
				require.Len(t, viaNode.Backends(), 2, "%s: %v", name, viaNode)
				if name != "node" {
					require.Equal(t, []netip.Addr{ip(from)}, viaNode.Clients("pod2"), "%s: %v", name, viaNode)
				} else {
					require.Equal(t, []netip.Addr{ip(c.a.Host)}, viaNode.Clients("pod2"), "%s: %v", name, viaNode)
				}
			}
		}
		for name, from := range all {
			if name == "remote pod" {
				continue
			}
			r := from.Probe(t.Context(), tr.probe, netip.AddrPortFrom(vip(family, 99), servicePort), 1, hasty)
			require.True(t, r.All(testenv.TimedOut) || r.All(testenv.Denied), "no Service has it, from %s: %v", name, r)
		}
		r := probe(c.pods[0].Host, vip(family, 2), servicePort, 3)
		require.True(t, r.All(testenv.Answered), "hairpin: %v", r)
		require.NotContains(t, r.Clients("pod0"), ip(c.pods[0].Host), "hairpin: %v", r)

		for _, from := range []*testenv.Host{c.pods[1].Host, c.a.Host} {
			r := probe(from, ingress(family, 5), servicePort, 2)
			require.Equal(t, map[string]int{"pod2": 2}, r.Backends(), "%s: %v", from.Name, r)
		}
		r = c.client.Probe(t.Context(), tr.probe, netip.AddrPortFrom(ingress(family, 5), servicePort), 1, hasty)
		require.True(t, r.All(testenv.TimedOut), "%v", r)
		r = probe(c.client.Host, ingress(family, 4), servicePort, 3)
		require.Equal(t, map[string]int{"pod0": 3}, r.Backends(), "%v", r)

		r = c.a.Probe(t.Context(), tr.probe, netip.AddrPortFrom(nft.FamilyOf(family).Loopback().Addr(), 30001), 2, patient)
		require.True(t, r.All(testenv.Refused), "loopback is left alone: %v", r)
	})
	out, err := c.a.Run(t.Context(), "nft", "list", "table", "ip", Table)
	require.NoError(t, err)
	number := c.programmed(serviceID("own", model.TCP, model.IPv4)).numbers[clusterRole]
	require.Contains(t, out, fmt.Sprintf(`10.96.0.2 . tcp . 80 comment "default/own:p/TCP/IPv4" : %#08x`, markTag|flagMasquerade|number), "for operators")
}

// TestMarkedByOthers asserts that a packet which another programmer has translated and marked is
// masqueraded, even if nothing else of the other programmer is left. Otherwise the pod would reply
// to the client without passing the node.
func TestMarkedByOthers(t *testing.T) {
	c := newCluster(t, Options{})
	require.NoError(t, c.Replace(t.Context(), c.state))
	for _, family := range families {
		name, to := "ip", c.pods[2].IPv4.String()
		if family == model.IPv6 {
			name, to = "ip6", "["+c.pods[2].IPv6.String()+"]"
		}
		_, err := c.a.Run(t.Context(), "nft", fmt.Sprintf(`table %s other {
			chain prerouting {
				type nat hook prerouting priority dstnat
				%s daddr %s tcp dport %d meta mark set meta mark or 0xca004000 dnat to %s:%d
			}
			chain postrouting {
				type filter hook postrouting priority srcnat + 1
				meta mark & 0x4000 != 0 drop
			}
		}`, name, name, ingress(family, 1), servicePort, to, tcpPort))
		require.NoError(t, err)
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(ingress(family, 1), servicePort), 2, patient)
		require.Equal(t, []netip.Addr{c.a.Addr(family == model.IPv6)}, r.Clients("pod2"), "%v", r)
	}
}

// TestAddressesThatAreNotTheServicesAlone asserts two things of a load balancer's addresses. The
// agent's answers to health checks are reached there, at any address that the Service has, while
// other ports are refused (kubernetes/kubernetes#117621, projectcalico/calico#10748). And a node
// does not take another node's address (kubernetes/kubernetes#104679).
func TestAddressesThatAreNotTheServicesAlone(t *testing.T) {
	c := newCluster(t, Options{})
	const check, changed, other = 31801, 31802, 31803
	c.a.Serve(testenv.TCP, check, changed, other)
	c.b.Serve(testenv.TCP, other)
	for _, family := range families {
		six := family == model.IPv6
		to := func(from *testenv.Host, a netip.Addr, port uint16, answer testenv.Outcome) {
			t.Helper()
			r := from.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(a, port), 2, patient)
			require.True(t, r.All(answer), "%s to %v port %d: %v", from.Name, a, port, r)
		}
		balanced := func(checkPort uint16, ofNodes bool, addresses ...netip.Addr) *view.ServicePort {
			p := &view.ServicePort{
				ID: serviceID("edge", model.TCP, family), Frontends: []view.Frontend{clusterIP(vip(family, 1))},
				Cluster: c.backends(family, tcpPort, 0, 2), HealthCheckPort: checkPort,
			}
			for _, a := range addresses {
				p.Frontends = append(p.Frontends, everywhere(view.Frontend{Kind: view.LoadBalancer, Address: a, Port: servicePort, OfNodes: ofNodes}, view.Cluster, true))
			}
			return p
		}
		c.set(balanced(check, false, ingress(family, 1)))
		require.NoError(t, c.Replace(t.Context(), c.state))
		id := serviceID("edge", model.TCP, family)
		for range 2 {
			for _, from := range []*testenv.Host{c.client.Host, c.a.Host, c.pods[0].Host} {
				to(from, ingress(family, 1), servicePort, testenv.Answered)
				to(from, ingress(family, 1), check, testenv.Answered)
				to(from, ingress(family, 1), other, testenv.Refused)
				to(from, vip(family, 1), check, testenv.Refused)
			}
			c.inHost = newInHost(t, c.a.Host, Options{})
			require.NoError(t, c.Replace(t.Context(), c.state))
		}
		// Only the port for health checks changes, so the frontends stay the same memory.
		next := *c.state.Ports[id]
		next.HealthCheckPort = changed
		c.apply(t, id, &next)
		to(c.client.Host, ingress(family, 1), check, testenv.Refused)
		to(c.client.Host, ingress(family, 1), changed, testenv.Answered)

		c.apply(t, id, balanced(check, true, c.a.Addr(six), c.b.Addr(six)))
		for _, from := range []*testenv.Host{c.a.Host, c.pods[0].Host} {
			to(from, c.b.Addr(six), other, testenv.Answered)
		}
		to(c.a.Host, c.b.Addr(six), servicePort, testenv.Answered)
		to(c.client.Host, c.a.Addr(six), servicePort, testenv.Answered)
		c.apply(t, id, nil)
	}
}
