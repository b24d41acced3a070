package verify

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
)

// question is a packet and what it is about.
type question struct {
	port     *view.ServicePort
	frontend view.Frontend
	source   Source
	to       netip.AddrPort
}

// packetOf returns the packet of a question.
func (c *comparison) packetOf(q question) trace.Packet {
	return trace.Packet{
		Protocol: q.port.ID.Protocol, Source: q.source.Address, Destination: q.to, Interface: q.source.Over, Firewalls: c.firewalls,
	}
}

// differ records a difference.
func (c *comparison) differ(q question, wanted, found string, by *trace.Rule) {
	d := Difference{
		Service: q.port.ID.String(), Frontend: fmt.Sprintf("%v %v", q.frontend.Kind, q.to), Source: q.source.String(),
		Wanted: wanted, Found: found,
	}
	if by != nil {
		d.Rule = by.String()
	}
	c.Differences = append(c.Differences, d)
}

// decidedBy returns the rule that has decided an outcome: the one that keeps the packet from being
// translated, or the last one that has matched it. It returns nil if there is none.
func decidedBy(o trace.Outcome) *trace.Rule {
	switch {
	case o.UntrackedBy != nil:
		return o.UntrackedBy
	case len(o.Path()) > 0:
		return o.Path()[len(o.Path())-1]
	}
	return nil
}

// follow follows a packet. It reports false if that is not possible, and records the reason.
func (c *comparison) follow(q question, p trace.Packet) ([]trace.Outcome, bool) {
	c.Packets++
	out, err := c.rules.Trace(p)
	if err != nil {
		c.cannotJudge(fmt.Sprintf("%v at %v %v from %v: %v", q.port.ID, q.frontend.Kind, q.to, q.source, err))
	}
	return out, err == nil
}

// trace follows a packet. It returns what the proxy does, without the masquerading of others.
func (c *comparison) trace(q question, p trace.Packet) ([]trace.Outcome, bool) {
	out, ok := c.follow(q, p)
	if !ok {
		return nil, false
	}
	return c.ofProxy(q, p, out)
}

// ofProxy returns what of a packet's outcomes the proxy does. If rules of others masquerade the
// packet, it is followed again without them.
func (c *comparison) ofProxy(q question, p trace.Packet, out []trace.Outcome) ([]trace.Outcome, bool) {
	at := slices.IndexFunc(out, func(o trace.Outcome) bool { return o.MasqueradedBy != nil && o.MasqueradedBy.Foreign })
	if at < 0 {
		return out, true
	}
	p.ProxyOnly = true // what the proxy does is compared without the masquerading of others
	proxys, ok := c.follow(q, p)
	if ok && slices.ContainsFunc(proxys, func(o trace.Outcome) bool { return o.Verdict == trace.Pass && !o.Masquerade }) {
		kind, _, _ := strings.Cut(q.source.Name, ",") // without a range of sources
		c.masquerades[masquerading{kind, out[at].MasqueradedBy.String()}]++
	}
	return proxys, ok
}

// untouched compares that a packet passes without translation.
func (c *comparison) untouched(q question) {
	out, ok := c.trace(q, c.packetOf(q))
	if !ok {
		return
	}
	at := slices.IndexFunc(out, func(o trace.Outcome) bool { return o.Backend.IsValid() || o.Verdict != trace.Pass })
	if at >= 0 && !c.tolerates(q, trace.Pass, out) {
		c.differ(q, "be left alone, because the address has no NodePorts", describe(out), decidedBy(out[at]))
	}
}

// packet compares what happens to a packet to a frontend. It returns what may happen to it, or nil
// if that cannot be judged.
func (c *comparison) packet(q question) []trace.Outcome {
	p := c.packetOf(q)
	all, ok := c.follow(q, p)
	if !ok {
		return nil
	}
	out, ok := c.ofProxy(q, p, all)
	if !ok {
		return all
	}
	if c.servedOnNode(q, out) {
		c.deviates(onNode)
		return all
	}
	if c.onlyOwnAddress(q, out) {
		c.deviates(ownAddress)
		return all
	}
	route, d := c.wanted(q)
	before := len(c.Differences)
	c.compare(q, route, out)
	if d != asDecided && len(c.Differences) == before {
		c.deviates(d)
	}
	return all
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
			c.differ(q, text, describe(out), decidedBy(out[at]))
		}
		return
	}
	if c.backendsDiffer(q, q.port.Backends(route.To), route, out) {
		return
	}
	for _, o := range out {
		// kube-proxy knows no schedulers of single Services.
		if wanted := c.IPVS.Scheduler; c.rules.KubeProxyIPVS && wanted != "" && o.Scheduler != "" && o.Scheduler != wanted {
			c.differ(q, "be scheduled by "+wanted, "is scheduled by "+o.Scheduler, decidedBy(o))
			return
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
				c.differ(q, wanted, found, decidedBy(o))
				return true
			}
		case !set.Contains(o.Backend):
			c.differ(q, wanted, fmt.Sprintf("may lead to %v, which is not among them", o.Backend), o.By)
			return true
		case o.Masquerade != (route.Masquerade && !c.staysOnNode(q, o.Backend.Addr()) || o.Backend.Addr() == q.source.Address):
			text, found := "with its own source address", "it is masqueraded"
			if !o.Masquerade {
				text, found = "masqueraded", "it is not masqueraded"
			}
			c.differ(q, fmt.Sprintf("lead to %v %s", o.Backend, text), found, decidedBy(o))
			return true
		}
	}
	if len(missing) > 0 {
		c.differ(q, wanted, "never leads to "+list(missing), decidedBy(out[0]))
		return true
	}
	even := 1 / float64(set.Len())
	for _, o := range out {
		if p := probability[o.Backend]; o.Backend.IsValid() && math.Abs(p-even) > tolerance*even {
			c.differ(q, fmt.Sprintf("lead to each of %s with probability %.4f", count(set.Len(), "backend"), even),
				fmt.Sprintf("leads to %v with probability %.4f", o.Backend, p), o.By)
			return true
		}
	}
	return false
}

// affinity compares how the kernel remembers clients.
func (c *comparison) affinity(q question, p *view.ServicePort, out []trace.Outcome) {
	for _, o := range out {
		if !sameAffinity(o.Affinity, p.Affinity) {
			c.differ(q, "have "+remembers(p.Affinity), "has "+remembers(o.Affinity), decidedBy(o))
			return
		}
	}
	if p.Affinity == 0 {
		return
	}
	for _, o := range out {
		again := c.packetOf(q)
		again.Known = o.Memory
		second, ok := c.trace(q, again)
		if !ok {
			return
		}
		for _, s := range second {
			if s.Backend != o.Backend || s.Verdict != o.Verdict {
				c.differ(q, fmt.Sprintf("lead to %v again, with which the client was connected before", o.Backend), describe(second), decidedBy(s))
				return
			}
			if !sameAffinity(s.Affinity, p.Affinity) {
				c.differ(q, fmt.Sprintf("have %s after each connection", remembers(p.Affinity)), "has "+remembers(s.Affinity), decidedBy(s))
				return
			}
		}
	}
	full := c.packetOf(q)
	full.Forgetful = true
	if third, ok := c.trace(q, full); ok {
		for _, o := range third {
			if o.Verdict != trace.Pass || !o.Backend.IsValid() {
				c.differ(q, "lead to a backend even if the kernel cannot remember more clients", describe(third), decidedBy(o))
				return
			}
		}
	}
}

// sameAffinity reports whether the kernel's timeout is what a Service wants. Slicecast's nftables
// programmer has round timeouts only, which may be longer by a tenth.
func sameAffinity(held, wanted time.Duration) bool { return held >= wanted && 10*held <= 11*wanted }

func remembers(d time.Duration) string {
	if d == 0 {
		return "no affinity"
	}
	return fmt.Sprintf("an affinity of %v", d)
}

// hairpins compares that a local backend's connection to itself, by its Service, is masqueraded.
func (c *comparison) hairpins(p *view.ServicePort) {
	// The same backends are led to by all frontends with the same set. One of each is followed.
	followed := map[view.Target]bool{}
	for _, f := range p.Frontends {
		if to := f.Pods.To; f.Kind != view.NodePort && to.Leads() && !followed[to] {
			followed[to] = true
			c.hairpinsAt(question{p, f, Source{}, netip.AddrPortFrom(f.Address, f.Port)})
		}
	}
}

// hairpinsAt is hairpins at one frontend.
func (c *comparison) hairpinsAt(q question) {
	seen := map[netip.Addr]struct{}{}
	for b := range q.port.Backends(q.frontend.Pods.To).All() {
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
		q.source = Source{"the backend itself", a, over}
		if route, _ := c.wanted(q); !route.To.Leads() {
			continue
		}
		out, ok := c.trace(q, c.packetOf(q))
		if !ok {
			return
		}
		for _, o := range out {
			if o.Verdict == trace.Pass && o.Backend.Addr() == a && !o.Masquerade {
				c.differ(q, fmt.Sprintf("lead to %v masqueraded, because it would answer itself otherwise", o.Backend), "it is not masqueraded", decidedBy(o))
				break
			}
		}
	}
}

// unwanted finds what IPVS and kube-proxy's rules have and no Service does.
func (c *comparison) unwanted() {
	add := func(wanted, found, rule string) {
		c.Differences = append(c.Differences, Difference{Wanted: wanted, Found: found, Rule: rule})
	}
	frontends := c.rules.Frontends()
	for _, f := range slices.SortedFunc(maps.Keys(frontends), func(a, b trace.Frontend) int { return strings.Compare(a.String(), b.String()) }) {
		_, ok := c.wantedAt[f]
		if slices.Contains(c.Addresses, f.Address) { // a virtual service of IPVS for a NodePort
			_, nodePort := c.wantedAt[trace.Frontend{Protocol: f.Protocol, Port: f.Port}]
			ok = ok || nodePort
		}
		if !ok {
			add("be no rules for "+f.String()+", which no Service has on this node", "there are some", frontends[f])
		}
	}
	if c.rules.KubeProxyIPVS {
		addresses := map[netip.Addr]bool{}
		for f := range c.wantedAt {
			addresses[f.Address] = true
		}
		for _, a := range c.rules.ServiceAddresses() {
			if !addresses[a] {
				add("be no address "+a.String()+" on a device for Services, because no Service has it", "there is", "")
			}
		}
	}
	// Where a packet differs or cannot be judged, those that would have come by later rules were not
	// followed.
	if c.Packets > 0 && len(c.Differences) == 0 && len(c.Unjudged) == 0 {
		for _, r := range c.rules.Intruders(c.ofPods) {
			add("be no rule in chain "+r.Chain+" of "+r.Table+" for some sources, marks, connections or interfaces that no proxy writes", "there is one", r.String())
		}
	}
	for _, name := range c.rules.Unreached() {
		add("be a rule that leads to "+name, "there is none", "")
	}
}

// ofPods reports whether a source is by what pods are told from others.
func (c *comparison) ofPods(s trace.Source) bool {
	pods := c.State.Node.Pods
	switch {
	case s.Network.IsValid():
		return slices.Contains(pods.Prefixes, s.Network)
	case s.IsPrefix:
		return s.Interface == pods.InterfacePrefix
	}
	return s.Interface == pods.Interface
}
