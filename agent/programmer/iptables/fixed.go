package iptables

import (
	"bytes"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// ChainPrefix begins the names of all chains of this package, and of no others.
const ChainPrefix = "SLICECAST-"

// ServicesChain is a chain of nat, for the first packet of a connection. It exists as long as a
// Programmer has programmed something.
const ServicesChain = ChainPrefix + "SERVICES"

// Chains that do not belong to a single Service port. They always exist unless stated otherwise.
// Those marked as trees are the roots of trees.
const (
	// These are in nat, as ServicesChain is.
	dispatchChain    = ChainPrefix + "DISPATCH"
	nonLocalChain    = ChainPrefix + "NONLOCAL"
	vipsChain        = ChainPrefix + "VIPS"     // a tree of addresses whose way is offPods
	externalChain    = ChainPrefix + "EXTERNAL" // a tree of all other addresses
	nodePortsChain   = ChainPrefix + "NODEPORTS"
	postroutingChain = ChainPrefix + "POSTROUTING"
	hairpinChain     = ChainPrefix + "HAIRPIN" // a tree

	// These are in filter.
	forwardChain         = ChainPrefix + "FORWARD"
	inputChain           = ChainPrefix + "INPUT"
	rejectChain          = ChainPrefix + "REJECT" // a tree
	rejectNodePortsChain = ChainPrefix + "REJECT-NODEPORTS"

	// nodeChain is in both tables and matches the node's addresses that have nodePorts.
	nodeChain = ChainPrefix + "NODE"

	// localnetChain is in filter, and exists only if loopback addresses have nodePorts, or had some
	// and packets of them are still routed.
	localnetChain = ChainPrefix + "LOCALNET"

	// checkChain is in both tables, and exists only while rejected Service ports are searched for.
	checkChain = ChainPrefix + "CHECK"
)

// nodePortsTree returns the name of a tree of nodePorts in nat.
func nodePortsTree(p model.Protocol) string { return ChainPrefix + "PORTS-" + p.String() }

// rejectTree returns the name of a tree of nodePorts in filter.
func rejectTree(p model.Protocol) string { return rejectChain + "-" + p.String() }

// hooks returns the rules in the kernel's base chains, in their order. Each is inserted at the head
// of its chain.
func (d *dialect) hooks() []hook {
	var hooks []hook
	if d.localnet || d.guarded {
		hooks = append(hooks, d.localnetHook())
	}
	return append(hooks, []hook{
		{nat, "-A PREROUTING -j " + ServicesChain},
		{nat, "-A OUTPUT -j " + ServicesChain},
		{nat, "-A POSTROUTING -j " + postroutingChain},
		{filter, "-A INPUT -m conntrack --ctstate NEW -j " + inputChain},
		forwardHook,
		{filter, "-A OUTPUT -m conntrack --ctstate NEW -j " + rejectChain},
	}...)
}

// allHooks returns hooks, and those that the kernel may hold beside them.
func (d *dialect) allHooks() []hook {
	all := d.hooks()
	if h := d.localnetHook(); !slices.Contains(all, h) {
		all = append(all, h)
	}
	return all
}

// forwardHook leads to the rules that accept what is forwarded for Services.
var forwardHook = hook{filter, "-A FORWARD -j " + forwardChain}

// protocols are in the order of their rules.
var protocols = []model.Protocol{model.TCP, model.UDP, model.SCTP}

// part is a part of a fixed chain: the target of all packets that any of the matches matches.
type part struct {
	target  string
	matches []match
}

var anyPacket = []match{{}}

// only returns the match of packets that have one property.
func only(property string) []match { return []match{{more: property}} }

// putParts adds a chain that consists of these parts to the transaction.
func putParts(x *transaction, t table, name string, parts ...part) {
	x.put(t, name, func(w *bytes.Buffer) {
		for _, p := range parts {
			for _, m := range p.matches {
				w.WriteString(m.rule(name, p.target))
			}
		}
	})
}

// fixedChains adds the chains, in both tables, that depend on the options and the node only.
func (d *dialect) fixedChains(x *transaction) {
	d.dispatchChains(x)
	d.nodeChains(x)
	d.postroutingChains(x)
	d.filterChains(x)
	if d.localnet || d.guarded {
		putLocalnet(x)
	}
}

// dispatchChains adds the chains in nat that lead packets to the trees of frontends.
//
// The mark is set before it is known whether the packet is for a Service, because most traffic to
// Services needs it, and cleared if the packet is not. So Service ports need no rule for it. A mark
// that was set before is left alone.
func (d *dialect) dispatchChains(x *transaction) {
	putParts(x, nat, ServicesChain,
		part{"-g " + dispatchChain, only("-m mark " + d.marked())},
		part{"-j " + nonLocalChain, anyPacket},
		part{"-j " + dispatchChain, anyPacket},
		part{d.mark(false), anyPacket})
	if len(d.pods) > 0 {
		putParts(x, nat, nonLocalChain, part{"-j RETURN", d.pods}, part{d.mark(true), anyPacket})
	} else {
		putParts(x, nat, nonLocalChain)
	}
	putParts(x, nat, dispatchChain,
		part{"-j " + vipsChain, anyPacket},
		part{d.mark(true), anyPacket},
		part{"-j " + externalChain, anyPacket},
		part{"-j " + nodeChain, d.toNode(nat)})
}

// nodeChains adds the chains of both tables that lead packets for the node to the trees of
// nodePorts.
func (d *dialect) nodeChains(x *transaction) {
	var prefixes []match
	for _, p := range d.nodePorts {
		prefixes = append(prefixes, to(p))
	}
	putParts(x, nat, nodeChain, part{"-g " + nodePortsChain, prefixes})
	putParts(x, filter, nodeChain, part{"-g " + rejectNodePortsChain, prefixes})
	var nodePorts, rejects []part
	for _, p := range protocols {
		one := []match{{protocol: "-p " + lower(p)}}
		nodePorts = append(nodePorts, part{"-g " + nodePortsTree(p), one})
		rejects = append(rejects, part{"-g " + rejectTree(p), one})
	}
	putParts(x, nat, nodePortsChain, nodePorts...)
	putParts(x, filter, rejectNodePortsChain, rejects...)
}

// postroutingChains adds the chain that masquerades.
//
// An unmarked packet may still be a hairpin, if it was translated. The mark is cleared because the
// packet may come by again, for example inside a tunnel's packet.
func (d *dialect) postroutingChains(x *transaction) {
	putParts(x, nat, postroutingChain,
		part{"-j " + hairpinChain, only("-m mark ! " + d.marked() + " -m conntrack --ctstate DNAT")},
		part{"-j RETURN", only("-m mark ! " + d.marked())},
		part{d.mark(false), anyPacket},
		part{d.masquerade(), anyPacket})
}

// filterChains adds the chains in filter that accept traffic of Services, or lead to the trees of
// what is refused.
//
// A packet that conntrack finds invalid would pass untranslated. It may be a pod's reply to a
// client that knows only the Service's address. The client would reset the connection.
func (d *dialect) filterChains(x *transaction) {
	invalid := only("-m conntrack --ctstate INVALID")
	switch {
	case d.liberal:
		invalid = nil
	case d.counters:
		invalid[0].more += " " + counted(invalidCounter)
	}
	putParts(x, filter, forwardChain,
		part{"-j DROP", invalid},
		part{"-j ACCEPT", d.accepted()},
		part{"-j " + rejectChain, only("-m conntrack --ctstate NEW")})
	putParts(x, filter, inputChain,
		part{"-j " + rejectChain, anyPacket},
		part{"-j " + nodeChain, d.toNode(filter)})
}

// accepted returns matches of Services' traffic that is accepted whatever FORWARD's policy is.
func (d *dialect) accepted() []match {
	return []match{{more: "-m mark " + d.marked()}, {more: "-m conntrack --ctstate RELATED,ESTABLISHED"}}
}

// putLocalnet adds localnetChain, the guard. Without it, the sysctl route_localnet would let the
// node's neighbors reach what listens on loopback addresses only.
func putLocalnet(x *transaction) {
	x.put(filter, localnetChain, func(w *bytes.Buffer) {
		w.WriteString(match{more: "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT"}.rule(localnetChain, "-j DROP"))
	})
}

// localnetHook leads to the guard.
func (d *dialect) localnetHook() hook {
	return hook{filter, "-A INPUT -d " + d.loopback + " ! -i lo -j " + localnetChain}
}
