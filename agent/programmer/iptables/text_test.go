package iptables

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// somePort gives a Service port with n backends, none of them local.
func somePort(n int) *view.ServicePort {
	p := &view.ServicePort{ID: serviceID("web", model.TCP, model.IPv4), Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 1))}}
	for i := range n {
		p.Backends = append(p.Backends, view.Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 180, byte(i >> 8), byte(i)}), 8080)})
	}
	return p
}

var jump = regexp.MustCompile(`^-A (\S+)(?: -p \S+)?(?: -m statistic --mode random --probability (\S+))? (?:-g (\S+)|-j DNAT --to-destination (\S+))\n$`)

// TestExactlyUniform works out the chance of each backend from the rules.
func TestExactlyUniform(t *testing.T) {
	for _, n := range []int{1, 2, 3, 7, 10, maxPlain, maxPlain + 1, 100, 1000, 5000} {
		port := somePort(n)
		x := newTransaction(newChainHashes())
		portChains(x, nil, port)
		left := map[string]float64{portChain(port.ID): 1} // of each chain: the chance to come to its next rule
		chances := map[string]float64{}
		var rules []string
		for _, chains := range []string{portChainPrefix, groupChainPrefix} { // so that a chain comes after what leads to it
			for line := range strings.Lines(x.parts[nat].rules.String()) {
				if strings.HasPrefix(line, "-A "+chains) {
					rules = append(rules, line)
				}
			}
		}
		for _, line := range rules {
			m := jump.FindStringSubmatch(line)
			require.NotNil(t, m, line)
			p := 1.0
			if m[2] != "" {
				var err error
				p, err = strconv.ParseFloat(m[2], 64)
				require.NoError(t, err)
			}
			if m[3] != "" {
				left[m[3]] = left[m[1]] * p
			} else {
				chances[m[4]] += left[m[1]] * p
			}
			left[m[1]] *= 1 - p
		}
		require.Len(t, chances, n)
		for backend, chance := range chances {
			require.InEpsilon(t, 1/float64(n), chance, 1e-4, "%v of %d", backend, n)
		}
		for chain, rest := range left {
			require.Zero(t, rest, "a connection falls out of %s", chain)
		}
	}
}

// TestTreeShape holds that the chains depend on the keys alone, and that no chain is long.
func TestTreeShape(t *testing.T) {
	d := newDialect(model.IPv4, DefaultMasqueradeMark, true)
	build := func() *tree[netip.Addr] {
		return newTree(nat, vipsChain, addressDigit, d.matchAddress, netip.Addr.Compare, d.frontendRules(view.MasqueradeNonLocal))
	}
	text := func(tr *tree[netip.Addr], all bool, held chainHashes) (*transaction, string) {
		x := newTransaction(held)
		tr.write(x, all)
		return x, string(x.text())
	}
	entryOf := func(i int) (netip.Addr, entry) {
		p := &view.ServicePort{ID: serviceID(fmt.Sprint(i), model.TCP, model.IPv4)}
		a := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
		return a, entry{p, view.Frontend{Kind: view.ClusterIP, Address: a, Port: 80}}
	}
	entries := make([]entry, 3000)
	for i := range entries {
		_, entries[i] = entryOf(i)
	}
	random := rand.New(rand.NewPCG(1, 2))
	once, twice := build(), build()
	for i, e := range entries[:2000] {
		_ = i
		once.add(e.frontend.Address, e)
	}
	for _, i := range random.Perm(len(entries)) {
		twice.add(entries[i].frontend.Address, entries[i])
	}
	held := newChainHashes()
	x, _ := text(twice, false, held)
	x.done()
	for _, i := range random.Perm(len(entries)) {
		if i >= 2000 {
			twice.remove(entries[i].frontend.Address, entries[i])
		}
	}
	x, _ = text(twice, false, held)
	x.done()
	_, want := text(once, true, newChainHashes())
	_, got := text(twice, true, newChainHashes())
	require.Equal(t, want, got)
	_, rest := text(once, true, held)
	require.Empty(t, rest, "what was written by and by is what is wanted")
	lengths := map[string]int{}
	for line := range strings.Lines(want) {
		if strings.HasPrefix(line, "-A ") {
			lengths[strings.Fields(line)[1]]++
		}
	}
	for chain, n := range lengths {
		require.LessOrEqual(t, n, leafKeys, chain)
		require.LessOrEqual(t, len(chain), 28)
	}
	for _, e := range entries[:2000] {
		once.remove(e.frontend.Address, e)
	}
	_, empty := text(once, true, newChainHashes())
	require.Equal(t, "*nat\n:SLICECAST-VIPS - [0:0]\nCOMMIT\n", empty)
}

// TestRulesReadWell shows what a node's rules look like.
func TestRulesReadWell(t *testing.T) {
	f := &kernelFamily{dialect: newDialect(model.IPv4, DefaultMasqueradeMark, true), held: &saved{chains: newChainHashes()}}
	f.reset([]netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00::/64")})
	port := somePort(2)
	port.Frontends = append(port.Frontends, nodePort(30080))
	port.Backends[0].Local = true
	f.set(port.ID, port)
	none := serviceID(`ev"il`+"\n"+strings.Repeat("x", 300), model.UDP, model.IPv4)
	f.set(none, &view.ServicePort{ID: none, Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 2))}})
	got := string(f.transaction(true).text())
	chain := portChain(port.ID)
	want := `*nat
:SLICECAST-DISPATCH - [0:0]
:SLICECAST-HAIRPIN - [0:0]
:SLICECAST-NODEPORTS - [0:0]
:SLICECAST-NODEPORTS-SCTP - [0:0]
:SLICECAST-NODEPORTS-TCP - [0:0]
:SLICECAST-NODEPORTS-UDP - [0:0]
:SLICECAST-NONLOCAL - [0:0]
:` + chain + ` - [0:0]
:SLICECAST-POSTROUTING - [0:0]
:SLICECAST-SERVICES - [0:0]
:SLICECAST-VIPS - [0:0]
-A SLICECAST-SERVICES -m mark --mark 0x4000/0x4000 -g SLICECAST-DISPATCH
-A SLICECAST-SERVICES -j SLICECAST-NONLOCAL
-A SLICECAST-SERVICES -j SLICECAST-DISPATCH
-A SLICECAST-SERVICES -j MARK --set-xmark 0x0/0x4000
-A SLICECAST-DISPATCH -j SLICECAST-VIPS
-A SLICECAST-DISPATCH ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j SLICECAST-NODEPORTS
-A SLICECAST-NODEPORTS -j MARK --set-xmark 0x4000/0x4000
-A SLICECAST-NODEPORTS -p tcp -j SLICECAST-NODEPORTS-TCP
-A SLICECAST-NODEPORTS -p udp -j SLICECAST-NODEPORTS-UDP
-A SLICECAST-NODEPORTS -p sctp -j SLICECAST-NODEPORTS-SCTP
-A SLICECAST-NONLOCAL -j MARK --set-xmark 0x0/0x4000
-A SLICECAST-NONLOCAL -s 10.180.0.0/16 -j RETURN
-A SLICECAST-NONLOCAL -j MARK --set-xmark 0x4000/0x4000
-A SLICECAST-POSTROUTING -m mark ! --mark 0x4000/0x4000 -m conntrack --ctstate DNAT -j SLICECAST-HAIRPIN
-A SLICECAST-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A SLICECAST-POSTROUTING -j MARK --set-xmark 0x0/0x4000
-A SLICECAST-POSTROUTING -j MASQUERADE --random-fully
-A ` + chain + ` -p tcp -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.180.0.0:8080
-A ` + chain + ` -p tcp -j DNAT --to-destination 10.180.0.1:8080
-A SLICECAST-VIPS -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -m comment --comment "default/web:p/TCP/IPv4 clusterIP" -j ` + chain + `
-A SLICECAST-HAIRPIN -s 10.180.0.0/32 -d 10.180.0.0/32 -j MASQUERADE --random-fully
-A SLICECAST-NODEPORTS-TCP -p tcp -m tcp --dport 30080 -m comment --comment "default/web:p/TCP/IPv4 nodePort" -j ` + chain + `
COMMIT
*filter
:SLICECAST-FORWARD - [0:0]
:SLICECAST-INPUT - [0:0]
:SLICECAST-REJECT - [0:0]
:SLICECAST-REJECT-NODEPORTS - [0:0]
:SLICECAST-REJECT-SCTP - [0:0]
:SLICECAST-REJECT-TCP - [0:0]
:SLICECAST-REJECT-UDP - [0:0]
-A SLICECAST-INPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j SLICECAST-REJECT-NODEPORTS
-A SLICECAST-REJECT-NODEPORTS -p tcp -j SLICECAST-REJECT-TCP
-A SLICECAST-REJECT-NODEPORTS -p udp -j SLICECAST-REJECT-UDP
-A SLICECAST-REJECT-NODEPORTS -p sctp -j SLICECAST-REJECT-SCTP
-A SLICECAST-FORWARD -m conntrack --ctstate INVALID -j DROP
-A SLICECAST-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A SLICECAST-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A SLICECAST-FORWARD -m conntrack --ctstate NEW -j SLICECAST-REJECT
-A SLICECAST-REJECT -d 10.96.0.2/32 -p udp -m udp --dport 80 -m comment --comment "default/ev_il_` + strings.Repeat("x", 216) + ` clusterIP" -j REJECT --reject-with icmp-port-unreachable
COMMIT
`
	require.Equal(t, want, got)

	// What is read back from it is what was written.
	x := newTransaction(parseSave([]byte(got)).chains)
	f.held = &saved{chains: x.held}
	require.Empty(t, f.transaction(true).text())
}

// TestRuleCount holds the package comment to its numbers.
func TestRuleCount(t *testing.T) {
	for _, want := range []struct{ services, backends, rules int }{{0, 0, 31}, {1000, 50, 51_300}, {10_000, 5, 64_400}} {
		f := &kernelFamily{dialect: newDialect(model.IPv4, DefaultMasqueradeMark, true), held: &saved{chains: newChainHashes()}}
		f.reset([]netip.Prefix{netip.MustParsePrefix("10.180.0.0/16")})
		for i := range want.services {
			p := benchmarkPort(i, want.backends, 0)
			f.set(p.ID, p)
		}
		rules := len(hooks) + bytes.Count(f.transaction(true).text(), []byte("\n-A "))
		require.InEpsilon(t, want.rules, rules, 0.001)
	}
}

// TestParseSave reads the output of iptables-save.
func TestParseSave(t *testing.T) {
	s := parseSave([]byte(`# Generated by iptables-save
*raw
:PREROUTING ACCEPT [0:0]
-A PREROUTING -j SLICECAST-RAW
COMMIT
*filter
:INPUT ACCEPT [1:2]
:SLICECAST-INPUT - [0:0]
:SLICECASTER - [0:0]
-A INPUT -m conntrack --ctstate NEW -j SLICECAST-INPUT
-A SLICECASTER -j ACCEPT
COMMIT
# Completed
*nat
:SLICECAST-VIPS - [0:0]
:SLICECAST-P-X - [0:0]
-A SLICECAST-VIPS -j ACCEPT
-A SLICECAST-VIPS -j SLICECAST-P-X
COMMIT
`))
	require.Equal(t, []hook{{filter, "-A INPUT -m conntrack --ctstate NEW -j SLICECAST-INPUT"}}, s.hooks)
	require.Equal(t, "SLICECAST-INPUT", s.hooks[0].target())
	require.Equal(t, chainHashes{
		nat: {
			"SLICECAST-VIPS": xxhash.Sum64String("-A SLICECAST-VIPS -j ACCEPT\n-A SLICECAST-VIPS -j SLICECAST-P-X\n"),
			"SLICECAST-P-X":  emptyChain,
		},
		filter: {"SLICECAST-INPUT": emptyChain},
	}, s.chains)
}

// TestRestoreErrorNamesLine looks up the line that iptables-restore names.
func TestRestoreErrorNamesLine(t *testing.T) {
	input := []byte("*nat\n-A X -j ONE\n-A X -j TWO\nCOMMIT\n")
	for said, line := range map[string]string{
		"Bad IP address\nError occurred at line: 3":                        "-A X -j TWO",
		"\nline 2: RULE_APPEND failed (Invalid argument): rule in chain X": "-A X -j ONE",
		"iptables-restore: line 4 failed":                                  "",
		"line 400 failed":                                                  "",
		"out of memory":                                                    "",
	} {
		err := restoreError(&commandError{name: "iptables-restore", exit: fmt.Errorf("exit status 1"), said: said}, bytes.Clone(input))
		var rejected *rejectedError
		require.ErrorAs(t, err, &rejected)
		require.Equal(t, line, rejected.line, said)
		require.ErrorContains(t, err, said)
	}
}
