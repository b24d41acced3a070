package iptables

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/agent/view"
)

// frontend is one of a Service port's frontends.
type frontend struct {
	port  *view.ServicePort
	index int
}

func (f frontend) get() view.Frontend { return f.port.Frontends[f.index] }

// class is some of what comes to a frontend, and its route.
type class struct {
	matches []match // one or another; what former classes match is out
	route   view.Route
}

// classes gives the classes whose routes differ. The last matches everything.
func (d *dialect) classes(f view.Frontend) []class {
	all := []class{{[]match{fromNode}, f.Node}, {[]match{{}}, f.Others}}
	if len(d.pods) > 0 {
		all = slices.Insert(all, 0, class{d.pods, f.Pods})
	}
	for i := range all {
		if !leads(all[i].route.To) {
			all[i].route.Masquerade = false // means nothing
		}
	}
	for len(all) > 1 && all[len(all)-2].route == all[len(all)-1].route {
		all = slices.Delete(all, len(all)-2, len(all)-1)
	}
	return all
}

// leads tells whether a target is a set of backends.
func leads(t view.Target) bool { return t == view.Cluster || t == view.Local }

// way is how the table nat sees a frontend.
type way uint8

const (
	nowhere       way = iota // none of its classes leads to backends
	offPods                  // all lead to one set, and are masqueraded unless they come from pods, as far as these can be told
	masqueradeAll            // all lead to one set, and are masqueraded
	differing                // the rest
)

// wayOf gives a frontend's way, and the set that all its classes lead to, unless these differ.
func (d *dialect) wayOf(f view.Frontend) (way, view.Target) {
	classes := d.classes(f)
	if !slices.ContainsFunc(classes, func(c class) bool { return leads(c.route.To) }) {
		return nowhere, 0
	}
	for _, c := range classes {
		if c.route.To != classes[0].route.To {
			return differing, 0
		}
	}
	set := classes[0].route.To
	switch {
	case f.Node.Masquerade && f.Others.Masquerade && (f.Pods.Masquerade || len(d.pods) == 0):
		return masqueradeAll, set
	case f.Kind == view.NodePort:
		return differing, set
	case len(d.pods) > 0 && !f.Pods.Masquerade && f.Node.Masquerade && f.Others.Masquerade,
		len(d.pods) == 0 && !f.Node.Masquerade && !f.Others.Masquerade:
		return offPods, set
	}
	return differing, set
}

// inline gives the backends of a Service port whose DNAT rules stand where others have a rule that leads to a chain of
// backends, since that takes no more rules; nil: it is none of these.
func (d *dialect) inline(port *view.ServicePort) []view.Backend {
	var backends []view.Backend
	leading := 0
	for _, f := range port.Frontends {
		switch way, set := d.wayOf(f); {
		case way == nowhere:
			continue
		case way == differing || len(f.Sources) > 0:
			return nil
		case leading == 0:
			backends = backendsOf(port, set)
		case !slices.Equal(backends, backendsOf(port, set)):
			return nil
		}
		leading++
	}
	if port.Affinity > 0 || len(backends) > maxPlain || leading*len(backends) > leading+len(backends) {
		return nil
	}
	return backends
}

// natWeight tells how many rules a frontend has in its tree of nat.
func (d *dialect) natWeight(f frontend) int { return max(1, len(d.inline(f.port))) }

// filterWeight tells the same of filter: few, and seldom more than one.
func filterWeight(frontend) int { return 1 }

// inOrder sorts the frontends under one key.
func inOrder(frontends []frontend) []frontend {
	return slices.SortedFunc(slices.Values(frontends), func(a, b frontend) int {
		return cmp.Or(
			cmp.Compare(a.port.ID.Protocol, b.port.ID.Protocol),
			cmp.Compare(a.get().Port, b.get().Port),
			cmp.Compare(a.port.ID.String(), b.port.ID.String()))
	})
}

// comment names a frontend for those who read the rules. Names from a cluster are harmless as they are.
func comment(f frontend) string {
	text := strings.Map(func(r rune) rune {
		if r > ' ' && r < 0x7f && r != '"' && r != '\\' && r != '\'' {
			return r
		}
		return '_'
	}, f.port.ID.String())
	return fmt.Sprintf("-m comment --comment \"%.230s %v\"", text, f.get().Kind)
}

// natRules writes the rules under a key of a tree of nat.
func (d *dialect) natRules(w *bytes.Buffer, chain string, frontends []frontend) {
	for _, f := range inOrder(frontends) {
		m := d.frontend(f.port.ID.Protocol, f.get())
		if backends := d.inline(f.port); backends != nil {
			destinations(w, chain, m, comment(f), f.port, backends)
			continue
		}
		w.WriteString(m.rule(chain, comment(f), "-j "+d.firstChain(f)))
	}
}

// firstChain gives the chain of a Service port that a frontend's rule in nat leads to.
func (d *dialect) firstChain(f frontend) string {
	if len(f.get().Sources) > 0 {
		return sourcesChain(f)
	}
	return d.routedChain(f)
}

// routedChain is the next after Sources.
func (d *dialect) routedChain(f frontend) string {
	if way, set := d.wayOf(f.get()); way != differing {
		return setChain(f.port.ID, set)
	}
	g := f.get()
	return routesChainPrefix + digest(fmt.Sprint(f.port.ID, "/", g.Pods, g.Node, g.Others))
}

// sourcesChain names the chain, in nat and in filter, where a frontend's Sources are told from others. Frontends of a
// Service port that are the same but for their address share it.
func sourcesChain(f frontend) string {
	g := f.get()
	return sourcesChainPrefix + digest(fmt.Sprint(f.port.ID, "/", g.Sources, g.Pods, g.Node, g.Others))
}

// frontendChains gives the chains of a Service port between its frontends and its backends, in nat and in filter.
func (d *dialect) frontendChains(port *view.ServicePort) []portChain {
	var chains []portChain
	for i, g := range port.Frontends {
		f := frontend{port, i}
		way, _ := d.wayOf(g)
		if way == differing {
			name := d.routedChain(f)
			chains = append(chains, portChain{nat, name, func(w *bytes.Buffer) { d.routes(w, name, f) }})
		}
		if len(g.Sources) == 0 {
			continue
		}
		name := sourcesChain(f)
		if way != nowhere {
			chains = append(chains, portChain{nat, name, func(w *bytes.Buffer) {
				for _, p := range g.Sources { // others are not translated, and come to filter as they are
					w.WriteString(from(p).rule(name, "-g "+d.routedChain(f)))
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

// routes writes the rules that lead each class to its set, marked as it is to be. Before them the mark may be set or not.
func (d *dialect) routes(w *bytes.Buffer, chain string, f frontend) {
	classes := d.classes(f.get())
	last := classes[len(classes)-1].route
	w.WriteString(match{}.rule(chain, d.mark(last.Masquerade)))
	for i, c := range classes {
		for _, m := range c.matches {
			if leads(c.route.To) && c.route.Masquerade != last.Masquerade {
				w.WriteString(m.rule(chain, d.mark(c.route.Masquerade)))
			}
			switch {
			case leads(c.route.To):
				w.WriteString(m.rule(chain, "-g "+setChain(f.port.ID, c.route.To)))
			case i < len(classes)-1:
				w.WriteString(m.rule(chain, "-j RETURN"))
			}
		}
	}
}

// refuses tells whether a class of a frontend is rejected.
func (d *dialect) refuses(f view.Frontend) bool {
	return slices.ContainsFunc(d.classes(f), func(c class) bool { return c.route.To == view.Reject })
}

// filtered tells whether a frontend has rules in filter.
func (d *dialect) filtered(f view.Frontend) bool {
	return len(f.Sources) > 0 || slices.ContainsFunc(d.classes(f), func(c class) bool { return !leads(c.route.To) })
}

// filterRules writes the rules under a key of a tree of filter. What nat has translated does not come by.
func (d *dialect) filterRules(w *bytes.Buffer, chain string, frontends []frontend) {
	for _, f := range inOrder(frontends) {
		g := f.get()
		m := d.frontend(f.port.ID.Protocol, g)
		if len(g.Sources) > 0 {
			if !d.refuses(g) {
				w.WriteString(m.rule(chain, comment(f), "-j DROP"))
				continue
			}
			w.WriteString(m.rule(chain, comment(f), "-j "+sourcesChain(f)))
		}
		classes := slices.DeleteFunc(d.classes(g), func(c class) bool { return leads(c.route.To) })
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
