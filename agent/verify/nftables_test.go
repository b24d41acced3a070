// These tests prove that what the nftables programmer writes is found to be as wanted, and that
// each way to break it is found and named.
package verify

import (
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/testenv"
)

// newNode returns a node without rules.
func newNode(t *testing.T) *testenv.Node {
	t.Helper()
	return testenv.NewNetwork(t).AddNode("a")
}

// compare compares the kernel of a node with a state.
func compare(t *testing.T, node *testenv.Node, state view.State) Result {
	t.Helper()
	return compareWith(t, node, Options{State: state, MasqueradeMark: programmer.DefaultMasqueradeMark})
}

func compareWith(t *testing.T, node *testenv.Node, o Options) (r Result) {
	t.Helper()
	require.NoError(t, node.Do(func() (err error) {
		r, err = Kernel(t.Context(), o)
		return err
	}))
	return r
}

// sentences returns the differences as text.
func sentences(r Result) string {
	var lines []string
	for _, d := range r.Differences {
		lines = append(lines, d.String())
	}
	return strings.Join(append(lines, r.Unjudged...), "\n")
}

func replaceNFT(t *testing.T, node *testenv.Node, state view.State) {
	t.Helper()
	require.NoError(t, node.Do(func() error {
		p, err := nftables.New(nftables.Options{Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		defer p.Close()
		return p.Replace(t.Context(), state)
	}))
}

// breakage is a way to break the kernel, as input of nft, and what has to be found then. In the
// input, KEY(map,data) is the key of the element with the data, DATA(map,key) the data for a key,
// ID(address) the id of the Service with the address, and RULE(chain,n) the nth rule of a chain.
type breakage struct {
	name, input string
	found       []string
}

var nftBreakages = []breakage{
	{"a backend is removed", "delete element T cluster-endpoints { KEY(cluster-endpoints,10.180.0.2 . 8080) }",
		[]string{"shop/web:http/TCP/IPv4: what comes to clusterIP 10.96.0.1:80 from a pod", "never leads to 10.180.0.2:8080"}},
	{"the last backend of a large set is removed", "delete element T cluster-endpoints { KEY(cluster-endpoints,10.180.0.31 . 8080) }",
		[]string{"shop/dns:http/UDP/IPv4", "never leads to 10.180.0.31:8080"}},
	{"all backends of a set are removed", "flush map T local-endpoints", []string{"shop/edge:http/TCP/IPv4", "lead to 1 backend of the local set, but is not translated"}},
	{"a backend is swapped", "delete element T cluster-endpoints { KEY(cluster-endpoints,10.180.0.1 . 8080) }\n" +
		"add element T cluster-endpoints { KEY(cluster-endpoints,10.180.0.1 . 8080) : 10.180.0.51 . 8080 }",
		[]string{"shop/web:http/TCP/IPv4", "may lead to 10.180.0.51:8080, which is not among them"}},
	{"a backend has another port", "delete element T cluster-endpoints { KEY(cluster-endpoints,10.180.0.1 . 8080) }\n" +
		"add element T cluster-endpoints { KEY(cluster-endpoints,10.180.0.1 . 8080) : 10.180.0.1 . 8081 }",
		[]string{"may lead to 10.180.0.1:8081"}},
	{"a backend is there twice", "delete element T cluster-endpoints { KEY(cluster-endpoints,10.180.0.3 . 8080) }\n" +
		"add element T cluster-endpoints { KEY(cluster-endpoints,10.180.0.3 . 8080) : 10.180.0.2 . 8080 }",
		[]string{"never leads to 10.180.0.3:8080"}},
	{"a backend is added", "add element T cluster-endpoints { ID(10.180.0.11) . 0x15 : 10.180.0.99 . 8080 }",
		[]string{"shop/dns:http/UDP/IPv4", "may lead to 10.180.0.99:8080"}},
	{"the size of a set is too small", "delete element T cluster-sizes { ID(10.180.0.1) }\nadd element T cluster-sizes { ID(10.180.0.1) : 0x1 }\n" +
		"add element T cluster-picks { 0x1 : goto local-1 }\nadd element T cluster-nodeport-picks { 0x1 : goto local-1-nodeport }",
		[]string{"shop/web:http/TCP/IPv4"}},
	{"the size of a set is removed", "delete element T cluster-sizes { ID(10.180.0.1) }", []string{"shop/web:http/TCP/IPv4", "is not translated"}},
	{"a size leads nowhere", "delete element T cluster-picks { 0x3 }", []string{"shop/web:http/TCP/IPv4", "clusterIP 10.96.0.1:80"}},
	{"a size of NodePorts leads nowhere", "delete element T cluster-nodeport-picks { 0x3 }", []string{"shop/web:http/TCP/IPv4", "nodePort"}},
	{"a frontend is removed", "delete element T frontends { 10.96.0.2 . udp . 80 }", []string{"shop/dns:http/UDP/IPv4", "is rejected"}},
	{"an external IP is removed", "delete element T frontends { 10.97.0.1 . tcp . 80 }", []string{"externalIP 10.97.0.1:80", "is not translated"}},
	{"a NodePort is removed", "delete element T nodeports { tcp . 30001 }", []string{"shop/web:http/TCP/IPv4", "nodePort", "is not translated"}},
	{"a frontend leads to another Service", "delete element T frontends { 10.96.0.1 . tcp . 80 }\n" +
		"add element T frontends { 10.96.0.1 . tcp . 80 : DATA(frontends,10.96.0.4 . tcp . 80) }", []string{"shop/web:http/TCP/IPv4", "10.180.0.51:8080"}},
	{"a frontend has the policy of another", "delete element T frontends { 10.97.0.1 . tcp . 80 }\n" +
		"add element T frontends { 10.97.0.1 . tcp . 80 : DATA(frontends,10.96.0.1 . tcp . 80) }", []string{"externalIP 10.97.0.1:80 from a pod", "it is not masqueraded"}},
	{"the filter of sources is bypassed", "delete element T frontends { 10.97.0.4 . tcp . 80 }\n" +
		"add element T frontends { 10.97.0.4 . tcp . 80 : DATA(nodeports,tcp . 30004) }", []string{"loadBalancer 10.97.0.4:80", "be dropped"}},
	{"a range of sources is removed", "delete element T sources-24 { 10.97.0.4 . tcp . 80 . 10.98.0.0 }", []string{"in 10.98.0.0/24", "is dropped"}},
	{"a range of sources is added", "add element T sources-24 { 10.97.0.4 . tcp . 80 . 203.0.113.0 }", []string{"from outside (203.0.113", "be dropped"}},
	{"a length of sources is forgotten", "delete RULE(sources,1)", []string{"shop/edge:http/TCP/IPv4", "from a pod", "is dropped"}},
	{"sources are not dropped", "delete RULE(sources,3)", []string{"should be dropped"}},
	{"nobody drops loopback NodePorts", "delete RULE(services,2)\nadd rule T services goto nodeports", []string{"127.0.0.1:30001", "be left alone"}},
	{"a policy leads nowhere", "delete element T policies { 0x1 }", []string{"shop/none:http/TCP/IPv4"}},
	{"a policy leads to another one", "delete element T policies { 0x0 }\nadd element T policies { 0x0 : goto pods-reject.node-reject.others-drop }",
		[]string{"clusterIP 10.96.0.5:80", "from outside", "should be rejected, but is dropped"}},
	{"pods are not recognized", "delete RULE(pods-cluster.node-cluster-masquerade.others-cluster-masquerade,1)", []string{"from a pod", "it is masqueraded"}},
	{"a rule is reordered", "add rule T pods-cluster.node-cluster-masquerade.others-cluster-masquerade ip saddr 10.180.0.0/16 goto cluster\n" +
		"delete RULE(pods-cluster.node-cluster-masquerade.others-cluster-masquerade,1)", []string{"from a pod", "it is masqueraded"}},
	{"the node is not recognized", "delete RULE(pods-cluster.node-cluster-masquerade.others-local,2)", []string{"from the node", "shop/edge"}},
	{"nothing is masqueraded", "delete RULE(postrouting,1)", []string{"from outside", "masqueraded, but it is not masqueraded"}},
	{"everything is masqueraded", "insert rule T postrouting masquerade", []string{"with its own source address, but it is masqueraded"}},
	{"hairpins are not masqueraded", "delete RULE(postrouting,2)", []string{"from the backend itself", "not masqueraded"}},
	{"one hairpin is not masqueraded", "delete element T hairpins { 10.180.0.11 . 10.180.0.11 }", []string{"shop/dns", "from the backend itself (10.180.0.11)"}},
	{"the node's packets are not looked up", "flush chain T output", []string{"from the node", "is not translated"}},
	{"packets are not looked up", "flush chain T prerouting", []string{"from outside", "is not translated"}},
	{"a chain of a size is empty", "flush chain T cluster-3", []string{"shop/web:http/TCP/IPv4", "is not translated"}},
	{"a chain draws from too few", "flush chain T cluster-24\nadd rule T cluster-24 meta mark 0 drop\ndelete RULE(cluster,1)", []string{"shop/dns"}},
	{"the draws are uneven", "insert rule T cluster-3 meta l4proto tcp numgen random mod 2 0 dnat to 10.180.0.1:8080", []string{"shop/web", "probability"}},
	{"affinity is not looked up", "delete RULE(cluster-affinity,2)", []string{"shop/sticky", "lead to 10.180.0.4", "again"}},
	{"affinity ends too soon", "delete RULE(affinity-10800,1)", []string{"shop/sticky", "have an affinity of 3h0m0s, but has an affinity of 10s"}},
	{"affinity is not kept", "delete RULE(cluster-3-affinity,1)", []string{"shop/sticky", "have an affinity of 3h0m0s, but has no affinity"}},
	{"clients beyond the limit find nothing", "delete RULE(cluster-3-affinity,2)", []string{"even if the kernel cannot remember more clients"}},
	{"the backend of an affinity is gone", "delete element T cluster-backends { KEY(cluster-backends,10.180.0.42 . 8080) }", []string{"shop/sticky"}},
	{"a stale frontend", "add element T frontends { 10.96.0.77 . tcp . 80 : DATA(frontends,10.96.0.1 . tcp . 80) }",
		[]string{"other elements of shop/web:http/TCP/IPv4"}},
	{"a stale NodePort", "add element T nodeports { udp . 30999 : DATA(nodeports,tcp . 30001) }", []string{"other elements of shop/web:http/TCP/IPv4"}},
	{"a stale chain", "add chain T stale\nadd rule T stale drop", []string{"chain stale"}},
	{"the filter drops everything", "insert rule T forward drop", []string{"is dropped", "chain forward"}},
	{"a chain drops by its policy", "add chain T forward { policy drop; }", []string{"is dropped"}},
	{"the table is dormant", "add table T { flags dormant; }", []string{"is not translated"}},
	{"the table is gone", "delete table T ", []string{"shop/web", "shop/dns", "shop/edge", "shop/sticky"}},
	{"another table is faster", "add table ip other\nadd chain ip other pre { type nat hook prerouting priority -110; }\n" +
		"add rule ip other pre ip daddr 10.96.0.1 tcp dport 80 dnat to 10.9.9.9:99", []string{"10.9.9.9:99", "chain pre in table ip other"}},
	{"a rule for one source", "insert rule T cluster ip saddr 10.9.9.9 drop", []string{"chain cluster in the IPv4 table slicecast, whose rule 1 another program has written"}},
	{"a rule for one interface", "insert rule T services iifname eth7 accept", []string{"chain services in the IPv4 table slicecast, whose rule 1 another program has written"}},
	{"a rule for a mark", "insert rule T cluster-3 meta mark & 0xf0 == 0x10 drop", []string{"chain cluster-3 in the IPv4 table slicecast, whose rule 1 another program has written"}},
	{"a rule for a state", "insert rule T forward ct state established drop", []string{"chain forward in the IPv4 table slicecast, whose rule 1 another program has written"}},
	{"a rule that only counts", "insert rule T forward ip saddr 10.9.9.9 counter", []string{"other rules in chain forward"}},
	{"a rule for an address of nobody", "insert rule T cluster ip daddr 8.8.8.8 drop", []string{"chain cluster in the IPv4 table slicecast, whose rule 1 another program has written"}},
	{"a translation of an address of nobody", "insert rule T services ip daddr 10.96.0.250 meta l4proto tcp dnat to 10.9.9.9:80",
		[]string{"chain services in the IPv4 table slicecast, whose rule 1 another program has written"}},
	{"an address of nobody is refused", "add element T cluster-ips { 8.8.8.8 }", []string{"no 8.8.8.8 in set cluster-ips"}},
	{"a cluster IP is not refused", "delete element T cluster-ips { 10.96.0.1 }", []string{"be 10.96.0.1 in set cluster-ips"}},
	{"a hairpin of nobody", "add element T hairpins { 10.9.9.9 . 10.9.9.9 }", []string{"no 10.9.9.9 in set hairpins"}},
	{"a hairpin of the policy Local is not masqueraded", "delete element T hairpins { 10.180.0.61 . 10.180.0.61 }",
		[]string{"shop/inner", "from the backend itself (10.180.0.61)"}},
	{"a range of sources far away is added", "add element T sources-24 { 10.97.0.4 . tcp . 80 . 198.51.100.0 }",
		[]string{"other elements of shop/edge:http/TCP/IPv4"}},
	{"a backend of nobody", "add element T cluster-endpoints { 0xfffff . 0x0 : 10.9.9.9 . 80 }", []string{"no element ffff0f0000000000 in set cluster-endpoints"}},
	{"a set of others", "add set T more { type ipv4_addr; }", []string{"no set more"}},
	{"a base chain of others", "add chain T more { type filter hook forward priority 10; policy drop; }", []string{"no chain more"}},
	{"a rule that cannot be judged", "insert rule T services tcp sport 1 drop", []string{"cannot be judged"}},
}

var placeholder = regexp.MustCompile(`(KEY|DATA|ID|RULE)\(([^)]*)\)`)

// input replaces the placeholders of a breakage by what is in a listing of the table.
func (b breakage) in(t *testing.T, listing string) string {
	part := func(kind, name string) string {
		_, rest, ok := strings.Cut(listing, kind+" "+name+" {")
		require.True(t, ok, "%s %s", kind, name)
		text, _, _ := strings.Cut(rest, "\n\t}")
		return text
	}
	find := func(text, pattern string) string {
		m := regexp.MustCompile(pattern).FindStringSubmatch(text)
		require.NotNil(t, m, pattern)
		return m[1]
	}
	text := placeholder.ReplaceAllStringFunc(b.input, func(s string) string {
		m := placeholder.FindStringSubmatch(s)
		name, what, _ := strings.Cut(m[2], ",")
		quoted := regexp.QuoteMeta(what)
		switch m[1] {
		case "KEY":
			return find(part("map", name), `(0x\w+ \. 0x\w+) : `+quoted+`\b`)
		case "DATA":
			return find(part("map", name), quoted+`(?: comment "[^"]*")? : (0x\w+)`)
		case "ID":
			return find(part("map", "cluster-endpoints"), `(0x\w+) \. 0x\w+ : `+regexp.QuoteMeta(name)+` `)
		}
		n, err := strconv.Atoi(what)
		require.NoError(t, err)
		handles := regexp.MustCompile(`# handle (\d+)\n`).FindAllStringSubmatch(part("chain", name)+"\n", -1)
		return "rule T " + name + " handle " + handles[n][1] // the first is the chain's
	})
	return strings.ReplaceAll(text, " T ", " ip slicecast ")
}

// TestNFTables breaks the table in many ways.
func TestNFTables(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	replaceNFT(t, node, state)
	r := compare(t, node, state)
	require.Empty(t, sentences(r))
	require.Greater(t, r.Packets, 100)
	for _, b := range nftBreakages {
		t.Run(b.name, func(t *testing.T) {
			listing, err := node.Run(t.Context(), "nft", "-a", "list", "table", "ip", "slicecast")
			require.NoError(t, err)
			command := node.Command(t.Context(), "nft", "-f", "-")
			command.Stdin = strings.NewReader(b.in(t, listing))
			out, err := command.CombinedOutput()
			require.NoError(t, err, "%s", out)
			found := sentences(compare(t, node, state))
			for _, text := range b.found {
				require.Contains(t, found, text)
			}
			require.NotContains(t, found, "IPv6")
			_, _ = node.Run(t.Context(), "nft", "delete", "table", "ip", "other") // if there is one
			if strings.Contains(b.name, "the table is") || strings.Contains(b.name, "policy") {
				_, _ = node.Run(t.Context(), "nft", "delete", "table", "ip", "slicecast")
			}
			replaceNFT(t, node, state)
			require.Empty(t, sentences(compare(t, node, state)), "repaired")
		})
	}
}

// TestIPVS proves that a node which uses IPVS is not judged, instead of being judged by its rules
// only.
func TestIPVS(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	_, err := node.Run(t.Context(), "ip", "link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "peer")
	require.NoError(t, err)
	r := compare(t, node, exampleState(node))
	require.Empty(t, r.Differences)
	require.Len(t, r.Unjudged, 1)
}
