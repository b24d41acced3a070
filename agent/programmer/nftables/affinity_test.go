// These tests prove that a client with affinity stays with its backend over all frontends and
// changes, only until the timeout, and never reaches a backend of another Service, with real
// packets.
package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// sticky returns a Service port with affinity. Its cluster IP leads to the cluster set. Its
// external IP and its nodePort lead connections from outside to the local set.
func (c *testCluster) sticky(family model.Family, tr transport, timeout time.Duration, cluster, local []int) *view.ServicePort {
	return &view.ServicePort{
		ID:        serviceID("sticky", tr.protocol, family),
		Frontends: []view.Frontend{clusterIP(vip(family, 1)), localPolicy(external(vip(family, 2))), localPolicy(nodePort(30001))},
		Cluster:   c.backends(family, tr.port, cluster...), Local: c.backends(family, tr.port, local...),
		Affinity: timeout,
	}
}

// TestAffinity asserts that a client stays with its backend over all frontends and through all
// other changes, as long as the set has that backend, and that other clients do not stay with it.
func TestAffinity(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	all := []int{0, 1, 2, 3}
	c.each(t, func(t *testing.T, family model.Family, tr transport, probe probe) {
		// There are more backends than sizes of their own.
		big := c.sticky(family, tr, time.Hour, all, nil)
		big.ID, big.Frontends = serviceID("big", tr.protocol, family), []view.Frontend{clusterIP(vip(family, 9))}
		var ports []uint16
		for port := uint16(20000); port < 20040; port++ {
			ports = append(ports, port)
			big.Cluster = view.NewBackends(append(big.Cluster.List(), c.backends(family, port, 0).List()...)...)
		}
		defer c.pods[0].Serve(tr.probe, ports...).Close()

		port := c.sticky(family, tr, time.Hour, all, []int{1})
		c.set(port, big)
		c.replace(t)
		// one returns the only backend that a client reaches.
		one := func(from *testenv.Host, to netip.Addr, port uint16) netip.AddrPort {
			t.Helper()
			// A new connection may have the source port of an earlier one, which conntrack still knows.
			require.NoError(t, c.a.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
			r := probe(from, to, port, 8)
			require.True(t, r.All(testenv.Answered), "%v", r)
			require.Len(t, r.Servers(), 1, "%v", r)
			for server := range r.Servers() {
				return server
			}
			return netip.AddrPort{}
		}
		pod, client, node := c.pods[0].Host, c.client.Host, c.a.Addr(family == model.IPv6)

		// The pod reaches the cluster set by each frontend.
		ofPod, ofBig := one(pod, vip(family, 1), servicePort), one(client, vip(family, 9), servicePort)
		require.Equal(t, ofPod, one(pod, vip(family, 2), servicePort))
		require.Equal(t, ofPod, one(pod, node, 30001))
		// The client reaches the cluster set by the cluster IP. By the others it reaches the local set,
		// and then stays there.
		one(client, vip(family, 1), servicePort)
		local := one(client, vip(family, 2), servicePort)
		require.Equal(t, c.backends(family, tr.port, 1).List()[0].Address, local)
		require.Equal(t, local, one(client, vip(family, 1), servicePort), "where its last connection went")
		require.Equal(t, local, one(client, node, 30001))

		// Another Service port, another process, other backends and another timeout leave the rest as it
		// was.
		other := c.sticky(family, tr, 2*time.Hour, []int{2}, []int{1})
		other.ID, other.Frontends = serviceID("other", tr.protocol, family), []view.Frontend{clusterIP(vip(family, 20))}
		c.apply(t, other)
		c.restart()
		c.replace(t)
		i := slices.IndexFunc(port.Cluster.List(), func(b view.Backend) bool { return b.Address == ofPod })
		for n, left := range [][]int{{1, i}, {i}, all} {
			slices.Sort(left)
			c.apply(t, c.sticky(family, tr, time.Duration(n+1)*time.Hour, slices.Compact(left), []int{1}))
			require.Equal(t, ofPod, one(pod, vip(family, 1), servicePort))
		}
		// The client's backend is removed and comes back.
		c.apply(t, c.sticky(family, tr, time.Hour, slices.DeleteFunc(slices.Clone(all), func(j int) bool { return j == i }), []int{1}))
		next := one(pod, vip(family, 1), servicePort)
		require.NotEqual(t, ofPod, next)
		c.apply(t, port)
		require.Equal(t, next, one(pod, vip(family, 1), servicePort))
		require.Equal(t, ofBig, one(client, vip(family, 9), servicePort))

		// Affinity is removed and added again.
		without := c.sticky(family, tr, 0, all, []int{1})
		c.apply(t, without)
		require.Len(t, probe(pod, vip(family, 1), servicePort, 60).Backends(), 4, "or else a chance of 1e-7")
		c.apply(t, port)
		one(pod, vip(family, 1), servicePort)
	})
}

// TestAffinitySpreads asserts that clients are spread evenly, each with one backend, even if all of
// them arrive at once.
func TestAffinitySpreads(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.set(c.sticky(model.IPv4, transports[1], time.Hour, []int{0, 1, 2, 3}, []int{1}))
	c.replace(t)
	const clients = 60
	seen := make([]testenv.Result, clients)
	var wait sync.WaitGroup
	for i := range clients {
		source := netip.AddrFrom4([4]byte{198, 51, 100, byte(i)})
		c.client.AddAddress(source)
		options := patient
		options.Source = netip.AddrPortFrom(source, 0)
		var mu sync.Mutex
		for range 3 {
			wait.Go(func() {
				r := c.client.Probe(t.Context(), testenv.UDP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 2, options)
				mu.Lock()
				defer mu.Unlock()
				seen[i].Attempts = append(seen[i].Attempts, r.Attempts...)
			})
		}
	}
	wait.Wait()
	spread := map[string]int{}
	for i, r := range seen {
		require.True(t, r.All(testenv.Answered), "%v", r)
		require.Len(t, r.Backends(), 1, fmt.Sprint("client ", i))
		spread[keys(r.Backends())[0]]++
	}
	require.Len(t, spread, 4, "or else a chance of 1e-7")
}

// TestAffinityEnds asserts that a client may go elsewhere after the timeout has passed since its
// last connection, but not since its first.
func TestAffinityEnds(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const timeout = 2 * time.Second
	c.set(c.sticky(model.IPv4, transports[0], timeout, []int{0, 1, 2, 3}, []int{1}))
	c.replace(t)
	next := func() string {
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), 1, patient)
		require.True(t, r.All(testenv.Answered), "%v", r)
		return keys(r.Backends())[0]
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
}

// TestAffinityIsOneServices asserts that a client reaches only backends of the Service that it
// calls, and that no id is reused soon, whatever affinity remembers. The Service port with the
// highest id and numbers, its backends, or both are removed. Then another one is added, after a
// Replace by the same process or another one.
func TestAffinityIsOneServices(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.each(t, func(t *testing.T, family model.Family, tr transport, probe probe) {
		one := func(name string, last byte, pods ...int) *view.ServicePort {
			p := c.sticky(family, tr, time.Hour, pods, nil)
			p.ID, p.Frontends = serviceID(name, tr.protocol, family), []view.Frontend{clusterIP(vip(family, last))}
			return p
		}
		remove := func(p *view.ServicePort) {
			require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.state.Ports[p.ID]}}))
			delete(c.state.Ports, p.ID)
		}
		answers := func(last byte, pod int) {
			t.Helper()
			require.NoError(t, c.a.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
			require.Equal(t, map[string]int{fmt.Sprint("pod", pod): 4}, probe(c.client.Host, vip(family, last), servicePort, 4).Backends())
		}
		f := c.inHost.families[slices.Index(families, family)]
		id := func(p *view.ServicePort) uint32 { return f.ports[p.ID].id }
		for again, restart := range map[string]func(){"Replace": func() {}, "restart": func() {
			c.restart()
			f = c.inHost.families[slices.Index(families, family)]
		}} {
			first := one("first", 1, 3) // keeps affinity in the table all the time
			c.set(first)
			c.replace(t)
			c.apply(t, one("second", 2, 1))
			answers(2, 1)
			c.apply(t, one("second", 2)) // removes the backends
			restart()
			c.replace(t)
			c.apply(t, one("other", 4, 2))
			c.apply(t, one("second", 2, 0))
			answers(2, 0)
			answers(4, 2)
			c.apply(t, one("second", 2, 1))
			answers(2, 1)

			// If everything is removed, another process may harmlessly reuse the id, but this process does
			// not.
			gone := id(one("second", 2))
			remove(one("other", 4))
			remove(one("second", 2))
			restart()
			c.replace(t)
			c.apply(t, one("third", 5, 2))
			if again == "Replace" {
				require.NotEqual(t, gone, id(one("third", 5)))
			}
			answers(5, 2)
			remove(one("third", 5))
			remove(first)
			c.replace(t)
		}
	})
}
