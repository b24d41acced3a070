// These tests prove that rules of other programs are no differences of the proxy where they do not
// concern it, and that they are named where they change what happens.
package verify

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
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
	require.Contains(t, sentences(compare(true)), "other rules in chain SLICECAST-VIPS")
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

// TestOrder proves that what depends on the order of chains with the same priority is not judged,
// because the kernel asks first the one that was made last, and does not say which one that is.
func TestOrder(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	replaceNFT(t, node, state)
	const harmless = "table ip NAME {\n chain pre {\n type nat hook prerouting priority -100;\n ip daddr 10.4.0.1 dnat to 10.9.9.9\n }\n}"
	nft(t, node, strings.Replace(harmless, "NAME", "after", 1))
	nft(t, node, strings.Replace(harmless, "NAME", "before", 1))
	require.Empty(t, sentences(compare(t, node, state)), "no packet of a Service depends on the order")
	for _, name := range []string{"after", "before"} {
		nft(t, node, "add rule ip "+name+" pre ip daddr 10.96.0.1 tcp dport 80 dnat to 10.9.9.9:99")
		r := compare(t, node, state)
		require.NotEmpty(t, r.Unjudged)
		require.Contains(t, r.Unjudged[0], "which of these chains was made last")
		require.Contains(t, r.Unjudged[0], "chain pre of table ip "+name)
		for _, d := range r.Differences {
			require.NotContains(t, d.String(), "from outside")
		}
		nft(t, node, "flush chain ip "+name+" pre")
	}
}

// kubeProxyRefuses are the rules by which kube-proxy's mode nftables refuses connections to a
// cluster IP without endpoints.
const kubeProxyRefuses = `
table ip kube-proxy {
	map no-endpoint-services {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.5 . tcp . 80 : goto reject-chain }
	}
	chain reject-chain { reject; }
	chain service-endpoints-check { ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }
	chain filter-forward {
		type filter hook forward priority 0
		ct state new jump service-endpoints-check
	}
	chain filter-output {
		type filter hook output priority 0
		ct state new jump service-endpoints-check
	}
}`

// TestOrderOfRefusals proves that a connection which one proxy refuses and another one drops is
// judged by the priorities of their chains, and not judged if these are the same, because then the
// kernel does what the newer chain says.
func TestOrderOfRefusals(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	programmed := exampleState(node)
	state := programmed
	none := *programmed.Ports[id("none", model.TCP, model.IPv4)]
	none.Frontends = none.Frontends[:1] // its cluster IP
	state.Ports = map[view.ServicePortID]*view.ServicePort{none.ID: &none}
	programmed.Ports = nil
	refused := func() bool {
		r := node.Probe(t.Context(), testenv.TCP, netip.MustParseAddrPort("10.96.0.5:80"), 1, testenv.ProbeOptions{})
		return r.All(testenv.Refused)
	}

	// The table lacks the Service, but that is about packets alone.
	packets := func() (r Result) {
		require.NoError(t, node.Do(func() error {
			facts, err := trace.ReadFacts()
			if err != nil {
				return err
			}
			rules, err := trace.Read(t.Context(), model.IPv4, facts)
			if err != nil {
				return err
			}
			r, err = Compare(t.Context(), Options{State: state, Addresses: facts.Addresses}, rules)
			return err
		}))
		return r
	}
	nft(t, node, kubeProxyRefuses)
	replaceNFT(t, node, programmed) // with the ranges of cluster IPs
	require.True(t, refused())
	require.Empty(t, sentences(packets()))

	// Slicecast's rules get the priority of kube-proxy's.
	for _, c := range []struct{ hook, chain string }{{"forward", "forward"}, {"output", "output-filter"}} {
		nft(t, node, fmt.Sprintf("delete chain ip slicecast %[2]s\nadd chain ip slicecast %[2]s { type filter hook %[1]s priority 0; }\n"+
			"add rule ip slicecast %[2]s ct state new ip daddr 10.96.0.0/16 drop", c.hook, c.chain))
	}
	require.False(t, refused(), "Slicecast's chains are newer")
	for range 2 {
		r := packets()
		require.Empty(t, r.Differences)
		require.NotEmpty(t, r.Unjudged)
		for _, u := range r.Unjudged {
			require.Contains(t, u, "shop/none")
			require.Contains(t, u, "which of these chains was made last")
			require.Contains(t, u, "chain filter-output of table ip kube-proxy and chain output-filter of table ip slicecast")
		}
		nft(t, node, "delete table ip kube-proxy")
		nft(t, node, kubeProxyRefuses)
		require.True(t, refused(), "kube-proxy's chains are newer")
	}

	// Both drop.
	nft(t, node, "flush chain ip kube-proxy reject-chain\nadd rule ip kube-proxy reject-chain drop")
	require.Contains(t, sentences(compare(t, node, state)), "should be rejected, but is dropped")
}

// TestIPTablesBesideDrops proves that the refusals of the programmer iptables are not judged beside
// the rules by which kube-proxy's mode nftables drops what it does not serve, and that all else is.
func TestIPTablesBesideDrops(t *testing.T) {
	t.Parallel()
	for _, variant := range []iptables.Variant{iptables.NFT, iptables.Legacy} {
		node := newNode(t)
		state := exampleState(node)
		replaceIPTables(t, node, variant, state)
		nft(t, node, `table ip kube-proxy {
			chain cluster-ips-check { ip daddr { 10.96.0.0/16 } drop; }
			chain filter-forward { type filter hook forward priority 0; ct state new jump cluster-ips-check; }
			chain filter-output { type filter hook output priority 0; ct state new jump cluster-ips-check; }
		}`)
		r := compare(t, node, state)
		require.Empty(t, r.Differences)
		require.NotEmpty(t, r.Unjudged)
		for _, u := range r.Unjudged {
			require.Contains(t, u, "shop/none:http/TCP/IPv4 at clusterIP 10.96.0.5:80")
			require.Contains(t, u, "and chain filter-forward of table ip kube-proxy")
		}
	}
}

// TestOrderInOneTable proves that chains of one table with the same hook and priority are followed
// as the kernel asks them, newest first, whatever their names are.
func TestOrderInOneTable(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	to := netip.MustParseAddrPort("10.96.0.1:80")
	nft(t, node, "add table ip some")
	for i, name := range []string{"m", "a", "z", "k"} {
		backend := fmt.Sprintf("127.0.0.%d", i+2)
		nft(t, node, fmt.Sprintf("add chain ip some %s { type nat hook output priority -100; }\n"+
			"add rule ip some %s ip daddr 10.96.0.1 udp dport 80 dnat to %s:90", name, name, backend))
		if i == 2 { // registered anew, oldest first
			nft(t, node, "add table ip some { flags dormant; }")
			nft(t, node, "add table ip some")
		}
		require.NoError(t, node.Do(func() error {
			server, err := net.ListenPacket("udp4", backend+":90")
			require.NoError(t, err)
			defer func() { require.NoError(t, server.Close()) }()
			require.NoError(t, server.SetDeadline(time.Now().Add(10*time.Second)))
			client, err := net.Dial("udp4", to.String())
			require.NoError(t, err)
			defer func() { require.NoError(t, client.Close()) }()
			_, err = client.Write([]byte("x"))
			require.NoError(t, err)
			_, _, err = server.ReadFrom(make([]byte, 1))
			require.NoError(t, err, "the kernel does not ask chain %s first", name)

			facts, err := trace.ReadFacts()
			require.NoError(t, err)
			rules, err := trace.Read(t.Context(), model.IPv4, facts)
			require.NoError(t, err)
			out, err := rules.Trace(trace.Packet{Protocol: model.UDP, Source: node.IPv4, Destination: to})
			require.NoError(t, err)
			require.Len(t, out, 1)
			require.Equal(t, backend+":90", out[0].Backend.String())
			return nil
		}))
	}
}

// TestRulesOfOthers proves that rules of other programs count for what they do, and that those that
// cannot be judged are named if they may matter, and only then.
func TestRulesOfOthers(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	replaceNFT(t, node, state)
	base := func(table, rules string) string {
		return "table " + table + " {\n chain pre {\n type nat hook prerouting priority -110;\n" + rules + "\n}\n}"
	}
	for name, c := range map[string]struct{ table, rules, found string }{
		"unknown and may translate":    {"ip other", "tcp sport 4 dnat to 10.9.9.9", "cannot be judged"},
		"a field that is not known":    {"ip other", "ip ttl 4 dnat to 10.9.9.9", "cannot be judged"},
		"unknown, for other addresses": {"ip other", "ip daddr 10.4.0.1 ip ttl 4 dnat to 10.9.9.9", ""},
		"all other keys of a map":      {"ip other", "ip daddr vmap { 10.4.0.1 : accept, * : drop }", "is dropped"},
		"a name of iptables":           {"inet nat", "ip daddr 10.96.0.1 tcp dport 80 dnat ip to 10.9.9.9:99", "10.9.9.9:99"},
	} {
		nft(t, node, base(c.table, c.rules))
		found := sentences(compare(t, node, state))
		require.Contains(t, found, c.found, name)
		if c.found == "" {
			require.Empty(t, found, name)
		}
		nft(t, node, "delete table "+c.table)
	}
	run := func(args ...string) {
		_, err := node.Run(t.Context(), args[0], args[1:]...)
		require.NoError(t, err)
	}
	run("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-j", "ACCEPT")
	run("iptables-nft", "-t", "nat", "-A", "POSTROUTING", "-s", "172.17.0.0/16", "!", "-o", "docker0", "-j", "MASQUERADE")
	run("iptables-nft", "-t", "nat", "-A", "POSTROUTING", "!", "-o", "eth7", "-j", "MASQUERADE")
	require.Empty(t, sentences(compare(t, node, state)), "rules that cannot be judged only masquerade")
	run("nft", "add rule ip nat PREROUTING ip ttl 4 meta mark set numgen random mod 5")
	require.Empty(t, sentences(compare(t, node, state)), "nothing comes there")
	run("nft", "insert rule ip nat PREROUTING ip ttl 4 dnat to 10.9.9.9")
	require.Contains(t, sentences(compare(t, node, state)), "cannot be judged")
}

// TestFirewall proves that a firewall which accepts packets before a proxy refuses them is noticed,
// and that its refusals are left to it.
func TestFirewall(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	replaceIPTables(t, node, iptables.Legacy, state)
	for rule, found := range map[string]string{
		"-j DROP": "",
		"-i outside -p tcp -m conntrack --ctstate RELATED,ESTABLISHED -o lo -j ACCEPT": "",
		"-p tcp -m conntrack --ctstate NEW -j ACCEPT":                                  "clusterIP 10.96.0.5:80 from outside (203.0.113.253) should be rejected, but is not translated",
		"-p tcp -m length --length 100 -j ACCEPT":                                      "cannot be judged",
		"-p udp -m length --length 100 -j ACCEPT":                                      "",
	} {
		args := append([]string{"-I", "FORWARD", "1"}, strings.Fields(rule)...)
		_, err := node.Run(t.Context(), "iptables-legacy", args...)
		require.NoError(t, err, rule)
		if r := sentences(compare(t, node, state)); found == "" {
			require.Empty(t, r, rule)
		} else {
			require.Contains(t, r, found, rule)
		}
		_, err = node.Run(t.Context(), "iptables-legacy", "-D", "FORWARD", "1")
		require.NoError(t, err)
	}
}

// TestBeforeTheProxy proves that what other programs do to the mark and to conntrack, before the
// rules of a proxy ask for them, is followed, and that it is named if it cannot be judged.
func TestBeforeTheProxy(t *testing.T) {
	t.Parallel()
	node := newNode(t)
	state := exampleState(node)
	replaceNFT(t, node, state)
	for rule, found := range map[string]string{
		"-t raw -A PREROUTING -d 10.96.0.1 -j CT --notrack": "clusterIP 10.96.0.1:80 from outside (203.0.113.253) should lead to 3 backends of the cluster set, but is not " +
			"translated, because conntrack does not track it; see rule 1 of chain PREROUTING in table raw of iptables-nft (-d 10.96.0.1/32 -j CT --notrack)",
		"-t raw -A PREROUTING -d 10.4.0.1 -j CT --notrack":                                        "",
		"-t raw -A PREROUTING -d 10.96.0.1 -j DROP":                                               "",
		"-t raw -A PREROUTING -m length --length 100 -j DROP":                                     "",
		"-t raw -A PREROUTING -m length --length 100 -j CT --notrack":                             "rule 1 of chain PREROUTING in table raw of iptables-nft",
		"-t mangle -A PREROUTING -d 10.96.0.1 -j MARK --set-xmark 0x4000/0x4000":                  "clusterIP 10.96.0.1:80 from a pod (10.180.255.254) should lead to 10.180.0.1:8080 with its own source address, but it is masqueraded",
		"-t mangle -A PREROUTING -m length --length 100 -j MARK --set-xmark 0x4000/0x4000":        "rule 1 of chain PREROUTING in table mangle of iptables-nft",
		"-t mangle -A PREROUTING -d 10.96.0.1 -j MARK --set-xmark 0x8000/0x8000":                  "",
		"-t mangle -A PREROUTING -m length --length 100 -j MARK --set-xmark 0x8000/0x8000":        "",
		"-t mangle -A PREROUTING -d 10.96.0.1 -p tcp --tcp-flags SYN,RST SYN -j MARK --or-mark 2": "",
	} {
		words := strings.Fields(rule)
		_, err := node.Run(t.Context(), "iptables-nft", words...)
		require.NoError(t, err, rule)
		if r := sentences(compare(t, node, state)); found == "" {
			require.Empty(t, r, rule)
		} else {
			require.Contains(t, r, found, rule)
		}
		_, err = node.Run(t.Context(), "iptables-nft", words[0], words[1], "-F")
		require.NoError(t, err)
	}
	require.Empty(t, sentences(compare(t, node, state)))
	_, err := node.Run(t.Context(), "sysctl", "-q", "-w", "net.ipv4.ip_forward=0")
	require.NoError(t, err)
	require.Equal(t, "there should be forwarding of IPv4 packets, without which no pod is reached, but net.ipv4.ip_forward = 0", sentences(compare(t, node, state)))
}

// TestUnreadable proves that rules which no program of the node can read are named.
func TestUnreadable(t *testing.T) {
	node := newNode(t)
	state := exampleState(node)
	replaceIPTables(t, node, iptables.Legacy, state)
	t.Setenv("PATH", t.TempDir())
	require.Contains(t, sentences(compare(t, node, state)), "there is no program iptables-legacy-save")
}

// TestNodeLocalDNSCache proves that a program which serves a Service on the node itself is no
// difference (kubernetes/dns#682), but that its rules are one if the node lacks the address.
func TestNodeLocalDNSCache(t *testing.T) {
	t.Parallel()
	for name, replace := range programmers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := newNode(t)
			state := exampleState(node)
			replace(t, node, state)
			run := func(args ...string) {
				_, err := node.Run(t.Context(), args[0], args[1:]...)
				require.NoError(t, err)
			}
			// These are the rules of NodeLocal DNSCache, for the address of a Service and its own one.
			for _, address := range []string{"169.254.20.10", "10.96.0.2"} {
				run("iptables-nft", "-t", "raw", "-A", "PREROUTING", "-d", address, "-p", "udp", "--dport", "80", "-j", "NOTRACK")
				run("iptables-nft", "-t", "raw", "-A", "OUTPUT", "-d", address, "-p", "udp", "--dport", "80", "-j", "NOTRACK")
				run("iptables-nft", "-t", "raw", "-A", "OUTPUT", "-s", address, "-p", "udp", "--sport", "80", "-j", "NOTRACK")
				run("iptables-nft", "-A", "INPUT", "-d", address, "-p", "udp", "--dport", "80", "-j", "ACCEPT")
				run("iptables-nft", "-A", "OUTPUT", "-s", address, "-p", "udp", "--sport", "80", "-j", "ACCEPT")
			}
			require.Contains(t, sentences(compare(t, node, state)), "shop/dns:http/UDP/IPv4", "the node lacks the address")
			run("ip", "link", "add", "nodelocaldns", "type", "veth", "peer", "name", "peer")
			for _, address := range []string{"169.254.20.10/32", "10.96.0.2/32"} {
				run("ip", "address", "add", address, "dev", "nodelocaldns")
			}
			r := compare(t, node, state)
			require.Empty(t, sentences(r))
			require.Positive(t, r.Tolerated)
			require.Contains(t, strings.Join(r.Facts, "\n"), "NodeLocal DNSCache")
		})
	}
}
