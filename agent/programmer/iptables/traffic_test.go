// TestTraffic proves that no connection is lost, new or open, while rules change, the agent
// restarts and the variant of iptables changes, with real packets all the time.
package iptables

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// stream makes connections from the client to one address after the other until stop is called.
// stop asserts that all of them were answered. A moment without the rules would be an error,
// because nothing else knows these addresses.
func (c *cluster) stream(t *testing.T, to ...netip.AddrPort) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	results := make([]testenv.Result, len(to))
	var wait sync.WaitGroup
	for i, address := range to {
		wait.Go(func() {
			for ctx.Err() == nil {
				r := c.client.Probe(context.WithoutCancel(ctx), testenv.TCP, address, 20, patient)
				results[i].Attempts = append(results[i].Attempts, r.Attempts...)
			}
		})
	}
	return func() {
		t.Helper()
		cancel()
		wait.Wait()
		for i, r := range results {
			require.True(t, r.All(testenv.Answered), "%v: %v", to[i], r)
			require.NotEmpty(t, r.Attempts)
		}
	}
}

// TestTraffic asserts that no connection is lost, new or established, while other Services change,
// the agent restarts, pods are recognized in another way, and the variant changes.
func TestTraffic(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		var open []*testenv.Conn
		var addresses []netip.AddrPort
		for _, family := range families {
			web := c.web("web", family, 1, 1, 2)
			sticky := c.sticky(family, transports[0], time.Hour, []int{0, 1, 2}, []int{0, 1})
			sticky.Frontends = []view.Frontend{localPolicy(external(vip(family, 2))), localPolicy(nodePort(30002))}
			sticky.Frontends[0].Kind = view.LoadBalancer
			sticky.Frontends[0].Sources = []netip.Prefix{netip.PrefixFrom(c.client.Addr(family == model.IPv6), 24)}
			c.set(web, sticky, &view.ServicePort{
				ID: serviceID("plain", model.TCP, family), Frontends: []view.Frontend{clusterIP(vip(family, 3))}, Cluster: web.Cluster,
			})
			node := c.a.Addr(family == model.IPv6)
			addresses = append(addresses, netip.AddrPortFrom(vip(family, 1), servicePort), netip.AddrPortFrom(node, 30001),
				netip.AddrPortFrom(vip(family, 2), servicePort), netip.AddrPortFrom(node, 30002), netip.AddrPortFrom(vip(family, 3), servicePort))
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		for _, to := range addresses {
			for range 3 {
				conn, err := c.client.Dial(t.Context(), testenv.TCP, to, patient)
				require.NoError(t, err)
				defer conn.Close()
				open = append(open, conn)
			}
		}

		stop := c.stream(t, addresses...)
		for i := range byte(20) {
			var changes []view.Change
			for _, family := range families {
				after := c.web(string('a'+rune(i)), family, 10+i, 0, 3)
				changes = append(changes, view.Change{After: after})
				c.set(after)
			}
			require.NoError(t, c.inHost.Apply(t.Context(), changes))
			if i%4 == 0 {
				c.state.Node.Pods.Prefixes = append(c.state.Node.Pods.Prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, i, 0}), 24))
			}
			c.inHost = newInHost(t, c.a.Host, c.options)
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		}
		for _, v := range []Variant{map[Variant]Variant{NFT: Legacy, Legacy: NFT}[variant], variant} {
			c.options.Variant = v
			c.inHost = newInHost(t, c.a.Host, c.options)
			require.NoError(t, c.inHost.Replace(t.Context(), c.state))
			require.NoError(t, c.inHost.RetireOtherVariant(t.Context()))
			for _, family := range families {
				require.NotContains(t, c.inHost.rules(t, family, map[Variant]Variant{NFT: Legacy, Legacy: NFT}[v]), prefix)
			}
		}
		stop()
		c.requireFresh(t)

		for _, family := range families {
			require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.web("web", family, 1, 1, 2), After: c.web("web", family, 1, 1)}}))
			r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, 1), servicePort), 20, patient)
			require.Equal(t, map[string]int{"pod1": 20}, r.Backends())
		}
		for _, conn := range open {
			reply, err := conn.Echo(t.Context(), "still there?")
			require.NoError(t, err)
			require.Equal(t, "still there?", reply.Echo)
		}
	})
}
