package ipvs

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// requireFailed checks that an error is about one IP family as a whole, and about nothing else.
func (c *cluster) requireFailed(t *testing.T, err error, family model.Family, reason string) {
	t.Helper()
	ports, failed := programmer.Split(err, c.Families())
	require.Empty(t, ports)
	require.Len(t, failed, 1, "%v", err)
	require.ErrorContains(t, failed[family], reason)
}

// requireServed checks that a pod serves a cluster IP.
func (c *cluster) requireServed(t *testing.T, family model.Family, last byte, pod string) {
	t.Helper()
	r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, last), servicePort), 2, patient)
	require.Equal(t, map[string]int{pod: 2}, r.Backends(), "%v", r)
}

// TestFamilyByItself holds that an IP family that can't be read or written is told as such, and
// keeps nothing of the other one from being programmed.
func TestFamilyByItself(t *testing.T) {
	faults := []struct {
		name, reason string
		families     []model.Family
		breakIt      func(t *testing.T, c *cluster, family model.Family) (mend func())
	}{
		{"table", "operation not permitted", families, func(t *testing.T, c *cluster, family model.Family) func() {
			layout := newLayout(family, view.Node{}, 0)
			c.tables.conn.AddTable(layout.table)
			c.tables.conn.DelTable(layout.table)
			require.NoError(t, c.tables.conn.Flush())
			return c.occupyTable(t, family).close
		}},
		{"backends", "read the backends of IPVS' virtual service", []model.Family{model.IPv4}, func(_ *testing.T, c *cluster, _ model.Family) func() {
			works := c.entries
			c.entries = &entryReader{fd: -1, buf: works.buf}
			return func() { c.entries = works }
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

// TestFamilyThatFailsLater holds that changes of both IP families, of which one fails, are
// programmed for the other one, and that the next ones of that are.
func TestFamilyThatFailsLater(t *testing.T) {
	for _, family := range families {
		t.Run(family.String(), func(t *testing.T) {
			c := newCluster(t, Options{})
			require.NoError(t, c.Replace(t.Context(), c.state))
			c.tables.conn.DelTable(newLayout(family, view.Node{}, 0).table)
			require.NoError(t, c.tables.conn.Flush())
			defer c.occupyTable(t, family).close()
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
