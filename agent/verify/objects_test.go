// These tests prove that each object which a programmer has written is found if it is changed, also
// those that no imagined packet comes by.
package verify

import (
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/testenv"
)

// loopbackState is the example with NodePorts on loopback addresses, which need a guard.
func loopbackState(node *testenv.Node) view.State {
	s := exampleState(node)
	s.Node.LocalhostNodePorts = true
	return s
}

// TestNFTablesObjects breaks each chain and each set of the table.
func TestNFTablesObjects(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := loopbackState(node)
	replaceNFT(t, node, state)
	require.Empty(t, sentences(compare(t, node, state)))
	listing, err := node.Run(t.Context(), "nft", "-s", "list", "table", "ip", "slicecast")
	require.NoError(t, err)
	var chains, sets []string
	for _, o := range regexp.MustCompile(`(?m)^\t(chain|set|map) (\S+) \{\n((?:\t\t.*\n)*)`).FindAllStringSubmatch(listing, -1) {
		switch {
		case o[1] == "chain":
			chains = append(chains, o[2])
		case strings.Contains(o[3], "elements = ") && o[2] != "affinity": // packets fill it
			sets = append(sets, o[1]+" ip slicecast "+o[2])
		}
	}
	require.Contains(t, chains, "guard-loopback")
	require.Greater(t, len(sets), 12)
	repaired := func() {
		replaceNFT(t, node, state)
		require.Empty(t, sentences(compare(t, node, state)), "repaired")
	}

	var insert, flush strings.Builder
	for _, name := range chains {
		insert.WriteString("insert rule ip slicecast " + name + " ip saddr 198.51.100.9 counter drop\n")
		flush.WriteString("flush chain ip slicecast " + name + "\n")
	}
	nft(t, node, insert.String())
	found := sentences(compare(t, node, state))
	for _, name := range chains {
		require.Contains(t, found, "other rules in chain "+name+" in the IPv4 table slicecast, whose rule 1 another program has written")
	}
	repaired()
	nft(t, node, flush.String())
	found = sentences(compare(t, node, state))
	for _, name := range chains {
		require.Contains(t, found, "other rules in chain "+name+" in the IPv4 table")
	}
	repaired()

	for _, name := range sets {
		nft(t, node, "flush "+name)
		r := compare(t, node, state)
		require.NotEmpty(t, r.Differences, name)
		require.NotContains(t, sentences(r), "IPv6")
		repaired()
	}
}

// TestIPTablesObjects breaks each chain, in both variants.
func TestIPTablesObjects(t *testing.T) {
	t.Parallel()
	for _, variant := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			node := newNode(t)
			state := loopbackState(node)
			program := "iptables-" + string(variant)
			repaired := func() {
				replaceIPTables(t, node, variant, state)
				require.Empty(t, sentences(compare(t, node, state)))
			}
			repaired()
			restore := func(text string) {
				command := node.Command(t.Context(), program+"-restore", "--noflush")
				command.Stdin = strings.NewReader(text)
				out, err := command.CombinedOutput()
				require.NoError(t, err, "%s", out)
			}
			for _, table := range []string{"nat", "filter"} {
				saved, err := node.Run(t.Context(), program+"-save", "-t", table)
				require.NoError(t, err)
				chains := regexp.MustCompile(`(?m)^:(SLICECAST-\S+)`).FindAllStringSubmatch(saved, -1)
				require.Greater(t, len(chains), 5)
				var insert, flush strings.Builder
				for _, c := range chains {
					insert.WriteString("-I " + c[1] + " -s 198.51.100.9 -j ACCEPT\n")
					flush.WriteString("-F " + c[1] + "\n")
				}
				for _, commands := range []string{insert.String(), flush.String()} {
					restore("*" + table + "\n" + commands + "COMMIT\n")
					found := sentences(compare(t, node, state))
					for _, c := range chains {
						if strings.HasPrefix(commands, "-I") || strings.Contains(saved, "-A "+c[1]+" ") {
							require.Contains(t, found, "other rules in chain "+c[1]+" in table "+table+" of iptables")
						}
					}
					require.NotContains(t, found, "ip6tables")
					repaired()
				}
				for _, hook := range regexp.MustCompile(`(?m)^-A [A-Z]+ .*-j SLICECAST-\S+$`).FindAllString(saved, -1) {
					restore("*" + table + "\n" + strings.Replace(hook, "-A", "-D", 1) + "\nCOMMIT\n")
					require.Contains(t, sentences(compare(t, node, state)), hook)
					repaired()
				}
			}
		})
	}
}

// TestSourcesOutside proves that no packet is imagined that the kernel drops because its source is
// the node's own, although source ranges contain the node.
func TestSourcesOutside(t *testing.T) {
	t.Parallel()
	own, service := netip.MustParseAddr("192.168.0.2"), netip.MustParseAddr("10.98.0.1")
	o := Options{Addresses: []netip.Addr{own}, ServiceAddresses: []netip.Addr{service}}
	f := view.Frontend{Sources: []netip.Prefix{
		netip.PrefixFrom(own, 31), netip.PrefixFrom(service, 32), netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("224.0.0.0/4"),
	}}
	for _, s := range Sources(o, 1, f) {
		if s.Over != "" {
			require.NotContains(t, []netip.Addr{own, service}, s.Address)
			require.False(t, s.Address.IsMulticast() || s.Address.IsUnspecified(), "%v", s)
		}
	}
}
