package nftables

import (
	"github.com/google/nftables/expr"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
)

// A policy encodes what happens to connections to a frontend in one number. It has three bits each
// for the routes of pods, of the node and of others, and one bit that is set if sources are
// filtered. The value of a frontend in the maps is an integer with the policy in its lowest three
// hexadecimal digits and the Service port's id in the others.
type policy uint32

const (
	policyMasquerade = 1 << 2
	policySources    = 1 << 9

	policyBits = 1<<12 - 1
	idBits     = 1<<32 - 1 - policyBits
)

func policyOf(f view.Frontend) policy {
	code := func(r view.Route) policy {
		c := policy(r.To - view.Reject)
		if r.Masquerade && r.To.Leads() {
			c |= policyMasquerade
		}
		return c
	}
	p := code(f.Pods)<<6 | code(f.Node)<<3 | code(f.Others)
	if len(f.Sources) > 0 {
		p |= policySources
	}
	return p
}

// valid reports whether p is a result that policyOf can return.
func (p policy) valid() bool { return p < policySources<<1 }

// routes returns the routes of pods, the node and others.
func (p policy) routes() (pods, node, others view.Route) {
	route := func(p policy) view.Route {
		return view.Route{To: view.Reject + view.Target(p&3), Masquerade: p&policyMasquerade != 0}
	}
	return route(p >> 6), route(p >> 3), route(p)
}

// chain returns the name of the policy's chain: "to-cluster", for example, or
// "pods-cluster.node-cluster-masquerade.others-local". It ends in ".sources" if sources are
// filtered.
func (p policy) chain() string {
	name := func(r view.Route) string {
		if r.Masquerade {
			return r.To.String() + "-masquerade"
		}
		return r.To.String()
	}
	pods, node, others := p.routes()
	text := "to-" + name(others)
	if pods != others || node != others {
		text = "pods-" + name(pods) + ".node-" + name(node) + ".others-" + name(others)
	}
	if p&policySources != 0 {
		text += ".sources"
	}
	return text
}

func (d *dialect) policyChain(p policy, detector view.PodDetector) []nft.Rule {
	var rules []nft.Rule
	if p&policySources != 0 {
		rules = append(rules, nft.Do(nft.Jump(sourcesChain)))
	}
	to := func(r view.Route) []expr.Any {
		var mark []expr.Any
		if r.Masquerade {
			mark = nft.ChangeMark(d.mark, d.mark)
		}
		switch r.To {
		case view.Cluster, view.Local:
			return append(mark, nft.Goto(r.To.String())...)
		case view.Drop:
			return nft.Drop()
		}
		return nft.Goto(rejectChain)
	}
	pods, node, others := p.routes()
	if pods != others || node != others {
		for _, match := range d.From(detector.Prefixes, detector.Interface, detector.InterfacePrefix) {
			rules = append(rules, nft.Do(match, to(pods)))
		}
	}
	if node != others {
		rules = append(rules, nft.Do(nft.IsLocal(expr.Fib{FlagSADDR: true}), to(node)))
	}
	return append(rules, nft.Do(to(others)))
}

// sourcesRules returns the rules of the chain that drops connections from outside a frontend's
// sources. lengths are all prefix lengths in use. There is a set for each length, so neither a
// packet nor a change costs more with the number of prefixes, as it would with a set of intervals.
func (d *dialect) sourcesRules(lengths []int) []nft.Rule {
	var rules []nft.Rule
	for _, bits := range lengths {
		source := d.Source(d.FrontendWords())
		if bits < d.Bits() {
			source = append(source, d.Masked(d.FrontendWords(), bits)...)
		}
		rules = append(rules, nft.Do(d.Frontend(0), source, in(sources+setID(bits)), nft.Return()))
	}
	return append(rules, nft.Do(nft.Drop()))
}
