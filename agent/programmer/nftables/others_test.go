// These tests prove that no connection is lost while a node changes between iptables and nftables,
// and that traffic passes where iptables drops what nothing accepts.
package nftables

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestChangingOver asserts that no connection is lost while a node changes from iptables to
// nftables and back. Each programmer is complete before the other's rules are removed. While both
// are in place, each connection is translated by one of them.
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

// TestForwardDrops asserts that if iptables' FORWARD drops what nothing accepts, what is forwarded
// for Services is accepted as by the iptables programmer, without an interruption. Nothing of that
// is left if it is not needed.
func TestForwardDrops(t *testing.T) {
	t.Parallel()
	for _, variant := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			var addresses []netip.AddrPort
			for _, family := range families {
				p := c.web(family, 1, 0, 2)
				p.Frontends = append(p.Frontends, nodePort(30001))
				c.set(p)
				addresses = append(addresses, netip.AddrPortFrom(vip(family, 1), servicePort), netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30001))
			}
			run := func(args ...string) {
				t.Helper()
				for _, program := range []string{"iptables-", "ip6tables-"} {
					_, err := c.a.Run(t.Context(), program+string(variant), args...)
					require.NoError(t, err)
				}
			}
			left := func() string {
				t.Helper()
				out, err := c.a.Run(t.Context(), "iptables-"+string(variant)+"-save")
				require.NoError(t, err)
				return strings.Join(slices.DeleteFunc(strings.Split(out, "\n"), func(line string) bool { return !strings.Contains(line, "SLICECAST") }), "\n")
			}
			var log bytes.Buffer
			retire := func() {
				t.Helper()
				log.Reset()
				options := iptables.Options{Log: slog.New(slog.NewTextHandler(&log, nil))}
				require.NoError(t, c.a.Do(func() error { return iptables.Retire(t.Context(), options) }))
			}
			replace := func() {
				t.Helper()
				require.NoError(t, c.a.Do(func() error {
					other, err := iptables.New(iptables.Options{Variant: variant, Log: slog.New(slog.DiscardHandler)})
					if err != nil {
						return err
					}
					return other.Replace(t.Context(), c.state)
				}))
			}
			run("-P", "FORWARD", "DROP")
			replace()
			stop := c.stream(t, addresses...)
			for range 3 {
				c.replace(t)
				retire()
				require.Contains(t, log.String(), "SLICECAST-FORWARD")
				require.NotContains(t, left(), "SLICECAST-SERVICES")
				require.Contains(t, left(), "-A FORWARD -j SLICECAST-FORWARD")
				before := left()
				retire() // as at the next start
				require.Equal(t, before, left())
				replace()
				require.NoError(t, c.inHost.Cleanup(t.Context()))
			}
			stop()
			// There was nothing before.
			c.replace(t)
			require.NoError(t, c.a.Do(func() error { return iptables.Cleanup(t.Context()) }))
			require.Empty(t, left())
			retire()
			for _, to := range addresses {
				require.True(t, c.client.Probe(t.Context(), testenv.TCP, to, 20, patient).All(testenv.Answered))
			}
			// The policy changes.
			run("-P", "FORWARD", "ACCEPT")
			retire()
			require.Empty(t, log.String())
			require.Empty(t, left())
		})
	}
}
