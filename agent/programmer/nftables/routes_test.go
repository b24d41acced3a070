// TestRoutes proves for every policy what happens to real packets from a pod, the node and others.
package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// requireRoute asserts that connections from a host took a route. Pod 0 is the cluster set and pod
// 1 the local set. Both are on the node, because a client would get replies from a pod elsewhere
// only if it is masqueraded.
func (c *testCluster) requireRoute(t *testing.T, family model.Family, route view.Route, from *testenv.Host, r testenv.Result) {
	t.Helper()
	switch route.To {
	case view.Reject:
		requireRefused(t, r)
		return
	case view.Drop:
		require.Equal(t, len(r.Attempts), r.Count(testenv.TimedOut)+r.Count(testenv.Denied), "%v", r)
		return
	case view.Local:
		require.Subset(t, []string{"pod1"}, keys(r.Backends()), "%v", r)
	case view.Cluster:
		require.Subset(t, []string{"pod0"}, keys(r.Backends()), "%v", r)
	}
	require.True(t, r.All(testenv.Answered), "%v", r)
	for name := range r.Backends() {
		hairpin := name == from.Name
		if from != c.a.Host { // masquerading uses the node's own address
			require.Equal(t, !route.Masquerade && !hairpin, slices.Equal([]netip.Addr{from.Addr(family == model.IPv6)}, r.Clients(name)), "%v", r)
		}
	}
}

func keys(m map[string]int) (out []string) {
	for k := range m {
		out = append(out, k)
	}
	return out
}

// TestRoutes asserts for every policy what happens to packets from a pod, the node and others, on
// addresses and nodePorts.
func TestRoutes(t *testing.T) {
	t.Parallel()
	routes := []view.Route{toReject, toDrop, toCluster, toClusterMasquerade, toLocal, {To: view.Local, Masquerade: true}}
	detectors := map[string]view.PodDetector{
		"prefixes": {Prefixes: []netip.Prefix{
			netip.MustParsePrefix("10.180.7.0/24"), netip.MustParsePrefix("10.180.0.0/24"),
			netip.MustParsePrefix("fd00:10:180:7::/64"), netip.MustParsePrefix("fd00:10:180::/64"),
		}},
		"none": {},
	}
	c := newCluster(t)
	pod := c.pods[0].Host
	type combination struct{ pods, node, others view.Route }
	var combinations []combination
	for i, r := range routes {
		// Each route is used once for each kind of client, beside other routes.
		combinations = append(combinations, combination{r, routes[(i+1)%len(routes)], routes[(i+3)%len(routes)]}, combination{r, r, r}, combination{routes[(i+2)%len(routes)], r, r})
	}
	for name, detector := range detectors {
		c.state.Node.Pods = detector
		for _, family := range families {
			for _, tr := range transports {
				for i, x := range combinations {
					c.set(&view.ServicePort{
						ID: serviceID(fmt.Sprint("s", i), tr.protocol, family),
						Frontends: []view.Frontend{
							routed(view.Frontend{Kind: view.ExternalIP, Address: vip(family, byte(i)), Port: servicePort}, x.pods, x.node, x.others),
							routed(view.Frontend{Kind: view.NodePort, Port: 30000 + uint16(i)}, x.pods, x.node, x.others),
						},
						Cluster: c.backends(family, tr.port, 0), Local: c.backends(family, tr.port, 1),
					})
				}
			}
		}
		c.replace(t)
		t.Run(name, func(t *testing.T) {
			c.each(t, func(t *testing.T, family model.Family, tr transport, _ probe) {
				for i, x := range combinations {
					for from, route := range map[*testenv.Host]view.Route{pod: x.pods, c.a.Host: x.node, c.client.Host: x.others} {
						if from == pod && name == "none" {
							route = x.others
						}
						for _, to := range []netip.AddrPort{
							netip.AddrPortFrom(vip(family, byte(i)), servicePort),
							netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30000+uint16(i)),
						} {
							options := patient
							if route.To == view.Drop {
								options = silence
							}
							t.Run(fmt.Sprintf("%v/%s/%v", to, from.Name, x), func(t *testing.T) {
								c.requireRoute(t, family, route, from, from.Probe(t.Context(), tr.probe, to, 2, options))
							})
						}
					}
				}
			})
		})
	}
}
