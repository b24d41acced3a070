// TestAddressesAreReadOnce proves that the node's addresses are read by one request, however many
// interfaces it has. One request for each, which returns all addresses each time, would take tens
// of seconds on nodes with many Services (kubernetes/kubernetes#138927).
package ipvs

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestAddressesAreReadOnce(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("a")
	const interfaces, services = 40, 500
	_, err := node.Run(t.Context(), "sh", "-c", fmt.Sprintf(
		"for i in $(seq %d); do echo link add dummy$i type dummy; echo addr add 198.18.$i.1/32 dev dummy$i; done | ip -batch -", interfaces))
	require.NoError(t, err)
	var list []netip.Addr
	for i := range services {
		list = append(list, netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}))
	}
	require.NoError(t, node.Do(func() error {
		d, err := openDevice()
		require.NoError(t, err)
		defer d.close()
		require.NoError(t, d.ensure())
		refused, err := d.addAddresses(list)
		require.NoError(t, err)
		require.Empty(t, refused)

		own, elsewhere, err := d.read(model.IPv4)
		require.NoError(t, err)
		require.Len(t, own, services)
		for i := range interfaces {
			require.Contains(t, elsewhere, netip.AddrFrom4([4]byte{198, 18, byte(i + 1), 1}))
		}
		request := d.requests.Buf
		require.EqualValues(t, len(request), netlink.Uint32(request[:4]), "more than one request")
		require.Zero(t, netlink.Uint32(request[unix.SizeofNlMsghdr+4:][:4]), "the request is for one interface")
		return nil
	}))
}
