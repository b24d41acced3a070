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
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/programmer/nftables"
	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Options are what the packets of a comparison depend on.
type Options struct {
	// State is what the node should do.
	State view.State
	// Beside means that another proxy serves other Services on this node. Then only what
	// Slicecast's own rules mention must be in State.
	Beside bool
	// MasqueradeMark is the mark of Slicecast's programmers on this node. 0 means their default.
	MasqueradeMark uint32
	// IPVS are the options of Slicecast's programmer for IPVS, apart from MasqueradeMark. kube-proxy's
	// scheduler must be the same one, unless it is empty.
	IPVS ipvs.Options
	// Addresses are the node's own addresses, without ServiceAddresses.
	Addresses []netip.Addr
	// ServiceAddresses are the node's addresses that only Services have, as with IPVS. What the node
	// itself sends to one of them has the same address as its source.
	ServiceAddresses []netip.Addr
}

// comparison compares one IP family.
type comparison struct {
	Options
	Result
	rules  *trace.Rules
	family model.Family
	// backends are the addresses of all backends.
	backends map[netip.Addr]struct{}
	// wantedAt are the frontends of all Services.
	wantedAt map[trace.Frontend]struct{}
	// ofServices are the ServiceAddresses.
	ofServices map[netip.Addr]struct{}
	pods       []netip.Addr
	node       netip.Addr
	outside    netip.Addr
	// masquerades counts the packets that rules of others masquerade although the proxy does not, and
	// deviations those that the mode treats in another way than the view.
	masquerades map[masquerading]int
	deviations  map[deviation]int
	// firewalls means that packets pass firewalls, whose refusals are in the outcomes.
	firewalls bool
}

// masquerading is what a rule of others does to packets from a kind of source.
type masquerading struct{ source, rule string }

// newComparison returns a comparison without a result.
func newComparison(o Options, rules *trace.Rules, family model.Family) *comparison {
	c := &comparison{
		Options: o, Result: Result{Differences: []Difference{}}, rules: rules, family: family, backends: map[netip.Addr]struct{}{},
		wantedAt: map[trace.Frontend]struct{}{}, ofServices: make(map[netip.Addr]struct{}, len(o.ServiceAddresses)),
		masquerades: map[masquerading]int{}, deviations: map[deviation]int{},
	}
	for _, a := range o.ServiceAddresses {
		c.ofServices[a] = struct{}{}
	}
	return c
}

// Compare compares the rules of one IP family with what they should do. It returns an error only if
// ctx ends.
func Compare(ctx context.Context, o Options, rules *trace.Rules) (Result, error) {
	c := newComparison(o, rules, rules.Family)
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
		for _, f := range p.Frontends {
			c.wantedAt[trace.Frontend{Protocol: p.ID.Protocol, Address: f.Address, Port: f.Port}] = struct{}{}
		}
	}
	c.chooseSources()
	for _, p := range ports {
		if ctx.Err() != nil {
			return c.Result, context.Cause(ctx)
		}
		for _, f := range p.Frontends {
			c.Frontends++
			c.frontend(p, f)
		}
		c.hairpins(p)
	}
	if !c.Beside {
		c.unwanted()
	}
	c.cannotJudge(c.rules.Unjudged...)
	c.cannotJudge(c.rules.Foreign()...)
	c.addMasquerades()
	c.addDeviations()
	return c.Result, nil
}

// Packet compares what happens to one packet to a frontend, as Compare does. It also returns what
// may happen to the packet, which passes firewalls, too. The outcomes are nil if they cannot be
// judged. Facts say if the mode treats the packet in its own way.
func Packet(
	o Options, rules *trace.Rules, p *view.ServicePort, f view.Frontend, from Source, to netip.AddrPort,
) (Result, []trace.Outcome) {
	c := newComparison(o, rules, p.ID.Family)
	c.Frontends, c.firewalls = 1, true
	out := c.packet(question{p, f, from, to})
	for d := range c.deviations {
		c.Facts = append(c.Facts, string(d))
	}
	return c.Result, out
}

// isServices reports whether an address is one of the ServiceAddresses.
func (c *comparison) isServices(a netip.Addr) bool {
	_, ok := c.ofServices[a]
	return ok
}

// frontend compares what happens to packets to a frontend.
func (c *comparison) frontend(p *view.ServicePort, f view.Frontend) {
	if f.Kind != view.NodePort {
		to := netip.AddrPortFrom(f.Address, f.Port)
		for _, s := range c.sources(f) {
			c.packet(question{p, f, s, to})
		}
		return
	}
	for _, a := range c.Addresses {
		// The address may also be that of a Service, on the same port.
		_, isFrontend := c.wantedAt[trace.Frontend{Protocol: p.ID.Protocol, Address: a, Port: f.Port}]
		if model.FamilyOf(a) != c.family || a.IsLinkLocalUnicast() || isFrontend {
			continue
		}
		to := netip.AddrPortFrom(a, f.Port)
		open := contains(c.State.Node.NodePorts, a)
		switch {
		case a.IsLoopback():
			open = open && a.Is4() && c.State.Node.LocalhostNodePorts
			s := Source{"the node", a, ""}
			q := question{p, f, s, to}
			d := c.loopbackNodePorts()
			if open && d == asDecided {
				c.packet(q)
				continue
			}
			before := len(c.Differences)
			if c.untouched(q); open && len(c.Differences) == before {
				c.deviates(d)
			}
		case open:
			for _, s := range c.sources(f) {
				c.packet(question{p, f, s, to})
			}
		case c.outside.IsValid():
			c.untouched(question{p, f, Source{"outside", c.outside, outsideInterfaces[0]}, to})
		}
	}
}

// forwards reports whether some backend is reached by packets that the node forwards.
func forwards(s view.State, family model.Family, facts trace.Facts) bool {
	for _, p := range s.Ports {
		if p.ID.Family != family {
			continue
		}
		for b := range p.Cluster.All() {
			if !facts.Local[b.Address.Addr()] {
				return true
			}
		}
	}
	return false
}

// differences returns what Slicecast's own rules have otherwise than its programmers would write
// them, in the network namespace of the calling thread. Rules that no packet of a comparison comes
// by are compared only by this.
func differences(ctx context.Context, o Options, rules *trace.Rules) (out []Difference, err error) {
	var all []string
	log := slog.New(slog.DiscardHandler)
	if rules.NFTables {
		all, err = nftables.Differences(rules.Family, nftables.Options{MasqueradeMark: o.MasqueradeMark, Log: log}, o.State)
	}
	for _, variant := range rules.IPTables {
		options := iptables.Options{Variant: iptables.Variant(variant), MasqueradeMark: o.MasqueradeMark, Log: log}
		different, errVariant := iptables.Differences(ctx, rules.Family, options, o.State)
		all, err = append(all, different...), errors.Join(err, errVariant)
	}
	if rules.SlicecastIPVS {
		options := o.IPVS
		options.MasqueradeMark = o.MasqueradeMark
		different, errIPVS := ipvs.Differences(rules.Family, options, o.State)
		all, err = append(all, different...), errors.Join(err, errIPVS)
	}
	for _, d := range all {
		out = append(out, Difference{Wanted: "be " + d, Found: "that is not what Slicecast writes"})
	}
	return out, err
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
		own, err := differences(ctx, o, rules)
		if err != nil {
			return all, err
		}
		r.Differences = append(r.Differences, own...)
		if setting := facts.NotForwarding[family]; setting != "" && forwards(o.State, family, facts) {
			r.Differences = append(r.Differences, Difference{
				Wanted: fmt.Sprintf("be forwarding of %v packets, without which no pod is reached", family), Found: setting,
			})
		}
		all.Merge(r)
	}
	return all, nil
}
