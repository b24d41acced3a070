package explain

import (
	"cmp"
	"fmt"
	"strconv"

	"github.com/slicecast/slicecast/internal/show"
)

// Report is an answer that the command explain prints.
type Report struct {
	*Answer

	Node    string
	Service string
}

// Fields implements show.Report.
func (r *Report) Fields() []show.Field {
	return []show.Field{
		{Name: "node", Value: r.Node}, {Name: "service", Value: r.Service}, {Name: "served", Value: r.Served},
		{Name: "ports", Value: r.Ports}, {Name: "problems", Value: r.Problems}, {Name: "unjudged", Value: r.Unjudged},
	}
}

// Print implements show.Report.
func (r *Report) Print(out *show.Page) {
	if !r.Served {
		out.Title("%s serves no such port of %s", r.Node, r.Service)
	}
	for _, p := range r.Ports {
		p.Print(out)
	}
	list := func(title string, lines []string) {
		if len(lines) > 0 {
			out.Title("%s", title)
		}
		for _, l := range lines {
			out.Row(l)
		}
	}
	list("Not served:", r.Problems)
	list("Not judged:", r.Unjudged)
}

// Print prints the decision, the rules and the flows of a port.
func (p *Port) Print(out *show.Page) {
	out.Title("Decision for %s:", p.ID)
	for _, set := range []struct{ name, why string }{{"cluster set", p.Cluster}, {"local set", p.Local}} {
		if set.why != "" {
			out.Row(set.name, set.why)
		}
	}
	out.Title("")
	if len(p.Endpoints) > 0 {
		out.Row("ENDPOINT", "ON THIS NODE", "CLUSTER SET", "LOCAL SET")
	}
	in := func(set string, e string) string {
		if set == "" {
			return "not used"
		}
		return cmp.Or(e, "yes")
	}
	for _, e := range p.Endpoints {
		out.Row(e.Address, strconv.FormatBool(e.Local), in(p.Cluster, string(e.NotInCluster)), in(p.Local, string(e.NotInLocal)))
	}
	if more := p.EndpointCount - len(p.Endpoints); more > 0 {
		out.Row(fmt.Sprintf("… and %d more", more))
	}
	out.Title("Kernel, compared with the decision:")
	for _, k := range p.Packets {
		k.print(out)
	}
	out.Title("Flows in conntrack: %d to the Service, %d of them stale; %d directly to its endpoints", p.Flows.Total, p.Flows.Stale, p.Flows.Direct)
	for _, t := range p.Flows.LeadsTo {
		out.Row(show.Plural("flow", t.Count), "to "+t.Address, t.Stale)
	}
}

// print prints what happens to a packet.
func (k *Packet) print(out *show.Page) {
	mark := "agrees"
	switch {
	case k.Difference != "":
		mark = "DIFFERS"
	case k.Found == "":
		mark = "not judged"
	}
	out.Row(mark, k.Frontend+" from "+k.Source)
	wanted := k.Wanted
	if k.Why != "" {
		wanted = fmt.Sprintf("%s set, %s", k.Wanted, show.Plural("backend", k.Backends))
	}
	out.Row(" ", "decided: "+wanted+"; "+k.Because)
	if k.Why != "" {
		text := "keeps its source: "
		if k.Masquerade {
			text = "masqueraded: "
		}
		out.Row(" ", text+k.Why)
	}
	if k.Found != "" {
		out.Row(" ", "kernel: "+k.Found)
	}
	for _, r := range k.RefusedBy {
		out.Row(" ", "not by the proxy: "+r)
	}
	if k.DecidedBy != "" {
		out.Row(" ", "decided by another program: "+k.DecidedBy)
	}
	for _, text := range []string{k.Deviation, k.Difference} {
		if text != "" {
			out.Row(" ", text)
		}
	}
	if !out.Wide && k.Difference == "" {
		return
	}
	for _, o := range k.Outcomes {
		out.Row(" ", fmt.Sprintf("%.1f %% %s %s", 100*o.Probability, o.Verdict, o.Backend))
		for _, r := range o.Rules {
			out.Row(" ", "  "+r)
		}
	}
}
