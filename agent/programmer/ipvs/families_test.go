// These tests prove that an IP family that a real kernel refuses is reported as a whole, that the
// other one is programmed, and that a Service port is at fault only if the kernel accepts an
// ordinary one.
package ipvs

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// requireFailed asserts that an error concerns one IP family as a whole, and nothing else.
func (c *cluster) requireFailed(t *testing.T, err error, family model.Family, reason string) {
	t.Helper()
	ports, failed := programmer.Split(err, c.Families())
	require.Empty(t, ports)
	require.Len(t, failed, 1, "%v", err)
	require.ErrorContains(t, failed[family], reason)
}

// requireServed asserts that a pod serves a cluster IP.
func (c *cluster) requireServed(t *testing.T, family model.Family, last byte, pod string) {
	t.Helper()
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, last), servicePort), 2, patient)
	require.Equal(t, map[string]int{pod: 2}, r.Backends(), "%v", r)
}

// TestFamilyByItself asserts that an IP family that cannot be read or written is reported as
// failed, and that the other one is programmed.
func TestFamilyByItself(t *testing.T) {
	faults := []struct {
		name, reason string
		families     []model.Family
		breakIt      func(t *testing.T, c *cluster, family model.Family) (mend func())
	}{
		{"table", "operation not permitted", families, func(t *testing.T, c *cluster, family model.Family) func() {
			require.NoError(t, c.nft.RemoveTable(tableOf(family)))
			return c.occupyTable(t, family).Close
		}},
		{"backends", "read the backends of IPVS' virtual service", []model.Family{model.IPv4}, func(_ *testing.T, c *cluster, _ model.Family) func() {
			works := c.ipvs.entries
			c.ipvs.entries = &entryReader{fd: -1, buf: works.buf}
			return func() { c.ipvs.entries = works }
		}},
	}
	for _, fault := range faults {
		for _, family := range fault.families {
			t.Run(fault.name+"/"+family.String(), func(t *testing.T) {
				c := newCluster(t, Options{})
				other := families[1-slices.Index(families, family)]
				for _, f := range families {
					c.set(c.web("web", f, 1, 0))
				}
				require.NoError(t, c.Replace(t.Context(), c.state))
				mend := fault.breakIt(t, c, family)
				for _, f := range families {
					c.set(c.web("web", f, 1, 1), c.web("more", f, 2, 2))
				}
				c.requireFailed(t, c.Replace(t.Context(), c.state), family, fault.reason)
				c.requireServed(t, other, 1, "pod1")
				c.requireServed(t, other, 2, "pod2")

				// Changes of the other family are applied meanwhile.
				changed := c.web("web", other, 1, 3)
				c.apply(t, changed.ID, changed)
				c.requireServed(t, other, 1, "pod3")
				c.requireFailed(t, c.Replace(t.Context(), c.state), family, fault.reason)
				c.requireServed(t, other, 1, "pod3")

				mend()
				require.NoError(t, c.Replace(t.Context(), c.state))
				c.requireServed(t, family, 1, "pod1")
				c.requireServed(t, family, 2, "pod2")
			})
		}
	}
}

// TestFamilyThatFailsLater asserts that if one IP family fails in an Apply with changes of both,
// the changes of the other family are programmed, and so are its next ones.
func TestFamilyThatFailsLater(t *testing.T) {
	for _, family := range families {
		t.Run(family.String(), func(t *testing.T) {
			c := newCluster(t, Options{})
			require.NoError(t, c.Replace(t.Context(), c.state))
			require.NoError(t, c.nft.RemoveTable(tableOf(family)))
			defer c.occupyTable(t, family).Close()
			var changes []view.Change
			for _, f := range families {
				changes = append(changes, view.Change{After: c.web("web", f, 1, 0)})
			}
			other := families[1-slices.Index(families, family)]
			c.requireFailed(t, c.Apply(t.Context(), changes), family, "operation not permitted")
			c.requireServed(t, other, 1, "pod0")
			changed := c.web("web", other, 1, 1)
			require.NoError(t, c.Apply(t.Context(), []view.Change{{Before: changes[0].After, After: changed}}))
			c.requireServed(t, other, 1, "pod1")
		})
	}
}

// TestAddressesThatAreRefused asserts that IPv6 counts as failed if the node accepts no IPv6
// addresses at all, whatever error the kernel returns. IPv4 goes on, and IPv6 is programmed once
// the node accepts addresses again.
func TestAddressesThatAreRefused(t *testing.T) {
	for _, refusal := range []struct{ name, refuse, take, reason string }{
		{
			"disabled", "sysctl -q -w net.ipv6.conf." + Device + ".disable_ipv6=1", "sysctl -q -w net.ipv6.conf." + Device + ".disable_ipv6=0",
			"permission denied",
		},
		{"MTU", "ip link set mtu 1000 dev " + Device, "ip link set mtu 1500 dev " + Device, "to device " + Device + ": invalid argument"},
	} {
		t.Run(refusal.name, func(t *testing.T) {
			c := newCluster(t, Options{})
			require.NoError(t, c.Replace(t.Context(), c.state)) // creates the device
			run := func(command string) {
				t.Helper()
				_, err := c.a.Run(t.Context(), "sh", "-c", command)
				require.NoError(t, err)
			}
			run(refusal.refuse)
			require.NoError(t, c.Replace(t.Context(), c.state), "nothing is wanted of IPv6")
			for _, family := range families {
				c.set(c.web("web", family, 1, 0))
			}
			c.requireFailed(t, c.Replace(t.Context(), c.state), model.IPv6, refusal.reason)
			c.requireServed(t, model.IPv4, 1, "pod0")
			c.apply(t, serviceID("other", model.TCP, model.IPv4), c.web("other", model.IPv4, 2, 1))
			c.requireServed(t, model.IPv4, 2, "pod1")
			c.set(c.web("more", model.IPv6, 2, 1))
			c.requireFailed(t, c.Replace(t.Context(), c.state), model.IPv6, refusal.reason)
			run(refusal.take)
			require.NoError(t, c.Replace(t.Context(), c.state))
			c.requireServed(t, model.IPv6, 1, "pod0")

			// A node that stops accepting addresses notices it at the next change.
			run(refusal.refuse)
			err := c.Apply(t.Context(), []view.Change{{After: c.web("next", model.IPv6, 3, 1)}})
			c.requireFailed(t, err, model.IPv6, refusal.reason)
		})
	}
}

// TestAddressThatIsRefused asserts that an address which no device may have affects only its
// Service port, even if that is the only one of its IP family.
func TestAddressThatIsRefused(t *testing.T) {
	c := newCluster(t, Options{})
	bad := c.web("bad", model.IPv6, 1, 0)
	bad.Frontends = []view.Frontend{clusterIP(netip.MustParseAddr("ff02::77"))}
	c.set(bad, c.web("good", model.IPv4, 1, 0))
	refused := func(err error) {
		t.Helper()
		ports, ok := programmer.PortErrors(err)
		require.True(t, ok, "%v", err)
		require.Len(t, ports, 1)
		require.Equal(t, bad.ID, ports[0].ID)
		require.False(t, ports[0].Lasting)
		require.ErrorIs(t, ports[0], unix.EADDRNOTAVAIL)
		out, err := c.a.Run(t.Context(), "sh", "-c", "ip addr show dev "+Device+"; cat /proc/self/net/ip_vs")
		require.NoError(t, err)
		ordinary := programmer.Ordinary(model.IPv6)
		require.NotContains(t, out, ordinary.Frontends[0].Address.String(), "it is tried without effect")
		require.NotContains(t, out, fmt.Sprintf("%X", markTag|maxID), "it is tried without effect")
	}
	refused(c.Replace(t.Context(), c.state))
	c.requireServed(t, model.IPv4, 1, "pod0")
	c.apply(t, bad.ID, nil)
	refused(c.Apply(t.Context(), []view.Change{{After: bad}}))
	c.set(bad)

	// The check with an ordinary Service port leaves a Service alone that has the same address.
	address := programmer.Ordinary(model.IPv6).Frontends[0].Address
	_, err := c.a.Run(t.Context(), "sh", "-c", "ip -6 addr flush to "+address.String())
	require.NoError(t, err)
	ordinary := c.web("ordinary", model.IPv6, 2, 1)
	ordinary.Frontends = []view.Frontend{clusterIP(address)}
	c.set(ordinary)
	for range 2 {
		ports, ok := programmer.PortErrors(c.Replace(t.Context(), c.state))
		require.True(t, ok)
		require.Len(t, ports, 1)
		require.Equal(t, bad.ID, ports[0].ID)
		out, err := c.a.Run(t.Context(), "ip", "addr", "show", "dev", Device)
		require.NoError(t, err)
		require.Contains(t, out, address.String()+"/128")
	}
}

// TestOrdinaryServicePort asserts that a Service port of which IPVS refuses something is at fault
// only as long as IPVS accepts an ordinary one.
func TestOrdinaryServicePort(t *testing.T) {
	c := newCluster(t, Options{})
	for _, family := range families {
		c.set(c.web("web", family, 1, 0))
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	web := c.state.Ports[serviceID("web", model.TCP, model.IPv4)]
	bad := *web
	bad.Cluster = view.NewBackends(append(web.Cluster.List(), view.Backend{Address: netip.MustParseAddrPort("224.0.0.1:80")})...)
	scheduler := c.options.Scheduler
	c.options.Scheduler = "best" // from now on, no virtual service can be created
	err := c.Apply(t.Context(), []view.Change{{Before: web, After: &bad}})
	c.requireFailed(t, err, model.IPv4, programmer.ErrOrdinary.Error())
	for _, family := range families {
		c.requireServed(t, family, 1, "pod0")
	}
	c.options.Scheduler = scheduler
	more := c.web("more", model.IPv6, 2, 1)
	c.apply(t, more.ID, more)
	c.requireServed(t, model.IPv6, 2, "pod1")
	c.set(&bad)
	ports, ok := programmer.PortErrors(c.Replace(t.Context(), c.state))
	require.True(t, ok)
	require.Len(t, ports, 1)
	require.Equal(t, bad.ID, ports[0].ID)
}
