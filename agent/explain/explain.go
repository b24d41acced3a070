// Package explain says what a node does with the traffic of one Service, and why. It has what the
// view has decided with its reasons (agent/view), what the kernel's rules do to packets
// (agent/trace), whether the two agree (agent/verify), and where the flows of conntrack lead.
package explain

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

const (
	// maxEndpoints, maxOutcomes and maxFlows bound what is listed; the counts are of all.
	maxEndpoints = 200
	maxOutcomes  = 50
	maxFlows     = 20
	// maxPackets bounds the packets that are followed, over all ports of the Service.
	maxPackets = 300
	// maxRules bounds the rules that a path lists, and maxText the bytes of each.
	maxRules = 40
	maxText  = 300
)

// Question is what is asked.
type Question struct {
	Service model.ServiceKey
	// Port is the name or the number of a port. Empty means all ports.
	Port string
	// From is the source of packets. If it is not valid, they come from a pod, the node and
	// outside.
	From netip.Addr
}

// Answer is what a node does with the traffic of a Service.
type Answer struct {
	// Served means that the view has ports of the Service that were asked for.
	Served   bool     `json:"served"`
	Ports    []Port   `json:"ports"`
	Problems []string `json:"problems"`
	// Unjudged is what could not be judged, each with the reason.
	Unjudged []string `json:"unjudged"`
}

// Differs reports whether the kernel does something other than was decided.
func (a *Answer) Differs() bool {
	return slices.ContainsFunc(a.Ports, func(p Port) bool {
		return slices.ContainsFunc(p.Packets, func(k Packet) bool { return k.Difference != "" })
	})
}

// Port is a Service port in one IP family.
type Port struct {
	ID       string `json:"id"`
	Protocol string `json:"protocol"`
	Family   string `json:"family"`
	// Cluster and Local say which endpoints the sets consist of, and why; see view.PortExplanation.
	Cluster         string `json:"cluster,omitempty"`
	Local           string `json:"local,omitempty"`
	ClusterBackends int    `json:"clusterBackends"`
	LocalBackends   int    `json:"localBackends"`
	AffinitySeconds int    `json:"affinitySeconds"`
	// Endpoints lists a bounded number of the endpoints, of which there are EndpointCount.
	Endpoints     []Endpoint `json:"endpoints"`
	EndpointCount int        `json:"endpointCount"`
	Packets       []Packet   `json:"packets"`
	Flows         Flows      `json:"flows"`
}

// Endpoint is an endpoint of a Service port.
type Endpoint struct {
	Address     string `json:"address"`
	Local       bool   `json:"local"`
	Ready       bool   `json:"ready"`
	Serving     bool   `json:"serving"`
	Terminating bool   `json:"terminating"`
	// NotInCluster and NotInLocal are why the endpoint is not in a set. Empty means that it is, or
	// that the set is not used.
	NotInCluster view.Exclusion `json:"notInCluster,omitempty"`
	NotInLocal   view.Exclusion `json:"notInLocal,omitempty"`
}

// Packet is a packet to a frontend.
type Packet struct {
	Frontend string `json:"frontend"`
	Source   string `json:"source"`
	// Wanted is what the view decided: reject, drop, cluster or local. Because is the reason.
	Wanted   string `json:"wanted"`
	Because  string `json:"because"`
	Backends int    `json:"backends"`
	// Masquerade means that the node's address should become the source. Why is the reason of it,
	// or of the contrary. It is empty if the packet leads to no backend.
	Masquerade bool   `json:"masquerade"`
	Why        string `json:"why,omitempty"`
	// Found is what the rules of the kernel do. It is empty if they were not evaluated.
	Found string `json:"found,omitempty"`
	// RefusedBy says which rules of firewalls and network policies, which no proxy owns, or which
	// settings of the kernel drop or reject some of the packets, or of the backends' answers. They are
	// no difference.
	RefusedBy []string `json:"refusedBy"`
	// DecidedBy is the rule of another program that led to Difference. It is empty if there is none.
	DecidedBy string `json:"decidedBy,omitempty"`
	// Difference is what the kernel does differently, as a sentence.
	Difference string `json:"difference,omitempty"`
	// Deviation is what kube-proxy's mode does on purpose in another way than decided. It is no
	// difference.
	Deviation string `json:"deviation,omitempty"`
	// Outcomes lists a bounded number of what may happen, of which there are OutcomeCount.
	Outcomes     []Outcome `json:"outcomes"`
	OutcomeCount int       `json:"outcomeCount"`
}

// Outcome is something that may happen to a packet.
type Outcome struct {
	Probability float64 `json:"probability"`
	Verdict     string  `json:"verdict"`
	Backend     string  `json:"backend,omitempty"`
	Masquerade  bool    `json:"masquerade"`
	// Rules are the rules that the packet matches, in their order.
	Rules []string `json:"rules"`
}

// Kernel answers a question for the kernel of the calling thread's network namespace.
func Kernel(ctx context.Context, v *view.View, q Question) (*Answer, error) {
	a := &Answer{Ports: []Port{}, Problems: []string{}, Unjudged: []string{}}
	ports, problems := v.Explain(q.Service)
	a.Problems = append(a.Problems, problems...)
	facts, err := trace.ReadFacts()
	if err != nil {
		return nil, err
	}
	e := &explainer{Answer: a, question: q, facts: facts, options: verify.Options{State: v.State(), Addresses: facts.Addresses, ServiceAddresses: facts.Services}}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		of := slices.DeleteFunc(slices.Clone(ports), func(p view.PortExplanation) bool {
			return p.ID.Family != family || q.From.IsValid() && model.FamilyOf(q.From) != family || !q.asks(p)
		})
		if len(of) == 0 {
			continue
		}
		var rules *trace.Rules
		if trace.Has(family) {
			rules, err = trace.Read(ctx, family, facts)
		} else {
			err = errors.New("it does not have this family")
		}
		switch {
		case rules != nil:
			a.Unjudged = append(a.Unjudged, rules.Unjudged...)
		case trace.Has(family) && !errors.Is(err, trace.ErrNoIPVS):
			return nil, err
		default:
			a.Unjudged = append(a.Unjudged, fmt.Sprintf("the rules of the kernel for %v: %v", family, err))
		}
		for _, p := range of {
			e.port(p, rules)
		}
		e.flows(family, of)
		if rules != nil {
			a.Unjudged = append(a.Unjudged, rules.Foreign()...)
		}
	}
	if q.From.IsValid() {
		strict, err := trace.StrictInterfaces(q.From)
		if err != nil {
			return nil, err
		}
		for _, setting := range strict {
			a.Unjudged = append(a.Unjudged, fmt.Sprintf("%s: what comes from %v over that interface is dropped, because the route to %v leads over another one (%s)",
				setting, q.From, q.From, facts.InterfaceTo(q.From)))
		}
	}
	a.Served = len(a.Ports) > 0
	a.Unjudged = bounded(a.Unjudged, maxRules)
	return a, nil
}

// asks reports whether a question is about a port.
func (q Question) asks(p view.PortExplanation) bool {
	if q.Port == "" || p.ID.Port == q.Port {
		return true
	}
	return slices.ContainsFunc(p.ServicePort.Frontends, func(f view.Frontend) bool { return fmt.Sprint(f.Port) == q.Port })
}

type explainer struct {
	*Answer

	question Question
	facts    trace.Facts
	options  verify.Options
	// cut means that there were more packets than are followed.
	cut bool
	// packets counts those that were followed.
	packets int
}

// port explains a Service port. Without rules, no packet is followed.
func (e *explainer) port(p view.PortExplanation, rules *trace.Rules) {
	out := Port{
		ID: p.ID.String(), Protocol: p.ID.Protocol.String(), Family: p.ID.Family.String(), Cluster: p.Cluster, Local: p.Local,
		ClusterBackends: p.ServicePort.Cluster.Len(), LocalBackends: p.ServicePort.Local.Len(),
		AffinitySeconds: int(p.Affinity.Seconds()), Endpoints: []Endpoint{}, EndpointCount: len(p.Endpoints), Packets: []Packet{},
	}
	for _, one := range p.Endpoints[:min(len(p.Endpoints), maxEndpoints)] {
		x := Endpoint{
			Address: one.Address.String(), Local: one.Local, Ready: one.Conditions.Ready, Serving: one.Conditions.Serving,
			Terminating: one.Conditions.Terminating,
		}
		if p.Cluster != "" {
			x.NotInCluster = one.Cluster
		}
		if p.Local != "" {
			x.NotInLocal = one.OfLocal
		}
		out.Endpoints = append(out.Endpoints, x)
	}
	for i, f := range p.ServicePort.Frontends {
		to := netip.AddrPortFrom(f.Address, f.Port)
		if f.Kind == view.NodePort {
			if to = e.nodePort(p.ID.Family, f.Port); !to.IsValid() {
				e.Unjudged = append(e.Unjudged, fmt.Sprintf("%v: the node has no address on which node ports of %v are open "+
					"(--nodeport-addresses)", p.ID, p.ID.Family))
				continue
			}
		}
		for _, s := range e.sources(p, f) {
			if e.packets == maxPackets {
				if !e.cut {
					e.Unjudged = append(e.Unjudged, fmt.Sprintf("more than %d pairs of frontend and source: name a port or use --from", maxPackets))
				}
				e.cut = true
				break
			}
			e.packets++
			out.Packets = append(out.Packets, e.packet(p, f, p.Frontends[i], s, to, rules))
		}
	}
	e.Ports = append(e.Ports, out)
}

// nodePort returns the node's first address on which NodePorts are open, with a port.
func (e *explainer) nodePort(family model.Family, port uint16) netip.AddrPort {
	for _, a := range e.options.Addresses {
		if model.FamilyOf(a) == family && !a.IsLoopback() && !a.IsLinkLocalUnicast() && contains(e.options.State.Node.NodePorts, a) {
			return netip.AddrPortFrom(a, port)
		}
	}
	return netip.AddrPort{}
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// sources returns where packets to a frontend come from. They arrive over the interfaces that the
// routes to their sources lead over. No pod need have the imagined address of a pod, so a route
// that leads outside says nothing of pods.
func (e *explainer) sources(p view.PortExplanation, f view.Frontend) []verify.Source {
	all := e.imagined(p, f)
	pods := e.options.State.Node.Pods
	outside := ""
	if at := slices.IndexFunc(all, func(s verify.Source) bool { return s.Name == "outside" }); at >= 0 {
		outside = e.facts.InterfaceTo(all[at].Address)
	}
	for i, s := range all {
		over := e.facts.InterfaceTo(s.Address)
		known := over != "" && (s.Name != "a pod" || over != outside)
		if s.Over != "" && known && pods.Recognizes(s.Address, over) == pods.Recognizes(s.Address, s.Over) {
			all[i].Over = over
		}
	}
	return all
}

// imagined returns the sources with interfaces that need not exist.
func (e *explainer) imagined(p view.PortExplanation, f view.Frontend) []verify.Source {
	all := verify.Sources(e.options, p.ID.Family, f)
	from := e.question.From
	if !from.IsValid() {
		return all
	}
	name := "outside"
	switch {
	case slices.Contains(e.options.Addresses, from), slices.Contains(e.options.ServiceAddresses, from):
		return []verify.Source{{Name: "the node", Address: from}}
	case contains(e.options.State.Node.Pods.Prefixes, from), slices.ContainsFunc(p.Endpoints, func(x view.EndpointExplanation) bool {
		return x.Local && x.Address.Addr() == from
	}):
		name = "a pod"
	}
	at := slices.IndexFunc(all, func(s verify.Source) bool { return s.Name == name })
	if at < 0 { // without anything that tells pods from others
		return []verify.Source{{Name: name, Address: from, Over: "outside"}}
	}
	return []verify.Source{{Name: name, Address: from, Over: all[at].Over}}
}

// packet explains what happens to a packet.
func (e *explainer) packet(
	p view.PortExplanation, f view.Frontend, why view.FrontendExplanation, s verify.Source, to netip.AddrPort, rules *trace.Rules,
) Packet {
	route, reasons := f.Others, why.Others
	switch {
	case e.options.State.Node.Pods.Recognizes(s.Address, s.Over):
		route, reasons = f.Pods, why.Pods
	case s.Over == "":
		route, reasons = f.Node, why.Node
	}
	out := Packet{
		Frontend: fmt.Sprintf("%v %v", f.Kind, to), Source: s.String(), Wanted: route.To.String(), Because: string(reasons.Target),
		Masquerade: route.Masquerade, Why: string(reasons.Masquerade), Backends: p.ServicePort.Backends(route.To).Len(), Outcomes: []Outcome{}, RefusedBy: []string{},
	}
	if len(f.Sources) > 0 && !contains(f.Sources, s.Address) {
		out.Wanted, out.Because, out.Masquerade, out.Why = view.Drop.String(), "the source is not in loadBalancerSourceRanges", false, ""
		out.Backends = 0
	}
	if rules == nil {
		return out
	}
	result, outcomes := verify.Packet(e.options, rules, p.ServicePort, f, s, to)
	e.Unjudged = append(e.Unjudged, result.Unjudged...)
	if len(result.Differences) > 0 {
		out.Difference, out.DecidedBy = result.Differences[0].String(), decidedBy(outcomes)
	}
	if len(result.Facts) > 0 {
		out.Deviation = result.Facts[0]
	}
	if out.OutcomeCount = len(outcomes); outcomes != nil {
		out.Found = found(outcomes)
	}
	for _, o := range outcomes {
		e.refusals(&out, o)
	}
	out.RefusedBy = bounded(out.RefusedBy, maxRules)
	for _, o := range outcomes[:min(len(outcomes), maxOutcomes)] {
		x := Outcome{Probability: o.Probability, Verdict: o.Verdict.String(), Masquerade: o.Masquerade, Rules: []string{}}
		if o.Backend.IsValid() {
			x.Backend = o.Backend.String()
		}
		for _, r := range o.Path()[:min(len(o.Path()), maxRules)] {
			text := r.String()
			x.Rules = append(x.Rules, text[:min(len(text), maxText)])
		}
		out.Outcomes = append(out.Outcomes, x)
	}
	return out
}

// refusals adds what refuses a packet, or the answer to it.
func (e *explainer) refusals(out *Packet, o trace.Outcome) {
	answers := fmt.Sprintf("the answer of %v ", o.Backend)
	for _, r := range []struct {
		what      string
		by, doubt *trace.Rule
		text      string
	}{
		{"what comes to " + out.Frontend + " from " + out.Source, o.RefusedBy, o.Doubt, o.Refusal.String()},
		{answers + "to " + out.Source, o.Answer.RefusedBy, o.Answer.Doubt, answers + o.Answer.Refusal.String()},
		{answers + "to " + out.Source, o.Answer.UntrackedBy, nil, answers + "is not translated back, because conntrack is kept from tracking it"},
	} {
		switch {
		case r.by == nil:
		case r.doubt != nil:
			e.Unjudged = append(e.Unjudged, fmt.Sprintf("whether %v refuses %s: before it, %v may accept it, which cannot be judged", r.by, r.what, r.doubt))
		default:
			out.RefusedBy = append(out.RefusedBy, fmt.Sprintf("%s by %v", r.text, r.by))
		}
	}
}

// decidedBy returns the rule of another program that has translated packets, or has kept them from
// being translated.
func decidedBy(outcomes []trace.Outcome) string {
	for _, o := range outcomes {
		for _, r := range []*trace.Rule{o.UntrackedBy, o.By} {
			if r != nil && r.Foreign {
				return r.String()
			}
		}
		path := o.Path()
		if last := len(path) - 1; !o.Backend.IsValid() && last >= 0 && path[last].Foreign {
			return path[last].String()
		}
	}
	return ""
}

// found says in words what happens to a packet.
func found(outcomes []trace.Outcome) string {
	backends, masqueraded := map[netip.AddrPort]bool{}, 0
	var others []string
	for _, o := range outcomes {
		switch {
		case o.Verdict == trace.Pass && o.Backend.IsValid():
			backends[o.Backend] = true
			if o.Masquerade {
				masqueraded++
			}
		case o.Verdict == trace.Pass && o.UntrackedBy != nil:
			others = append(others, "is not translated, because conntrack does not track it")
		case o.Verdict == trace.Pass:
			others = append(others, "is not translated")
		default:
			others = append(others, o.Verdict.String())
		}
	}
	if len(backends) > 0 {
		text := fmt.Sprintf("reaches %d backends", len(backends))
		if len(backends) == 1 {
			text = "reaches 1 backend"
		}
		if masqueraded > 0 {
			text += ", masqueraded"
		}
		others = append(others, text)
	}
	slices.Sort(others)
	return strings.Join(slices.Compact(others), " or ")
}

// bounded returns at most n of the texts, each once, and how many more there are.
func bounded(texts []string, n int) []string {
	slices.Sort(texts)
	texts = slices.Compact(texts)
	if more := len(texts) - n; more > 0 {
		texts = append(texts[:n], fmt.Sprintf("… and %d more", more))
	}
	return texts
}
