package view

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// families returns the IP families in which a Service is served, with the cluster IP of each. They
// are the families of its cluster IPs.
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

// maxFrontends bounds the number of ports times addresses that a Service has in a family. The
// largest Services in use have some hundreds.
const maxFrontends = model.MaxFrontends

// servedPort is a port of a Service. sameNumber and sameNodePort are the first ports of the Service
// with the same number and with the same NodePort, which may be the port itself.
type servedPort struct {
	*model.ServicePort
	sameNumber, sameNodePort *model.ServicePort
}

// servedPorts returns the ports of a Service. If several have the same name and protocol, which
// makes them neighbors, it returns only the first.
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

// wanted is what a Service asks for in one IP family.
type wanted struct {
	family model.Family
	// addresses are what each port asks for besides its NodePort, in the order of
	// ServicePort.Frontends. They are Frontends without Port, Sources and Routes. No address appears
	// twice.
	addresses []Frontend
	nodePorts bool // whether the Service's ports may have NodePorts
	ports     []servedPort
	// again contains the external addresses that equal the cluster IP. leftAddresses and leftPorts are
	// the numbers of addresses and ports left out because of maxFrontends.
	again                    []netip.Addr
	leftAddresses, leftPorts int
}

// want returns what a Service asks for in a family with this cluster IP. Its cost is that of ports
// plus addresses; only callers that combine the two pay for the product.
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
		// An external IP that is also a load balancer's address is covered by the latter, which has the
		// source ranges and leads to the same backends.
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
	// Addresses are left out before ports, so that as many ports as possible keep the cluster IP.
	w.leftPorts = max(len(w.ports)-maxFrontends, 0)
	w.ports = w.ports[:len(w.ports)-w.leftPorts]
	w.leftAddresses = max(len(w.addresses)-maxFrontends/max(len(w.ports), 1), 0)
	w.addresses = w.addresses[:len(w.addresses)-w.leftAddresses]
	return w
}

// vips returns the load balancer's addresses of a family whose traffic nodes capture.
func vips(s *model.Service, family model.Family) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, i := range s.LoadBalancerIngress {
			if s.Type == model.LoadBalancer && !i.ProxyMode && model.FamilyOf(i.IP) == family && !yield(i.IP) {
				return
			}
		}
	}
}

// claimed returns everything that a Service claims, each claim once, with the kind of its frontend.
// A nil Service claims nothing.
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

// frontends returns the frontends that a port asks for, without those that an earlier port of the
// Service asks for.
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

// recordProblems records what is left out of a Service, no matter which other Services exist.
func (w *wanted) recordProblems(s *service) {
	for _, ip := range w.again {
		s.problem("%s is the Service's cluster IP: it is not served as another address", ip)
	}
	if w.leftPorts > 0 || w.leftAddresses > 0 {
		s.problem("more than %d pairs of port and address over %s: the last %d ports and the last %d external "+
			"addresses are not served",
			maxFrontends, w.family, w.leftPorts, w.leftAddresses)
	}
	for _, p := range w.ports {
		if p.sameNumber != p.ServicePort {
			s.problem("ports %q and %q both have the number %d/%s: only the first is served",
				p.sameNumber.Name, p.Name, p.Port, p.Protocol)
		}
		if w.hasNodePort(p) && p.sameNodePort != p.ServicePort {
			s.problem("ports %q and %q both have the node port %d/%s: it leads to the first",
				p.sameNodePort.Name, p.Name, p.NodePort, p.Protocol)
		}
	}
}

// frontends returns the frontends of a port of a Service, without their routes. It leaves out those
// that an earlier port or another Service has. It records a problem for each that another Service
// has.
func (v *View) frontends(s *service, w *wanted, port servedPort, sources []netip.Prefix) []Frontend {
	var out []Frontend
	for f := range w.frontends(port) {
		c := claim{f.Address, f.Port, port.Protocol, w.family}
		if owner := v.claims.owners[c]; owner.service != s {
			loser := claimant{s, f.Kind}
			s.problem("%s %s", c, v.claims.ahead(c, loser).first(loser))
			continue
		}
		if f.Kind == ExternalIP || f.Kind == LoadBalancer {
			if owner := v.nodePort(c); owner.service != nil && owner.service != s {
				s.problem("%s is on an address of the node, where it is the node port of Service %s", c, owner.key)
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

// nodePort returns the owner of the NodePort with c's port, if the node has NodePorts on c's
// address. Otherwise, or if nobody owns that NodePort, it returns the zero claimant.
func (v *View) nodePort(c claim) claimant {
	if !slices.Contains(v.node.ips, c.address) ||
		!slices.ContainsFunc(v.node.programmed.NodePorts, func(p netip.Prefix) bool { return p.Contains(c.address) }) {
		return claimant{}
	}
	c.address = netip.Addr{}
	return v.claims.owners[c]
}

// sources returns the sources that may use the load balancer's addresses of a family; nil means
// that all may. If the node is among them, so are the load balancer's addresses themselves. A node
// that has these on one of its interfaces uses them as the source of its own connections to them.
func (v *View) sources(s *model.Service, family model.Family) []netip.Prefix {
	ranges := ofFamily(s.LoadBalancerSourceRanges, family)
	if slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Bits() == 0 }) {
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

// setRoutes sets the routes of a port's frontends.
func (v *View) setRoutes(p *ServicePort, s *model.Service, anyUsable bool) {
	for i := range p.Frontends {
		f := &p.Frontends[i]
		r := v.rule(p, s, f.Kind, anyUsable)
		f.Pods, f.Node, f.Others = r.pods.Route, r.node.Route, r.others.Route
	}
}

// Reason is why a route leads where it does, or why it is masqueraded.
type Reason string

// These are the reasons for targets.
const (
	NoEndpoint         Reason = "no endpoint is ready, and none terminates while still serving"
	NoLocalEndpoint    Reason = "the policy is Local, and no endpoint on this node is ready or still serves"
	InternalCluster    Reason = "internalTrafficPolicy is Cluster"
	InternalLocal      Reason = "internalTrafficPolicy is Local"
	ExternalCluster    Reason = "externalTrafficPolicy is Cluster"
	ExternalLocal      Reason = "externalTrafficPolicy is Local"
	ExternalLocalInner Reason = "externalTrafficPolicy is Local, which does not bind connections of pods and of the node"
)

// These are the reasons for masquerading and for not masquerading.
const (
	MasqueradesAll     Reason = "--masquerade-all is set"
	MasqueradesOthers  Reason = "the source is no pod, so replies must come back through this node"
	MasqueradesForward Reason = "the backend may be on another node, so replies must come back through this node"
	MasqueradesNode    Reason = "the source may be the address that the connection goes to"
	KeepsPodSource     Reason = "backends answer pods directly"
	KeepsUnknownSource Reason = "pods are not told from other sources, so no source of cluster IPs is masqueraded"
	KeepsClientSource  Reason = "externalTrafficPolicy Local keeps the client's address"
)

// ruling is a route with its reasons. They are constants, so that a ruling costs no allocation.
type ruling struct {
	Route
	target, masquerade Reason
}

// rulings are the rulings of a frontend, one for each of its routes.
type rulings struct{ pods, node, others ruling }

// rule returns the rulings of a frontend of a kind.
func (v *View) rule(p *ServicePort, s *model.Service, kind FrontendKind, anyUsable bool) rulings {
	to := func(t Target, because Reason, masquerade bool, why Reason) ruling {
		switch {
		case !anyUsable:
			return ruling{Route{To: Reject}, NoEndpoint, ""}
		case t == Local && p.Local.Len() == 0:
			return ruling{Route{To: Drop}, NoLocalEndpoint, ""}
		}
		return ruling{Route{t, masquerade}, because, why}
	}
	podsTold := v.node.programmed.Pods.Of(p.ID.Family)
	switch {
	case kind == ClusterIP:
		target, because := Cluster, InternalCluster
		if s.InternalTrafficPolicy == model.TrafficLocal {
			target, because = Local, InternalLocal
		}
		pods, others := KeepsPodSource, MasqueradesOthers
		switch {
		case v.options.MasqueradeAll:
			pods, others = MasqueradesAll, MasqueradesAll
		case !podsTold:
			pods, others = KeepsUnknownSource, KeepsUnknownSource
		}
		r := to(target, because, v.options.MasqueradeAll || podsTold, others)
		return rulings{pods: to(target, because, v.options.MasqueradeAll, pods), node: r, others: r}
	case s.ExternalTrafficPolicy != model.TrafficLocal:
		// A connection may go to another node, and its replies must come back through this one.
		r := to(Cluster, ExternalCluster, true, MasqueradesForward)
		return rulings{r, r, r}
	}
	others := to(Local, ExternalLocal, false, KeepsClientSource)
	if !podsTold {
		// Pods and other sources cannot be told apart.
		return rulings{others, to(Cluster, ExternalLocalInner, true, MasqueradesNode), others}
	}
	// Connections of this node behave as if they had gone to the load balancer and come back to any
	// node. They need masquerading, because their source may be the address that they go to.
	return rulings{
		to(Cluster, ExternalLocalInner, false, KeepsPodSource), to(Cluster, ExternalLocalInner, true, MasqueradesNode), others,
	}
}

// uses reports which sets a Service's frontends lead to, provided that these are not empty.
func uses(s *model.Service, frontends []Frontend) (cluster, local bool) {
	for i := range frontends {
		policy := s.ExternalTrafficPolicy
		if frontends[i].Kind == ClusterIP {
			policy = s.InternalTrafficPolicy
		}
		local = local || policy == model.TrafficLocal
		// Whatever the external policy is, connections of the node and its pods to an external frontend
		// go to any backend.
		cluster = cluster || policy != model.TrafficLocal || frontends[i].Kind != ClusterIP
	}
	return cluster, local
}
