// The oracle determines what happens to one connection, by looking through all objects each time.
// It states kube-proxy's semantics as plainly as possible, for one question at a time. The view
// computes sets, routes and frontends for all connections instead.
package view_test

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// world contains all objects that exist.
type world struct {
	options view.Options
	// node is the last Node that the world has seen.
	node     *model.Node
	services map[model.ServiceKey]*model.Service
	slices   []*model.Slice
}

// see sets the Node. nil means that the Node was deleted, which changes nothing.
func (w *world) see(n *model.Node) {
	if n != nil {
		w.node = n
	}
}

// addresses returns the Node's addresses.
func (w *world) addresses() []netip.Addr {
	if w.node == nil {
		return nil
	}
	return w.node.Addresses
}

// origin is where a connection comes from.
type origin int

const (
	fromPod  origin = iota // as the options recognize pods
	fromNode               // from this node itself
	fromElsewhere
)

var origins = []origin{fromPod, fromNode, fromElsewhere}

// connection is a new connection to an address, or to a NodePort on one of the node's addresses.
type connection struct {
	from     origin
	source   netip.Addr
	to       netip.Addr // not set for a NodePort
	port     uint16
	protocol model.Protocol
	family   model.Family
}

// fate is what happens to a connection: it gets a verdict, or else goes to one of the endpoints.
type fate struct {
	verdict    string   // "untouched", "reject" or "drop"; empty if there are endpoints
	endpoints  []string // "address:port", with a star if on this node, ascending
	masquerade bool
	affinity   uint32
	scheduler  string
}

func (f fate) equal(o fate) bool {
	return f.verdict == o.verdict && slices.Equal(f.endpoints, o.endpoints) && f.masquerade == o.masquerade && f.affinity == o.affinity && f.scheduler == o.scheduler
}

// fate returns what happens to a connection.
func (w *world) fate(c connection) fate {
	s, port, kind := w.whose(c)
	if s == nil {
		return fate{verdict: "untouched"}
	}
	if kind == view.LoadBalancer && !w.admitted(s, c) {
		return fate{verdict: "drop"}
	}
	all := w.endpointsOf(s, port, c.family)
	usable := filter(all, ready)
	if len(usable) == 0 {
		usable = filter(all, stillServing)
	}
	if len(usable) == 0 && len(filter(all, stillServing)) == 0 {
		return fate{verdict: "reject"} // the whole cluster has no endpoint
	}

	podsTold := w.podsTold(c.family)
	var chosen []heldEndpoint
	masquerade := false
	if kind == view.ClusterIP {
		chosen = w.clusterWide(all)
		if s.InternalTrafficPolicy == model.TrafficLocal {
			chosen = w.onThisNode(all)
		}
		masquerade = podsTold && c.from != fromPod || w.options.MasqueradeAll
	} else {
		switch {
		case s.ExternalTrafficPolicy != model.TrafficLocal:
			chosen, masquerade = w.clusterWide(all), true
		case c.from == fromPod && podsTold:
			chosen = w.clusterWide(all)
		case c.from == fromNode:
			chosen, masquerade = w.clusterWide(all), true
		default:
			chosen = w.onThisNode(all)
		}
	}
	if len(chosen) == 0 {
		return fate{verdict: "drop"} // the cluster has endpoints, but this node has none
	}
	out := fate{masquerade: masquerade, affinity: s.ClientIPAffinitySeconds}
	if slices.Contains(w.options.Schedulers, s.IPVSScheduler) {
		out.scheduler = s.IPVSScheduler
	}
	for _, e := range chosen {
		out.endpoints = append(out.endpoints, e.text())
	}
	slices.Sort(out.endpoints)
	return out
}

// whose returns the Service, the port and the kind of address that a connection is for. The Service
// is nil if the connection is for none.
func (w *world) whose(c connection) (*model.Service, model.ServicePort, view.FrontendKind) {
	var candidates []*model.Service
	for _, s := range w.services {
		if _, kind, ok := w.wants(s, c); ok && !w.isNodePort(s, kind, c) {
			candidates = append(candidates, s)
		}
	}
	if len(candidates) == 0 {
		return nil, model.ServicePort{}, 0
	}
	rank := func(s *model.Service) int {
		_, kind, _ := w.wants(s, c)
		return slices.Index([]view.FrontendKind{view.NodePort, view.ClusterIP, view.LoadBalancer, view.ExternalIP}, kind)
	}
	first := slices.MinFunc(candidates, func(a, b *model.Service) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.CreationTimeSeconds, b.CreationTimeSeconds), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	port, kind, _ := w.wants(first, c)
	return first, port, kind
}

// isNodePort reports whether a connection to an external address of s belongs to another Service,
// because it is to that Service's NodePort on the node itself.
func (w *world) isNodePort(s *model.Service, kind view.FrontendKind, c connection) bool {
	if kind != view.ExternalIP && kind != view.LoadBalancer || !slices.Contains(w.addresses(), c.to) {
		return false
	}
	primary := slices.IndexFunc(w.addresses(), func(a netip.Addr) bool { return model.FamilyOf(a) == c.family })
	if w.options.LocalhostNodePorts == nil && w.addresses()[primary] != c.to {
		return false
	}
	c.to = netip.Addr{}
	owner, _, _ := w.whose(c)
	return owner != nil && owner != s
}

// wants reports whether a Service asks for the address that a connection goes to, for which port,
// and as which kind.
func (w *world) wants(s *model.Service, c connection) (port model.ServicePort, kind view.FrontendKind, ok bool) {
	i := slices.IndexFunc(s.ClusterIPs, func(a netip.Addr) bool { return model.FamilyOf(a) == c.family })
	if i < 0 {
		return port, 0, false // not served in this family
	}
	clusterIP := s.ClusterIPs[i]
	for i, port := range s.Ports {
		sameName := func(p model.ServicePort) bool { return p.Name == port.Name && p.Protocol == port.Protocol }
		if slices.ContainsFunc(s.Ports[:i], sameName) {
			continue // only the first port with a name and protocol exists
		}
		if port.Protocol != c.protocol {
			continue
		}
		if !c.to.IsValid() {
			if s.Type != model.ClusterIP && port.NodePort == c.port && c.port != 0 {
				return port, view.NodePort, true
			}
			continue
		}
		if port.Port != c.port {
			continue
		}
		if c.to == clusterIP {
			return port, view.ClusterIP, true
		}
		for _, ingress := range s.LoadBalancerIngress {
			if s.Type == model.LoadBalancer && ingress.IP == c.to && !ingress.ProxyMode {
				return port, view.LoadBalancer, true
			}
		}
		if slices.Contains(s.ExternalIPs, c.to) && !w.options.RefuseExternalIPs {
			return port, view.ExternalIP, true
		}
	}
	return port, 0, false
}

// admitted reports whether the source ranges admit a connection to a load balancer's address.
func (w *world) admitted(s *model.Service, c connection) bool {
	var of []netip.Prefix
	for _, r := range s.LoadBalancerSourceRanges {
		if r.Addr().Is4() == (c.family == model.IPv4) {
			of = append(of, r)
		}
	}
	if len(of) == 0 {
		return true
	}
	nodeAdmitted := false
	for _, r := range of {
		if r.Bits() == 0 || r.Contains(c.source) {
			return true
		}
		for _, ip := range w.addresses() {
			nodeAdmitted = nodeAdmitted || r.Contains(ip)
		}
	}
	// The node may use one of the load balancer's addresses as its source.
	for _, ingress := range s.LoadBalancerIngress {
		if nodeAdmitted && ingress.IP == c.source && !ingress.ProxyMode {
			return true
		}
	}
	return false
}

func (w *world) podsTold(family model.Family) bool {
	told := w.options.ClusterCIDRs
	switch w.options.DetectLocal {
	case view.ByBridgeInterface, view.ByInterfaceNamePrefix:
		return true
	case view.ByNodeCIDR:
		told = nil
		if w.node != nil {
			told = w.node.PodCIDRs
		}
	}
	for _, p := range told {
		if p.Addr().Is4() == (family == model.IPv4) {
			return true
		}
	}
	return false
}

// heldEndpoint is an endpoint of one Service port.
type heldEndpoint struct {
	model.Endpoint
	port  uint16
	local bool
}

func (e heldEndpoint) text() string {
	text := netip.AddrPortFrom(e.Address, e.port).String()
	if e.local {
		text += "*"
	}
	return text
}

func ready(e heldEndpoint) bool          { return e.Conditions.Ready }
func notTerminating(e heldEndpoint) bool { return !e.Conditions.Terminating }
func isServing(e heldEndpoint) bool      { return e.Conditions.Serving }
func isLocal(e heldEndpoint) bool        { return e.local }
func stillServing(e heldEndpoint) bool   { return e.Conditions.Serving && e.Conditions.Terminating }

func filter(list []heldEndpoint, f func(heldEndpoint) bool) []heldEndpoint {
	var out []heldEndpoint
	for _, e := range list {
		if f(e) {
			out = append(out, e)
		}
	}
	return out
}

// endpointsOf returns one copy of each endpoint that a port of a Service has in a family.
func (w *world) endpointsOf(s *model.Service, port model.ServicePort, family model.Family) []heldEndpoint {
	copies := map[netip.AddrPort][]heldEndpoint{}
	sorted := slices.SortedFunc(slices.Values(w.slices), func(a, b *model.Slice) int { return cmp.Compare(a.Name, b.Name) })
	for _, slice := range sorted {
		if slice.Namespace != s.Namespace || slice.Service != s.Name || slice.Family != family {
			continue
		}
		for _, p := range slice.Ports {
			if p.Name != port.Name || p.Protocol != port.Protocol || p.Port == 0 {
				continue
			}
			for _, e := range slice.Endpoints {
				address := netip.AddrPortFrom(e.Address, p.Port)
				copies[address] = append(copies[address], heldEndpoint{e, p.Port, w.options.NodeName != "" && e.NodeName == w.options.NodeName})
			}
		}
	}
	var out []heldEndpoint
	for _, list := range copies {
		for _, better := range []func(heldEndpoint) bool{notTerminating, ready, isServing, isLocal} {
			if some := filter(list, better); len(some) > 0 {
				list = some
			}
		}
		out = append(out, list[0])
	}
	return out
}

// clusterWide returns the endpoints of connections that may go to any node.
func (w *world) clusterWide(all []heldEndpoint) []heldEndpoint {
	readyOnes := filter(all, ready)
	if len(readyOnes) == 0 {
		return filter(all, stillServing)
	}
	zone := ""
	if w.node != nil {
		zone = w.node.Labels["topology.kubernetes.io/zone"]
	}
	for _, kind := range []struct {
		hints func(heldEndpoint) []string
		mine  string
	}{
		{func(e heldEndpoint) []string { return e.NodeHints }, w.options.NodeName},
		{func(e heldEndpoint) []string { return e.ZoneHints }, zone},
	} {
		hinted := filter(readyOnes, func(e heldEndpoint) bool { return len(kind.hints(e)) > 0 })
		mine := filter(readyOnes, func(e heldEndpoint) bool { return slices.Contains(kind.hints(e), kind.mine) })
		if len(hinted) == len(readyOnes) && len(mine) > 0 {
			return mine
		}
	}
	return readyOnes
}

// onThisNode returns the endpoints of connections that stay on this node.
func (w *world) onThisNode(all []heldEndpoint) []heldEndpoint {
	here := filter(all, isLocal)
	if readyOnes := filter(here, ready); len(readyOnes) > 0 {
		return readyOnes
	}
	return filter(here, stillServing)
}

// observed returns what happens to a connection according to the view's state.
func observed(state view.State, c connection) fate {
	for id, p := range state.Ports {
		if id.Protocol != c.protocol || id.Family != c.family {
			continue
		}
		for _, f := range p.Frontends {
			if f.Address != c.to || f.Port != c.port {
				continue
			}
			if len(f.Sources) > 0 && !slices.ContainsFunc(f.Sources, func(s netip.Prefix) bool { return s.Contains(c.source) }) {
				return fate{verdict: "drop"}
			}
			route := map[origin]view.Route{fromPod: f.Pods, fromNode: f.Node, fromElsewhere: f.Others}[c.from]
			set := map[view.Target]view.Backends{view.Cluster: p.Cluster, view.Local: p.Local}[route.To]
			out := fate{masquerade: route.Masquerade}
			if route.To == view.Reject || route.To == view.Drop {
				out.verdict = route.To.String()
				return out
			}
			out.affinity, out.scheduler = uint32(p.Affinity.Seconds()), p.Scheduler
			for b := range set.All() {
				text := b.Address.String()
				if b.Local {
					text += "*"
				}
				out.endpoints = append(out.endpoints, text)
			}
			slices.Sort(out.endpoints)
			return out
		}
	}
	return fate{verdict: "untouched"}
}

// localEndpoints returns the number of endpoints that a Service's health check in a family counts.
func (w *world) localEndpoints(s *model.Service, family model.Family) int {
	counted := map[netip.Addr]bool{}
	for _, slice := range w.slices {
		for _, p := range slice.Ports {
			port := model.ServicePort{Name: p.Name, Protocol: p.Protocol}
			for _, e := range w.endpointsOf(s, port, family) {
				if ready(e) && e.local {
					counted[e.Address] = true
				}
			}
		}
	}
	return len(counted)
}
