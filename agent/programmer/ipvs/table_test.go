package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/nftables/userdata"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// TestReadElements asserts that the elements of each set and the addresses of all devices are read
// as the libraries read them.
func TestReadElements(t *testing.T) {
	c := newCluster(t, Options{})
	for _, family := range families {
		few := c.web("few", family, 1, 0, 2)
		few.Frontends = append(few.Frontends, everywhere(view.Frontend{
			Kind: view.LoadBalancer, Address: ingress(family, 1), Port: servicePort,
			Sources: []netip.Prefix{netip.PrefixFrom(ingress(family, 0), 24).Masked(), netip.PrefixFrom(vip(family, 0), 24).Masked()},
		}, view.Cluster, true))
		c.set(few)
		for i := range byte(200) { // more than fit into one message
			c.set(c.web(fmt.Sprint("web", i), family, 2+i, 0))
		}
	}
	require.NoError(t, c.Replace(t.Context(), c.state))
	for _, family := range families {
		l := c.family(family).layout
		got, want := elements{}, elements{}
		for id, s := range l.sets {
			before := len(got)
			require.NoError(t, c.tables.readElements(l, setID(id), got))
			require.NotEqual(t, before, len(got), "the test has none in set %s", s.Name)
			list, err := c.tables.conn.GetSetElements(s)
			require.NoError(t, err)
			for _, e := range list {
				value := element{end: string(e.KeyEnd), comment: e.Comment}
				if len(e.Val) == 4 {
					value.mark = binary.BigEndian.Uint32(e.Val)
				}
				want[elementKey{setID(id), string(e.Key)}] = value
			}
		}
		require.Equal(t, want, got)
	}

	list, err := c.links.AddrList(nil, netlink.FAMILY_ALL)
	require.NoError(t, err)
	var want []deviceAddress
	for _, a := range list {
		address, _ := netip.AddrFromSlice(a.IP)
		want = append(want, deviceAddress{address.Unmap(), a.LinkIndex})
	}
	got, err := c.listAddresses(unix.AF_UNSPEC)
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Greater(t, len(got), 400)
	for _, family := range families {
		one, err := c.listAddresses(domain(family))
		require.NoError(t, err)
		isOther := func(a deviceAddress) bool { return model.FamilyOf(a.Addr) != family }
		require.Equal(t, slices.DeleteFunc(slices.Clone(want), isOther), one)
	}
}

// TestCommentOf asserts that user data which this package never wrote do not count as a comment.
func TestCommentOf(t *testing.T) {
	whole := userdata.AppendString(nil, userdata.NFTNL_UDATA_SET_ELEM_COMMENT, "default/web")
	require.Equal(t, "default/web", commentOf(whole))
	for i := range whole {
		require.Empty(t, commentOf(whole[:i]))
	}
	require.Empty(t, commentOf(append(whole, 1, 1, 0)))
}
