// This test proves that verify finds what is broken in what a real kube-proxy has programmed, in
// its three modes, and names it. A breakage is made with the tools of the kernel in a network
// namespace whose kube-proxy has stopped, so nobody repairs it.
package conformance

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/verify"
)

// brokenObjects are Services of each kind.
const brokenObjects = `
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: NodePort
  clusterIP: 10.96.9.1
  externalIPs: [198.51.100.91]
  ports: [{name: http, port: 80, nodePort: 30901}]
---
apiVersion: v1
kind: Service
metadata: {name: sticky, namespace: shop}
spec:
  clusterIP: 10.96.9.2
  sessionAffinity: ClientIP
  ports: [{name: http, port: 80}]
---
apiVersion: v1
kind: Service
metadata: {name: edge, namespace: shop}
spec:
  type: LoadBalancer
  clusterIP: 10.96.9.3
  externalTrafficPolicy: Local
  loadBalancerSourceRanges: [203.0.113.0/25]
  ports: [{name: http, port: 80, nodePort: 30903}]
---
apiVersion: v1
kind: Service
metadata: {name: none, namespace: shop}
spec:
  clusterIP: 10.96.9.4
  ports: [{name: http, port: 80}]
`

// brokenSlice is the slice of a Service with a local and a remote endpoint.
const brokenSlice = `
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-1, namespace: shop, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{name: http, port: 80, protocol: TCP}]
endpoints:
- {addresses: [10.180.0.%[2]d], nodeName: node1, conditions: {ready: true}}
- {addresses: [10.180.1.%[2]d], conditions: {ready: true}}
`

// edit breaks rules: the first match of the expression is replaced. Found are parts of what verify
// must say then.
type edit struct {
	name, expression, replacement string
	found                         []string
}

// ruleset is how the rules of a mode are listed and loaded.
type ruleset struct {
	save, restore []string
	// before is loaded before a listing.
	before string
	edits  []edit
}

var brokenRulesets = map[Mode]ruleset{
	NFTables: {
		[]string{"nft", "list", "table", "ip", "kube-proxy"}, []string{"nft", "-f", "-"}, "delete table ip kube-proxy\n",
		brokenNFTables,
	},
	IPTables: {[]string{"iptables-nft-save"}, []string{"iptables-nft-restore"}, "", brokenIPTables},
	IPVS:     {[]string{"iptables-nft-save"}, []string{"iptables-nft-restore"}, "", brokenIPVSRules},
}

// TestBrokenKubeProxy breaks the rules of kube-proxy in many ways.
func TestBrokenKubeProxy(t *testing.T) {
	t.Parallel()
	cases, _ := loadAll(t)
	text := brokenObjects
	for i, name := range []string{"web", "sticky", "edge"} {
		text += fmt.Sprintf(brokenSlice, name, 10*(i+1))
	}
	objects, err := parseObjects(text)
	require.NoError(t, err)
	at := slices.IndexFunc(cases, func(c *Case) bool { return c.ID == "etp-local" })
	c := &Case{ID: "broken", Config: cases[at].Config, Node: cases[at].Node, Objects: objects}
	if *record != "" {
		return // only outcomes are recorded
	}
	eachVariant(t, *broken, func(t *testing.T, mode Mode, _ string) {
		rules := brokenRulesets[mode]
		// The rules of iptables are the same in both variants.
		iptables := map[Mode]string{IPTables: "nft", IPVS: "nft"}[mode]
		s := newStage(t)
		s.subject = newKubeProxy(t, s, mode, iptables)
		s.setUp(t, c)
		require.NoError(t, s.cluster.Apply(t.Context(), objects))
		require.NoError(t, s.cluster.Patch(t.Context(), Reference{"Service", "shop", "edge"},
			map[string]any{"status": map[string]any{"loadBalancer": map[string]any{"ingress": []any{map[string]any{"ip": "198.51.100.93"}}}}}, "status"))
		require.NoError(t, s.awaitSync(t))
		state, err := s.wanted(t.Context())
		require.NoError(t, err)
		// It may still be about to program the other family.
		require.NoError(t, s.node.Do(func() error { return s.judge(t.Context(), c, &Step{}, state) }))
		require.NoError(t, s.subject.Stop())
		compare := func() string {
			var lines []string
			require.NoError(t, s.node.Do(func() error {
				r, err := verify.Kernel(t.Context(), verify.Options{State: state, IPVS: ipvs.Options{Scheduler: "rr"}})
				for _, d := range r.Differences {
					lines = append(lines, d.String())
				}
				lines = append(lines, r.Unjudged...)
				return err
			}))
			return strings.Join(lines, "\n")
		}
		load := func(t *testing.T, text string) {
			command := s.node.Command(t.Context(), rules.restore[0], rules.restore[1:]...)
			command.Stdin = strings.NewReader(rules.before + text)
			out, err := command.CombinedOutput()
			require.NoError(t, err, "%s", out)
		}
		good, err := s.node.Run(t.Context(), rules.save[0], rules.save[1:]...)
		require.NoError(t, err)
		require.Empty(t, compare())
		for _, e := range rules.edits {
			t.Run(e.name, func(t *testing.T) {
				expression := regexp.MustCompile(e.expression)
				at := expression.FindStringSubmatchIndex(good)
				require.NotNil(t, at, "nothing in the rules matches %s", e.expression)
				load(t, good[:at[0]]+string(expression.ExpandString(nil, e.replacement, good, at))+good[at[1]:])
				found := compare()
				for _, text := range e.found {
					require.Contains(t, found, text)
				}
				require.NotContains(t, found, "IPv6")
			})
		}
		load(t, good)
		require.Empty(t, compare())
		if mode == NFTables {
			k, ok := s.subject.(*kubeProxy)
			require.True(t, ok)
			k.featureGates = map[string]bool{"KubeProxyNFTablesLocalhostNodePorts": true} // since 1.37
			require.NoError(t, k.Start(*s.running))
			require.NoError(t, s.awaitSync(t))
			state, err = s.wanted(t.Context())
			require.NoError(t, err)
			require.NoError(t, s.node.Do(func() error { return s.judge(t.Context(), c, &Step{}, state) }))
			require.NoError(t, k.Stop())
			rejected, err := s.node.Run(t.Context(), "nft", "list", "map", "ip", "kube-proxy", "localhost-nodeport-reject-ports")
			require.NoError(t, err)
			require.Contains(t, rejected, "tcp . 30901 : goto localhost-nodeport-reject-tcp")
		}
		if mode != IPVS {
			return
		}
		b := newIPVSBreaker(t, s)
		for _, e := range brokenIPVS {
			t.Run(e.name, func(t *testing.T) {
				b.T = t
				defer b.restore()
				e.make(b)
				found := compare()
				for _, text := range e.found {
					require.Contains(t, found, text)
				}
				require.NotContains(t, found, "IPv6")
			})
		}
		require.Empty(t, compare())
	})
}

var brokenNFTables = []edit{
	{"a backend is removed", `mod 2 map \{ 0 : 10\.180\.0\.10 \. 80, 1 : 10\.180\.1\.10 \. 80 \}`, "mod 1 map { 0 : 10.180.0.10 . 80 }",
		[]string{"shop/web:http", "never leads to 10.180.1.10:80"}},
	{"a backend is swapped", `1 : 10\.180\.1\.10 \. 80`, "1 : 10.180.1.30 . 80", []string{"shop/web:http", "may lead to 10.180.1.30:80"}},
	{"a draw has no backend", `mod 2 (map \{ 0 : 10\.180\.0\.10)`, "mod 3 $1", []string{"shop/web:http", "is not translated"}},
	{"a cluster IP is removed", `10\.96\.9\.2 \. tcp \. 80 : goto`, "10.96.9.2 . udp . 80 : goto", []string{"shop/sticky:http", "clusterIP 10.96.9.2:80"}},
	{"a cluster IP leads to another Service", `(10\.96\.9\.1 \. tcp \. 80 : goto) service-\S+shop/web/tcp/http`, "$1 reject-chain",
		[]string{"clusterIP 10.96.9.1:80", "is rejected"}},
	{"a NodePort is removed", `tcp \. 30901 : goto`, "udp . 30901 : goto", []string{"shop/web:http", "nodePort 192.168.0.2:30901"}},
	{"a frontend is stale", `tcp \. 30901 : goto ([^\s,]+)`, "udp . 30999 : goto $1, $0", []string{"no rules for NodePort 30999/UDP"}},
	{"the firewall is gone", `(?s)(map firewall-ips \{[^}]*?)elements = \{[^}]*\}`, "$1", []string{"shop/edge:http", "should be dropped"}},
	{"the firewall has another range", `203\.0\.113\.0/25`, "203.0.113.0/24", []string{"just after 203.0.113.0/25", "should be dropped"}},
	{"refusals are silent", `(helper for [^\n]*\n\s+)reject`, "${1}drop", []string{"shop/none:http", "should be rejected, but is dropped"}},
	{"a policy is reordered", `(?m)^(\s+ip saddr 10\.180\.0\.0/16 goto service-\S+shop/edge\S+ comment "[^"]*"\n)((?:.*\n){2})(\s+goto local-.*\n)`, "$3$1$2",
		[]string{"shop/edge:http", "from a pod"}},
	{"a local backend is swapped", `(chain local-\S+shop/edge\S+ \{\s+meta l4proto tcp dnat to )10\.180\.0\.30`, "${1}10.180.1.30",
		[]string{"of the local set", "10.180.1.30:80"}},
	{"pods are masqueraded", `ip saddr != 10\.180\.0\.0/16 (meta mark set)`, "$1", []string{"from a pod", "it is masqueraded"}},
	{"nothing is masqueraded", `(?m)^\s+meta mark & 0x00004000 != .*$`, "", []string{"masqueraded, but it is not masqueraded"}},
	{"a hairpin is not masqueraded", `10\.180\.0\.10 \. 10\.180\.0\.10 \. tcp \. 80`, "10.180.0.10 . 10.180.0.10 . udp . 80", []string{"shop/web:http", "from the backend itself (10.180.0.10)"}},
	{"affinity is not kept", `(?m)^\s+update @affinity-\S+10\.180\.0\.20/80 .*$`, "", []string{"shop/sticky:http", "has no affinity"}},
	{"affinity leads elsewhere", `(ip saddr @affinity-\S+10\.180\.0\.20/80 goto )endpoint-\S+`, "${1}reject-chain", []string{"shop/sticky:http", "again"}},
	{"the node's packets are not looked up", `(chain nat-output \{\s+type [^\n]*\n)\s+jump services`, "$1", []string{"from the node", "is not translated"}},
	{"a rule for one source", `chain service-\S+shop/web/\S+ \{`, "$0\n ip saddr 10.9.9.9 drop", []string{"no proxy writes", "shop/web", "(source address == 10.9.9.9 drop)"}},
	{"a rule for one interface", `chain service-\S+shop/web/\S+ \{`, "$0\n iifname \"eth7\" reject", []string{"no proxy writes", "shop/web", `(input interface == "eth7" reject)`}},
	{"a rule for a mark", `chain endpoint-\S+10\.180\.1\.20/80 \{`, "$0\n meta mark 0x99 drop", []string{"no proxy writes", "10.180.1.20/80", "(mark == 0x99 drop)"}},
	{"a rule for a state", `(chain filter-forward \{\s+type [^\n]*\n)`, "$1 ct state established,related drop\n", []string{"no proxy writes", "(ct state & established,related != 0 drop)"}},
	{"another hairpin", `chain endpoint-\S+10\.180\.1\.20/80 \{`, "$0\n ip saddr 10.9.9.9 meta mark set meta mark or 0x4000", []string{"no proxy writes", "(source address == 10.9.9.9 mark"}},
	{"a stale chain", `(chain reject-chain \{)`, "chain service-AAAAAAAA-shop/gone/tcp/http {\n drop\n}\n$1", []string{"chain service-AAAAAAAA-shop/gone/tcp/http"}},
}

var brokenIPTables = []edit{
	{"a backend is removed", `(?m)^-A KUBE-SVC-\S+ .*-> 10\.180\.0\.10:80" .*$`, "", []string{"shop/web:http", "never leads to 10.180.0.10:80"}},
	{"the last backend is removed", `(?m)^-A KUBE-SVC-\S+ .*-> 10\.180\.1\.10:80" .*$`, "", []string{"shop/web:http", "is not translated"}},
	{"a backend is swapped", `--to-destination 10\.180\.1\.10:80`, "--to-destination 10.180.1.30:80", []string{"may lead to 10.180.1.30:80"}},
	{"a probability is wrong", `(10\.180\.0\.10:80" -m statistic --mode random --probability) 0\.5`, "$1 0.9", []string{"shop/web:http", "probability"}},
	{"a cluster IP is removed", `(?m)^-A KUBE-SERVICES -d 10\.96\.9\.2/32 .*$`, "", []string{"clusterIP 10.96.9.2:80", "is not translated"}},
	{"an external IP is removed", `(?m)^-A KUBE-SERVICES -d 198\.51\.100\.91/32 .*$`, "", []string{"externalIP 198.51.100.91:80"}},
	{"a NodePort is removed", `(?m)^-A KUBE-NODEPORTS -p tcp .*--dport 30901 .*$`, "", []string{"nodePort 192.168.0.2:30901"}},
	{"a NodePort is stale", `(?m)^(-A KUBE-NODEPORTS -p tcp .*--dport) 30901 (.*)$`, "$0\n$1 30999 $2", []string{"no rules for NodePort 30999/TCP"}},
	{"the firewall is gone", `(?m)^-A KUBE-PROXY-FIREWALL .*$`, "", []string{"shop/edge:http", "should be dropped"}},
	{"the firewall has another range", `203\.0\.113\.0/25`, "203.0.113.0/24", []string{"just after 203.0.113.0/25", "should be dropped"}},
	{"nothing is refused", `(?m)^-A KUBE-SERVICES -d 10\.96\.9\.4/32 .*REJECT.*$`, "", []string{"shop/none:http", "should be rejected"}},
	{"refusals are not looked up", `(?m)^-A FORWARD .* -j KUBE-SERVICES$`, "", []string{"shop/none:http", "from outside", "should be rejected"}},
	{"a policy is reordered", `(?m)^(-A KUBE-EXT-\S+ -s 10\.180\.0\.0/16 .*\n)((?:.*\n){2})(-A KUBE-EXT-\S+ -j KUBE-SVL.*\n)`, "$3$1$2",
		[]string{"shop/edge:http", "from a pod"}},
	{"pods are masqueraded", `(-A KUBE-SVC-\S+) ! -s 10\.180\.0\.0/16 (-d 10\.96\.9\.1/32)`, "$1 $2", []string{"from a pod", "it is masqueraded"}},
	{"nothing is masqueraded", `(?m)^-A KUBE-POSTROUTING .*MASQUERADE.*$`, "", []string{"masqueraded, but it is not masqueraded"}},
	{"a hairpin is not masqueraded", `(?m)^-A KUBE-SEP-\S+ -s 10\.180\.0\.10/32 .*$`, "", []string{"from the backend itself (10.180.0.10)"}},
	{"affinity is not kept", `-m recent --set --name \S+ --mask \S+ --rsource (-m tcp -j DNAT --to-destination 10\.180\.0\.20)`, "$1",
		[]string{"shop/sticky:http", "has no affinity"}},
	{"affinity is shorter", `--rcheck --seconds 10800`, "--rcheck --seconds 60", []string{"shop/sticky:http", "affinity of"}},
	{"the node's packets are not looked up", `(?m)^-A OUTPUT .*"kubernetes service portals" -j KUBE-SERVICES\n(-A POSTROUTING)`, "$1",
		[]string{"from the node", "is not translated"}},
	{"a rule for one source", `(?m)^(-A KUBE-SVC-\S+) .*-> 10\.180\.0\.10:80" .*$`, "$1 -s 10.9.9.9 -j ACCEPT\n$0", []string{"no proxy writes", "(-s 10.9.9.9/32 -j ACCEPT)"}},
	{"a rule for one interface", `(?m)^(-A KUBE-SVC-\S+) .*-> 10\.180\.0\.10:80" .*$`, "$1 -i eth7 -p tcp -j DNAT --to-destination 10.9.9.9:80\n$0", []string{"no proxy writes", "(-i eth7 -p tcp -j DNAT --to-destination 10.9.9.9:80)"}},
	{"a rule for a mark", `(?m)^(-A KUBE-SEP-\S+) .*--to-destination 10\.180\.1\.10:80$`, "$1 -m mark --mark 0x99 -j RETURN\n$0", []string{"no proxy writes", "(-m mark --mark 0x99 -j RETURN)"}},
	{"a rule for a state", `(?m)^-A KUBE-FORWARD .*INVALID.*$`, "-A KUBE-FORWARD -m conntrack --ctstate ESTABLISHED -j DROP\n$0", []string{"no proxy writes", "(-m conntrack --ctstate ESTABLISHED -j DROP)"}},
	{"a rule for forwarded packets of one source", `(?m)^-A KUBE-FORWARD .*INVALID.*$`, "-A KUBE-FORWARD -s 10.9.9.9 -j DROP\n$0", []string{"no proxy writes", "(-s 10.9.9.9/32 -j DROP)"}},
	{"another hairpin", `(?m)^(-A KUBE-SEP-\S+) .*--to-destination 10\.180\.1\.10:80$`, "$1 -s 10.9.9.9 -j KUBE-MARK-MASQ\n$0", []string{"no proxy writes", "(-s 10.9.9.9/32 -j KUBE-MARK-MASQ)"}},
	{"a stale chain", `(?m)^:KUBE-SVC-\S+ - .*$`, "$0\n:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]\n-A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -j DNAT --to-destination 10.9.9.9:80",
		[]string{"chain KUBE-SEP-AAAAAAAAAAAAAAAA"}},
}
