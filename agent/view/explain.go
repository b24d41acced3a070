package view

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/internal/model"
)

// PortExplanation is a Service port with the reasons of what the view has decided. The code that
// decides also gives the reasons, so the two cannot disagree.
type PortExplanation struct {
	*ServicePort

	// Cluster and Local say which endpoints the sets of backends consist of, and why. Local is
	// empty if no frontend has a policy Local, and Cluster if no frontend leads to any node.
	Cluster, Local string
	// Endpoints are all endpoints of the Service port, ascending.
	Endpoints []EndpointExplanation
	// Frontends are the reasons of ServicePort.Frontends, in the same order.
	Frontends []FrontendExplanation
}

// EndpointExplanation is an endpoint and why it is in a set of backends or not. An Exclusion counts
// only if the set is used.
type EndpointExplanation struct {
	Address    netip.AddrPort
	Local      bool
	Conditions model.Conditions
	Cluster    Exclusion
	OfLocal    Exclusion
}

// FrontendExplanation is the reasons of the routes of a frontend.
type FrontendExplanation struct{ Pods, Node, Others RouteExplanation }

// RouteExplanation is why a route leads where it does and, if it leads to backends, why it is
// masqueraded or not.
type RouteExplanation struct{ Target, Masquerade Reason }

// Explain returns the ports of a Service as of the last Update with the reasons of what was
// decided, and the Service's problems. It must not be called between a Set and the next Update. A
// port that has no frontends is not among them.
func (v *View) Explain(key model.ServiceKey) (ports []PortExplanation, problems []string) {
	s := v.services[key]
	if s == nil {
		return nil, nil
	}
	for _, id := range s.ids {
		ports = append(ports, v.explain(s, v.ports[id]))
	}
	v.reader.forget()
	return ports, slices.Clone(s.problems)
}

// explain returns a port of a Service with the reasons.
func (v *View) explain(s *service, p *ServicePort) PortExplanation {
	out := PortExplanation{ServicePort: p}
	all := v.reader.read(s.slices, p.ID, netip.Addr{})
	var t tally
	v.count(&t, all, 1)
	for _, e := range all {
		out.Endpoints = append(out.Endpoints, EndpointExplanation{
			Address: e.backend().Address, Local: e.local, Conditions: e.Conditions,
			Cluster: v.excludes(t.cluster(), e), OfLocal: v.excludes(t.local(), e),
		})
	}
	cluster, local := uses(s.object, p.Frontends)
	if cluster {
		out.Cluster = v.describe(&t, t.cluster())
	}
	if local {
		out.Local = v.describe(&t, t.local())
	}
	because := func(r ruling) RouteExplanation { return RouteExplanation{r.target, r.masquerade} }
	for _, f := range p.Frontends {
		r := v.rule(p, s.object, f.Kind, t.usable())
		out.Frontends = append(out.Frontends, FrontendExplanation{because(r.pods), because(r.node), because(r.others)})
	}
	return out
}

// describe says which endpoints a criterion selects, and why it applies.
func (v *View) describe(t *tally, c choice) string {
	switch c {
	case stillServing:
		if t.stillServing == 0 {
			return "none: no endpoint is ready, and none terminates while still serving"
		}
		return "the terminating endpoints that still serve, because none is ready"
	case readyForNode:
		return "the ready endpoints that are hinted for this node"
	case readyForZone:
		return fmt.Sprintf("the ready endpoints that are hinted for this node's zone %q", v.node.zone)
	case readyLocal:
		return "the ready endpoints on this node"
	case stillServingLocal:
		if t.stillServingLocal == 0 {
			return "none: no endpoint on this node is ready, and none terminates while still serving"
		}
		return "the terminating endpoints on this node that still serve, because none there is ready"
	}
	text := "all ready endpoints"
	switch use, zone := t.hints(t.nodeHints, t.forNode), t.hints(t.zoneHints, t.forZone); {
	case use == someUnhinted:
		text += fmt.Sprintf("; hints for nodes do not count, because only %d of %d have one", t.nodeHints, t.ready)
	case use == noneForUs:
		text += "; hints for nodes do not count, because none names this node"
	case zone == someUnhinted:
		text += fmt.Sprintf("; hints for zones do not count, because only %d of %d have one", t.zoneHints, t.ready)
	case zone == noneForUs:
		text += fmt.Sprintf("; hints for zones do not count, because none names this node's zone %q", v.node.zone)
	}
	return text
}

// Recognizes reports whether a connection counts as from a pod. over is the interface through which
// it arrives; the empty string means that this node sends it.
func (d PodDetector) Recognizes(source netip.Addr, over string) bool {
	switch {
	case d.Interface != "":
		return over == d.Interface
	case d.InterfacePrefix != "":
		return strings.HasPrefix(over, d.InterfacePrefix)
	}
	return slices.ContainsFunc(d.Prefixes, func(p netip.Prefix) bool { return p.Contains(source) })
}
