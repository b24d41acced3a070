// This test proves that a kube-proxy that answers nowhere is found by the rules that it makes, in a
// real kernel, and that leftovers of an earlier one are not mistaken for it.
package kubeproxy

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

func TestDetector(t *testing.T) {
	nftables := `add table ip6 kube-proxy
add chain ip6 kube-proxy nat-prerouting
delete chain ip6 kube-proxy nat-prerouting
add chain ip6 kube-proxy nat-prerouting { type nat hook prerouting priority -100; }
`
	iptables := `*nat
:KUBE-POSTROUTING - [0:0]
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
COMMIT
`
	canary := `*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
`
	for name, c := range map[string]struct {
		program      []string
		input        string
		made         string
		remove       string
		noticedAgain bool // whether making the same again is noticed
	}{
		"nftables": {
			[]string{"nft", "-f", "-"}, nftables, "the IPv6 chain nat-prerouting in table kube-proxy", "nft delete table ip6 kube-proxy", true,
		},
		"iptables": {
			[]string{"iptables-nft-restore", "--noflush"}, iptables, "the IPv4 chain KUBE-POSTROUTING in table nat",
			"iptables-nft -t nat -F KUBE-POSTROUTING; iptables-nft -t nat -X KUBE-POSTROUTING", true,
		},
		"legacy iptables": {
			[]string{"iptables-legacy-restore", "--noflush"}, canary, "the IPv4 chain KUBE-PROXY-CANARY of legacy iptables",
			"iptables-legacy -t mangle -X KUBE-PROXY-CANARY", false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			host := testenv.NewNetwork(t).AddNode("a").Host
			find := func(d *Detector) (where string) {
				t.Helper()
				require.NoError(t, host.Do(func() (err error) {
					where, err = d.Find(t.Context())
					return err
				}))
				return where
			}
			makeRules := func() {
				t.Helper()
				restore := host.Command(t.Context(), c.program[0], c.program[1:]...)
				restore.Stdin = strings.NewReader(c.input)
				out, err := restore.CombinedOutput()
				require.NoError(t, err, "%s", out)
			}
			remove := func() {
				t.Helper()
				for command := range strings.SplitSeq(c.remove, "; ") {
					words := strings.Fields(command)
					_, err := host.Run(t.Context(), words[0], words[1:]...)
					require.NoError(t, err)
				}
			}
			want := "this container does not see it, but it has made rules: " + c.made

			first := &Detector{}
			require.Empty(t, find(first))
			makeRules()
			for range 2 { // as long as they are there
				require.Equal(t, want, find(first))
			}

			later := &Detector{}
			for range 2 {
				require.Empty(t, find(later), "they may be leftovers")
			}
			makeRules()
			if c.noticedAgain {
				require.Equal(t, want, find(later))
			}
			remove()
			require.Empty(t, find(first))
			require.Empty(t, find(later))
			makeRules()
			require.Equal(t, want, find(later))
		})
	}
}
