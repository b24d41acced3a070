// This file makes the connections of a case's flows with real packets, and judges where they
// arrive, with which source, or how they are refused.
package conformance

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

const (
	// A flow has at least leastConnections connections and perBackend for each backend. With that
	// many, a backend that no connection reaches is not in use.
	leastConnections = 40
	perBackend       = 24
	// silence is the time for which nothing must be seen after a packet before it counts as
	// dropped.
	silence = 200 * time.Millisecond
	// retryInterval is the pause before failed flows are tried again.
	retryInterval = 50 * time.Millisecond
)

// defaultSources are the source addresses, IPv4 and IPv6, of connections for which the case has
// none. For the node, its own kernel chooses.
var defaultSources = map[Origin][2]netip.Addr{
	PodLocal:  {netip.MustParseAddr("10.180.0.200"), netip.MustParseAddr("fd00:10:180::200")},
	PodRemote: {netip.MustParseAddr("10.180.1.200"), netip.MustParseAddr("fd00:10:180:1::200")},
	External:  {netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8:cafe::2")},
	FromNode:  {},
}

// hostOf returns the host at which connections of an origin begin.
func (s *stage) hostOf(origin Origin) *testenv.Host {
	switch origin {
	case PodLocal:
		return s.pods.Host
	case FromNode:
		return s.node.Host
	default:
		return s.outside.Host
	}
}

// openings returns n connections.
func (s *stage) openings(c *Connections, n int) []Opening {
	sources := c.SrcRange.All()
	if len(sources) == 0 {
		src := c.Src.Addr
		if !src.IsValid() {
			src = defaultSources[c.From][0]
			if c.Dst.Is6() {
				src = defaultSources[c.From][1]
			}
		}
		sources = []netip.Addr{src}
	}
	var list []Opening
	for i := range n {
		list = append(list, Opening{
			From: s.hostOf(c.From), Proto: c.Proto,
			Src: netip.AddrPortFrom(sources[i%len(sources)], c.Sport), Dst: netip.AddrPortFrom(c.Dst.Addr, c.Port),
		})
	}
	return list
}

// checkFlows tries all flows of a step at once, repeatedly until each leads where it must. A flow
// with a source port is tried only once, because the kernel would remember the connection. If its
// client goes on, however, it is tried repeatedly: the remembered connection is then what must not
// last.
func (s *stage) checkFlows(ctx context.Context, t *testing.T, c *Case, step *Step, exceptions exceptions, report func(string, error)) {
	t.Helper()
	var single, pending []*check
	for i := range step.Flows {
		f := &step.Flows[i]
		k := &check{flow: f, node: c.Node, want: f.targets(s.subject.Mode(), s.reference())}
		if does, ok := ofKubeProxyIPVS(c, step, f); ok && s.reference() && s.subject.Mode() == IPVS {
			k.want = []Expectation{does}
		}
		if !s.subject.Reference() {
			k.exception = exceptions.find(s.subject.Mode(), c.ID, step.Name, f.Name)
		}
		if k.exception != nil {
			k.excused = f.expected(s.subject.Mode())
		}
		if f.Sport != 0 && !f.GoesOn {
			single = append(single, k)
		} else {
			pending = append(pending, k)
		}
	}
	s.try(t, single)
	report = reporter(report)
	for _, k := range single {
		report(k.flow.Name, k.err)
	}
	for {
		s.try(t, pending)
		pending = slices.DeleteFunc(pending, func(k *check) bool {
			if k.err == nil {
				report(k.flow.Name, nil)
			}
			return k.err == nil
		})
		if len(pending) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			for _, k := range pending {
				report(k.flow.Name, k.err)
			}
			return
		case <-time.After(retryInterval):
		}
	}
}

// reporter returns a report function that prefixes names with "flow".
func reporter(report func(string, error)) func(string, error) {
	return func(name string, err error) { report(fmt.Sprintf("flow %q", name), err) }
}

// check is the check of one flow.
type check struct {
	flow *Flow
	node Node
	// want lists the acceptable results.
	want []Expectation
	// exception allows the result excused instead; nil if there is no exception.
	exception *exception
	excused   Expectation
	err       error // the result of the last try
}

// try makes the connections of flows and judges the results.
func (s *stage) try(t *testing.T, checks []*check) {
	t.Helper()
	var openings []Opening
	counts := make([]int, len(checks))
	for i, k := range checks {
		counts[i] = k.connections()
		openings = append(openings, s.openings(&k.flow.Connections, counts[i])...)
	}
	fates, err := s.wire.Open(t.Context(), openings, silence)
	require.NoError(t, err)
	for i, k := range checks {
		k.err = k.judge(fates[:counts[i]])
		fates = fates[counts[i]:]
		if k.err != nil && s.relays(k.flow) {
			fate, err := s.wire.Relayed(t.Context(), k.flow.Src.Addr, netip.AddrPortFrom(k.flow.Dst.Addr, k.flow.Port))
			require.NoError(t, err)
			k.err = k.judge([]Fate{fate})
		}
	}
}

// relays reports whether the subject may be a proxy in user space for a flow, as kube-proxy is in
// mode nftables at loopback addresses.
func (s *stage) relays(f *Flow) bool {
	return s.subject.Reference() && s.subject.Mode() == NFTables && f.From == FromNode && f.Proto == TCP && f.Dst.IsLoopback()
}

func (k *check) connections() int {
	if k.flow.Sport != 0 {
		return 1
	}
	n := leastConnections
	for _, want := range k.want {
		n = max(n, perBackend*len(want.Backends))
	}
	return n
}

// judge returns an error unless the fates of the connections match an acceptable result.
func (k *check) judge(fates []Fate) error {
	var reasons []string
	for i := range k.want {
		reason := k.want[i].differs(fates, k.node)
		if reason == "" {
			if k.exception != nil {
				return fmt.Errorf("the result is right, so the exception is not needed any more (%s)", k.exception.Reason)
			}
			return nil
		}
		reasons = append(reasons, fmt.Sprintf("want %s: %s", k.want[i], reason))
	}
	if k.exception != nil && k.excused.differs(fates, k.node) == "" {
		return nil
	}
	return fmt.Errorf("%s; seen: %s", strings.Join(reasons, "; or "), describe(fates))
}

// targets returns the acceptable results: for kube-proxy what it does in this mode, for Slicecast
// what is best, in every mode.
func (f *Flow) targets(mode Mode, reference bool) []Expectation {
	want := f.Expect
	switch {
	case reference:
		want = f.expected(mode)
	case f.ExpectSlicecast != nil:
		want = *f.ExpectSlicecast
	case f.ExpectNFTables != nil:
		want = *f.ExpectNFTables
	}
	return append([]Expectation{want}, f.Accept...)
}

// expected returns what kube-proxy does in a mode.
func (f *Flow) expected(mode Mode) Expectation {
	switch {
	case mode == NFTables && f.ExpectNFTables != nil:
		return *f.ExpectNFTables
	case mode == IPVS && f.ExpectIPVS != nil:
		return *f.ExpectIPVS
	default:
		return f.Expect
	}
}

func (e Expectation) String() string {
	if e.Verdict != "" {
		return string(e.Verdict)
	}
	var backends []string
	for _, b := range e.Backends {
		backends = append(backends, b.String())
	}
	return fmt.Sprintf("%s, masquerade %s", strings.Join(backends, " "), e.Masquerade)
}

// differs describes how the fates of connections differ from the expectation. It returns "" if they
// do not differ.
func (e *Expectation) differs(fates []Fate, node Node) string {
	reached := map[netip.AddrPort]bool{}
	for i := range fates {
		f := &fates[i]
		if reason := e.differsOne(f, node); reason != "" {
			return reason
		}
		reached[f.SeenDst] = true
	}
	if e.Verdict == "" && len(fates) > 1 {
		for _, b := range e.Backends {
			if !reached[b.AddrPort] {
				return fmt.Sprintf("%s is not reached", b)
			}
		}
	}
	return ""
}

func (e *Expectation) differsOne(f *Fate, node Node) string {
	switch e.Verdict {
	case Reject:
		// A TCP reset refuses the client just as immediately.
		if f.At != nil || !f.PortUnreachable() && !f.Answered {
			return "not refused at once"
		}
		return ""
	case Drop:
		if f.At != nil || f.Answered || f.Refused != "" {
			return "not dropped in silence"
		}
		return ""
	case Accept:
		if f.At == nil || f.SeenDst != f.Dst || f.SeenSrc.Addr() != f.Src.Addr() {
			return "not delivered unchanged"
		}
		return ""
	}
	if f.At == nil || !slices.Contains(e.Backends, AddrPort{f.SeenDst}) {
		return "a connection does not reach one of these"
	}
	if !f.Answered {
		return fmt.Sprintf("the answer of %s does not come back from %s", f.SeenDst, f.Dst)
	}
	want := e.Masquerade
	if want == HairpinOnly {
		want = SourceKept
		if f.SeenDst.Addr() == f.Src.Addr() {
			want = Masqueraded
		}
	}
	seen := Addr{f.SeenSrc.Addr()}
	if want == Masqueraded && !slices.Contains(node.IPs, seen) && !slices.Contains(node.ExtraIPs, seen) {
		return "the source is not rewritten to an address of the node"
	}
	if want == SourceKept && seen.Addr != f.Src.Addr() {
		return "the source is not kept"
	}
	return ""
}

// describe summarizes the fates of connections in one line.
func describe(fates []Fate) string {
	counts := map[string]int{}
	for i := range fates {
		counts[describeOne(&fates[i])]++
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d× %s", counts[what], what))
	}
	return strings.Join(parts, "; ")
}

func describeOne(f *Fate) string {
	switch {
	case f.At != nil:
		text := fmt.Sprintf("%s → %s arrives at %s as %s → %s", f.Src.Addr(), f.Dst, f.At.Name, f.SeenSrc.Addr(), f.SeenDst)
		if !f.Answered {
			text += ", and no answer comes back"
		}
		return text
	case f.Refused != "":
		return f.Refused
	case f.Answered:
		return "reset"
	case f.Denied != nil:
		return "not sent: " + f.Denied.Error()
	default:
		return "silence"
	}
}
