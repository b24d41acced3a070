package iptables

import (
	"bytes"

	"github.com/slicecast/slicecast/internal/model"
)

// All chains of ours have this prefix, and nothing else has.
const prefix = "SLICECAST-"

// Chains that always exist. Those that are said to be trees are the roots of such.
const (
	// In nat, for the first packet of a connection.
	servicesChain    = prefix + "SERVICES"
	dispatchChain    = prefix + "DISPATCH"
	nonLocalChain    = prefix + "NONLOCAL"
	vipsChain        = prefix + "VIPS"      // a tree: addresses by offPods
	externalChain    = prefix + "EXTERNAL"  // a tree: other addresses
	nodePortsChain   = prefix + "NODEPORTS" // with a protocol appended, trees
	postroutingChain = prefix + "POSTROUTING"
	hairpinChain     = prefix + "HAIRPIN" // a tree

	// In filter.
	forwardChain         = prefix + "FORWARD"
	inputChain           = prefix + "INPUT"
	rejectChain          = prefix + "REJECT" // a tree; and with a protocol appended, trees of nodePorts
	rejectNodePortsChain = prefix + "REJECT-NODEPORTS"

	// In both: the node's addresses that have nodePorts.
	nodeChain = prefix + "NODE"

	// In filter, only where loopback addresses have nodePorts.
	localnetChain = prefix + "LOCALNET"

	// In both, while a rejected Service port is looked for.
	checkChain = prefix + "CHECK"
)

// hooks gives the rules in the kernel's base chains, in their order, each put at the head.
func (d *dialect) hooks() []hook {
	var hooks []hook
	if d.localnet {
		hooks = append(hooks, d.localnetHook())
	}
	return append(hooks, []hook{
		{nat, "-A PREROUTING -j " + servicesChain},
		{nat, "-A OUTPUT -j " + servicesChain},
		{nat, "-A POSTROUTING -j " + postroutingChain},
		{filter, "-A INPUT -m conntrack --ctstate NEW -j " + inputChain},
		forwardHook,
		{filter, "-A OUTPUT -m conntrack --ctstate NEW -j " + rejectChain},
	}...)
}

// forwardHook leads to what is accepted.
var forwardHook = hook{filter, "-A FORWARD -j " + forwardChain}

// protocols in the order of rules.
var protocols = []model.Protocol{model.TCP, model.UDP, model.SCTP}

// fixedChains puts the chains that do not depend on any Service.
func (d *dialect) fixedChains(x *transaction) {
	// A chain's rules come in parts: what each of some matches leads to.
	type part struct {
		target  string
		matches []match
	}
	chain := func(t table, name string, parts ...part) {
		x.put(t, name, func(w *bytes.Buffer) {
			for _, p := range parts {
				for _, m := range p.matches {
					w.WriteString(m.rule(name, p.target))
				}
			}
		})
	}
	all := []match{{}}
	only := func(m string) []match { return []match{{more: m}} }

	// The mark is set before it is known whether a Service is meant, as most traffic to them wants it, and cleared again
	// if none was: so a Service port needs no rule for it. A mark that was there before is left alone.
	chain(nat, servicesChain,
		part{"-g " + dispatchChain, only("-m mark " + d.marked())},
		part{"-j " + nonLocalChain, all},
		part{"-j " + dispatchChain, all},
		part{d.mark(false), all})
	if len(d.pods) > 0 {
		chain(nat, nonLocalChain, part{"-j RETURN", d.pods}, part{d.mark(true), all})
	} else {
		chain(nat, nonLocalChain)
	}
	chain(nat, dispatchChain,
		part{"-j " + vipsChain, all},
		part{d.mark(true), all},
		part{"-j " + externalChain, all},
		part{"-j " + nodeChain, d.toNode(nat)})

	var prefixes []match
	for _, p := range d.nodePorts {
		prefixes = append(prefixes, to(p))
	}
	chain(nat, nodeChain, part{"-g " + nodePortsChain, prefixes})
	chain(filter, nodeChain, part{"-g " + rejectNodePortsChain, prefixes})
	var nodePorts, rejects []part
	for _, p := range protocols {
		one := []match{{protocol: "-p " + lower(p)}}
		nodePorts = append(nodePorts, part{"-g " + nodePortsChain + "-" + p.String(), one})
		rejects = append(rejects, part{"-g " + rejectChain + "-" + p.String(), one})
	}
	chain(nat, nodePortsChain, nodePorts...)
	chain(filter, rejectNodePortsChain, rejects...)

	// What is not marked may still be a hairpin, and that only if it was translated. The mark is cleared as the packet
	// may come by again, e.g. inside a tunnel's.
	chain(nat, postroutingChain,
		part{"-j " + hairpinChain, only("-m mark ! " + d.marked() + " -m conntrack --ctstate DNAT")},
		part{"-j RETURN", only("-m mark ! " + d.marked())},
		part{d.mark(false), all},
		part{d.masquerade(), all})

	// A packet that conntrack finds invalid would pass untranslated, e.g. a pod's reply to a client that knows only the
	// Service's address, and the client would reset the connection.
	invalid := only("-m conntrack --ctstate INVALID")
	if d.liberal {
		invalid = nil
	}
	chain(filter, forwardChain,
		part{"-j DROP", invalid},
		part{"-j ACCEPT", d.accepted()},
		part{"-j " + rejectChain, only("-m conntrack --ctstate NEW")})
	chain(filter, inputChain,
		part{"-j " + rejectChain, all},
		part{"-j " + nodeChain, d.toNode(filter)})

	if d.localnet {
		putLocalnet(x)
	}
}

// accepted match what of Services' traffic is accepted, whatever FORWARD's policy is.
func (d *dialect) accepted() []match {
	return []match{{more: "-m mark " + d.marked()}, {more: "-m conntrack --ctstate RELATED,ESTABLISHED"}}
}

// putLocalnet puts the guard: the sysctl route_localnet lets neighbours reach what listens on loopback only.
func putLocalnet(x *transaction) {
	x.put(filter, localnetChain, func(w *bytes.Buffer) {
		w.WriteString(match{more: "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT"}.rule(localnetChain, "-j DROP"))
	})
}

// localnetHook leads to the guard.
func (d *dialect) localnetHook() hook {
	return hook{filter, "-A INPUT -d " + d.loopback + " ! -i lo -j " + localnetChain}
}
