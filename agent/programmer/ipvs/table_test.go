// These tests prove that sets are read from a real kernel as a library reads them,
// and that foreign comments are not mistaken for the programmer's.
package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/nftables"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
)

// TestReadElements asserts that the elements of each set are read as the library reads them.
func TestReadElements(t *testing.T) {
	c := newCluster(t, Options{})
	for _, family := range families {
		few := c.web("few", family, 1, 0, 2)
		few.Frontends = append(few.Frontends, everywhere(view.Frontend{
			Kind: view.LoadBalancer, Address: ingress(family, 1), Port: servicePort,
			Sources: []netip.Prefix{netip.PrefixFrom(ingress(family, 0), 24).Masked(), netip.PrefixFrom(vip(family, 0), 24).Masked()},
		}, view.Cluster, true))
		few.HealthCheckPort = 32100
		c.set(few)
		for i := range byte(200) { // more than fit into one message
			c.set(c.web(fmt.Sprint("web", i), family, 2+i, 0))
		}
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	var library *nftables.Conn
	require.NoError(t, c.a.Do(func() (err error) {
		library, err = nftables.New(nftables.AsLasting())
		return err
	}))
	defer func() { require.NoError(t, library.CloseLasting()) }()
	for _, family := range families {
		l, want := c.family(family).layout, elements{}
		got, err := c.readElements(l)
		require.NoError(t, err)
		table := &nftables.Table{Family: nftables.TableFamily(l.Number), Name: l.Name}
		for id, s := range l.sets {
			set, err := library.GetSetByName(table, s.name)
			require.NoError(t, err)
			list, err := library.GetSetElements(set)
			require.NoError(t, err)
			require.NotEmpty(t, list, "the test has none in set %s", s.name)
			for _, e := range list {
				value := element{end: string(e.KeyEnd), comment: e.Comment}
				if len(e.Val) == 4 {
					value.mark = binary.NativeEndian.Uint32(e.Val)
				}
				want[elementKey{setID(id), string(e.Key)}] = value
			}
		}
		require.Equal(t, want, got)
	}
}
