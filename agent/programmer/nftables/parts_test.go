// These tests prove that backends in several parts of a table are served and found again by another
// process, and that emptied parts go without a trace in anything else.
package nftables

import (
	"bytes"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestParts asserts that Service ports whose backends are in different parts are served, and that
// another process finds them there.
func TestParts(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for _, f := range c.inHost.families {
		f.partSize = 3
	}
	for _, family := range families {
		for i := range byte(parts + 2) {
			p := c.web(family, i, 0, 2)
			p.Frontends = append(p.Frontends, localPolicy(nodePort(30000+uint16(i))))
			p.Local = c.backends(family, tcpPort, 0)
			c.set(p)
		}
	}
	c.replace(t)
	served := func() {
		t.Helper()
		eachFamily(t, func(t *testing.T, family model.Family) {
			for i := range byte(parts + 2) {
				// The probability of missing one of two backends is 2^-29.
				require.Len(t, c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, i), servicePort), 30, patient).Backends(), 2)
				to := netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30000+uint16(i))
				require.Equal(t, map[string]int{"pod0": 1}, c.client.Probe(t.Context(), testenv.TCP, to, 1, patient).Backends())
			}
		})
		for _, f := range c.inHost.families {
			f.holds(t)
		}
	}
	served()
	for _, f := range c.inHost.families {
		require.NotContains(t, f.loads, 0)
	}
	before := c.generation(t)
	c.restart()
	c.replace(t)
	require.Equal(t, before, c.generation(t), "nothing is touched")
	served()
	// New Service ports are in the first part, which holds all of them. The next Replace removes the
	// other parts.
	for _, family := range families {
		for i := range byte(parts + 2) {
			c.apply(t, c.web(family, i))
			require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.web(family, i)}}))
			delete(c.state.Ports, c.web(family, i).ID)
			c.set(c.web(family, i, 1))
		}
	}
	c.replace(t)
	for _, family := range families {
		require.NotContains(t, c.inHost.list(t, family), "-part-")
	}
}

// TestEmptiedPart asserts that another process removes a part whose last Service ports are gone or
// have left it. Everything else stays, including affinity.
func TestEmptiedPart(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for _, f := range c.inHost.families {
		f.partSize = 1
	}
	for _, family := range families {
		sticky := c.sticky(family, transports[0], time.Hour, []int{0, 1, 2}, nil)
		sticky.Frontends = []view.Frontend{clusterIP(vip(family, 9))}
		c.set(sticky)
	}
	c.replace(t)
	for _, family := range families {
		for i := range 3 {
			c.apply(t, c.web(family, byte(1+i), i))
		}
	}
	affine := func() netip.AddrPort {
		t.Helper()
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 9), servicePort), 4, patient)
		require.Len(t, r.Servers(), 1, "%v", r)
		return slices.Collect(maps.Keys(r.Servers()))[0]
	}
	backend := affine()
	for _, family := range families {
		require.Contains(t, c.inHost.list(t, family), "-part-3")
		delete(c.state.Ports, c.web(family, 2).ID)
		other := c.web(family, 3, 2)
		other.ID.Service.Name = "renamed"
		delete(c.state.Ports, c.web(family, 3).ID)
		c.set(other)
	}
	var log bytes.Buffer
	c.inHost = newInHost(t, c.a.Host, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	c.replace(t)
	require.Empty(t, log.String())
	for _, family := range families {
		require.NotContains(t, c.inHost.list(t, family), "-part-")
	}
	require.Equal(t, backend, affine())
	for _, f := range c.inHost.families {
		f.holds(t)
	}
}
