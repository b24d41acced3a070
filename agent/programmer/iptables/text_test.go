// These tests prove properties of the rules' text without a kernel: exact probabilities, the shape
// of the trees, the numbers and examples in docs/iptables.md, and how the output of iptables'
// programs is read.
package iptables

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// somePort returns a Service port with n backends, none of which is local.
func somePort(n int) *view.ServicePort {
	p := &view.ServicePort{ID: serviceID("web", model.TCP, model.IPv4), Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 1))}}
	var backends []view.Backend
	for i := range n {
		backends = append(backends, view.Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 180, byte(i >> 8), byte(i)}), 8080)})
	}
	p.Cluster = view.NewBackends(backends...)
	return p
}

var jump = regexp.MustCompile(`^-A (\S+)(?: -d \S+)?(?: -p \S+)?(?: -m tcp --dport \d+)?(?: -m comment --comment "[^"]*")?` +
	`(?: -m statistic --mode random --probability (\S+))? (?:-[gj] (SLICECAST\S+)|-j DNAT --to-destination (\S+))\n$`)

// rulesOf returns the rules of chains.
func rulesOf(chains []portChain) string {
	var b bytes.Buffer
	for _, c := range chains {
		c.write(&b)
	}
	return b.String()
}

// TestExactlyUniform computes the probability of each backend from the rules, for a Service port
// that has chains for its backends and for one whose rules are in the tree because they are few.
func TestExactlyUniform(t *testing.T) {
	d := newDialect(model.IPv4, programmer.DefaultMasqueradeMark, true)
	for _, n := range []int{1, 2, 3, 7, 10, maxPlain, maxPlain + 1, 100, 1000, 5000} {
		for _, frontends := range []int{1, 3} {
			port := somePort(n)
			for i := range frontends - 1 {
				port.Frontends = append(port.Frontends, external(vip(model.IPv4, byte(2+i))))
			}
			var first bytes.Buffer
			p := d.plan(port)
			d.natRules(&first, vipsChain, []frontend{{p, 0}})
			rules := slices.Collect(strings.Lines(first.String() + rulesOf(d.chainsOf(p))))
			left := map[string]float64{vipsChain: 1} // by chain, the probability of reaching its next rule
			chances := map[string]float64{}
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
}

// TestTreeShape asserts that the chains depend on the entries alone, and that no chain is long.
func TestTreeShape(t *testing.T) {
	d := newDialect(model.IPv4, programmer.DefaultMasqueradeMark, true)
	build := func() *tree[netip.Addr, frontend] {
		return newTree(nat, vipsChain, keys[netip.Addr]{addressBit, d.matchAddress, netip.Addr.Compare}, entries[frontend]{d.natWeight, d.natRules})
	}
	text := func(tr *tree[netip.Addr, frontend], all bool, held chainHashes) (*transaction, string) {
		x := newTransaction(held)
		tr.write(x, all)
		return x, string(x.text())
	}
	random := rand.New(rand.NewPCG(1, 2))
	entries := make([]frontend, 3000)
	for i := range entries {
		p := &view.ServicePort{ID: serviceID(fmt.Sprint(i), model.TCP, model.IPv4), Cluster: somePort(random.IntN(40)).Cluster}
		a := netip.AddrFrom4([4]byte{10, 96, byte(random.IntN(256)), byte(i)})
		if p.Cluster.Len() > 0 {
			p.Frontends = []view.Frontend{clusterIP(a)}
		} else {
			p.Frontends = []view.Frontend{everyone(clusterIP(a), view.Route{To: view.Local})}
		}
		entries[i] = frontend{d.plan(p), 0}
	}
	once, twice := build(), build()
	for _, e := range entries[:2000] {
		once.change(true, e.get().Address, e)
	}
	for _, i := range random.Perm(len(entries)) {
		twice.change(true, entries[i].get().Address, entries[i])
	}
	held := newChainHashes()
	x, _ := text(twice, false, held)
	s := &saved{chains: held}
	s.done(x)
	require.Equal(t, held.rules(nat), s.rules[nat])
	for _, i := range random.Perm(len(entries)) {
		if i >= 2000 {
			twice.change(false, entries[i].get().Address, entries[i])
		}
	}
	x, _ = text(twice, false, held)
	s.done(x)
	require.Equal(t, held.rules(nat), s.rules[nat], "the count is kept up to date")
	_, want := text(once, true, newChainHashes())
	_, got := text(twice, true, newChainHashes())
	require.Equal(t, want, got)
	_, rest := text(once, true, held)
	require.Empty(t, rest, "what was written by and by is what is wanted")
	rules := map[string]int{}
	keys := map[string]map[string]bool{}
	for line := range strings.Lines(want) {
		if fields := strings.Fields(line); fields[0] == "-A" {
			rules[fields[1]]++
			if keys[fields[1]] == nil {
				keys[fields[1]] = map[string]bool{}
			}
			keys[fields[1]][fields[3]] = true
		}
	}
	for chain, n := range rules {
		require.True(t, n <= leafRules || len(keys[chain]) <= leafKeys, "%s: %d rules", chain, n)
	}
	for _, e := range entries[:2000] {
		once.change(false, e.get().Address, e)
	}
	_, empty := text(once, true, newChainHashes())
	require.Equal(t, "*nat\n:SLICECAST-VIPS - [0:0]\nCOMMIT\n", empty)
}

// chainNames adds the names of all chains that a tree can have to those of its table. No two chains
// of a table may have the same name.
func chainNames[K, E comparable](t *testing.T, names *[tables]map[string]bool, tr *tree[K, E]) {
	t.Helper()
	for bits := range maxBits + 1 {
		for path := range 1 << bits {
			name := tr.chain(fmt.Sprintf("%0*b", bits, path)[:bits])
			if names[tr.table][name] {
				require.Fail(t, "two chains have this name", name)
			}
			names[tr.table][name] = true
		}
	}
}

// TestChainNames asserts that iptables accepts the name of every chain that there can be: of every
// path of every tree, of whatever Service port, and of the chains that always exist.
func TestChainNames(t *testing.T) {
	f := newFamily(view.Node{NodePorts: everywhere, LocalhostNodePorts: true})
	names := [tables]map[string]bool{{}, {}}
	x := newTransaction(newChainHashes())
	f.fixedChains(x)
	for table := range x.parts {
		for name := range x.parts[table].put {
			names[table][name] = true
		}
	}
	for _, tr := range []*tree[netip.Addr, frontend]{f.vips, f.external, f.rejectVIPs} {
		chainNames(t, &names, tr)
	}
	chainNames(t, &names, f.hairpins)
	for _, p := range protocols {
		chainNames(t, &names, f.nodePorts[p])
		chainNames(t, &names, f.rejectNodePorts[p])
	}
	longest := 0
	check := func(name string) {
		longest = max(longest, len(name))
		if len(name) > maxName {
			require.Fail(t, "iptables does not accept this name", name)
		}
	}
	for _, of := range names {
		for name := range of {
			check(name)
		}
	}
	require.Greater(t, len(names[nat])+len(names[filter]), 10<<maxBits)
	rapid.Check(t, func(rt *rapid.T) {
		for _, c := range f.chainsOf(f.plan(drawPort(rt, serviceID(rapid.String().Draw(rt, "name"), model.SCTP, model.IPv4)))) {
			check(c.name)
		}
	})
	require.Equal(t, maxName, longest, "the names of a Service port's chains")
	require.Panics(t, func() {
		newTree(nat, ChainPrefix+"NODEPORTS-SCTP", keys[uint16]{}, entries[frontend]{})
	}, "one character too many")
}

// newFamily returns a family without a kernel.
func newFamily(node view.Node) *kernelFamily {
	f := &kernelFamily{dialect: newDialect(model.IPv4, programmer.DefaultMasqueradeMark, true), held: &saved{chains: newChainHashes()}}
	f.reset(node)
	return f
}

// TestRulesInDocs compares the example in docs/iptables.md with the rules that are written for
// these Services.
func TestRulesInDocs(t *testing.T) {
	f := newFamily(view.Node{Pods: view.PodDetector{Prefixes: podCIDRs}, NodePorts: []netip.Prefix{netip.MustParsePrefix("192.168.0.2/32")}})
	web := somePort(2)
	backends := slices.Clone(web.Cluster.List())
	backends[0].Local = true
	web.Cluster = view.NewBackends(backends...)
	lb := &view.ServicePort{
		ID:        serviceID("lb", model.TCP, model.IPv4),
		Frontends: []view.Frontend{clusterIP(vip(model.IPv4, 2)), localPolicy(external(netip.MustParseAddr("198.51.100.4"))), localPolicy(nodePort(30002))},
		Cluster:   web.Cluster, Local: view.NewBackends(backends[0]), Affinity: 3 * time.Hour,
	}
	lb.Frontends[1].Kind, lb.Frontends[1].Sources = view.LoadBalancer, []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}
	none := serviceID("none", model.UDP, model.IPv4)
	for _, p := range []*view.ServicePort{web, lb, {ID: none, Frontends: []view.Frontend{rejected(clusterIP(vip(model.IPv4, 3)))}}} {
		f.set(p.ID, p)
	}
	got := string(f.transaction(true).text())
	page, err := os.ReadFile("../../../docs/iptables.md")
	require.NoError(t, err)
	_, example, _ := strings.Cut(string(page), "```text\n")
	example, _, _ = strings.Cut(example, "```")
	require.Equal(t, example, regexp.MustCompile(`(?m)^:.*\n`).ReplaceAllString(got, ""))

	// Reading the rules back finds what was written.
	f.held = &saved{chains: parseSave([]byte(got)).chains}
	require.Empty(t, f.transaction(true).text())

	// Names from a cluster do no harm.
	evil := frontend{f.plan(&view.ServicePort{ID: serviceID("ev\"il\n -j X"+strings.Repeat("x", 300), model.TCP, model.IPv4), Frontends: web.Frontends}), 0}
	require.Equal(t, `-m comment --comment "default/ev_il__-j_X`+strings.Repeat("x", 211)+` clusterIP"`, comment(evil))
}

// TestRuleCount asserts the numbers of rules in docs/iptables.md.
func TestRuleCount(t *testing.T) {
	node := view.Node{Pods: view.PodDetector{Prefixes: podCIDRs}, NodePorts: everywhere}
	for _, want := range []struct{ services, backends, rules int }{{0, 0, 34}, {1000, 50, 50_350}, {10_000, 5, 51_400}} {
		for _, scattered := range []bool{false, true} {
			f := newFamily(node)
			for i := range want.services {
				p := benchmarkPort(i, want.backends, 0)
				if scattered {
					b := sha256.Sum256([]byte{byte(i), byte(i >> 8)})
					p.Frontends[0].Address = netip.AddrFrom4([4]byte{10, 96, b[0], b[1]})
				}
				f.set(p.ID, p)
			}
			rules := len(f.hooks()) + bytes.Count(f.transaction(true).text(), []byte("\n-A "))
			require.InEpsilon(t, want.rules, rules, 0.003)
		}
	}
}

// TestParseSave asserts what is read from the output of iptables-save.
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
			"SLICECAST-VIPS": hashOf([]byte("-A SLICECAST-VIPS -j ACCEPT\n-A SLICECAST-VIPS -j SLICECAST-P-X\n")),
			"SLICECAST-P-X":  emptyChain,
		},
		filter: {"SLICECAST-INPUT": emptyChain},
	}, s.chains)
}

// TestRestoreErrorNamesLine asserts that the error contains the line that iptables-restore names.
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

// TestManyFrontends asserts that the work for a Service port grows linearly with the number of its
// addresses.
func TestManyFrontends(t *testing.T) {
	work := func(addresses int) float64 {
		port := somePort(5)
		for i := range addresses {
			port.Frontends = append(port.Frontends, external(netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)})))
		}
		return testing.AllocsPerRun(1, func() {
			f := newFamily(view.Node{})
			f.set(port.ID, port)
			require.NotEmpty(t, f.transaction(true).text())
			f.set(port.ID, nil)
		})
	}
	require.Less(t, work(2000), 20*work(200))
}
