// This test proves that backends that are read by getsockopt are those that netlink reports, for a
// real kernel's virtual services of any size.
package ipvs

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestReadBackends asserts that getsockopt returns the same backends as netlink, with their weights
// and connections. It covers marks and addresses, many backends and none. Reading a large virtual
// service must not leave anything behind for the next one.
func TestReadBackends(t *testing.T) {
	c := newCluster(t, Options{})
	web := c.web("web", model.IPv4, 1, 0)
	many := c.web("many", model.IPv4, 2)
	var list []view.Backend
	for i := range 1000 {
		list = append(list, view.Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 181, byte(i >> 8), byte(i)}), uint16(8080+i))})
	}
	many.Cluster = view.NewBackends(list...)
	many.Frontends = []view.Frontend{clusterIP(vip(model.IPv4, 2))}
	sticky := c.web("sticky", model.IPv4, 3, 1, 2, 3)
	sticky.Affinity = time.Hour
	c.set(web, many, sticky)
	require.NoError(t, c.Replace(t.Context(), c.state))
	open, err := c.client.Dial(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(model.IPv4, 1), servicePort), patient)
	require.NoError(t, err)
	defer open.Close()
	c.apply(t, web.ID, c.web("web", model.IPv4, 1, 2))

	read := func(tell func(serviceKey, func(heldBackend)) error, k serviceKey) (got []heldBackend) {
		require.NoError(t, tell(k, func(b heldBackend) { got = append(got, b) }))
		slices.SortFunc(got, func(a, b heldBackend) int { return a.address.Compare(b.address) })
		return got
	}
	count := func(id view.ServicePortID) (total int) {
		for _, v := range c.virtuals(id) {
			got := read(c.ipvs.entries.read, v.serviceKey)
			dump := func(k serviceKey, each func(heldBackend)) error { return c.ipvs.dumpBackends(k, func() {}, each) }
			require.Equal(t, read(dump, v.serviceKey), got, "%v of %v", v.serviceKey, id)
			total += len(got)
		}
		return total
	}
	// After the large one, the buffer stays large.
	for range 2 {
		require.Equal(t, 2, count(web.ID))
		require.Equal(t, 1000, count(many.ID))
		require.Equal(t, 3*len(c.virtuals(sticky.ID)), count(sticky.ID))
	}
	draining := read(c.ipvs.entries.read, c.virtuals(web.ID)[0].serviceKey)[0]
	require.Equal(t, heldBackend{address: netip.AddrPortFrom(c.pods[0].Addr(false), tcpPort), connections: 1, active: 1}, draining)
	require.Empty(t, read(c.ipvs.entries.read, serviceKey{family: model.IPv4, number: maxID}))
	require.Empty(t, read(c.ipvs.entries.read, serviceKey{family: model.IPv4, address: vip(model.IPv4, 9), protocol: model.UDP, port: 53}))
}
