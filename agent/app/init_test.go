// This test proves that --init-only enables the routing of loopback addresses, together with the
// rules that guard them, exactly if NodePorts on loopback addresses will need it. The kernel is
// that of a network namespace.
package app

import (
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

// TestInitOnly asserts that --init-only prepares the kernel for NodePorts on loopback addresses if
// there will be any, and leaves the kernel alone otherwise.
func TestInitOnly(t *testing.T) {
	for args, ready := range map[string]bool{
		"--iptables-localhost-nodeports": true,
		"--iptables-localhost-nodeports --nodeport-addresses=127.0.0.0/8,192.168.0.0/16":       true,
		"--iptables-localhost-nodeports --nodeport-addresses=192.168.0.0/16":                   false,
		"--iptables-localhost-nodeports --nodeport-addresses=primary":                          false,
		"--iptables-localhost-nodeports --programmer=printer":                                  false,
		"--iptables-localhost-nodeports=false --nodeport-addresses=127.0.0.0/8,192.168.0.0/16": false,
	} {
		for programmer, guard := range map[string]string{"iptables": "jump SLICECAST-LOCALNET", "auto": "chain guard-loopback {"} {
			t.Run(programmer+" "+args, func(t *testing.T) {
				node := testenv.NewNetwork(t).AddNode("a")
				o := parse(t, append([]string{
					"--programmer=" + programmer, "--init-only", "--conntrack-max-per-core=0", "--iptables-variant=nft",
				}, strings.Fields(args)...)...)
				require.NoError(t, node.Do(func() error { return Run(t.Context(), o, slog.New(slog.DiscardHandler), io.Discard) }))
				localnet, err := node.Run(t.Context(), "cat", "/proc/sys/net/ipv4/conf/all/route_localnet")
				require.NoError(t, err)
				rules, err := node.Run(t.Context(), "nft", "list", "ruleset")
				require.NoError(t, err)
				if ready {
					require.Equal(t, "1", strings.TrimSpace(localnet))
					require.Contains(t, rules, guard)
				} else {
					require.Equal(t, "0", strings.TrimSpace(localnet))
					require.Empty(t, strings.TrimSpace(rules))
				}
			})
		}
	}
}
