// These tests prove that rules of other programs are no differences of the proxy where they do not
// concern it, and that they are named where they change what happens.
package verify

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/internal/testenv"
)

// nft lets nft execute commands on a node.
func nft(t *testing.T, node *testenv.Node, script string) {
	t.Helper()
	command := node.Command(t.Context(), "nft", "-f", "-")
	command.Stdin = strings.NewReader(script)
	out, err := command.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// networkPlugin are the rules by which flannel masquerades: what pods of this node send to pods
// keeps its source, and all else that goes to pods does not.
const networkPlugin = `
table ip plugin {
	chain postrouting {
		type nat hook postrouting priority PRIORITY;
		ip saddr 10.180.0.0/24 ip daddr 10.180.0.0/16 return
		ip saddr 10.180.0.0/16 ip daddr 10.180.0.0/24 return
		ip daddr 10.180.0.0/16 masquerade
	}
}`

func TestMasqueradingOfOthers(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	state.Node.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/24"), netip.MustParsePrefix("fd00:10:180::/64")}
	replaceNFT(t, node, state)
	require.Empty(t, sentences(compare(t, node, state)))
	for _, priority := range []string{"90", "110"} {
		nft(t, node, strings.Replace(networkPlugin, "PRIORITY", priority, 1))
		r := compare(t, node, state)
		require.Empty(t, sentences(r))
		require.Len(t, r.Facts, 1, "%q", r.Facts)
		require.Contains(t, r.Facts[0], "connections from outside keep their source as far as the proxy is concerned")
		require.Contains(t, r.Facts[0], "chain postrouting in table ip plugin")

		// The proxy's own masquerading is missed nevertheless.
		nft(t, node, "flush chain ip slicecast postrouting")
		require.Contains(t, sentences(compare(t, node, state)), "masqueraded, but it is not masqueraded")
		replaceNFT(t, node, state)
		nft(t, node, "delete table ip plugin")
	}
}

// TestBesideKubeProxy proves that the Services of a proxy beside Slicecast are not taken for stale
// rules, and that Slicecast's own stale rules are.
func TestBesideKubeProxy(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	replaceIPTables(t, node, iptables.Legacy, state)
	restore := func(rules string) {
		command := node.Command(t.Context(), "iptables-legacy-restore", "--noflush")
		command.Stdin = strings.NewReader("*nat\n" + rules + "COMMIT\n")
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	compare := func(beside bool) (r Result) {
		require.NoError(t, node.Do(func() (err error) {
			r, err = Kernel(t.Context(), Options{State: state, Beside: beside})
			return err
		}))
		return r
	}
	restore(":KUBE-SERVICES - [0:0]\n:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]\n:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]\n" +
		"-A PREROUTING -j KUBE-SERVICES\n-A KUBE-SERVICES -d 10.96.0.99/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-AAAAAAAAAAAAAAAA\n" +
		"-A KUBE-SVC-AAAAAAAAAAAAAAAA -p tcp -j DNAT --to-destination 10.180.0.1:8080\n" +
		"-A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -j DNAT --to-destination 10.180.0.1:8080\n")
	require.Empty(t, sentences(compare(true)))
	require.Contains(t, sentences(compare(false)), "no rules for 10.96.0.99:80/TCP")
	require.Contains(t, sentences(compare(false)), "leads to chain KUBE-SEP-AAAAAAAAAAAAAAAA")
	restore("-A SLICECAST-VIPS -d 10.96.0.98/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.180.0.1:8080\n")
	require.Contains(t, sentences(compare(true)), "no rules for 10.96.0.98:80/TCP")
}

// TestAbout proves that a lasting difference is recognized while what is wanted changes.
func TestAbout(t *testing.T) {
	t.Parallel()
	d := func(service, frontend, wanted string) Difference {
		return Difference{Service: service, Frontend: frontend, Source: "outside", Wanted: wanted, Found: wanted}
	}
	earlier := Result{Differences: []Difference{d("a", "x", "lead to 3 backends"), d("a", "y", "lead"), d("", "", "be no rules for y")}}
	now := Result{Differences: []Difference{d("a", "x", "lead to 4 backends"), d("b", "y", "lead"), d("", "", "be no rules for z")}}
	require.Equal(t, now.Differences[:1], now.Both(earlier).Differences)
}
