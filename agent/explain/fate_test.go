// This test proves, with real packets, that what an answer says of other programs' rules and of the
// kernel's settings is what happens. The rules are of all tables of iptables, in both variants, and
// of nf_tables. They concern the first packet of a connection or the backend's answer. What is not
// judged is named with its table, chain and rule.
package explain_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/explain"
	"github.com/slicecast/slicecast/internal/testenv"
)

// fate is a change of a node, and what an answer says then of connections to the Service. Commands
// of iptables are for both variants.
type fate struct {
	name, from, command string
	// says is a part of what the answer says. Nothing means that it says that a backend is reached,
	// and nothing else.
	says string
	// unjudged means that the answer does not say what happens.
	unjudged bool
	// random means that the rules draw what happens, so packets prove nothing.
	random bool
}

var fatesOfIPTables = []fate{
	{name: "raw drops", from: "pod", command: "-t raw -A PREROUTING -p tcp --dport 80 -j DROP", says: "is dropped by rule 1 of chain PREROUTING in table raw of iptables-V (-p tcp -m tcp --dport 80 -j DROP)"},
	{name: "raw drops what the node sends", from: "node", command: "-t raw -A OUTPUT -p tcp --dport 80 -j DROP", says: "is dropped by rule 1 of chain OUTPUT in table raw"},
	{name: "raw drops others", from: "pod", command: "-t raw -A PREROUTING -p tcp --dport 81 -j DROP"},
	{name: "nothing is known in raw", from: "pod", command: "-t raw -A PREROUTING -p tcp --dport 80 -m conntrack --ctstate NEW -j DROP"},
	{name: "all is invalid in raw", from: "pod", command: "-t raw -A PREROUTING -p tcp --dport 80 -m conntrack --ctstate INVALID -j DROP", says: "is dropped by rule 1 of chain PREROUTING in table raw"},
	{name: "raw does not track", from: "pod", command: "-t raw -A PREROUTING -p tcp --dport 80 -j CT --notrack", says: "is not translated, because conntrack does not track it; decided by rule 1 of chain PREROUTING in table raw"},
	{name: "raw does not track what the node sends", from: "node", command: "-t raw -A OUTPUT -p tcp --dport 80 -j NOTRACK", says: "conntrack does not track it"},
	{name: "raw does not track answers", from: "pod", command: "-t raw -A PREROUTING -p tcp --sport 8080 -j CT --notrack", says: "is not translated back, because conntrack is kept from tracking it by rule 1"},
	{name: "mangle accepts first", from: "pod", command: "-t mangle -A PREROUTING -p tcp --dport 80 -j ACCEPT\n-t mangle -A PREROUTING -p tcp -j ACCEPT\n-t mangle -A PREROUTING -j DROP"},
	{name: "mangle drops later", from: "outside", command: "-t mangle -A POSTROUTING -p tcp --dport 8080 -j DROP", says: "is dropped by rule 1 of chain POSTROUTING in table mangle"},
	{name: "mangle drops before translation", from: "pod", command: "-t mangle -A PREROUTING -d 10.96.0.80 -j DROP", says: "is dropped by rule 1 of chain PREROUTING in table mangle"},
	{name: "the policy of mangle", from: "pod", command: "-t mangle -P FORWARD DROP", says: "is dropped by the policy of chain FORWARD in table mangle"},
	{name: "mangle marks, filter drops", from: "pod", command: "-t mangle -A PREROUTING -d 10.96.0.80 -j MARK --set-xmark 0x70/0xff\n-A FORWARD -m mark --mark 0x70/0xf0 -j DROP", says: "is dropped by rule 1 of chain FORWARD in table filter"},
	{name: "a mark of the connection", from: "pod", command: "-t mangle -A PREROUTING -d 10.96.0.80 -j CONNMARK --set-mark 7\n-A FORWARD -m connmark --mark 7 -j DROP", says: "is dropped by rule 1 of chain FORWARD in table filter"},
	{name: "the answer has the connection's mark", from: "pod", command: "-t mangle -A PREROUTING -d 10.96.0.80 -j CONNMARK --set-mark 7\n-t mangle -A PREROUTING -p tcp --sport 8080 -j CONNMARK --restore-mark\n-A FORWARD -m mark --mark 7 -j DROP", says: "is dropped by rule 1 of chain FORWARD in table filter"},
	{name: "security drops", from: "pod", command: "-t security -A FORWARD -p tcp --dport 8080 -j DROP", says: "is dropped by rule 1 of chain FORWARD in table security"},
	{name: "an answer is dropped", from: "pod", command: "-A FORWARD -p tcp --sport 8080 -j DROP", says: "the answer of 10.180.0.2:8080 is dropped by rule 1 of chain FORWARD in table filter"},
	{name: "an answer is rejected", from: "pod", command: "-A FORWARD -p tcp -m multiport --sports 80,8080 -j REJECT", says: "the answer of 10.180.0.2:8080 is rejected by rule 1 of chain FORWARD in table filter"},
	{name: "an answer to the node is dropped", from: "node", command: "-A INPUT -s 10.180.0.2 -j DROP", says: "the answer of 10.180.0.2:8080 is dropped by rule 1 of chain INPUT in table filter"},
	{name: "an answer is established", from: "outside", command: "-A FORWARD -m conntrack --ctstate ESTABLISHED -j DROP", says: "the answer of 10.180.0.2:8080 is dropped"},
	{name: "an answer is accepted", from: "outside", command: "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT\n-A FORWARD -j DROP"},
	{name: "an answer is not known", from: "outside", command: "-A FORWARD -p tcp --dport 8080 -j ACCEPT\n-A FORWARD -j DROP", says: "the answer of 10.180.0.2:8080 is dropped by rule 2 of chain FORWARD"},
	{name: "some answers are dropped", from: "pod", command: "-N some\n-A some -m statistic --mode random --probability 0.5 -j DROP\n-A some -j ACCEPT\n-A FORWARD -p tcp --sport 8080 -j some", says: "the answer of 10.180.0.2:8080 is dropped by rule 1 of chain some in table filter", random: true},
	{name: "some answers are not tracked, the others dropped", from: "pod", command: "-t raw -A PREROUTING -p tcp --sport 8080 -m statistic --mode random --probability 0.5 -j CT --notrack\n-A FORWARD -p tcp --sport 8080 -m conntrack --ctstate ESTABLISHED -j DROP", says: "the answer of 10.180.0.2:8080 is dropped by rule 1 of chain FORWARD", random: true},
	{name: "flags", from: "pod", command: "-A FORWARD -p tcp --tcp-flags SYN,ACK SYN,ACK -j DROP", says: "the answer of 10.180.0.2:8080 is dropped"},
	{name: "flags of the first packet", from: "pod", command: "-A FORWARD -p tcp --syn -j DROP", says: "is dropped by rule 1 of chain FORWARD"},
	{name: "clamping", from: "pod", command: "-t mangle -A FORWARD -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"},
	{name: "an interface", from: "outside", command: "-A FORWARD -i eth0 -p tcp --dport 8080 -j DROP", says: "is dropped by rule 1 of chain FORWARD"},
	{name: "an interface of others", from: "pod", command: "-A FORWARD -i eth0 -p tcp --dport 8080 -j DROP"},
	{name: "an ipset", from: "pod", command: "-A FORWARD -m set --match-set members src,dst -j DROP", says: "is dropped by rule 1 of chain FORWARD"},
	{name: "an ipset of others", from: "outside", command: "-A FORWARD -m set --match-set members src,dst -j DROP"},
	{name: "routes to sources", from: "pod", command: "-t raw -A PREROUTING -m rpfilter --validmark --invert -j DROP"},
	{name: "addresses of others", from: "pod", command: "-A FORWARD -m addrtype --dst-type MULTICAST,BROADCAST -j DROP"},
	{name: "a match that is not known", from: "pod", command: "-t raw -A PREROUTING -p tcp -m length --length 1000:2000 -j DROP", says: "rule 1 of chain PREROUTING in table raw of iptables-V (-p tcp -m length --length 1000:2000 -j DROP): -m cannot be judged", unjudged: true},
	{name: "a port that clients do not choose", from: "pod", command: "-t mangle -A PREROUTING -p tcp -d 10.96.0.80 --sport 4 -j DROP"},
	{name: "a chain that may not be called", from: "pod", command: "-t raw -N maybe\n-t raw -A maybe -j NOTRACK\n-t raw -A PREROUTING -m length --length 1000:2000 -j maybe", says: "rule 1 of chain PREROUTING in table raw of iptables-V (-m length --length 1000:2000 -j maybe)", unjudged: true},
	{name: "a mark that may be set", from: "pod", command: "-t mangle -A PREROUTING -m length --length 1000:2000 -j MARK --set-xmark 0x70/0xff\n-A FORWARD -m mark --mark 0x70/0xf0 -j DROP", says: "rule 1 of chain PREROUTING in table mangle", unjudged: true},
	{name: "a mark that nobody asks", from: "pod", command: "-t mangle -A PREROUTING -m length --length 1000:2000 -j MARK --set-xmark 0x70/0xff"},
	{name: "only logged", from: "pod", command: "-t raw -A PREROUTING -m limit --limit 1/hour -j LOG --log-prefix x"},
	{name: "sent to a local proxy", from: "pod", command: "-t mangle -A PREROUTING -p tcp -m length --length 1000:2000 -j TPROXY --on-port 1 --on-ip 127.0.0.1 --tproxy-mark 0x1/0x1", says: "chain PREROUTING in table mangle", unjudged: true},
}

var fatesOfOthers = []fate{
	{name: "nf_tables does not track", from: "pod", command: "nft 'table ip other { chain pre { type filter hook prerouting priority raw; tcp dport 80 notrack; }; }'", says: "conntrack does not track it; decided by rule 1 of chain pre in table ip other (protocol == tcp destination port == 80 notrack)"},
	{name: "too late to keep from tracking", from: "pod", command: "nft 'table ip other { chain pre { type filter hook prerouting priority mangle; tcp dport 80 notrack; }; }'"},
	{name: "what is not tracked is dropped", from: "pod", command: "nft 'table inet other { chain pre { type filter hook prerouting priority raw; ip daddr 10.96.0.80 notrack; }; chain f { type filter hook forward priority 0; ct state untracked drop; }; }'", says: "is dropped by rule 1 of chain f in table inet other (ct state & untracked != 0 drop)"},
	{name: "nf_tables does not track answers", from: "node", command: "nft 'table ip other { chain pre { type filter hook prerouting priority raw; tcp sport 8080 notrack; }; }'", says: "is not translated back"},
	{name: "nf_tables drops answers", from: "outside", command: "nft 'table inet other { chain f { type filter hook forward priority 5; ip saddr 10.180.0.0/24 tcp sport 8080 drop; }; }'", says: "the answer of 10.180.0.2:8080 is dropped by rule 1 of chain f in table inet other"},
	{name: "nf_tables drops what the node sends", from: "node", command: "nft 'table inet other { chain out { type route hook output priority mangle; tcp dport 80 drop; }; }'", says: "is dropped by rule 1 of chain out in table inet other"},
	{name: "a counter with a name", from: "pod", command: "nft 'table ip other { counter seen { }; chain f { type filter hook forward priority 0; tcp dport 8080 counter name seen drop; }; }'", says: "is dropped by rule 1 of chain f in table ip other"},
	{name: "a quota with a name", from: "pod", command: "nft 'table ip other { quota few { over 1 mbytes }; chain f { type filter hook forward priority 0; tcp dport 8080 quota name few drop; }; }'", says: "what it refers to by name may not match", unjudged: true},
	{name: "a route to the source", from: "pod", command: "nft 'table inet other { chain pre { type filter hook prerouting priority raw; fib saddr . iif oif missing drop; }; }'"},
	{name: "a match of nf_tables that is not known", from: "pod", command: "nft 'table inet other { chain f { type filter hook forward priority 0; tcp dport 8080 meta length 1000-2000 drop; }; }'", says: "rule 1 of chain f in table inet other (protocol == tcp destination port == 8080 meta", unjudged: true},
	{
		name: "another way back", from: "outside", unjudged: true,
		command: "ip link add eth1 type veth peer name eth1peer && ip address add 192.0.2.1/24 dev eth1 && ip link set eth1 up && ip link set eth1peer up && " +
			"ip route add 203.0.113.0/24 dev eth1 && sysctl -q -w net.ipv4.conf.eth0.rp_filter=1",
		says: "net.ipv4.conf.eth0.rp_filter = 1: what comes from 203.0.113.2 over that interface is dropped, because the route to 203.0.113.2 leads over another one (eth1)",
	},
	{name: "no forwarding", from: "pod", command: "sysctl -q -w net.ipv4.ip_forward=0", says: "is dropped by net.ipv4.ip_forward = 0"},
	{name: "no forwarding, from the node", from: "node", command: "sysctl -q -w net.ipv4.ip_forward=0"},
	{name: "no forwarding of an interface", from: "outside", command: "sysctl -q -w net.ipv4.conf.eth0.forwarding=0", says: "net.ipv4.conf.eth0.forwarding = 0: the interface that packets arrive over is not known", unjudged: true},
}

func TestFates(t *testing.T) {
	t.Parallel()
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			var all []fate
			for _, f := range fatesOfIPTables {
				var lines []string
				for line := range strings.Lines(f.command) {
					lines = append(lines, "iptables-"+variant+" "+strings.TrimSpace(line))
				}
				f.command, f.says = strings.Join(lines, " && "), strings.ReplaceAll(f.says, "iptables-V", "iptables-"+variant)
				all = append(all, f)
			}
			if variant == "nft" {
				all = append(all, fatesOfOthers...)
			}
			testFates(t, all)
		})
	}
}

// undo returns the command that undoes one.
func undo(command string) string {
	var all []string
	for name, mend := range map[string]string{
		"table ip other": "nft delete table ip other", "table inet other": "nft delete table inet other",
		"forward": "sysctl -q -w net.ipv4.ip_forward=1 net.ipv4.conf.eth0.forwarding=1", "eth1": "ip link delete eth1 && sysctl -q -w net.ipv4.conf.eth0.rp_filter=0",
	} {
		if strings.Contains(command, name) {
			all = append(all, mend)
		}
	}
	tables := map[string]bool{}
	for words := range strings.SplitSeq(command, " && ") {
		if program, arguments, _ := strings.Cut(words, " "); strings.HasPrefix(program, "iptables") {
			table := "filter"
			if rest, ok := strings.CutPrefix(arguments, "-t "); ok {
				table, _, _ = strings.Cut(rest, " ")
			}
			tables[program+" -t "+table] = true
		}
	}
	for of := range tables {
		all = append(all, of+" -F", of+" -X")
		if strings.Contains(command, "-P FORWARD") {
			all = append(all, of+" -P FORWARD ACCEPT")
		}
	}
	return strings.Join(all, " && ")
}

func testFates(t *testing.T, all []fate) {
	network := testenv.NewNetwork(t)
	node := network.AddNode("a")
	pod, server, client := node.AddPod("client"), node.AddPod("server"), network.AddClient("outside")
	client.RouteVia(node, netip.MustParsePrefix("10.96.0.0/16"))
	server.Serve(testenv.TCP, 8080)
	require.Equal(t, "10.180.0.2", server.IPv4.String())
	_, err := node.Run(t.Context(), "sh", "-c", "ipset create members hash:ip,port && ipset add members "+pod.IPv4.String()+",tcp:8080")
	require.NoError(t, err)
	v := see(t, nothing, endpoint(server.IPv4.String(), "node-1"))
	program(t, node, v)
	from := map[string]*testenv.Host{"pod": pod.Host, "node": node.Host, "outside": client.Host}
	sources := map[string]netip.Addr{"pod": pod.IPv4, "node": node.IPv4, "outside": client.IPv4}
	reaches := func(f fate) bool {
		r := from[f.from].Probe(t.Context(), testenv.TCP, netip.MustParseAddrPort("10.96.0.80:80"), 1, testenv.ProbeOptions{Timeout: 300 * time.Millisecond})
		return r.Attempts[0].Outcome == testenv.Answered
	}
	says := func(f fate) (text string, unjudged bool) {
		var a *explain.Answer
		require.NoError(t, node.Do(func() (err error) {
			a, err = explain.Kernel(t.Context(), v, explain.Question{Service: web, From: sources[f.from]})
			return err
		}))
		p := to(t, a.Ports[0], "clusterIP", "")
		switch {
		case len(a.Unjudged) > 0:
			return strings.Join(a.Unjudged, "\n"), true
		case len(p.RefusedBy) > 0:
			return strings.Join(p.RefusedBy, "\n"), false
		case p.DecidedBy != "":
			return fmt.Sprintf("%s; decided by %s", p.Found, p.DecidedBy), false
		case !strings.HasPrefix(p.Found, "reaches 1 backend"):
			return p.Found, false
		}
		return "", false
	}
	for _, f := range append([]fate{{name: "nothing", from: "pod"}, {name: "nothing", from: "node"}, {name: "nothing", from: "outside"}}, all...) {
		t.Run(f.name, func(t *testing.T) {
			if f.command != "" {
				_, err := node.Run(t.Context(), "sh", "-c", f.command)
				require.NoError(t, err)
				defer func() {
					_, err := node.Run(t.Context(), "sh", "-c", undo(f.command))
					require.NoError(t, err)
				}()
			}
			text, unjudged := says(f)
			require.Equal(t, f.unjudged, unjudged, text)
			if f.says == "" {
				require.Empty(t, text)
			}
			require.Contains(t, text, f.says)
			if !unjudged && !f.random {
				require.Equal(t, text == "", reaches(f), "what packets do, after %q", text)
			}
		})
	}
}
