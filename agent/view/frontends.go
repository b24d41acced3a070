package view

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// families gives the IP families that a Service is served in: those of its cluster IPs.
func families(s *model.Service) iter.Seq2[model.Family, netip.Addr] {
	return func(yield func(model.Family, netip.Addr) bool) {
		var seen model.Family
		for _, ip := range s.ClusterIPs {
			family := model.FamilyOf(ip)
			if family == seen {
				continue
			}
			if seen = family; !yield(family, ip) {
				return
			}
		}
	}
}

// servedPorts gives the ports of a Service; of several with one name and protocol, the first.
func servedPorts(s *model.Service) iter.Seq[*model.ServicePort] {
	return func(yield func(*model.ServicePort) bool) {
		for i := range s.Ports {
			port := &s.Ports[i]
			sameName := func(p model.ServicePort) bool { return p.Name == port.Name && p.Protocol == port.Protocol }
			if !slices.ContainsFunc(s.Ports[:i], sameName) && !yield(port) {
				return
			}
		}
	}
}

// wanted gives, without Routes and Sources, the frontends that one port of a Service asks for in a family with this cluster
// IP, in the order of ServicePort.Frontends. An address that is there as several kinds is given as each.
func wanted(s *model.Service, family model.Family, clusterIP netip.Addr, port *model.ServicePort) iter.Seq[Frontend] {
	return func(yield func(Frontend) bool) {
		if !yield(Frontend{Kind: ClusterIP, Address: clusterIP, Port: port.Port}) {
			return
		}
		for _, ip := range s.ExternalIPs {
			if model.FamilyOf(ip) == family && !yield(Frontend{Kind: ExternalIP, Address: ip, Port: port.Port}) {
				return
			}
		}
		for ip := range vips(s, family) {
			if !yield(Frontend{Kind: LoadBalancer, Address: ip, Port: port.Port}) {
				return
			}
		}
		if port.NodePort != 0 && s.Type != model.ClusterIP {
			yield(Frontend{Kind: NodePort, Port: port.NodePort})
		}
	}
}

// vips gives the load balancer's addresses of a family that nodes capture.
func vips(s *model.Service, family model.Family) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, i := range s.LoadBalancerIngress {
			if s.Type == model.LoadBalancer && !i.ProxyMode && model.FamilyOf(i.IP) == family && !yield(i.IP) {
				return
			}
		}
	}
}

// claimed gives all that a Service asks for, some of it perhaps more than once; nothing for nil.
func claimed(s *model.Service) iter.Seq[claim] {
	return func(yield func(claim) bool) {
		if s == nil {
			return
		}
		for family, ip := range families(s) {
			for port := range servedPorts(s) {
				for f := range wanted(s, family, ip, port) {
					if !yield(claim{f.Address, f.Port, port.Protocol, family}) {
						return
					}
				}
			}
		}
	}
}

// frontends gives the frontends that a port of a Service has, without Routes: those of the wanted ones that no other Service
// has, each address and port once. What is left out for another reason than that it is there already is a problem.
func (v *View) frontends(s *service, family model.Family, clusterIP netip.Addr, port *model.ServicePort) []Frontend {
	var out []Frontend
	sources := v.sources(s.claimed, family)
	for f := range wanted(s.claimed, family, clusterIP, port) {
		c := claim{f.Address, f.Port, port.Protocol, family}
		if owner := v.claims.owners[c]; owner != s {
			s.problem("%s is %s's, which is older or comes first by name", c, owner.key)
			continue
		}
		if first := firstPort(s.claimed, f, port); first != port {
			s.problem("%s is both port %q's and port %q's: it is the first one's", c, first.Name, port.Name)
			continue
		}
		if f.Kind == LoadBalancer {
			f.Sources = sources
		}
		i := slices.IndexFunc(out, func(o Frontend) bool { return o.Address == f.Address })
		switch {
		case i < 0:
			out = append(out, f)
		case out[i].Kind == ClusterIP:
			s.problem("%s is the cluster IP and nothing else", c)
		default:
			// An external IP that is the load balancer's too: it has the filter, and leads to the same.
			out = append(slices.Delete(out, i, i+1), f)
		}
	}
	return out
}

// firstPort gives the first port of a Service that asks for the same as this frontend of a port of it.
func firstPort(s *model.Service, f Frontend, port *model.ServicePort) *model.ServicePort {
	for p := range servedPorts(s) {
		if p == port {
			break
		}
		number := p.Port
		if f.Kind == NodePort {
			number = p.NodePort
		}
		if p.Protocol == port.Protocol && number == f.Port {
			return p
		}
	}
	return port
}

// sources gives who may use the load balancer's addresses of a family; nothing: all may. Where the node is among them, what
// comes from the addresses themselves is too: a node that has them on one of its interfaces uses them as the source of its own
// connections to them.
func (v *View) sources(s *model.Service, family model.Family) []netip.Prefix {
	ranges := ofFamily(s.LoadBalancerSourceRanges, family)
	if slices.ContainsFunc(ranges, isZero) {
		return nil
	}
	ofNode := func(p netip.Prefix) bool { return slices.ContainsFunc(v.node.ips, p.Contains) }
	if !slices.ContainsFunc(ranges, ofNode) {
		return ranges
	}
	for ip := range vips(s, family) {
		ranges = append(ranges, netip.PrefixFrom(ip, ip.BitLen()))
	}
	return canonical(ranges)
}

// route fills in where the frontends of a port lead.
func (v *View) route(p *ServicePort, s *model.Service, anyUsable bool) {
	to := func(t Target, masquerade bool) Route {
		switch {
		case !anyUsable:
			return Route{To: Reject}
		case t == Local && len(p.Local) == 0:
			return Route{To: Drop}
		}
		return Route{t, masquerade}
	}
	podsTold := v.node.programmed.Pods.Of(p.ID.Family)
	for i := range p.Frontends {
		f := &p.Frontends[i]
		switch {
		case f.Kind == ClusterIP:
			target := policyTarget(s.InternalTrafficPolicy)
			f.Pods = to(target, v.options.MasqueradeAll)
			f.Node = to(target, v.options.MasqueradeAll || podsTold)
			f.Others = f.Node
		case s.ExternalTrafficPolicy != model.TrafficLocal:
			// What goes to another node must come back this way.
			f.Others = to(Cluster, true)
			f.Pods, f.Node = f.Others, f.Others
		default:
			f.Others = to(Local, false)
			// As if it had gone to the load balancer and come back to any node. A connection of the node itself may have the
			// address it goes to as its source.
			f.Pods, f.Node = to(Cluster, false), to(Cluster, true)
			if !podsTold {
				f.Pods = f.Others
			}
		}
	}
}

func policyTarget(p model.TrafficPolicy) Target {
	if p == model.TrafficLocal {
		return Local
	}
	return Cluster
}

// uses tells which sets a Service's frontends lead to, if there is anything in them.
func uses(s *model.Service, frontends []Frontend) (cluster, local bool) {
	for i := range frontends {
		policy := s.ExternalTrafficPolicy
		if frontends[i].Kind == ClusterIP {
			policy = s.InternalTrafficPolicy
		}
		local = local || policy == model.TrafficLocal
		// Whatever the external policy, connections of the node itself go anywhere.
		cluster = cluster || policy != model.TrafficLocal || frontends[i].Kind != ClusterIP
	}
	return cluster, local
}
