// Package trace says what a kernel's rules do to the first packet of a connection. It reads the
// rules of all programs from the kernel and evaluates them as the kernel would. So it judges the
// rules of Slicecast and those of kube-proxy in the same way.
//
// Where the kernel draws a random number, all results are followed, each with its probability. What
// the rules make the kernel remember of a client is part of the outcome, and a second connection of
// the same client can be followed with it. What packets before have made the kernel remember does
// not count.
//
// A rule with an expression that this package does not know, or whose result it cannot know, cannot
// be judged. It counts as not matching, and is reported. Nothing is guessed.
//
// # Scope
//
// All chains that translate addresses are evaluated. So are those chains of proxies that filter. A
// network policy or a firewall which drops packets to a Service does what it is for. If it
// accepts packets before a proxy's chain of iptables refuses them, that is followed. So is what
// chains of others do to the mark and to conntrack, before a proxy's rules ask for them.
//
// With Packet.Firewalls, all chains of iptables and of nf_tables for IP are evaluated, and whether
// the kernel forwards packets. Routes are not: a packet leaves by an interface that is not known.
// It has come over the one that the route to its source leads to. Chains of devices and bridges are
// not read.
package trace

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// Packet is the first packet of a connection.
type Packet struct {
	Protocol    model.Protocol
	Source      netip.Addr
	Destination netip.AddrPort
	// Interface is the name of the interface over which the packet arrives. If it is empty, this
	// node sends the packet.
	Interface string
	// Known is what an Outcome of the client's earlier connection says that the kernel remembers.
	Known Memory
	// Forgetful means that the kernel has no room to remember another client.
	Forgetful bool
	// ProxyOnly means that rules of chains that no proxy owns do not masquerade. It shows what the
	// proxy does by itself.
	ProxyOnly bool
	// Firewalls means that the first rule which refuses the packet, of those that no proxy owns, is
	// in the outcome. The packet then goes on. Rules that cannot be judged do not count as such.
	// Answers of backends are followed, too.
	Firewalls bool
}

// Family returns the packet's IP family.
func (p Packet) Family() model.Family { return model.FamilyOf(p.Destination.Addr()) }

// Verdict is what happens to a packet.
type Verdict uint8

const (
	// Pass means that the packet goes on its way.
	Pass Verdict = iota
	// Drop means that the packet is dropped without an answer.
	Drop
	// Reject means that the sender is told that the connection is refused.
	Reject
)

// String returns a verb.
func (v Verdict) String() string { return [...]string{"passes", "is dropped", "is rejected"}[v] }

// Outcome is something that may happen to a packet.
type Outcome struct {
	Probability float64
	Verdict     Verdict
	// Backend is where the packet is translated to. It is not valid if the packet is not
	// translated.
	Backend netip.AddrPort
	// Masquerade means that the packet's source becomes one of the node's addresses.
	Masquerade bool
	// UntrackedBy is the rule because of which conntrack does not track the packet, or nil. Then
	// nothing translates it.
	UntrackedBy *Rule
	// MasqueradedBy is the rule that masquerades, or nil.
	MasqueradedBy *Rule
	// RefusedBy is the rule of a firewall or a network policy that drops or rejects the packet, or
	// nil. It is set only for a packet with Firewalls.
	RefusedBy *Rule
	// Refusal is what RefusedBy does: Drop or Reject.
	Refusal Verdict
	// Doubt is a rule before RefusedBy that may have accepted the packet, but cannot be judged. It is
	// nil if there is none.
	Doubt *Rule
	// Answer is what happens to the backend's first answer. It is set only for a packet with
	// Firewalls, and for a bounded number of backends.
	Answer Fate
	// Affinity is how long the kernel remembers the client's backend. 0 means that it does not.
	Affinity time.Duration
	// Memory is what the kernel remembers of the client.
	Memory Memory
	// By is the rule that has translated the packet, or nil. Scheduler is that of the virtual service
	// of IPVS that has, or empty.
	By        *Rule
	Scheduler string

	// ctMark is the mark of the connection.
	ctMark uint32
	path   *path
}

// Path returns the rules that have led the packet here, in their order.
func (o Outcome) Path() []*Rule { return o.path.list() }

// Rule is a rule of the kernel.
type Rule struct {
	// Table and Chain are where the rule is. Both are empty for a setting of the kernel that acts as
	// a rule would. Position counts the chain's rules from 1. The policy of a
	// firewall's chain counts as a rule with Position 0.
	Table, Chain string
	Position     int
	// Text is the rule, or what the rule's expressions do.
	Text string
	// Foreign means that no proxy owns the rule's chain.
	Foreign bool
	// unknown is what cannot be judged of the rule.
	unknown string
	// unknownOfClients is what cannot be judged of a rule that translates, or of a proxy, for packets
	// of clients: it asks the client's port.
	unknownOfClients string
	// certain are the steps before the part that cannot be judged. If one of them does not match,
	// the rule does not.
	certain []step
	// consequence is what a rule that cannot be judged may do. alters means that it may change what
	// the rules of proxies do, and decides that firewalls may refuse the packet because of it.
	consequence     consequence
	alters, decides bool
	// asksMore means that the rule asks more than the packet's protocol and destination, or how often
	// it was asked. visited means that a packet has come by it, and matched that one has matched it.
	asksMore, visited, matched bool
	// asksMark are the bits of the packet's mark that the rule asks.
	asksMark uint32
	// firewalls is as in chain.
	firewalls bool
	// scheduler is that of a virtual service, which stands for a rule.
	scheduler string

	steps []step
	// same means that the rule before does the same.
	same bool
	// to is the address that the rule is for, if the rule is for a single one.
	to netip.Addr
}

// why returns why the rule cannot be judged for packets of clients, or an empty string.
func (r *Rule) why() string { return cmp.Or(r.unknown, r.unknownOfClients) }

// String names the rule.
func (r *Rule) String() string {
	switch {
	case r.Table == "":
		return r.Text
	case r.Position == 0:
		return fmt.Sprintf("the policy of chain %s in %s", r.Chain, r.Table)
	}
	return fmt.Sprintf("rule %d of chain %s in %s (%s)", r.Position, r.Chain, r.Table, r.Text)
}

// chain is a list of rules.
type chain struct {
	table, name string
	rules       []*Rule
	// index lists the positions in rules that a packet to an address may match, if the chain is
	// long.
	index *index
	// reached means that a rule or an element leads to the chain.
	reached bool
	// drops means that what reaches the end of a base chain is dropped. policy stands for that in a
	// firewall's chain, and is nil in others.
	drops  bool
	policy *Rule
	// proxys means that the chain belongs to a proxy, and slicecasts that this is Slicecast.
	proxys, slicecasts bool
	// firewalls means that the chain filters and that no proxy owns it. What it refuses is left
	// out, and what it accepts does not come to the rules of proxies after it.
	firewalls bool
}

// base is a chain that the kernel calls.
type base struct {
	*chain
	hook     uint32 // unix.NF_INET_*
	priority int32
	nat      bool
	// handle is higher than that of the table's older chains. It is 0 in other tables than those of
	// nf_tables, which have one chain for a hook and priority.
	handle uint64
	// balances means that the chain stands for IPVS.
	balances bool
	// firewall means that the chain does not translate, and that none of its rules is a proxy's. Only
	// packets with Firewalls pass it, and others if it alters what the rules of proxies do.
	firewall, alters bool
}

// Facts are what rules ask about the node beside the packet.
type Facts struct {
	// Local are the node's own addresses. Loopback addresses are local in any case.
	Local map[netip.Addr]bool
	// Addresses are the node's own addresses without those that only Services have, ascending.
	Addresses []netip.Addr
	// IPVS means that a proxy serves Services with IPVS, and KubeProxyIPVS that kube-proxy does.
	IPVS, KubeProxyIPVS bool
	// Delivered are the marks of packets that the routing policy delivers to the node, whatever their
	// address, by IP family.
	Delivered map[model.Family][]uint32
	// Services are the addresses on the devices that only have addresses of Services.
	Services []netip.Addr
	// NotForwarding are the settings by which the kernel forwards nothing, by IP family.
	NotForwarding map[model.Family]string
	// PartlyForwarding are the settings by which it does not forward what arrives over an interface,
	// although it forwards what arrives over others.
	PartlyForwarding map[model.Family]string
	// interfaces are those that InterfaceTo has found. If it is nil, there are none.
	interfaces map[netip.Addr]string
}

// InterfaceTo returns the interface that the route to an address leads over, as the package's
// function does. It asks the kernel once for each address.
func (f Facts) InterfaceTo(a netip.Addr) string {
	if f.interfaces == nil {
		return ""
	}
	name, known := f.interfaces[a]
	if !known {
		name = InterfaceTo(a)
		f.interfaces[a] = name
	}
	return name
}

func (f Facts) local(a netip.Addr) bool { return a.IsLoopback() || f.Local[a] }

// forwarding are the settings of the kernel that keep it from forwarding packets: all of them, and
// those that arrive over some interface. Both may be nil.
type forwarding struct{ none, some *Rule }

// Rules are the rules of a kernel for one IP family.
type Rules struct {
	Family model.Family
	facts  Facts
	chains []*chain
	bases  []*base
	// orders are the orders in which the kernel may ask bases. Of chains with the same hook and
	// priority, the kernel asks first the one that was registered last. That counts for chains that
	// translate, and for chains of proxies that refuse packets in different ways.
	orders [][]*base
	// ties says which chains these are.
	ties string
	// bridges means that a rule asks whether a packet comes through a port of a bridge.
	bridges bool
	// balancer is IPVS, or nil.
	balancer *balancer
	// ipsets are read if a proxy uses IPVS, or if rules ask them.
	ipsets map[string]*ipset
	// frontends are the addresses and ports that kube-proxy's rules and maps mention, and those of
	// virtual services. The value is the rule, map or virtual service.
	frontends map[Frontend]string
	// KubeProxyIPTables means that kube-proxy has written the rules, in its mode iptables, and no
	// other proxy has written any. KubeProxyNFTables and KubeProxyIPVS mean the same of its other
	// modes, and SlicecastIPVS of Slicecast's programmer for IPVS, whatever kube-proxy has written.
	KubeProxyIPTables, KubeProxyNFTables, KubeProxyIPVS, SlicecastIPVS bool
	// NFTables means that Slicecast's programmer for nftables has written rules, and IPTables are the
	// variants in which that for iptables has.
	NFTables bool
	IPTables []string
	// slicecasts means that Slicecast has written rules, and kubeProxys that kube-proxy has.
	// ipvsTable means that the table of Slicecast's programmer for IPVS is among the rules, and
	// otherProgrammers that rules of its other programmers are.
	slicecasts, kubeProxys, ipvsTable, otherProgrammers bool
	// Unjudged are the rules of proxies' chains that cannot be judged, each with the reason.
	Unjudged []string
	// forwarding says what the node does not forward.
	forwarding forwarding
	// unjudged are the rules of other chains that could not be judged, as far as packets came by
	// them.
	unjudged map[*Rule]struct{}
	// last has followed the last packet. Its room is used again.
	last run
}

// Frontend is an address and port that rules mention. NodePorts have no address.
type Frontend struct {
	Protocol model.Protocol
	Address  netip.Addr
	Port     uint16
}

// String returns the frontend as in 10.96.0.1:443/TCP.
func (f Frontend) String() string {
	if !f.Address.IsValid() {
		return fmt.Sprintf("NodePort %d/%v", f.Port, f.Protocol)
	}
	return fmt.Sprintf("%v/%v", netip.AddrPortFrom(f.Address, f.Port), f.Protocol)
}

// Frontends returns all addresses and ports that virtual services and kube-proxy's rules and maps
// mention, each with the place.
func (r *Rules) Frontends() map[Frontend]string { return r.frontends }

// ServiceAddresses returns the addresses of the family on devices that only have addresses of
// Services.
func (r *Rules) ServiceAddresses() (out []netip.Addr) {
	for _, a := range r.facts.Services {
		if model.FamilyOf(a) == r.Family {
			out = append(out, a)
		}
	}
	return out
}

// Beside reports whether the kernel has rules of Slicecast and of kube-proxy.
func (r *Rules) Beside() bool { return r.slicecasts && r.kubeProxys }

// fixedChain matches the names of kube-proxy's chains that exist whether or not something leads to
// them.
var fixedChain = regexp.MustCompile(`^(services|KUBE-[A-Z]{4,}.*|[^/]*-check|` +
	`firewall-check|reject-chain|mark-for-masquerade|masquerading|nodeport-.*|localhost-nodeport-reject-.*)$`)

// Unreached returns kube-proxy's chains that hold rules and to which nothing leads, apart from
// those that always exist.
func (r *Rules) Unreached() (names []string) {
	for _, c := range r.chains {
		if c.proxys && !c.slicecasts && !c.reached && len(c.rules) > 0 && !fixedChain.MatchString(c.name) {
			names = append(names, fmt.Sprintf("chain %s of %s", c.name, c.table))
		}
	}
	slices.Sort(names)
	return names
}

// Foreign returns the rules of others that a packet came by and that could not be judged, although
// they may matter: they may translate packets, or accept those that a proxy refuses.
func (r *Rules) Foreign() (rules []string) {
	for rule := range r.unjudged {
		rules = append(rules, fmt.Sprintf("%v: %s", rule, rule.why()))
	}
	slices.Sort(rules)
	return rules
}

// newRules returns Rules without any.
func newRules(family model.Family, facts Facts) *Rules {
	setting := func(text string) *Rule {
		if text == "" {
			return nil
		}
		return &Rule{Text: text, Foreign: true, unknown: "the interface that packets arrive over is not known"}
	}
	return &Rules{
		Family: family, facts: facts, forwarding: forwarding{setting(facts.NotForwarding[family]), setting(facts.PartlyForwarding[family])},
		frontends: map[Frontend]string{}, unjudged: map[*Rule]struct{}{},
	}
}

// finish prepares the chains for packets.
func (r *Rules) finish() {
	r.order()
	r.KubeProxyIPTables = r.KubeProxyIPTables && !r.slicecasts
	r.KubeProxyNFTables = r.KubeProxyNFTables && !r.slicecasts
	r.KubeProxyIPVS = r.facts.KubeProxyIPVS && !r.slicecasts
	r.SlicecastIPVS = r.ipvsTable && !r.otherProgrammers
	r.kubeProxys = r.kubeProxys || r.KubeProxyIPTables || r.KubeProxyIPVS
	if r.balancer != nil {
		r.addVirtualFrontends()
	}
	for _, b := range r.bases {
		b.reached = true
	}
	for _, c := range r.chains {
		c.index = newIndex(c.rules)
		for _, rule := range c.rules {
			rule.Foreign, rule.firewalls = !c.proxys, c.firewalls
			if why := rule.why(); why != "" && c.proxys {
				r.Unjudged = append(r.Unjudged, fmt.Sprintf("%v: %s", rule, why))
			}
		}
	}
	slices.Sort(r.Unjudged)
	r.resolve()
}

// ErrOrder reports that what happens to a packet depends on which of several chains was made last,
// which the kernel does not say.
var ErrOrder = errors.New("it depends on which of these chains was made last, and the kernel does not say")

// ErrBridge reports that what happens to a packet depends on whether it comes through a port of a
// bridge, which is not known.
var ErrBridge = errors.New("it depends on whether the packet comes through a port of a bridge, which is not known")

// ErrTooComplex reports that a packet takes more steps through the rules than are followed.
var ErrTooComplex = errors.New("the rules have too many branches to follow them all")

// Trace returns everything that may happen to a packet. The probabilities add up to 1. It must not
// be called concurrently.
func (r *Rules) Trace(p Packet) (first []Outcome, err error) {
	for i, order := range r.orders {
		out, err := r.trace(p, order, false)
		switch {
		case err != nil:
			return nil, err
		case i == 0:
			first = out
		case !same(first, out):
			return nil, fmt.Errorf("%w: %s", ErrOrder, r.ties)
		}
		if !r.bridges || p.Interface == "" {
			continue
		}
		if out, err = r.trace(p, order, true); err != nil {
			return nil, err
		}
		if !same(first, out) {
			return nil, ErrBridge
		}
	}
	if p.Firewalls {
		if err := r.addAnswers(p, first); err != nil {
			return nil, err
		}
	}
	return first, nil
}

// same reports whether the same happens to a packet, whichever rules make it happen.
func same(a, b []Outcome) bool {
	type result struct {
		verdict    Verdict
		backend    netip.AddrPort
		masquerade bool
		refused    *Rule
		affinity   time.Duration
	}
	sum := map[result]float64{}
	for i, outcomes := range [][]Outcome{a, b} {
		for _, o := range outcomes {
			sum[result{o.Verdict, o.Backend, o.Masquerade, o.RefusedBy, o.Affinity}] += o.Probability * float64(1-2*i)
		}
	}
	for _, left := range sum {
		if math.Abs(left) > 1e-9 {
			return false
		}
	}
	return true
}

// trace follows a packet through the base chains in an order. If bridged is true, the packet has
// come through a port of a bridge.
func (r *Rules) trace(p Packet, order []*base, bridged bool) ([]Outcome, error) {
	x := &r.last
	*x = run{
		rules: r, packet: p, bases: order, budget: maxSteps, over: p.Interface, sent: p.Interface == "", bridged: bridged,
		accepted: x.accepted, frames: x.frames, done: x.done[:0],
	}
	x.setHeaders()
	in := []state{{probability: 1, to: p.Destination, memory: p.Known}}
	// What IPVS has led to a backend begins anew as a packet that the node sends.
	again := func() {
		stolen := x.stolen
		x.stolen, x.sent = nil, true
		x.finish(x.hook(unix.NF_INET_POST_ROUTING, x.hook(unix.NF_INET_LOCAL_OUT, stolen)))
	}
	// What is translated counts as forwarded. Whether the backend is in the node's own network
	// makes no difference to what proxies do. It makes one to firewalls.
	input := func(s state) bool {
		delivered := !s.translated && slices.Contains(r.facts.Delivered[r.Family], s.mark)
		return delivered || (!s.translated || p.Firewalls) && r.facts.local(s.to.Addr())
	}
	if !x.sent {
		in = x.hook(unix.NF_INET_PRE_ROUTING, in)
		own, forward := divide(in, input)
		x.finish(x.hook(unix.NF_INET_LOCAL_IN, own))
		in = x.hook(unix.NF_INET_FORWARD, x.forward(forward))
		x.finish(x.hook(unix.NF_INET_POST_ROUTING, in))
		again()
	} else {
		in = x.hook(unix.NF_INET_LOCAL_OUT, in)
		again()
		in = x.hook(unix.NF_INET_POST_ROUTING, in)
		own, others := divide(in, input)
		x.finish(others)
		// What the node sends to itself comes back over lo.
		x.over, x.sent, x.looped = "lo", false, true
		x.finish(x.hook(unix.NF_INET_LOCAL_IN, x.hook(unix.NF_INET_PRE_ROUTING, own)))
		again()
	}
	if x.budget <= 0 {
		return nil, ErrTooComplex
	}
	return x.outcomes(), nil
}

// divide returns the states for which first returns true, and the others, which are in the array of
// all.
func divide(all []state, first func(state) bool) (chosen, others []state) {
	others = all[:0]
	for _, s := range all {
		if first(s) {
			chosen = append(chosen, s)
		} else {
			others = append(others, s)
		}
	}
	return chosen, others
}

// finish records states as outcomes.
func (x *run) finish(all []state) { x.done = append(x.done, all...) }

// outcomes returns the final states, merging those that are the same.
func (x *run) outcomes() []Outcome {
	type key struct {
		verdict    Verdict
		backend    netip.AddrPort
		masquerade *Rule
		refused    *Rule
		untracked  *Rule
		affinity   time.Duration
		ctMark     uint32 // the answer's rules may ask for it
	}
	merged := make(map[key]int, len(x.done))
	out := make([]Outcome, 0, len(x.done))
	for i := range x.done {
		s := &x.done[i]
		o := Outcome{
			Probability: s.probability, Verdict: s.verdict, Masquerade: s.masqueraded, MasqueradedBy: s.masqueradedBy,
			RefusedBy: s.refusedBy, Refusal: s.refusal, Doubt: s.refusedDoubt,
			UntrackedBy: s.untracked, Memory: s.memory, By: s.by, ctMark: s.ctMark, path: s.path,
		}
		if s.translated {
			o.Backend = s.to
		}
		if s.by != nil {
			o.Scheduler = s.by.scheduler
		}
		if s.doubt != nil && s.verdict != Pass {
			x.rules.unjudged[s.doubt] = struct{}{}
		}
		o.Affinity = s.memory.since(x.packet.Known)
		k := key{o.Verdict, o.Backend, o.MasqueradedBy, o.RefusedBy, o.UntrackedBy, o.Affinity, o.ctMark}
		if at, known := merged[k]; known {
			out[at].Probability += o.Probability
			continue
		}
		merged[k] = len(out)
		out = append(out, o)
	}
	slices.SortFunc(out, func(a, b Outcome) int {
		return cmp.Or(cmp.Compare(a.Verdict, b.Verdict), a.Backend.Compare(b.Backend), cmp.Compare(a.Affinity, b.Affinity))
	})
	return out
}
