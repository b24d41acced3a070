package verify

import (
	"net/netip"

	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Source is where packets come from.
type Source struct {
	// Name describes the source, such as "a pod".
	Name    string
	Address netip.Addr
	// Over is the interface through which packets arrive. It is empty if the node sends them.
	Over string
}

// String returns the name and the address.
func (s Source) String() string { return source{s.Name, s.Address, s.Over}.String() }

// of returns a comparison without a result.
func of(o Options, rules *trace.Rules, family model.Family) *comparison {
	return &comparison{
		Options: o, Result: Result{Differences: []Difference{}}, rules: rules, family: family, backends: map[netip.Addr]struct{}{},
		masquerades: map[masquerading]int{}, deviations: map[deviation]int{},
	}
}

// Sources returns the sources from which Compare sends packets to a frontend.
func Sources(o Options, family model.Family, f view.Frontend) (all []Source) {
	c := of(o, nil, family)
	c.chooseSources()
	for _, s := range c.sources(f) {
		all = append(all, Source{s.name, s.address, s.over})
	}
	return all
}

// Packet compares what happens to one packet to a frontend, as Compare does. It also returns what
// may happen to the packet. Facts say if a mode of kube-proxy treats it in its own way.
func Packet(
	o Options, rules *trace.Rules, p *view.ServicePort, f view.Frontend, from Source, to netip.AddrPort,
) (Result, []trace.Outcome) {
	c, s := of(o, rules, p.ID.Family), source{from.Name, from.Address, from.Over}
	c.Frontends = 1
	c.packet(p, f, s, to)
	for d := range c.deviations {
		c.Facts = append(c.Facts, string(d))
	}
	out, err := rules.Trace(question{p, f, s, to}.packet())
	if err != nil {
		return c.Result, nil // the error is in Result.Unjudged
	}
	return c.Result, out
}
