// These tests prove for each scheduler of a real kernel that new connections reach the backends
// that take them while others drain.
package ipvs

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// nobodys returns n backends that do not answer.
func nobodys(n int) (backends []view.Backend) {
	for i := range n {
		backends = append(backends, view.Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), tcpPort)})
	}
	return backends
}

// TestSchedulersAndDrains asserts for each scheduler that new connections go to the remaining
// backends while others drain.
func TestSchedulersAndDrains(t *testing.T) {
	c := newCluster(t, Options{})
	require.NoError(t, c.Replace(t.Context(), c.state))
	last := byte(0)
	for _, scheduler := range Schedulers() {
		last++
		web := c.web(scheduler, model.IPv4, last, 0, 1, 2, 3)
		web.Scheduler = scheduler
		c.apply(t, web.ID, web)
		target := netip.AddrPortFrom(vip(model.IPv4, last), servicePort)
		check := func(pod string, drain int) {
			t.Helper()
			weights := map[uint32]int{}
			for _, weight := range c.destinations(t, web.ID) {
				weights[weight]++
			}
			want := map[uint32]int{1: 1}
			if drain > 0 {
				want[0] = drain
			}
			require.Equal(t, want, weights, scheduler)
			r := c.client.Probe(t.Context(), testenv.TCP, target, 12, patient)
			require.Equal(t, map[string]int{pod: 12}, r.Backends(), "%s: %v", scheduler, r)
		}
		drain := 3
		if scheduler == "dh" {
			drain = 0
		}
		left := func(scheduler string, pod int) {
			less := *web
			less.Scheduler, less.Cluster = scheduler, c.backends(model.IPv4, tcpPort, pod)
			c.apply(t, web.ID, &less)
		}
		left(scheduler, 3)
		check("pod3", drain)
		left(scheduler, 1)
		check("pod1", drain)
		require.NoError(t, c.Replace(t.Context(), c.state))
		check("pod1", drain)
		// A scheduler that has no room for draining backends has them removed.
		left("dh", 1)
		check("pod1", 0)
	}
}

// TestSchedulersTables asserts that schedulers with tables of backends find those that take
// connections, however many there were before.
func TestSchedulersTables(t *testing.T) {
	c := newCluster(t, Options{})
	require.NoError(t, c.Replace(t.Context(), c.state))
	for last, scheduler := range map[byte]string{1: "sh", 2: "mh"} {
		web := c.web(scheduler, model.IPv4, last)
		web.Scheduler, web.Cluster = scheduler, view.NewBackends(append(nobodys(300), c.backends(model.IPv4, tcpPort, 0).List()...)...)
		web.Frontends = []view.Frontend{clusterIP(vip(model.IPv4, last))}
		c.apply(t, web.ID, web)
		none := *web
		none.Cluster = view.Backends{}
		c.apply(t, web.ID, &none)
		require.Len(t, c.destinations(t, web.ID), 301, "%s: where nobody is led there is room", scheduler)
		less := *web
		less.Cluster = c.backends(model.IPv4, tcpPort, 0)
		c.apply(t, web.ID, &less)
		require.Equal(t, map[netip.AddrPort]uint32{less.Cluster.List()[0].Address: 1}, c.destinations(t, web.ID), scheduler)
		require.Empty(t, c.family(model.IPv4).draining)
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, last), servicePort), 8, patient)
		require.Equal(t, map[string]int{"pod0": 8}, r.Backends(), "%s: %v", scheduler, r)
	}
	// A Service that mh has no room for is served by the default scheduler, until mh has room for it.
	large := c.web("large", model.IPv4, 3, 0)
	large.Scheduler, large.Cluster = "mh", view.NewBackends(nobodys(mhTable+1)...)
	check := func(err error) {
		t.Helper()
		ports, ok := programmer.PortErrors(err)
		require.True(t, ok, "%v", err)
		require.Len(t, ports, 1)
		require.Equal(t, large.ID, ports[0].ID)
		require.True(t, ports[0].Served)
		require.ErrorContains(t, ports[0], "mh supports at most 4093 backends, and there are 4094: using rr")
	}
	scheduler := func() string {
		s, err := c.ipvs.GetService(c.virtuals(large.ID)[0].serviceKey.moby())
		require.NoError(t, err)
		return s.SchedName
	}
	check(c.Apply(t.Context(), []view.Change{{After: large}}))
	require.Equal(t, "rr", scheduler())
	c.set(large)
	check(c.Replace(t.Context(), c.state))
	require.Len(t, c.destinations(t, large.ID), mhTable+1)
	less := *large
	less.Cluster = c.backends(model.IPv4, tcpPort, 0, 1)
	c.apply(t, large.ID, &less)
	require.Equal(t, "mh", scheduler())
	require.Len(t, c.destinations(t, large.ID), 2)
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 3), servicePort), 40, patient)
	require.Len(t, r.Backends(), 2, "or else a chance of 2^-39, as mh hashes the source's port: %v", r)
}
