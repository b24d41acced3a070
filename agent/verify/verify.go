// Package verify compares what a kernel's rules do with what a node should do for its Services.
//
// It sends imagined packets through the rules (agent/trace): to each frontend, from each kind of
// source that the frontend's routes distinguish, and from local backends to themselves. What may
// happen to a packet is compared with what the view decided (agent/view). Whose rules these are
// makes no difference.
//
// The other way round, each frontend that the rules mention must be that of a Service, and some
// rule must lead to each chain of a proxy.
package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Difference is something that the kernel does and that it should not do, or the other way round.
type Difference struct {
	// Service, Frontend and Source say for which packets. They are empty if no Service is
	// concerned.
	Service  string `json:"service,omitempty"`
	Frontend string `json:"frontend,omitempty"`
	Source   string `json:"source,omitempty"`
	// Wanted and Found are what should happen and what happens, each with a verb.
	Wanted string `json:"wanted"`
	Found  string `json:"found"`
	// Rule is the last rule that has decided this, or the place of what is found.
	Rule string `json:"rule,omitempty"`
}

// String returns the difference as a sentence.
func (d Difference) String() string {
	var b strings.Builder
	if d.Service != "" {
		fmt.Fprintf(&b, "%s: ", d.Service)
	}
	if d.Frontend != "" {
		fmt.Fprintf(&b, "what comes to %s ", d.Frontend)
	}
	if d.Source != "" {
		fmt.Fprintf(&b, "from %s ", d.Source)
	}
	if b.Len() == 0 {
		b.WriteString("there ")
	}
	fmt.Fprintf(&b, "should %s, but %s", d.Wanted, d.Found)
	if d.Rule != "" {
		fmt.Fprintf(&b, "; see %s", d.Rule)
	}
	return b.String()
}

// Result is the result of a comparison.
type Result struct {
	Differences []Difference `json:"differences"`
	// Unjudged are what could not be judged, each with the reason. There are at most maxShown of
	// them.
	Unjudged []string `json:"unjudged,omitempty"`
	// Facts are what rules of others and modes of kube-proxy do to packets of Services that is no
	// difference.
	Facts []string `json:"facts,omitempty"`
	// Tolerated counts packets that a mode of kube-proxy treats in another way than the view, on
	// purpose. Facts say in which.
	Tolerated int `json:"tolerated"`
	// Frontends and Packets count what was compared.
	Frontends int `json:"frontends"`
	Packets   int `json:"packets"`
}

// Merge adds another result.
func (r *Result) Merge(o Result) {
	r.Differences = append(r.Differences, o.Differences...)
	r.cannotJudge(o.Unjudged...)
	r.Facts = append(r.Facts, o.Facts...)
	r.Tolerated += o.Tolerated
	r.Frontends += o.Frontends
	r.Packets += o.Packets
}

// Both returns the result with only those of its differences that an earlier result has, too. What
// was on its way into the kernel when one of them was made is not a difference.
func (r Result) Both(earlier Result) Result {
	known := make(map[about]struct{}, len(earlier.Differences))
	for _, d := range earlier.Differences {
		known[d.about()] = struct{}{}
	}
	r.Differences = slices.DeleteFunc(slices.Clone(r.Differences), func(d Difference) bool {
		_, also := known[d.about()]
		return !also
	})
	return r
}

// cannotJudge adds to what cannot be judged, up to a bound.
func (r *Result) cannotJudge(reasons ...string) {
	for _, reason := range reasons {
		switch {
		case len(r.Unjudged) < maxShown-1:
			r.Unjudged = append(r.Unjudged, reason)
		case len(r.Unjudged) == maxShown-1:
			r.Unjudged = append(r.Unjudged, "more than can be listed")
		}
	}
}

// about is what a difference is about: the packets or, without a Service, what is wanted. What is
// wanted and found for the same packets may change while a Service changes.
type about struct{ service, frontend, source, wanted string }

// about returns what a difference is about.
func (d Difference) about() about {
	a := about{service: d.Service, frontend: d.Frontend, source: d.Source}
	if d.Service == "" {
		a.wanted = d.Wanted
	}
	return a
}

// Options are what the packets of a comparison depend on.
type Options struct {
	// State is what the node should do.
	State view.State
	// Beside means that another proxy serves other Services on this node. Then only what
	// Slicecast's own rules mention must be in State.
	Beside bool
	// Scheduler is the IPVS scheduler of Services that ask for no other one. Empty means that it is
	// not compared.
	Scheduler string
	// Addresses are the node's own addresses, without ServiceAddresses.
	Addresses []netip.Addr
	// ServiceAddresses are the node's addresses that only Services have, as with IPVS. What the node
	// itself sends to one of them has the same address as its source.
	ServiceAddresses []netip.Addr
}

// maxBackendsShown is how many backends a difference names.
const maxBackendsShown = 5

// comparison compares one IP family.
type comparison struct {
	Options
	Result
	rules  *trace.Rules
	family model.Family
	// backends are the addresses of all backends.
	backends map[netip.Addr]struct{}
	pods     []netip.Addr
	node     netip.Addr
	outside  netip.Addr
	// masquerades counts the packets that rules of others masquerade although the proxy does not, and
	// deviations those that a mode of kube-proxy treats in another way than the view.
	masquerades map[masquerading]int
	deviations  map[deviation]int
}

// masquerading is what a rule of others does to packets from a kind of source.
type masquerading struct{ source, rule string }

// Compare compares the rules of one IP family with what they should do. It returns an error only if
// ctx ends.
func Compare(ctx context.Context, o Options, rules *trace.Rules) (Result, error) {
	c := of(o, rules, rules.Family)
	ports := slices.DeleteFunc(slices.Collect(maps.Values(o.State.Ports)), func(p *view.ServicePort) bool {
		return p.ID.Family != c.family
	})
	slices.SortFunc(ports, func(a, b *view.ServicePort) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	for _, p := range ports {
		for _, set := range []view.Backends{p.Cluster, p.Local} {
			for b := range set.All() {
				c.backends[b.Address.Addr()] = struct{}{}
			}
		}
	}
	c.chooseSources()
	wanted := map[trace.Frontend]struct{}{}
	for _, p := range ports {
		if ctx.Err() != nil {
			return c.Result, context.Cause(ctx)
		}
		for _, f := range p.Frontends {
			wanted[trace.Frontend{Protocol: p.ID.Protocol, Address: f.Address, Port: f.Port}] = struct{}{}
			c.Frontends++
			c.frontend(p, f)
		}
		c.hairpins(p)
	}
	c.unwanted(wanted)
	c.addMasquerades()
	c.addDeviations()
	return c.Result, nil
}

// The names of interfaces that packets arrive over, where only the kind of interface matters.
var (
	outsideInterfaces = []string{"outside", "elsewhere"}
	anyPodInterface   = "pod"
)

// source is where a packet comes from.
type source struct {
	name    string
	address netip.Addr
	// over is the interface; "" means that the node sends the packet.
	over string
}

func (s source) String() string { return fmt.Sprintf("%s (%v)", s.name, s.address) }

// route returns which of a frontend's routes is that of a source.
func (c *comparison) route(f view.Frontend, s source) view.Route {
	switch {
	case c.State.Node.Pods.Recognizes(s.address, s.over):
		return f.Pods
	case s.over == "":
		return f.Node
	}
	return f.Others
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// chooseSources chooses addresses for a pod, the node and a client outside. None of them is a
// backend, because a backend's packets to itself are another matter.
func (c *comparison) chooseSources() {
	unused := func(a netip.Addr) bool {
		_, isBackend := c.backends[a]
		return a.IsValid() && !isBackend && !slices.Contains(c.Addresses, a)
	}
	for _, p := range c.podRanges() {
		a := last(p)
		for range 1 << 10 {
			if !p.Contains(a) {
				break
			}
			if unused(a) {
				c.pods = append(c.pods, a)
				break
			}
			a = a.Prev()
		}
	}
	for _, a := range c.Addresses {
		if model.FamilyOf(a) == c.family && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			c.node = a
			break
		}
	}
	// reserved for documentation
	prefixes := []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("192.0.2.0/24")}
	if c.family == model.IPv6 {
		prefixes = []netip.Prefix{netip.MustParsePrefix("2001:db8:ffff::/64"), netip.MustParsePrefix("3fff::/64")}
	}
	for _, p := range prefixes {
		if a := last(p).Prev(); unused(a) && !contains(c.State.Node.Pods.Prefixes, a) {
			c.outside = a
			break
		}
	}
}

// podRanges returns the ranges of this node's pods. The Node's podCIDRs come first, because rules
// of others may treat pods of other nodes in another way. A range by which pods are recognized is
// added if no podCIDR is in it.
func (c *comparison) podRanges() (ranges []netip.Prefix) {
	of := func(p netip.Prefix) bool { return p.IsValid() && model.FamilyOf(p.Addr()) == c.family }
	for _, p := range c.State.Node.PodCIDRs {
		if of(p) {
			ranges = append(ranges, p)
		}
	}
	for _, p := range c.State.Node.Pods.Prefixes {
		inside := func(o netip.Prefix) bool { return p.Contains(o.Addr()) && o.Bits() >= p.Bits() }
		if of(p) && !slices.ContainsFunc(c.State.Node.PodCIDRs, inside) {
			ranges = append(ranges, p)
		}
	}
	return ranges
}

// last returns the last address of a prefix but one, which is no broadcast address.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	if p.IsSingleIP() {
		return a
	}
	return a.Prev()
}

// sources returns where packets to a frontend come from.
func (c *comparison) sources(f view.Frontend) (all []source) {
	over := outsideInterfaces[0]
	if p := c.State.Node.Pods.InterfacePrefix; p != "" && strings.HasPrefix(over, p) {
		over = outsideInterfaces[1]
	}
	add := func(name string, a netip.Addr, over string) {
		// Kernels drop what arrives from a loopback address.
		if a.IsValid() && (over == "" || !a.IsLoopback()) {
			all = append(all, source{name, a, over})
		}
	}
	podInterface := anyPodInterface
	switch pods := c.State.Node.Pods; {
	case pods.Interface != "":
		podInterface = pods.Interface
	case pods.InterfacePrefix != "":
		podInterface = pods.InterfacePrefix + "0"
	}
	if len(c.pods) == 0 && podInterface != anyPodInterface {
		add("a pod", c.outside, podInterface)
	}
	for _, a := range c.pods {
		add("a pod", a, podInterface)
	}
	if slices.Contains(c.ServiceAddresses, f.Address) {
		add("the node", f.Address, "")
	} else {
		add("the node", c.node, "")
	}
	add("outside", c.outside, over)
	for _, p := range f.Sources {
		if model.FamilyOf(p.Addr()) != c.family || p.Bits() == 0 {
			continue
		}
		first := p.Masked().Addr()
		add("outside, in "+p.String(), first, over)
		if before := first.Prev(); !contains(f.Sources, before) {
			add("outside, just before "+p.String(), before, over)
		}
		end := first
		if !p.IsSingleIP() {
			end = last(p).Next()
			add("outside, in "+p.String(), end, over)
		}
		if after := end.Next(); !contains(f.Sources, after) {
			add("outside, just after "+p.String(), after, over)
		}
	}
	return all
}

// frontend compares what happens to packets to a frontend.
func (c *comparison) frontend(p *view.ServicePort, f view.Frontend) {
	if f.Kind != view.NodePort {
		to := netip.AddrPortFrom(f.Address, f.Port)
		for _, s := range c.sources(f) {
			c.packet(p, f, s, to)
		}
		return
	}
	for _, a := range c.Addresses {
		if model.FamilyOf(a) != c.family || a.IsLinkLocalUnicast() || c.isFrontend(p, a, f.Port) {
			continue
		}
		to := netip.AddrPortFrom(a, f.Port)
		open := contains(c.State.Node.NodePorts, a)
		switch {
		case a.IsLoopback():
			open = open && a.Is4() && c.State.Node.LocalhostNodePorts
			s := source{"the node", a, ""}
			if open {
				c.packet(p, f, s, to)
			} else {
				c.untouched(p, f, s, to)
			}
		case open:
			for _, s := range c.sources(f) {
				c.packet(p, f, s, to)
			}
		case c.outside.IsValid():
			c.untouched(p, f, source{"outside", c.outside, outsideInterfaces[0]}, to)
		}
	}
}

// isFrontend reports whether an address of the node is also that of a Service, on the same port.
func (c *comparison) isFrontend(p *view.ServicePort, a netip.Addr, port uint16) bool {
	for _, o := range c.State.Ports {
		for _, f := range o.Frontends {
			if f.Address == a && f.Port == port && o.ID.Protocol == p.ID.Protocol {
				return true
			}
		}
	}
	return false
}

// question is a packet and what it is about.
type question struct {
	port     *view.ServicePort
	frontend view.Frontend
	source   source
	to       netip.AddrPort
}

func (q question) packet() trace.Packet {
	return trace.Packet{Protocol: q.port.ID.Protocol, Source: q.source.address, Destination: q.to, Interface: q.source.over}
}

// differ records a difference.
func (c *comparison) differ(q question, wanted, found string, path []*trace.Rule) {
	d := Difference{
		Service: q.port.ID.String(), Frontend: fmt.Sprintf("%v %v", q.frontend.Kind, q.to), Source: q.source.String(),
		Wanted: wanted, Found: found,
	}
	if len(path) > 0 {
		d.Rule = path[len(path)-1].String()
	}
	c.Differences = append(c.Differences, d)
}

// trace follows a packet. It reports false if that is not possible, and records the reason.
func (c *comparison) trace(q question, p trace.Packet) ([]trace.Outcome, bool) {
	c.Packets++
	out, err := c.rules.Trace(p)
	if err != nil {
		c.cannotJudge(fmt.Sprintf("%v at %v %v from %v: %v", q.port.ID, q.frontend.Kind, q.to, q.source, err))
		return nil, false
	}
	at := slices.IndexFunc(out, func(o trace.Outcome) bool { return o.MasqueradedBy != nil && o.MasqueradedBy.Foreign })
	if at < 0 || p.ProxyOnly {
		return out, true
	}
	// What the proxy does is compared without the masquerading of others.
	p.ProxyOnly = true
	proxys, ok := c.trace(q, p)
	if ok && slices.ContainsFunc(proxys, func(o trace.Outcome) bool { return o.Verdict == trace.Pass && !o.Masquerade }) {
		kind, _, _ := strings.Cut(q.source.name, ",") // without a range of sources
		c.masquerades[masquerading{kind, out[at].MasqueradedBy.String()}]++
	}
	return proxys, ok
}

// untouched compares that a packet passes without translation.
func (c *comparison) untouched(p *view.ServicePort, f view.Frontend, s source, to netip.AddrPort) {
	q := question{p, f, s, to}
	out, ok := c.trace(q, q.packet())
	if !ok {
		return
	}
	at := slices.IndexFunc(out, func(o trace.Outcome) bool { return o.Backend.IsValid() || o.Verdict != trace.Pass })
	if at >= 0 && !c.tolerates(q, trace.Pass, out) {
		c.differ(q, "be left alone, because the address has no NodePorts", describe(out), out[at].Path)
	}
}

// packet compares what happens to a packet to a frontend.
func (c *comparison) packet(p *view.ServicePort, f view.Frontend, s source, to netip.AddrPort) {
	q := question{p, f, s, to}
	out, ok := c.trace(q, q.packet())
	if !ok {
		return
	}
	if c.onlyOwnAddress(q, out) {
		c.deviates(ownAddress)
		return
	}
	route, d := c.wanted(q)
	before := len(c.Differences)
	c.compare(q, route, out)
	if d != asDecided && len(c.Differences) == before {
		c.deviates(d)
	}
}

// compare compares what may happen to a packet with a route.
func (c *comparison) compare(q question, route view.Route, out []trace.Outcome) {
	wanted := map[view.Target]trace.Verdict{view.Drop: trace.Drop, view.Reject: trace.Reject}
	if verdict, ends := wanted[route.To]; ends {
		at := slices.IndexFunc(out, func(o trace.Outcome) bool { return o.Verdict != verdict })
		if at >= 0 && !c.tolerates(q, verdict, out) {
			text := "be rejected"
			if verdict == trace.Drop {
				text = "be dropped"
			}
			c.differ(q, text, describe(out), out[at].Path)
		}
		return
	}
	if c.backendsDiffer(q, q.port.Backends(route.To), route, out) {
		return
	}
	if scheduler := cmp.Or(q.port.Scheduler, c.Scheduler); scheduler != "" {
		for _, o := range out {
			if o.Scheduler != "" && o.Scheduler != scheduler {
				c.differ(q, "be scheduled by "+scheduler, "is scheduled by "+o.Scheduler, o.Path)
				return
			}
		}
	}
	c.affinity(q, q.port, out)
}

// tolerance is how much the probability of a backend may differ from what it should be. The
// fractions in iptables' rules have eleven digits.
const tolerance = 0.01

// backendsDiffer compares the backends that packets are led to. It reports whether there is a
// difference.
func (c *comparison) backendsDiffer(q question, set view.Backends, route view.Route, out []trace.Outcome) bool {
	wanted := fmt.Sprintf("lead to %s of the %v set", count(set.Len(), "backend"), route.To)
	probability := map[netip.AddrPort]float64{}
	for _, o := range out {
		if o.Verdict == trace.Pass && o.Backend.IsValid() {
			probability[o.Backend] += o.Probability
		}
	}
	var missing []string
	for b := range set.All() {
		if probability[b.Address] == 0 {
			missing = append(missing, b.Address.String())
		}
	}
	for _, o := range out {
		switch {
		case o.Verdict != trace.Pass || !o.Backend.IsValid():
			if o.Probability > 1e-6 {
				found := describe(out)
				if len(probability) > 0 && len(missing) > 0 {
					found += ", and never leads to " + list(missing)
				}
				c.differ(q, wanted, found, o.Path)
				return true
			}
		case !set.Contains(o.Backend):
			c.differ(q, wanted, fmt.Sprintf("may lead to %v, which is not among them", o.Backend), []*trace.Rule{o.By})
			return true
		case o.Masquerade != (route.Masquerade || o.Backend.Addr() == q.source.address):
			text, found := "with its own source address", "it is masqueraded"
			if !o.Masquerade {
				text, found = "masqueraded", "it is not masqueraded"
			}
			c.differ(q, fmt.Sprintf("lead to %v %s", o.Backend, text), found, o.Path)
			return true
		}
	}
	if len(missing) > 0 {
		c.differ(q, wanted, "never leads to "+list(missing), out[0].Path)
		return true
	}
	even := 1 / float64(set.Len())
	for _, o := range out {
		if p := probability[o.Backend]; o.Backend.IsValid() && math.Abs(p-even) > tolerance*even {
			c.differ(q, fmt.Sprintf("lead to each of %s with probability %.4f", count(set.Len(), "backend"), even),
				fmt.Sprintf("leads to %v with probability %.4f", o.Backend, p), []*trace.Rule{o.By})
			return true
		}
	}
	return false
}

// affinity compares how the kernel remembers clients.
func (c *comparison) affinity(q question, p *view.ServicePort, out []trace.Outcome) {
	for _, o := range out {
		if o.Affinity != p.Affinity {
			c.differ(q, "have "+remembers(p.Affinity), "has "+remembers(o.Affinity), o.Path)
			return
		}
	}
	if p.Affinity == 0 {
		return
	}
	for _, o := range out {
		again := q.packet()
		again.Known = o.Memory
		second, ok := c.trace(q, again)
		if !ok {
			return
		}
		for _, s := range second {
			if s.Backend != o.Backend || s.Verdict != o.Verdict {
				c.differ(q, fmt.Sprintf("lead to %v again, with which the client was connected before", o.Backend), describe(second), s.Path)
				return
			}
			if s.Affinity != p.Affinity {
				c.differ(q, fmt.Sprintf("have %s after each connection", remembers(p.Affinity)), "has "+remembers(s.Affinity), s.Path)
				return
			}
		}
	}
	full := q.packet()
	full.Forgetful = true
	if third, ok := c.trace(q, full); ok {
		for _, o := range third {
			if o.Verdict != trace.Pass || !o.Backend.IsValid() {
				c.differ(q, "lead to a backend even if the kernel cannot remember more clients", describe(third), o.Path)
				return
			}
		}
	}
}

func remembers(d time.Duration) string {
	if d == 0 {
		return "no affinity"
	}
	return fmt.Sprintf("an affinity of %v", d)
}

// hairpins compares that a local backend's connection to itself, by its Service, is masqueraded.
func (c *comparison) hairpins(p *view.ServicePort) {
	if len(p.Frontends) == 0 || p.Frontends[0].Kind == view.NodePort {
		return
	}
	f := p.Frontends[0]
	q := question{p, f, source{}, netip.AddrPortFrom(f.Address, f.Port)}
	seen := map[netip.Addr]struct{}{}
	for b := range p.Cluster.All() {
		a := b.Address.Addr()
		if _, again := seen[a]; again || !b.Local {
			continue
		}
		seen[a] = struct{}{}
		over := cmp.Or(c.State.Node.Pods.Interface, anyPodInterface)
		if prefix := c.State.Node.Pods.InterfacePrefix; prefix != "" {
			over = prefix + "0"
		}
		if slices.Contains(c.Addresses, a) {
			over = ""
		}
		q.source = source{"the backend itself", a, over}
		if route, _ := c.wanted(q); !route.To.Leads() {
			continue
		}
		out, ok := c.trace(q, q.packet())
		if !ok {
			return
		}
		for _, o := range out {
			if o.Verdict == trace.Pass && o.Backend.Addr() == a && !o.Masquerade {
				c.differ(q, fmt.Sprintf("lead to %v masqueraded, because it would answer itself otherwise", o.Backend), "it is not masqueraded", o.Path)
				break
			}
		}
	}
}

// unwanted finds what the rules have and no Service does.
func (c *comparison) unwanted(wanted map[trace.Frontend]struct{}) {
	frontends := c.rules.Frontends()
	if c.Beside {
		frontends = c.rules.OwnFrontends()
	}
	sorted := slices.SortedFunc(maps.Keys(frontends), func(a, b trace.Frontend) int { return strings.Compare(a.String(), b.String()) })
	for _, f := range sorted {
		_, ok := wanted[f]
		if slices.Contains(c.Addresses, f.Address) { // a virtual service of IPVS for a NodePort
			_, nodePort := wanted[trace.Frontend{Protocol: f.Protocol, Port: f.Port}]
			ok = ok || nodePort
		}
		if !ok {
			c.Differences = append(c.Differences, Difference{
				Wanted: "be no rules for " + f.String() + ", which no Service has on this node", Found: "there are some", Rule: frontends[f],
			})
		}
	}
	addresses := map[netip.Addr]bool{}
	for f := range wanted {
		addresses[f.Address] = true
	}
	for _, a := range c.rules.ServiceAddresses() {
		if !addresses[a] && !c.Beside {
			c.Differences = append(c.Differences, Difference{
				Wanted: "be no address " + a.String() + " on a device for Services, because no Service has it", Found: "there is",
			})
		}
	}
	for _, name := range c.rules.Unreached(c.Beside) {
		c.Differences = append(c.Differences, Difference{
			Wanted: "be a rule that leads to " + name, Found: "there is none",
		})
	}
	c.cannotJudge(c.rules.Unjudged...)
	c.cannotJudge(c.rules.Foreign()...)
}

// describe says in words what happens to packets.
func describe(out []trace.Outcome) string {
	var backends, others []string
	masqueraded := 0
	for _, o := range out {
		switch {
		case o.Verdict != trace.Pass:
			others = append(others, o.Verdict.String())
		case o.Backend.IsValid():
			backends = append(backends, o.Backend.String())
			if o.Masquerade {
				masqueraded++
			}
		default:
			others = append(others, "is not translated")
		}
	}
	slices.Sort(others)
	others = slices.Compact(others)
	if len(backends) > 0 {
		text := "leads to " + list(backends)
		if masqueraded == len(backends) {
			text += ", masqueraded"
		}
		others = append(others, text)
	}
	return cmp.Or(strings.Join(others, " or "), "nothing happens")
}

// list joins some of the words.
func list(words []string) string {
	if rest := len(words) - maxBackendsShown; rest > 1 {
		return strings.Join(words[:maxBackendsShown], ", ") + fmt.Sprintf(" and %d others", rest)
	}
	return strings.Join(words, ", ")
}

func count(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

// Kernel compares the kernel of the calling thread's network namespace with a state. It reads the
// addresses of the options itself.
func Kernel(ctx context.Context, o Options) (Result, error) {
	all := Result{Differences: []Difference{}}
	facts, err := trace.ReadFacts()
	if err != nil {
		return all, err
	}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		if !trace.Has(family) {
			continue
		}
		rules, err := trace.Read(ctx, family, facts)
		if errors.Is(err, trace.ErrNoIPVS) {
			all.Unjudged = []string{"this node has a device slicecast-ipvs0 or kube-ipvs0, but no IPVS: remove the device, or load ip_vs"}
			return all, nil
		}
		if err != nil {
			return all, err
		}
		o.Addresses, o.ServiceAddresses = facts.Addresses, facts.Services
		r, err := Compare(ctx, o, rules)
		if err != nil {
			return all, err
		}
		all.Merge(r)
	}
	return all, nil
}
