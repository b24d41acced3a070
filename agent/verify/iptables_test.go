// These tests prove that what the iptables programmer writes is found to be as wanted, in both
// variants, and that each way to break it is found and named.
package verify

import (
	"log/slog"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/testenv"
)

func replaceIPTables(t *testing.T, node *testenv.Node, variant iptables.Variant, state view.State) {
	t.Helper()
	require.NoError(t, node.Do(func() error {
		p, err := iptables.New(iptables.Options{Variant: variant, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		return p.Replace(t.Context(), state)
	}))
}

// edit is a way to break what iptables-save has printed: the first line that matches the expression
// is replaced. An empty replacement removes it.
type edit struct {
	name, expression, replacement string
	found                         []string
}

var iptablesBreakages = []edit{
	{"a backend is removed", `-A SLICECAST-P-\S+ -p tcp -m statistic .* 10\.180\.0\.2:8080`, "", []string{"shop/web", "never leads to 10.180.0.2:8080"}},
	{"the last backend is removed", `-A SLICECAST-P-\S+ -p tcp -j DNAT --to-destination 10\.180\.0\.3:8080`, "", []string{"shop/web", "is not translated"}},
	{"a backend is swapped", `10\.180\.0\.2:8080`, "10.180.0.99:8080", []string{"shop/web", "may lead to 10.180.0.99:8080"}},
	{"a backend has another port", `10\.180\.0\.1:8080`, "10.180.0.1:81", []string{"may lead to 10.180.0.1:81"}},
	{"a probability is wrong", `(10\.96\.0\.2/32 .*)0\.25000000000`, "${1}0.90000000000", []string{"shop/dns", "probability"}},
	{"a rule is reordered", `(?m)^(-A SLICECAST-\S+ -s 10\.180\.0\.0/16 -g \S+)\n((?:-A SLICECAST-R-.*\n)+)`, "$2$1\n", []string{"shop/edge", "from a pod"}},
	{"a frontend is removed", `-A SLICECAST-VIPS -d 10\.96\.0\.1/32 .*`, "", []string{"clusterIP 10.96.0.1:80", "is not translated"}},
	{"a NodePort is removed", `-A SLICECAST-PORTS-TCP .*30001 .*`, "", []string{"shop/web", "nodePort"}},
	{"a frontend has another address", `10\.96\.0\.3/32`, "10.96.0.33/32", []string{"shop/sticky", "other rules in chain SLICECAST-VIPS"}},
	{"a frontend has another port", `(10\.96\.0\.1/32 .*--dport )80`, "${1}81", []string{"shop/web", "other rules in chain SLICECAST-VIPS"}},
	{"a NodePort is stale", `(?m)^(-A SLICECAST-PORTS-TCP .*)30001 (.*)$`, "${1}30001 $2\n${1}31111 $2", []string{"other rules in chain SLICECAST-PORTS-TCP"}},
	{"a frontend leads to another Service", `(?m)(10\.96\.0\.1/32 .*) -j \S+$`, "$1 -j DNAT --to-destination 10.180.0.41:8080", []string{"shop/web", "10.180.0.41:8080"}},
	{"pods are masqueraded", `-A SLICECAST-NONLOCAL -s .*`, "", []string{"from a pod", "but it is masqueraded"}},
	{"nothing is masqueraded", `-A SLICECAST-NONLOCAL -j MARK.*`, "", []string{"from outside", "but it is not masqueraded"}},
	{"the mark is not that of postrouting", `(-A SLICECAST-NONLOCAL -j MARK --set-xmark )0x4000/0x4000`, "${1}0x8000/0x8000", []string{"from outside", "but it is not masqueraded"}},
	{"masquerading is gone", `-A SLICECAST-POSTROUTING -j MASQUERADE.*`, "", []string{"but it is not masqueraded"}},
	{"a hairpin of the policy Local is gone", `-A SLICECAST-HAIRPIN -s 10\.180\.0\.61/32.*`, "", []string{"shop/inner", "from the backend itself (10.180.0.61)"}},
	{"hairpins are gone", `-A SLICECAST-HAIRPIN -s 10\.180\.0\.1/32.*`, "", []string{"from the backend itself (10.180.0.1)"}},
	{"a source is removed", `-A SLICECAST-S-\S+ -s 10\.98\.0\.0/24.*`, "", []string{"in 10.98.0.0/24", "is dropped"}},
	{"a source is wider", `(-A SLICECAST-S-\S+ -s )10\.98\.0\.0/24`, "${1}10.98.0.0/20", []string{"just after 10.98.0.0/24", "be dropped"}},
	{"the sources' drop is gone", `-A SLICECAST-REJECT -d 10\.97\.0\.4/32.*`, "", []string{"loadBalancer 10.97.0.4:80", "should be dropped, but is not translated"}},
	{"a refusal is removed", `-A SLICECAST-REJECT -d 10\.96\.0\.5/32.*`, "", []string{"shop/none", "clusterIP 10.96.0.5:80", "should be rejected, but is not translated"}},
	{"a refusal is silent", `(-A SLICECAST-REJECT -d 10\.96\.0\.5/32.*)-j REJECT.*`, "$1-j DROP", []string{"should be rejected, but is dropped"}},
	{"a NodePort's refusal is removed", `-A SLICECAST-REJECT-TCP -s .*30005.*`, "", []string{"shop/none", "nodePort", "from a pod"}},
	{"affinity is not looked up", `-A SLICECAST-P-\S+ -p tcp -m recent --update .*10\.180\.0\.41:8080`, "", []string{"shop/sticky", "no affinity"}},
	{"affinity has another timeout", `--seconds 10800`, "--seconds 60", []string{"shop/sticky", "an affinity of 1m0s"}},
	{"affinity is not kept", `-m recent --set --name \S+ --mask \S+ --rsource (-j DNAT --to-destination 10\.180\.0\.43)`, "$1", []string{"shop/sticky", "no affinity"}},
	{"affinity leads to another backend", `(--update .*)10\.180\.0\.41:`, "${1}10.180.0.42:", []string{"shop/sticky", "10.180.0.41:8080 again"}},
	{"packets are not looked up", `-A PREROUTING -j SLICECAST-SERVICES`, "", []string{"from outside", "is not translated"}},
	{"the node's packets are not looked up", `-A OUTPUT -j SLICECAST-SERVICES`, "", []string{"from the node", "is not translated"}},
	{"refusals are not looked up", `-A FORWARD -j SLICECAST-FORWARD`, "", []string{"shop/none", "clusterIP 10.96.0.5:80 from outside"}},
	{"another rule is first", `(?m)^-A PREROUTING -j SLICECAST-SERVICES$`, "-A PREROUTING -d 10.96.0.1/32 -p tcp -j DNAT --to-destination 10.9.9.9\n$0",
		[]string{"10.9.9.9:80", "rule 1 of chain PREROUTING in table nat"}},
	{"a rule for one source", `(?m)^-A SLICECAST-VIPS -d 10\.96\.0\.1/32 .*$`, "-A SLICECAST-VIPS -s 10.9.9.9 -d 10.96.0.1 -j ACCEPT\n$0", []string{"other rules in chain SLICECAST-VIPS in table nat"}},
	{"a rule for a state", `(?m)^-A SLICECAST-FORWARD .*INVALID.*$`, "-A SLICECAST-FORWARD -m conntrack --ctstate ESTABLISHED -j DROP\n$0", []string{"other rules in chain SLICECAST-FORWARD in table filter"}},
	{"a stale chain", `(?m)^:SLICECAST-VIPS .*$`, "$0\n:SLICECAST-P-AAAAAAAAAAAAAAAA - [0:0]\n-A SLICECAST-P-AAAAAAAAAAAAAAAA -p tcp -j DNAT --to-destination 10.9.9.9:80",
		[]string{"chain SLICECAST-P-AAAAAAAAAAAAAAAA"}},
	{"a rule that cannot be judged", `(?m)^-A SLICECAST-DISPATCH -j SLICECAST-VIPS$`, "-A SLICECAST-DISPATCH -m length --length 100:200 -j RETURN\n$0", []string{"cannot be judged"}},
}

// TestIPTables breaks the rules in many ways.
func TestIPTables(t *testing.T) {
	t.Parallel()
	for variant, breakages := range map[iptables.Variant][]edit{iptables.NFT: iptablesBreakages[:3], iptables.Legacy: iptablesBreakages} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			node := newNode(t)
			state := exampleState(node)
			replaceIPTables(t, node, variant, state)
			require.Empty(t, sentences(compare(t, node, state)))
			good, err := node.Run(t.Context(), "iptables-"+string(variant)+"-save")
			require.NoError(t, err)
			restore := func(t *testing.T, text string) {
				command := node.Command(t.Context(), "iptables-"+string(variant)+"-restore")
				command.Stdin = strings.NewReader(text)
				out, err := command.CombinedOutput()
				require.NoError(t, err, "%s", out)
			}
			for _, b := range breakages {
				t.Run(b.name, func(t *testing.T) {
					e := regexp.MustCompile(b.expression)
					at := e.FindStringSubmatchIndex(good)
					require.NotNil(t, at)
					broken := good[:at[0]] + string(e.ExpandString(nil, b.replacement, good, at)) + good[at[1]:]
					restore(t, broken)
					found := sentences(compare(t, node, state))
					for _, text := range b.found {
						require.Contains(t, found, text)
					}
					require.NotContains(t, found, "IPv6")
				})
			}
			restore(t, good)
			require.Empty(t, sentences(compare(t, node, state)))
		})
	}
}

// TestNativeRules asserts that rules which others have added with nft to the tables of iptables-nft
// are no difference, wherever they are, although iptables' programs print nothing of such a table
// or fail. What they or others really break is found.
func TestNativeRules(t *testing.T) {
	t.Parallel()
	for _, rules := range []string{
		"insert rule ip nat PREROUTING ip daddr 192.0.2.1 tcp dport { 8443, 9443 } dnat to 10.1.1.1:443; " +
			"insert rule ip filter INPUT ip daddr 192.0.2.1 tcp dport { 1, 2 } accept; insert rule ip filter FORWARD ct mark set 7",
		"add rule ip nat PREROUTING ip daddr 192.0.2.1 tcp dport { 8443, 9443 } dnat to 10.1.1.1:443",
		"insert rule ip filter FORWARD ip saddr 203.0.113.7 meta mark set 0x70000; insert rule ip nat OUTPUT ip daddr 192.0.2.1 meta mark set 0x70000",
		"add rule ip filter FORWARD ip saddr 203.0.113.7 meta mark set 0x70000; add chain ip nat OTHER; add rule ip nat OTHER fib daddr type local accept",
	} {
		t.Run(rules, func(t *testing.T) {
			t.Parallel()
			node := newNode(t)
			state := exampleState(node)
			replaceIPTables(t, node, iptables.NFT, state)
			_, err := node.Run(t.Context(), "nft", rules)
			require.NoError(t, err)
			require.Empty(t, sentences(compare(t, node, state)))
			for change, found := range map[string][]string{
				"insert rule ip nat PREROUTING ip daddr 10.96.0.1 tcp dport { 80, 81 } dnat to 10.9.9.9:80": {"10.9.9.9:80", "chain PREROUTING in table nat"},
				"flush chain ip nat PREROUTING":                              {"from outside", "is not translated"},
				"flush chain ip nat SLICECAST-SERVICES":                      {"from outside", "is not translated"},
				"flush chain ip filter INPUT; flush chain ip filter FORWARD": {"shop/none"},
			} {
				_, err := node.Run(t.Context(), "nft", change)
				require.NoError(t, err)
				text := sentences(compare(t, node, state))
				for _, f := range found {
					require.Contains(t, text, f, change)
				}
				_, err = node.Run(t.Context(), "nft", "flush ruleset")
				require.NoError(t, err)
				replaceIPTables(t, node, iptables.NFT, state)
				_, err = node.Run(t.Context(), "nft", rules)
				require.NoError(t, err)
			}
		})
	}
}
