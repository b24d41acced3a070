package nftables

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestChangingOver holds that no connection is lost while a node changes from iptables to nftables and back, as each is complete
// before the other's rules go, and that where both are each connection is translated by one of them.
func TestChangingOver(t *testing.T) {
	t.Parallel()
	for _, variant := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.state.Node.ServiceCIDRs = testenv.ServiceCIDRs()
			var addresses []netip.AddrPort
			for _, family := range families {
				plain := c.web(family, 1, 0, 2)
				plain.Frontends = append(plain.Frontends, nodePort(30001))
				sticky := c.sticky(family, transports[0], time.Hour, []int{0, 1}, []int{0, 1})
				sticky.Frontends = []view.Frontend{localPolicy(external(vip(family, 2))), localPolicy(nodePort(30002))}
				c.set(plain, sticky)
				node := c.a.Addr(family == model.IPv6)
				addresses = append(addresses, netip.AddrPortFrom(vip(family, 1), servicePort), netip.AddrPortFrom(vip(family, 2), servicePort),
					netip.AddrPortFrom(node, 30001), netip.AddrPortFrom(node, 30002))
			}
			var other *iptables.Programmer
			require.NoError(t, c.a.Do(func() (err error) {
				other, err = iptables.New(iptables.Options{Variant: variant, Log: slog.New(slog.DiscardHandler)})
				return err
			}))
			replace := func() { require.NoError(t, c.a.Do(func() error { return other.Replace(t.Context(), c.state) })) }
			replace()
			stop := c.stream(t, addresses...)
			for range 5 {
				c.replace(t)
				require.NoError(t, c.a.Do(func() error { return other.Cleanup(t.Context()) }))
				replace()
				require.NoError(t, c.inHost.Cleanup(t.Context()))
			}
			stop()
		})
	}
}
