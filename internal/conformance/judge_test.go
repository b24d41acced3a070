// These tests prove that the judges of flows and sessions accept what a case expects and nothing
// else, and that an exception that is not needed any more is an error. The connections are made up.
package conformance

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

var (
	edge     = &testenv.Host{Name: "edge"}
	testNode = Node{IPs: []Addr{{netip.MustParseAddr("192.168.0.2")}}}
)

// fate returns the fate of an answered connection from 10.180.0.1 to 10.96.0.1:80 that arrived with
// the given source and destination.
func fate(src, dst string) Fate {
	return Fate{
		Opening: Opening{Src: netip.MustParseAddrPort("10.180.0.1:5000"), Dst: netip.MustParseAddrPort("10.96.0.1:80")},
		At:      edge, SeenSrc: netip.MustParseAddrPort(src), SeenDst: netip.MustParseAddrPort(dst), Answered: true,
	}
}

// lost returns the fate of a connection that arrived nowhere.
func lost() Fate {
	f := fate("10.180.0.1:5000", "10.96.0.1:80")
	return Fate{Opening: f.Opening}
}

func refused() Fate {
	f := lost()
	f.Refused, f.Denied = "ICMP port unreachable", unix.EPERM
	return f
}

func backends(masquerade Masquerade, addrs ...string) Expectation {
	e := Expectation{Masquerade: masquerade}
	for _, addr := range addrs {
		e.Backends = append(e.Backends, AddrPort{netip.MustParseAddrPort(addr)})
	}
	return e
}

func TestJudge(t *testing.T) {
	verdict := func(v Verdict) Expectation { return Expectation{Verdict: v} }
	kept, rewritten := fate("10.180.0.1:5000", "10.180.0.9:80"), fate("192.168.0.2:6000", "10.180.0.9:80")
	hairpin, bare := fate("192.168.0.2:6000", "10.180.0.1:80"), fate("10.180.0.1:5000", "10.180.0.1:80")
	unchanged := fate("10.180.0.1:5000", "10.96.0.1:80")
	unanswered, reset, denied := kept, lost(), lost()
	unanswered.Answered, reset.Answered, denied.Denied = false, true, unix.EPERM
	unreachable := lost()
	unreachable.Refused = "ICMP destination unreachable, code 1"
	fates := func(list ...Fate) []Fate { return list }
	for _, test := range []struct {
		name  string
		want  Expectation
		fates []Fate
		right bool
	}{
		{"a backend", backends(SourceKept, "10.180.0.9:80"), fates(kept, kept), true},
		{"a backend that is not reached", backends(SourceKept, "10.180.0.9:80", "10.180.0.8:80"), fates(kept, kept), false},
		{"a backend that is none", backends(HairpinOnly, "10.180.0.9:80"), fates(kept, hairpin), false},
		{"one connection is enough for one backend", backends(SourceKept, "10.180.0.9:80", "10.180.0.8:80"), fates(kept), true},
		{"no answer", backends(SourceKept, "10.180.0.9:80"), fates(kept, unanswered), false},
		{"some are lost", backends(SourceKept, "10.180.0.9:80"), fates(kept, lost()), false},
		{"the source is not kept", backends(SourceKept, "10.180.0.9:80"), fates(rewritten, rewritten), false},
		{"the source is not rewritten", backends(Masqueraded, "10.180.0.9:80"), fates(rewritten, kept), false},
		{"the source is rewritten", backends(Masqueraded, "10.180.0.9:80"), fates(rewritten, rewritten), true},
		{"any source", backends(MasqueradedAny, "10.180.0.9:80"), fates(rewritten, kept), true},
		{"hairpin only", backends(HairpinOnly, "10.180.0.9:80", "10.180.0.1:80"), fates(kept, hairpin), true},
		{"hairpin, not rewritten", backends(HairpinOnly, "10.180.0.9:80", "10.180.0.1:80"), fates(kept, bare), false},
		{"not only the hairpin", backends(HairpinOnly, "10.180.0.9:80", "10.180.0.1:80"), fates(rewritten, hairpin), false},
		{"refused", verdict(Reject), fates(refused(), refused()), true},
		{"reset", verdict(Reject), fates(refused(), reset), true},
		{"not reachable is not refused", verdict(Reject), fates(unreachable), false},
		{"silence is not refusal", verdict(Reject), fates(refused(), lost()), false},
		{"a closed port of the node is not refusal", verdict(Reject), fates(unchanged), false},
		{"silence", verdict(Drop), fates(lost(), denied), true},
		{"refusal is not silence", verdict(Drop), fates(lost(), refused()), false},
		{"reset is not silence", verdict(Drop), fates(reset), false},
		{"unchanged", verdict(Accept), fates(unchanged, unchanged), true},
		{"translated", verdict(Accept), fates(unchanged, kept), false},
		{"masqueraded", verdict(Accept), fates(fate("192.168.0.2:6000", "10.96.0.1:80")), false},
		{"dropped", verdict(Accept), fates(unchanged, lost()), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			k := check{flow: &Flow{}, node: testNode, want: []Expectation{test.want}}
			if err := k.judge(test.fates); test.right {
				require.NoError(t, err)
			} else {
				require.Error(t, err)
			}
		})
	}
}

func TestTargets(t *testing.T) {
	accept, drop, reject := Expectation{Verdict: Accept}, Expectation{Verdict: Drop}, Expectation{Verdict: Reject}
	f := &Flow{Expect: accept, ExpectNFTables: &drop, ExpectIPVS: &reject, Accept: []Expectation{drop}}
	require.Equal(t, []Expectation{accept, drop}, f.targets(IPTables, true))
	require.Equal(t, []Expectation{drop, drop}, f.targets(NFTables, true))
	require.Equal(t, []Expectation{reject, drop}, f.targets(IPVS, true))
	for _, mode := range []Mode{IPTables, NFTables, IPVS} {
		require.Equal(t, []Expectation{drop, drop}, f.targets(mode, false), "Slicecast's targets depend on the mode")
	}
	f.ExpectNFTables = nil
	require.Equal(t, []Expectation{accept, drop}, f.targets(IPVS, false))
	f.ExpectSlicecast = &drop
	require.Equal(t, []Expectation{drop, drop}, f.targets(IPTables, false))
	require.Equal(t, []Expectation{accept, drop}, f.targets(IPTables, true))
}

func TestExceptions(t *testing.T) {
	k := check{
		flow: &Flow{}, node: testNode, want: []Expectation{{Verdict: Drop}},
		exception: &exception{Reason: "because"}, excused: Expectation{Verdict: Reject},
	}
	require.NoError(t, k.judge([]Fate{refused()}))
	require.ErrorContains(t, k.judge([]Fate{lost()}), "not needed any more (because)")
	require.ErrorContains(t, k.judge([]Fate{fate("10.180.0.1:5000", "10.180.0.9:80")}), "not dropped in silence")

	cases, err := Load("testdata/scenarios")
	require.NoError(t, err)
	load := func(text string) (exceptions, error) {
		file := filepath.Join(t.TempDir(), "exceptions.yaml")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		return loadExceptions(file, cases)
	}
	_, err = load("- {programmer: ipvs, case: etp-local, flow: a flow, reason: r}\n")
	require.ErrorContains(t, err, `exceptions.yaml: etp-local, step "", flow "a flow": no such flow or session for "ipvs"`)
	list, err := load("- {programmer: ipvs, case: etp-local, flow: external to LB IP hits only local, reason: r}\n")
	require.NoError(t, err)
	require.NotNil(t, list.find(IPVS, "etp-local", "", "external to LB IP hits only local"))
	require.Nil(t, list.find(NFTables, "etp-local", "", "external to LB IP hits only local"))
	_, err = load("- {programmer: ipvs, case: etp-local, flow: external to LB IP hits only local}\n")
	require.ErrorContains(t, err, "reason is missing")
	_, err = load("- {programer: ipvs}\n")
	require.ErrorContains(t, err, "field programer not found")
}

func TestSessionJudge(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.180.0.1:80"), netip.MustParseAddrPort("10.180.0.2:80")
	both := []AddrPort{{a}, {b}}
	one, spread := Session{Expect: ExpectSession{Backends: both, Distinct: 1}}, Session{Expect: ExpectSession{Backends: both, DistinctMin: 2}}
	require.NoError(t, one.judge([]netip.AddrPort{a, a}))
	require.ErrorContains(t, one.judge([]netip.AddrPort{a, b}), "want 1")
	require.ErrorContains(t, spread.judge([]netip.AddrPort{a, a}), "want at least 2")
	require.NoError(t, spread.judge([]netip.AddrPort{a, b, a}))
	one.Count, spread.Count = 3, 3
	require.False(t, one.suffices([]netip.AddrPort{a, a}))
	require.True(t, one.suffices([]netip.AddrPort{a, a, a}))
	require.True(t, spread.suffices([]netip.AddrPort{a, a, b}))
	require.False(t, spread.suffices(slices.Repeat([]netip.AddrPort{a}, certainty-1)), "by chance")
	require.True(t, spread.suffices(slices.Repeat([]netip.AddrPort{a}, certainty)))
	other := netip.MustParseAddrPort("10.180.0.3:80")
	require.ErrorContains(t, one.judge([]netip.AddrPort{a, other}), "connection 1 reaches 10.180.0.3:80")
}
