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

// maxFrontends bounds how many ports times addresses a Service has in a family: the largest ones in use have some hundreds.
const maxFrontends = model.MaxFrontends

// servedPort is a port of a Service, and the first ports of it that have its numbers: itself, or ones before it.
type servedPort struct {
	*model.ServicePort
	sameNumber, sameNodePort *model.ServicePort
}

// servedPorts gives the ports of a Service; of several with one name and protocol, which are side by side, the first.
func servedPorts(s *model.Service) []servedPort {
	type number struct {
		number   uint16
		protocol model.Protocol
	}
	numbers, nodePorts := make(map[number]*model.ServicePort), make(map[number]*model.ServicePort)
	first := func(of map[number]*model.ServicePort, n uint16, p *model.ServicePort) *model.ServicePort {
		key := number{n, p.Protocol}
		if of[key] == nil {
			of[key] = p
		}
		return of[key]
	}
	out := make([]servedPort, 0, len(s.Ports))
	for i := range s.Ports {
		p := &s.Ports[i]
		if i > 0 && s.Ports[i-1].Name == p.Name && s.Ports[i-1].Protocol == p.Protocol {
			continue
		}
		out = append(out, servedPort{p, first(numbers, p.Port, p), first(nodePorts, p.NodePort, p)})
	}
	return out
}

// wanted is what a Service asks for in a family.
type wanted struct {
	family model.Family
	// addresses are what each port asks for beside its NodePort, as Frontends without Port, Routes and Sources, in the order of
	// ServicePort.Frontends. Each address is there once.
	addresses []Frontend
	nodePorts bool // ports may have NodePorts
	ports     []servedPort
	// again are external addresses that are the cluster IP too; left is how many there are of addresses and ports beyond
	// maxFrontends.
	again                    []netip.Addr
	leftAddresses, leftPorts int
}

// want gives what a Service asks for in a family with this cluster IP. A cost of ports times addresses is for those who go on from
// there.
func (o *Options) want(s *model.Service, family model.Family, clusterIP netip.Addr) wanted {
	w := wanted{
		family: family, addresses: []Frontend{{Kind: ClusterIP, Address: clusterIP}},
		nodePorts: s.Type != model.ClusterIP, ports: servedPorts(s),
	}
	add := func(kind FrontendKind, ip netip.Addr) {
		switch {
		case ip != clusterIP:
			w.addresses = append(w.addresses, Frontend{Kind: kind, Address: ip})
		case !slices.Contains(w.again, ip):
			w.again = append(w.again, ip)
		}
	}
	balanced := slices.Compact(slices.Collect(vips(s, family)))
	for i, ip := range s.ExternalIPs {
		// One that is the load balancer's too has its filter, and leads to the same.
		_, too := slices.BinarySearchFunc(balanced, ip, netip.Addr.Compare)
		switch {
		case model.FamilyOf(ip) != family || too || i > 0 && s.ExternalIPs[i-1] == ip || o.RefuseExternalIPs:
		default:
			add(ExternalIP, ip)
		}
	}
	for _, ip := range balanced {
		add(LoadBalancer, ip)
	}
	// Each port keeps the cluster IP, as far as that goes.
	w.leftPorts = max(len(w.ports)-maxFrontends, 0)
	w.ports = w.ports[:len(w.ports)-w.leftPorts]
	w.leftAddresses = max(len(w.addresses)-maxFrontends/max(len(w.ports), 1), 0)
	w.addresses = w.addresses[:len(w.addresses)-w.leftAddresses]
	return w
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

// claimed gives all that a Service asks for, and as what, each once; nothing for nil.
func (o *Options) claimed(s *model.Service) iter.Seq2[claim, FrontendKind] {
	return func(yield func(claim, FrontendKind) bool) {
		if s == nil {
			return
		}
		for family, ip := range families(s) {
			w := o.want(s, family, ip)
			for _, port := range w.ports {
				for f := range w.frontends(port) {
					if !yield(claim{f.Address, f.Port, port.Protocol, family}, f.Kind) {
						return
					}
				}
			}
		}
	}
}

// frontends gives those that a port asks for and no port before it does.
func (w *wanted) frontends(p servedPort) iter.Seq[Frontend] {
	return func(yield func(Frontend) bool) {
		if p.sameNumber == p.ServicePort {
			for _, f := range w.addresses {
				f.Port = p.Port
				if !yield(f) {
					return
				}
			}
		}
		if w.hasNodePort(p) && p.sameNodePort == p.ServicePort {
			yield(Frontend{Kind: NodePort, Port: p.NodePort})
		}
	}
}

func (w *wanted) hasNodePort(p servedPort) bool { return w.nodePorts && p.NodePort != 0 }

// problems tells of what is left out, whoever else wants it.
func (w *wanted) problems(s *service) {
	for _, ip := range w.again {
		s.problem("%s is the cluster IP and nothing else", ip)
	}
	if w.leftPorts > 0 || w.leftAddresses > 0 {
		s.problem("its ports times its addresses are more than %d over %s: the last %d ports and the last %d of the external addresses are left out",
			maxFrontends, w.family, w.leftPorts, w.leftAddresses)
	}
	for _, p := range w.ports {
		if p.sameNumber != p.ServicePort {
			s.problem("port %d/%s is both port %q's and port %q's: it is the first one's", p.Port, p.Protocol, p.sameNumber.Name, p.Name)
		}
		if w.hasNodePort(p) && p.sameNodePort != p.ServicePort {
			s.problem("node port %d/%s is both port %q's and port %q's: it is the first one's", p.NodePort, p.Protocol, p.sameNodePort.Name, p.Name)
		}
	}
}

// frontends gives the frontends that a port of a Service has, without Routes: those of the wanted ones that neither another
// Service has nor another port. What another Service has is a problem.
func (v *View) frontends(s *service, w *wanted, port servedPort, sources []netip.Prefix) []Frontend {
	var out []Frontend
	for f := range w.frontends(port) {
		c := claim{f.Address, f.Port, port.Protocol, w.family}
		if owner := v.claims.owners[c]; owner.service != s {
			s.problem("%s is %s", c, owner.before(claimant{s, f.Kind}))
			continue
		}
		if f.Kind == ExternalIP || f.Kind == LoadBalancer {
			if owner := v.nodePort(c); owner.service != nil && owner.service != s {
				s.problem("%s is on an address of the node itself, where it is %s's node port", c, owner.key)
				continue
			}
		}
		if f.Kind == LoadBalancer {
			f.Sources = sources
		}
		out = append(out, f)
	}
	return out
}

// nodePort gives who has the NodePort that c is too, if the node has it on that address; nobody: it is none.
func (v *View) nodePort(c claim) claimant {
	if !slices.Contains(v.node.ips, c.address) ||
		!slices.ContainsFunc(v.node.programmed.NodePorts, func(p netip.Prefix) bool { return p.Contains(c.address) }) {
		return claimant{}
	}
	c.address = netip.Addr{}
	return v.claims.owners[c]
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
		case t == Local && p.Local.Len() == 0:
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
