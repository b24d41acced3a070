package ipvs

import (
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
)

// The packet mark selects the set of backends. IPVS has a virtual service for each mark, called a
// firewall mark service. The marks of this package have markTag in their highest byte. The maps
// hold marks with flags, which the rules clear before IPVS sees the mark.
const (
	markTag     uint32 = 0x5c << 24
	markTagMask uint32 = 0xff << 24

	flagMasquerade uint32 = 1 << 23
	flagReject     uint32 = 1 << 22
	flagDrop       uint32 = 1 << 21

	maxID uint32 = flagDrop - 1
)

// Chains of the table. The first eight have hooks.
const (
	preroutingChain  = "prerouting"
	reenterChain     = "reenter"
	inputChain       = "input"
	outputChain      = "output"
	endedChain       = "ended"
	postroutingChain = "postrouting"
	forwardChain     = "forward"
	leaveChain       = "leave"
	sourcesChain     = "sources"
	unknownChain     = "unknown-port"
	routeChain       = "route"
)

// class is where a new connection comes from, as the Routes of a Frontend distinguish it.
type class int

const (
	pods class = iota
	node
	others
	classes // number of classes
)

func (c class) String() string { return [...]string{"pods", "node", "others"}[c] }

// route returns a frontend's route for the class.
func (c class) route(f view.Frontend) view.Route {
	return [...]view.Route{f.Pods, f.Node, f.Others}[c]
}

type chain struct {
	name  string
	hook  nft.Hook
	rules []nft.Rule
}

// Priorities of the chains that mark packets. The hooks of IPVS have the priorities 98 and 99 in
// input, and -99 and -98 in output (net/netfilter/ipvs/ip_vs_core.c). The mark is set as late as
// possible, so that rules of others do not see it. It is cleared as soon as IPVS has sent the
// packet on, because the packet then passes all of output.
const (
	beforeIPVSInput  = 97
	afterIPVSInput   = 101
	beforeIPVSOutput = -99
)

// afterTranslation is the priority of the chain prerouting. Packets that others translate have the
// addresses of their backends by then.
const afterTranslation = -99

func (l *layout) chains() []chain {
	filter := func(number uint32, priority int32) nft.Hook {
		return nft.Hook{Kind: "filter", Number: number, Priority: priority}
	}
	chains := []chain{
		{preroutingChain, filter(unix.NF_INET_PRE_ROUTING, afterTranslation), l.preroutingRules()},
		{reenterChain, filter(unix.NF_INET_LOCAL_OUT, -300), []nft.Rule{
			nft.Do(isTagged(expr.CmpOpEq), nft.Immediate(0, 0), nft.StoreMark(0)).Because("IPVS has seen its mark"),
		}},
		{inputChain, filter(unix.NF_INET_LOCAL_IN, beforeIPVSInput), l.inputRules()},
		{endedChain, filter(unix.NF_INET_LOCAL_IN, afterIPVSInput), l.endedRules()},
		{outputChain, filter(unix.NF_INET_LOCAL_OUT, beforeIPVSOutput), []nft.Rule{
			l.checkSources(), nft.Do(nft.Goto(node.String())),
		}},
		{postroutingChain, nft.Hook{Kind: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: 100}, l.postroutingRules()},
		{forwardChain, filter(unix.NF_INET_FORWARD, nft.AfterFilter), slices.Concat(l.refusedRules(), l.unusedRules())},
		{leaveChain, filter(unix.NF_INET_LOCAL_OUT, nft.AfterFilter), l.unusedRules()},
		{name: sourcesChain, rules: []nft.Rule{
			nft.Do(l.Frontend(0), l.Source(l.FrontendWords()), l.in(setSources), nft.Return()).
				Because("loadBalancerSourceRanges"),
			nft.Do(nft.Drop()),
		}},
		{name: unknownChain, rules: l.unknownRules()},
		{name: routeChain, rules: l.routeRules()},
	}
	for c := range classes {
		chains = append(chains, chain{name: c.String(), rules: l.classRules(c)})
	}
	return chains
}

// preroutingRules mark packets to frontends that have an address, so that they are delivered to
// the node although the address may be another machine's. New connections that are to be refused
// or dropped are forwarded to the chain forward instead: the kernel sends no ICMP error from an
// address that is not the node's.
//
// Packets of open connections are delivered whatever happens to new ones, because IPVS may still
// lead them. ICMP errors about its answers are not: IPVS also takes these in the hook forward.
func (l *layout) preroutingRules() []nft.Rule {
	deliver := func(matches ...[]expr.Any) nft.Rule {
		return nft.Do(slices.Concat(matches...), nft.Immediate(markDeliver, 0), nft.StoreMark(0))
	}
	begin := func(c class, matches ...[]expr.Any) nft.Rule {
		return nft.Do(isNew(), slices.Concat(matches...), l.Frontend(0), l.lookup(c.frontends()),
			nft.ChangeMark(^(markTagMask|flagReject|flagDrop), 0), nft.Return())
	}
	rules := []nft.Rule{
		nft.Do(nft.IsReply(), nft.Return()),
		deliver(l.Frontend(0), l.in(setHealth)).Because("the agent answers"),
	}
	for _, match := range l.fromPods() {
		rules = append(rules, begin(pods, match).Because("from pods"))
	}
	return append(rules,
		begin(others),
		nft.Do(isNew(), nft.Return()),
		deliver(l.Frontend(0), l.lookup(others.frontends())),
	)
}

// refusedRules refuse or drop the new connections that are not delivered.
func (l *layout) refusedRules() []nft.Rule {
	marked := func(flag uint32) []expr.Any {
		return slices.Concat(isNew(), nft.Meta(expr.MetaKeyMARK, 0), nft.Compare(expr.CmpOpEq, nft.Integer(markTag|flag)))
	}
	return append([]nft.Rule{
		nft.Do(marked(flagDrop), nft.Drop()).Because("no local endpoint"),
		nft.Do(marked(flagReject), l.Frontend(0), l.in(setFiltered), nft.Jump(sourcesChain)),
	}, l.Refuse("no endpoint", marked(flagReject))...)
}

// endedRules reset TCP connections to external addresses that IPVS does not lead, or no longer. The
// kernel does so itself at addresses that are the node's, but not at others in IPv4.
func (l *layout) endedRules() []nft.Rule {
	tcp := append(nft.Protocol(0), nft.Compare(expr.CmpOpEq, []byte{unix.IPPROTO_TCP})...)
	return []nft.Rule{
		nft.Do(isTagged(expr.CmpOpNeq), nft.Return()),
		nft.Do(nft.IsLocal(expr.Fib{FlagDADDR: true}), nft.Return()),
		nft.Do(l.Frontend(0), l.in(setHealth), nft.Return()).Because("the agent answers"),
		nft.Do(tcp, []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}).Because("no connection"),
	}
}

// fromPods returns matches for packets from pods, any of which may match.
func (l *layout) fromPods() [][]expr.Any {
	detector := l.node.Pods
	return l.From(detector.Prefixes, detector.Interface, detector.InterfacePrefix)
}

// inputRules distinguish pods from others.
func (l *layout) inputRules() []nft.Rule {
	rules := []nft.Rule{l.checkSources()}
	for _, match := range l.fromPods() {
		rules = append(rules, nft.Do(match, nft.Goto(pods.String())).Because("from pods"))
	}
	return append(rules, nft.Do(nft.Goto(others.String())))
}

// checkSources returns the rule that sends new connections to frontends with sources to the chain
// which drops those from other sources.
func (l *layout) checkSources() nft.Rule {
	return nft.Do(isNew(), l.Frontend(0), l.in(setFiltered), nft.Jump(sourcesChain))
}

// classRules look the frontend up by address, or as a NodePort.
func (l *layout) classRules(c class) []nft.Rule {
	rules := []nft.Rule{
		nft.Do(l.Frontend(0), l.lookup(c.frontends()), nft.Goto(routeChain)),
		nft.Do(l.Destination(0), l.in(setAddresses), nft.Goto(unknownChain)),
		nft.Do(l.InPrefix(l.Destination, expr.CmpOpEq, l.Loopback()), nft.Return()).Because("no NodePorts there"),
	}
	local, lookup := nft.IsLocal(expr.Fib{FlagDADDR: true}), l.lookup(c.nodePorts())
	for _, p := range l.Own(l.node.NodePorts) {
		match := l.InPrefix(l.Destination, expr.CmpOpEq, p)
		rules = append(rules, nft.Do(match, local, nft.Port(0), lookup, nft.Goto(routeChain)).Because("NodePorts"))
	}
	return rules
}

// unusedRules drop new connections to addresses within the ranges of cluster IPs that no Service
// has. Such packets would be routed anywhere. The rules come after IPVS and after what other
// proxies refuse. By then, others have led packets elsewhere, or refused them.
func (l *layout) unusedRules() (rules []nft.Rule) {
	unused := slices.Concat(l.Destination(0), nft.NotIn(l.sets[setAddresses].name), isNew(), nft.Drop())
	for _, p := range l.Own(l.node.ServiceCIDRs) {
		rules = append(rules, nft.Do(l.InPrefix(l.Destination, expr.CmpOpEq, p), unused).Because("no Service"))
	}
	return rules
}

// unknownRules refuse new connections to unknown ports of addresses that only Services have.
// Otherwise they would reach whatever listens on all of the node's addresses.
func (l *layout) unknownRules() []nft.Rule {
	portless := nft.Protocol(0)
	for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
		portless = append(portless, nft.Compare(expr.CmpOpNeq, []byte{protocol})...)
	}
	return append([]nft.Rule{
		nft.Do(portless, nft.Return()).Because("no ports"),
	}, l.Refuse("no Service", isNew())...)
}

// routeRules do what the flags of the mark say, and leave the rest to IPVS. They reject and drop
// only new connections. IPVS knows the others.
func (l *layout) routeRules() []nft.Rule {
	rules := []nft.Rule{nft.Do(isNew(), nft.MarkHas(flagDrop), nft.Drop()).Because("no local endpoint")}
	rules = append(rules, l.Refuse("no endpoint", isNew(), nft.MarkHas(flagReject))...)
	return append(rules,
		nft.Do(nft.MarkHas(flagDrop|flagReject), nft.Immediate(0, 0), nft.StoreMark(0), nft.Return()).
			Because("open connections go on"),
		nft.Do(isNew(), nft.MarkHas(flagMasquerade), nft.ChangeCtMark(l.masqBit, l.masqBit)).Because("to be masqueraded"),
		nft.Do(nft.ChangeMark(flagMasquerade, 0)).Because("the mark of the virtual service"),
	)
}

func (l *layout) postroutingRules() []nft.Rule {
	outside := append(nft.Meta(expr.MetaKeyOIFNAME, 0), nft.Compare(expr.CmpOpNeq, nft.InterfaceName("lo"))...)
	return []nft.Rule{
		nft.Do(l.Source(0), l.Destination(l.Words()), l.in(setHairpins), nft.Masquerade()).Because("a backend to itself"),
		nft.Do(nft.CtHas(expr.CtKeyMARK, l.masqBit), nft.Masquerade()),
		// These are connections that others translate and have marked for masquerading. When this
		// programmer takes over, a packet may have passed the first of the others' rules just before all
		// of them are removed. Without masquerading, its connection would get no reply, even if the
		// client sends the packet again, because conntrack keeps the translation. The rule clears the
		// mark, because the packet may come by again, for example inside a tunnel's packet.
		nft.Do(isTagged(expr.CmpOpNeq), nft.MarkHas(l.masqBit), nft.ChangeMark(l.masqBit, 0), nft.Masquerade()).
			Because("asked for by others"),
		// If the node connects to one of its own addresses, the kernel uses that address as the
		// connection's source.
		nft.Do(outside, l.Source(0), l.in(setAddresses), nft.Masquerade()).Because("no reply would come"),
	}
}

// isTagged compares the part of the packet's mark that is markTag in marks of this package.
func isTagged(op expr.CmpOp) []expr.Any {
	return slices.Concat(nft.Meta(expr.MetaKeyMARK, 0), nft.AndMask(0, markTagMask), nft.Compare(op, nft.Integer(markTag)))
}

func isNew() []expr.Any { return nft.CtHas(expr.CtKeySTATE, nft.CtStateNew) }

// in matches if a set holds what was loaded.
func (l *layout) in(id setID) []expr.Any { return nft.In(l.sets[id].name) }

// lookup sets the mark to the value that a map holds for what was loaded, and matches if there is
// one.
func (l *layout) lookup(id setID) []expr.Any {
	return append(nft.Lookup(l.sets[id].name, 0, 0), nft.StoreMark(0)...)
}
