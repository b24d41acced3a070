package iptables

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// plan is a Service port with what its rules need for each of its frontends.
type plan struct {
	*view.ServicePort
	// ways has an element for each frontend.
	ways []wayTo
	// sets are the sets of backends that the frontends lead to.
	sets []view.Target
	// inline holds the backends whose DNAT rules are written directly into the tree, because that
	// takes no more rules than a rule that leads to a chain of backends. nil means that the Service
	// port has such a chain.
	inline []view.Backend
}

func (d *dialect) plan(port *view.ServicePort) *plan {
	p := &plan{ServicePort: port, ways: make([]wayTo, len(port.Frontends))}
	for i, f := range port.Frontends {
		p.ways[i] = d.wayOf(f)
		for _, c := range d.classes(f) {
			if c.route.To.Leads() && !slices.Contains(p.sets, c.route.To) {
				p.sets = append(p.sets, c.route.To)
			}
		}
	}
	p.inline = p.inlined()
	return p
}

// frontend is one of a Service port's frontends.
type frontend struct {
	port  *plan
	index int
}

// healthCheck is the index that stands for a Service's healthCheckNodePort, which is accepted at
// the same addresses as NodePorts.
const healthCheck = -1

func (f frontend) get() view.Frontend {
	if f.index == healthCheck {
		return view.Frontend{Kind: view.NodePort, Port: f.port.HealthCheckPort}
	}
	return f.port.Frontends[f.index]
}

func (f frontend) way() wayTo { return f.port.ways[f.index] }

// class is a part of the connections to a frontend, and their route.
type class struct {
	matches []match // any of them is enough; connections that an earlier class matches are excluded
	route   view.Route
}

// classes returns the classes of a frontend's connections, merged where neighbors have the same
// route. The last class matches everything.
func (d *dialect) classes(f view.Frontend) []class {
	all := []class{{[]match{fromNode}, f.Node}, {[]match{{}}, f.Others}}
	if len(d.pods) > 0 {
		all = slices.Insert(all, 0, class{d.pods, f.Pods})
	}
	for i := range all {
		if !all[i].route.To.Leads() {
			all[i].route.Masquerade = false // has no meaning here
		}
	}
	for len(all) > 1 && all[len(all)-2].route == all[len(all)-1].route {
		all = slices.Delete(all, len(all)-2, len(all)-1)
	}
	return all
}

// way is how the table nat treats a frontend.
type way uint8

const (
	nowhere       way = iota // no class leads to backends
	offPods                  // all lead to one set, and are masqueraded unless known to come from pods
	masqueradeAll            // all lead to one set and are masqueraded
	differing                // everything else
)

// wayTo is a frontend's way. set is the set that all of its classes lead to, or 0 if they differ.
type wayTo struct {
	way
	set view.Target
}

func (d *dialect) wayOf(f view.Frontend) wayTo {
	classes := d.classes(f)
	if !slices.ContainsFunc(classes, func(c class) bool { return c.route.To.Leads() }) {
		return wayTo{nowhere, 0}
	}
	for _, c := range classes {
		if c.route.To != classes[0].route.To {
			return wayTo{differing, 0}
		}
	}
	set := classes[0].route.To
	switch {
	case f.Node.Masquerade && f.Others.Masquerade && (f.Pods.Masquerade || len(d.pods) == 0):
		return wayTo{masqueradeAll, set}
	case f.Kind == view.NodePort:
		return wayTo{differing, set}
	case len(d.pods) > 0 && !f.Pods.Masquerade && f.Node.Masquerade && f.Others.Masquerade,
		len(d.pods) == 0 && !f.Node.Masquerade && !f.Others.Masquerade:
		return wayTo{offPods, set}
	}
	return wayTo{differing, set}
}

func (p *plan) inlined() []view.Backend {
	var backends view.Backends
	leading := 0
	for i, f := range p.Frontends {
		switch w := p.ways[i]; {
		case w.way == nowhere:
			continue
		case w.way == differing || len(f.Sources) > 0:
			return nil
		case leading == 0:
			backends = p.Backends(w.set)
		case !backends.Equal(p.Backends(w.set)):
			return nil
		}
		leading++
	}
	if p.Affinity > 0 || backends.Len() > maxPlain || leading*backends.Len() > leading+backends.Len() {
		return nil
	}
	return backends.List()
}

// natWeight returns how many rules a frontend has in its tree of nat.
func (d *dialect) natWeight(f frontend) int {
	n := max(1, len(f.port.inline))
	if d.countsLocalhost(f.get()) {
		n++
	}
	return n
}

// inOrder returns the frontends under one key, sorted.
func inOrder(frontends []frontend) []frontend {
	return slices.SortedFunc(slices.Values(frontends), func(a, b frontend) int {
		return cmp.Or(
			cmp.Compare(a.port.ID.Protocol, b.port.ID.Protocol),
			cmp.Compare(a.get().Port, b.get().Port),
			cmp.Compare(a.port.ID.String(), b.port.ID.String()))
	})
}

// comment returns the comment that names a frontend to those who read the rules. Characters that
// iptables could misread are replaced.
func comment(f frontend) string {
	text := strings.Map(func(r rune) rune {
		if r > ' ' && r < 0x7f && r != '"' && r != '\\' && r != '\'' {
			return r
		}
		return '_'
	}, f.port.ID.String())
	kind := f.get().Kind.String()
	if f.index == healthCheck {
		kind = "healthCheckNodePort"
	}
	return fmt.Sprintf("-m comment --comment \"%.230s %s\"", text, kind)
}

func (d *dialect) natRules(w *bytes.Buffer, chain string, frontends []frontend) {
	for _, f := range inOrder(frontends) {
		m := d.frontend(f.port.ID.Protocol, f.get())
		if d.countsLocalhost(f.get()) {
			local := m.and(match{destination: "-d " + d.loopback, more: counted(localhostCounter)})
			w.WriteString(local.rule(chain, comment(f)))
		}
		if f.port.inline != nil {
			destinations(w, chain, m, comment(f), f.port.ServicePort, f.port.inline)
			continue
		}
		w.WriteString(m.rule(chain, comment(f), "-j "+firstChain(f)))
	}
}

// firstChain returns the chain of a Service port that a frontend's rule in nat leads to.
func firstChain(f frontend) string {
	if len(f.get().Sources) > 0 {
		return sourcesChain(f)
	}
	return routedChain(f)
}

// routedChain returns the chain that comes after the filter by sources.
func routedChain(f frontend) string {
	if w := f.way(); w.way != differing {
		return setChain(f.port.ID, w.set)
	}
	g := f.get()
	return routesChainPrefix + digest(fmt.Sprint(f.port.ID, "/", g.Pods, g.Node, g.Others))
}

// sourcesChain returns the name of the chain, in nat and in filter, that matches a frontend's
// sources. Frontends of a Service port that differ only in their address share it.
func sourcesChain(f frontend) string {
	g := f.get()
	return sourcesChainPrefix + digest(fmt.Sprint(f.port.ID, "/", g.Sources, g.Pods, g.Node, g.Others))
}

// frontendChains returns the chains of a Service port between its frontends and its backends, in
// nat and in filter.
func (d *dialect) frontendChains(port *plan) []portChain {
	var chains []portChain
	for i, g := range port.Frontends {
		f := frontend{port, i}
		if f.way().way == differing {
			name := routedChain(f)
			chains = append(chains, portChain{nat, name, func(w *bytes.Buffer) { d.routes(w, name, f) }})
		}
		if len(g.Sources) == 0 {
			continue
		}
		name := sourcesChain(f)
		if f.way().way != nowhere {
			chains = append(chains, portChain{nat, name, func(w *bytes.Buffer) {
				for _, p := range g.Sources {
					// Other packets are not translated, and reach filter with the Service's address.
					w.WriteString(from(p).rule(name, "-g "+routedChain(f)))
				}
			}})
		}
		if d.refuses(g) {
			chains = append(chains, portChain{filter, name, func(w *bytes.Buffer) {
				for _, p := range g.Sources {
					w.WriteString(from(p).rule(name, "-j RETURN"))
				}
				w.WriteString(match{}.rule(name, "-j DROP"))
			}})
		}
	}
	return chains
}

// routes writes the rules that set or clear the mark for each class and lead it to its set. The
// mark of a packet that reaches the chain may be set or not.
func (d *dialect) routes(w *bytes.Buffer, chain string, f frontend) {
	classes := d.classes(f.get())
	last := classes[len(classes)-1].route
	w.WriteString(match{}.rule(chain, d.mark(last.Masquerade)))
	for i, c := range classes {
		for _, m := range c.matches {
			if c.route.To.Leads() && c.route.Masquerade != last.Masquerade {
				w.WriteString(m.rule(chain, d.mark(c.route.Masquerade)))
			}
			switch {
			case c.route.To.Leads():
				w.WriteString(m.rule(chain, "-g "+setChain(f.port.ID, c.route.To)))
			case i < len(classes)-1:
				w.WriteString(m.rule(chain, "-j RETURN"))
			}
		}
	}
}

// refuses reports whether a class of a frontend is rejected.
func (d *dialect) refuses(f view.Frontend) bool {
	return slices.ContainsFunc(d.classes(f), func(c class) bool { return c.route.To == view.Reject })
}

// filtered reports whether a frontend has rules in filter.
func (d *dialect) filtered(f view.Frontend) bool {
	return len(f.Sources) > 0 || slices.ContainsFunc(d.classes(f), func(c class) bool { return !c.route.To.Leads() })
}

// filterRules writes the rules under a key of a tree of filter. Packets that nat has translated do
// not reach them.
func (d *dialect) filterRules(w *bytes.Buffer, chain string, frontends []frontend) {
	for _, f := range inOrder(frontends) {
		g := f.get()
		if f.index == healthCheck {
			w.WriteString(d.frontend(model.TCP, g).rule(chain, comment(f), "-j ACCEPT"))
			continue
		}
		m := d.frontend(f.port.ID.Protocol, g)
		if len(g.Sources) > 0 {
			if !d.refuses(g) {
				w.WriteString(m.rule(chain, comment(f), "-j DROP"))
				continue
			}
			w.WriteString(m.rule(chain, comment(f), "-j "+sourcesChain(f)))
		}
		classes := slices.DeleteFunc(d.classes(g), func(c class) bool { return c.route.To.Leads() })
		if !slices.ContainsFunc(classes, func(c class) bool { return c.route != classes[0].route }) {
			classes = classes[:min(1, len(classes))]
			for i := range classes {
				classes[i].matches = []match{{}}
			}
		}
		for _, c := range classes {
			target := "-j DROP"
			if c.route.To == view.Reject {
				target = d.rejectWith(f.port.ID.Protocol)
			}
			for _, cm := range c.matches {
				w.WriteString(m.and(cm).rule(chain, comment(f), target))
			}
		}
	}
}
