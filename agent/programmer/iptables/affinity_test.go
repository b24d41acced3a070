// These tests prove that a client with affinity stays with its backend over all frontends and
// changes, and only until the timeout, with real packets through both variants of iptables.
package iptables

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// sticky returns a Service port with affinity, for which all pods can be backends. Its cluster IP
// leads to the cluster set. Its external IP and its nodePort lead connections from outside to the
// local set.
func (c *cluster) sticky(family model.Family, tr transport, timeout time.Duration, cluster, local []int) *view.ServicePort {
	return &view.ServicePort{
		ID: serviceID("sticky", tr.protocol, family),
		Frontends: []view.Frontend{
			clusterIP(vip(family, 1)), localPolicy(external(vip(family, 2))), localPolicy(nodePort(30001)), external(vip(family, 3)),
		},
		Cluster: c.backends(family, tr.port, cluster...), Local: c.backends(family, tr.port, local...),
		Affinity: timeout,
	}
}

// TestAffinity asserts that a client stays with its backend over all frontends and through all
// other changes, as long as the set has that backend, and that other clients do not stay with it.
func TestAffinity(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		both := []int{0, 1, 2, 3}
		sources := map[model.Family][]netip.Addr{}
		for i := range byte(40) {
			a := netip.AddrFrom4([4]byte{198, 51, 100, i})
			b := netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 5: 5, 15: 1 + i})
			sources[model.IPv4], sources[model.IPv6] = append(sources[model.IPv4], a), append(sources[model.IPv6], b)
			c.client.AddAddress(a)
			c.client.AddAddress(b)
		}
		c.each(t, func(t *testing.T, family model.Family, tr transport, probe func(*testenv.Host, netip.Addr, uint16, int) testenv.Result) {
			// The changes below do not touch this Service port. It has enough backends for groups, whose
			// choice must be remembered as well.
			big := c.sticky(family, tr, time.Hour, both, []int{1})
			big.ID = serviceID("big", tr.protocol, family)
			big.Frontends = []view.Frontend{clusterIP(vip(family, 9))}
			big.Local = view.Backends{}
			for port := range uint16(maxPlain) {
				big.Cluster = view.NewBackends(append(big.Cluster.List(), c.backends(family, 20000+port, 0).List()...)...)
			}
			var ports []uint16
			for port := range uint16(maxPlain) {
				ports = append(ports, 20000+port)
			}
			defer c.pods[0].Serve(tr.probe, ports...).Close()

			port := c.sticky(family, tr, time.Hour, both, []int{1})
			c.set(port, big)
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			c.requireFresh(t)
			// one returns the only backend that a client reaches.
			one := func(from *testenv.Host, to netip.Addr, port uint16) netip.AddrPort {
				t.Helper()
				// A UDP socket that happens to get the port of an earlier one would belong to that one's flow.
				require.NoError(t, c.a.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
				r := probe(from, to, port, 8)
				require.True(t, r.All(testenv.Answered), "%v", r)
				require.Len(t, r.Servers(), 1, "%v", r)
				for server := range r.Servers() {
					return server
				}
				return netip.AddrPort{}
			}
			node := c.a.Addr(family == model.IPv6)
			apply := func(after *view.ServicePort) {
				t.Helper()
				require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.state.Ports[after.ID], After: after}}))
				c.set(after)
			}

			// The pod reaches the cluster set by each frontend.
			ofPod, ofBig := one(c.pods[0].Host, vip(family, 1), servicePort), one(c.client.Host, vip(family, 9), servicePort)
			require.Equal(t, ofPod, one(c.pods[0].Host, vip(family, 2), servicePort))
			require.Equal(t, ofPod, one(c.pods[0].Host, node, 30001))
			require.Equal(t, ofPod, one(c.pods[0].Host, vip(family, 3), servicePort))
			// The client reaches the cluster set by the cluster IP. By another frontend it reaches the local
			// set, and then stays there.
			one(c.client.Host, vip(family, 1), servicePort)
			local := one(c.client.Host, vip(family, 2), servicePort)
			require.Equal(t, c.backends(family, tr.port, 1).List()[0].Address, local)
			require.Equal(t, local, one(c.client.Host, vip(family, 1), servicePort), "where its last connection went")
			require.Equal(t, local, one(c.client.Host, node, 30001))

			// Another Service port, another process, and one backend more or less leave the rest as it was.
			other := c.web("other", family, 20, 2)
			c.set(other)
			require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{After: other}}))
			c.inHost = newInHost(t, c.a.Host, c.options)
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			i := slices.IndexFunc(port.Cluster.List(), func(b view.Backend) bool { return b.Address == ofPod })
			without := slices.DeleteFunc(slices.Clone(both), func(j int) bool { return j == i })
			for _, left := range [][]int{{1, i}, {i}, both} {
				apply(c.sticky(family, tr, time.Hour, left, []int{1}))
				require.Equal(t, ofPod, one(c.pods[0].Host, vip(family, 1), servicePort))
			}
			// The client's backend is removed and comes back.
			apply(c.sticky(family, tr, time.Hour, without, []int{1}))
			next := one(c.pods[0].Host, vip(family, 1), servicePort)
			require.NotEqual(t, ofPod, next)
			apply(port)
			require.Equal(t, next, one(c.pods[0].Host, vip(family, 1), servicePort))
			require.Equal(t, ofBig, one(c.client.Host, vip(family, 9), servicePort))

			// The probability that 40 clients have the same of four backends is 4^-39.
			seen := map[string]int{}
			for _, source := range sources[family] {
				r := c.client.Probe(t.Context(), tr.probe, netip.AddrPortFrom(vip(family, 1), servicePort), 3, testenv.ProbeOptions{Timeout: patient.Timeout, Source: netip.AddrPortFrom(source, 0)})
				require.Len(t, r.Backends(), 1, "%v", r)
				for name := range r.Backends() {
					seen[name]++
				}
			}
			require.Greater(t, len(seen), 1)
		})
	})
}

// TestAffinityEnds asserts that a client may go elsewhere after the timeout has passed since its
// last connection, but not since its first.
func TestAffinityEnds(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		const timeout = 2 * time.Second
		c.set(c.sticky(model.IPv4, transports[0], timeout, []int{0, 1, 2, 3}, []int{1}))
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		next := func() string {
			r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 1, patient)
			require.True(t, r.All(testenv.Answered), "%v", r)
			for name := range r.Backends() {
				return name
			}
			return ""
		}
		first := next()
		tick := time.NewTicker(timeout / 4)
		defer tick.Stop()
		for range 8 { // twice the timeout
			require.Equal(t, first, next())
			<-tick.C
		}
		tick.Reset(timeout + timeout/4)
		// The probability of the same backend each time is 4^-12.
		for range 12 {
			<-tick.C
			if next() != first {
				return
			}
		}
		require.Fail(t, "stayed with its backend")
	})
}
