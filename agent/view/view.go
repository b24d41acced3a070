// Package view decides what this node does for each Service. It is the only package with Service
// semantics: programmers receive frontends, backends and policies that are already decided. The
// package is pure. Objects go in, and Service ports come out.
//
// The decisions are those of kube-proxy 1.37. Where kube-proxy's modes differ, the view follows the
// better one. Unlike kube-proxy, the view never gives two Service ports the same address and port.
// If several Services ask for one, the Service whose cluster IP it is comes first, then a Service
// that has it as its load balancer's address, then one that lists it as an external IP. Among
// equals the oldest wins. The others get the address in their turn. On the node's own addresses, a
// NodePort comes before the external addresses of other Services.
//
// The view is incremental. Setting a Service costs as much as that Service is large, however many
// Services there are. If a few of many endpoints change, it costs little more than reading the
// slices that contain them.
package view

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// View holds the Service ports of this node. Only one goroutine may use a View.
//
// Invariants, from the end of one Update to the next call of SetNode or Set:
//
//  1. ports, health and the Services' problems depend only on the options, the Node, and the last
//     object and slices of each Service. The history of calls makes no difference.
//  2. The claims in claims are those of the present objects: service.claimed is service.object.
//  3. No two entries of ports have a frontend in common, because each frontend is a claim with one
//     owner.
//  4. A non-nil service.seen describes the endpoints that the Service's entries in ports were
//     computed from.
//
// Outside Update, dirty contains exactly the services whose field dirty is set, each once.
type View struct {
	options  Options
	object   *model.Node
	node     node
	services map[model.ServiceKey]*service
	claims   claims
	ports    map[ServicePortID]*ServicePort
	health   map[HealthCheckID]HealthCheck
	// dirty contains the Services that the next Update computes anew.
	dirty []*service
	// problems are the problems that have changed since TakeProblems last returned them, by Service:
	// those that the Service has now; "" means none.
	problems map[model.ServiceKey]string
	// told is the Node that State returned as of the last Update.
	told Node
	// healthChanged reports that something has changed since TakeHealthChecks last returned the
	// checks.
	healthChanged bool

	reader       endpointReader
	backendSpace []Backend       // kept to save allocations
	idSpace      []ServicePortID // kept to save allocations
}

// service is a Service that exists, or that existed when Update was last called.
type service struct {
	key model.ServiceKey
	// object and slices are the arguments of the last Set. A nil object means that the Service does
	// not exist.
	object *model.Service
	slices []*model.Slice
	// claimed is the object whose claims are in View.claims; nil means that it has none there.
	claimed *model.Service
	dirty   bool
	// reconsider reports that more than the slices may have changed.
	reconsider bool
	// ids are the keys of the Service's ports in View.ports.
	ids      []ServicePortID
	problems []string
	// seen is nil if all endpoints have to be read.
	seen *seen
}

// maxProblems bounds how many problems of one Service are reported. Each of a hundred ports may
// have one.
const maxProblems = 5

func (s *service) problem(format string, args ...any) {
	if len(s.problems) > maxProblems {
		return
	}
	text := fmt.Sprintf(format, args...)
	if slices.Contains(s.problems, text) {
		return
	}
	if len(s.problems) == maxProblems {
		text = "and more"
	}
	s.problems = append(s.problems, text)
}

// New returns a view without Services, for a node whose Node object is not known.
func New(o Options) *View {
	nodeless := o.node(&model.Node{})
	return &View{
		options:  o,
		node:     nodeless,
		told:     nodeless.programmed,
		services: make(map[model.ServiceKey]*service),
		claims:   claims{owners: make(map[claim]claimant), rivals: make(map[claim][]claimant)},
		ports:    make(map[ServicePortID]*ServicePort),
		health:   make(map[HealthCheckID]HealthCheck),
		problems: make(map[model.ServiceKey]string),
		reader:   endpointReader{nodeName: o.NodeName},
	}
}

// SetNode sets the Node. A nil Node, for one that was deleted or has not been received, changes
// nothing: the last known Node stays valid until another one replaces it.
func (v *View) SetNode(n *model.Node) {
	if n == nil || n == v.object {
		return
	}
	v.object = n
	before := v.node
	v.node = v.options.node(n)
	if v.node.equal(&before) {
		return
	}
	for _, s := range v.services {
		s.seen = nil
		v.touch(s)
	}
}

// Set sets a Service and the slices that name it, of any IP family. A nil object means that the
// Service does not exist. The view keeps both. They take effect in the next Update.
func (v *View) Set(key model.ServiceKey, object *model.Service, endpointSlices []*model.Slice) {
	s := v.services[key]
	if s == nil {
		if object == nil {
			return
		}
		s = &service{key: key}
		v.services[key] = s
	}
	if s.object != object {
		s.seen, s.reconsider = nil, true
	}
	s.object, s.slices = object, endpointSlices
	v.markDirty(s)
}

// touch has the next Update recompute everything about a Service.
func (v *View) touch(s *service) {
	s.reconsider = true
	v.markDirty(s)
}

func (v *View) markDirty(s *service) {
	if !s.dirty {
		s.dirty = true
		v.dirty = append(v.dirty, s)
	}
}

// touchNode touches the Services that a NodePort affects when it is claimed or released: those that
// own its port on one of the node's own addresses. It ignores claims of addresses.
func (v *View) touchNode(c claim) {
	if c.address.IsValid() {
		return
	}
	for _, ip := range v.node.ips {
		c.address = ip
		if owner, ok := v.claims.owners[c]; ok {
			v.touch(owner.service)
		}
	}
}

// Update applies what SetNode and Set have changed since the last call. It returns one Change for
// each Service port that differs. If an address passes from one Service to another, both have a
// Change. node reports whether State().Node differs, in which case the caller has to program
// everything anew.
func (v *View) Update() (changes []Change, node bool) {
	// Claims are settled first. This may touch further Services, which this loop then reaches, too.
	for i := 0; i < len(v.dirty); i++ {
		s := v.dirty[i]
		if s.claimed != s.object {
			v.claim(s)
		}
	}
	for _, s := range v.dirty {
		changes = v.updateService(s, changes)
		s.dirty, s.reconsider = false, false
		if s.object == nil {
			delete(v.services, s.key)
		}
	}
	clear(v.dirty)
	v.dirty = v.dirty[:0]
	v.reader.forget() // otherwise it would keep deleted slices in memory
	node = !v.told.equal(v.node.programmed)
	v.told, v.healthChanged = v.node.programmed, v.healthChanged || node
	return changes, node
}

// claim makes the claims of a Service those of its present object. A claim that the Service keeps,
// in the same place among its rivals, is left alone.
func (v *View) claim(s *service) {
	var stays map[claim]FrontendKind
	if s.claimed != nil && s.object != nil && s.claimed.CreationTimeSeconds == s.object.CreationTimeSeconds {
		before := maps.Collect(v.options.claimed(s.claimed))
		stays = maps.Collect(v.options.claimed(s.object))
		maps.DeleteFunc(stays, func(c claim, as FrontendKind) bool { return before[c] != as })
	}
	for c, as := range v.options.claimed(s.claimed) {
		if stays[c] == 0 {
			v.claims.release(c, claimant{s, as}, v.touch)
			v.touchNode(c)
		}
	}
	s.claimed = s.object
	for c, as := range v.options.claimed(s.claimed) {
		if stays[c] == 0 {
			v.claims.take(c, claimant{s, as}, v.touch)
			v.touchNode(c)
		}
	}
}

// State returns what a programmer should hold, as of the last Update. The map belongs to the view,
// and the caller has to read it before the next Update.
func (v *View) State() State { return State{Node: v.node.programmed, Ports: v.ports} }

// PortsOf returns the Service ports that this node would have if only these Services existed,
// without any endpoints. It does not change the View.
func (v *View) PortsOf(services []*model.Service) map[ServicePortID]*ServicePort {
	alone := New(v.options)
	alone.node = v.node
	for _, s := range services {
		alone.Set(s.ServiceKey(), s, nil)
	}
	alone.Update()
	return alone.ports
}

// TakeHealthChecks returns all health checks as of the last Update. changed reports whether a check
// or State().Node has changed since the last call; if not, checks is nil.
func (v *View) TakeHealthChecks() (checks map[HealthCheckID]HealthCheck, changed bool) {
	if !v.healthChanged {
		return nil, false
	}
	v.healthChanged = false
	return maps.Clone(v.health), true
}

// TakeProblems returns the problems that have changed since the last call, as of the last Update:
// for each such Service what it has now, in no particular order. A Reason of "" means none.
func (v *View) TakeProblems() []Problem {
	var out []Problem
	for key, reason := range v.problems {
		out = append(out, Problem{key, reason})
	}
	clear(v.problems)
	return out
}

// updateService recomputes the ports and health checks of a Service, and appends what differs to
// changes.
func (v *View) updateService(s *service, changes []Change) []Change {
	if len(s.slices) >= manySlices && s.seen == nil {
		s.seen = &seen{ports: make(map[ServicePortID]seenPort)}
	}
	if s.reconsider {
		changes = v.updateAll(s, changes)
	} else {
		changes = v.updateSets(s, changes)
	}
	if s.seen != nil {
		s.seen.slices = s.slices
	}
	v.updateHealthChecks(s)
	return changes
}

// updateSets updates a Service of which only the slices are new. Its ports and frontends stay the
// same.
func (v *View) updateSets(s *service, changes []Change) []Change {
	for _, id := range s.ids {
		before := v.ports[id]
		if p := v.port(s, id, slices.Clone(before.Frontends), before.Scheduler, before.HealthCheckPort, before); p != before {
			v.ports[id] = p
			changes = append(changes, Change{before, p})
		}
	}
	return changes
}

// updateAll recomputes everything about a Service.
func (v *View) updateAll(s *service, changes []Change) []Change {
	ids := v.idSpace[:0]
	problems := s.problems
	s.problems = nil
	if s.object != nil {
		scheduler := v.scheduler(s)
		for family, ip := range families(s.object) {
			w := v.options.want(s.object, family, ip)
			w.recordProblems(s)
			sources := v.sources(s.object, family)
			checkPort := healthCheckPort(s.object, family)
			for _, port := range w.ports {
				id := ServicePortID{s.key, port.Name, port.Protocol, family}
				before := v.ports[id]
				p := v.port(s, id, v.frontends(s, &w, port, sources), scheduler, checkPort, before)
				if p == nil {
					continue
				}
				checkPort = 0 // only the first port of a family has it
				ids = append(ids, id)
				if p != before {
					v.ports[id] = p
					changes = append(changes, Change{before, p})
				}
			}
			if len(w.ports)+w.leftPorts < len(s.object.Ports) {
				s.problem("several ports have the same name and protocol: only the first of them is served")
			}
		}
	}
	v.idSpace = ids
	if !slices.Equal(ids, s.ids) {
		still := make(map[ServicePortID]bool, len(ids))
		for _, id := range ids {
			still[id] = true
		}
		for _, id := range s.ids {
			if !still[id] {
				changes = append(changes, Change{Before: v.ports[id]})
				delete(v.ports, id)
			}
		}
	}
	s.ids = keep(s.ids, ids)
	if !slices.Equal(s.problems, problems) {
		v.problems[s.key] = strings.Join(s.problems, "; ")
	}
	return changes
}

// port returns a Service port with these frontends, and sets their routes. If nothing differs from
// before, it returns before. It returns nil if there are no frontends, because such a port cannot
// be reached.
func (v *View) port(
	s *service, id ServicePortID, frontends []Frontend, scheduler string, checkPort uint16, before *ServicePort,
) *ServicePort {
	if len(frontends) == 0 {
		return nil
	}
	p := &ServicePort{
		ID: id, Frontends: frontends, Affinity: time.Duration(s.object.ClientIPAffinitySeconds) * time.Second,
		Scheduler: scheduler, HealthCheckPort: checkPort,
	}
	old := before
	if old == nil {
		old = &ServicePort{}
	}
	v.setRoutes(p, s.object, v.setBackends(s, p, before))
	if !slices.EqualFunc(p.Frontends, old.Frontends, Frontend.Equal) {
		return p
	}
	p.Frontends = old.Frontends
	if p.Affinity == old.Affinity && p.Scheduler == old.Scheduler && p.HealthCheckPort == old.HealthCheckPort &&
		p.Cluster.Same(old.Cluster) && p.Local.Same(old.Local) && p.Serving.Same(old.Serving) {
		return before
	}
	return p
}

// scheduler returns the IPVS scheduler that a Service's annotation asks for, or the empty string if
// it asks for none. A name that is not among Options.Schedulers counts as none and is a problem of
// the Service, unless Options.Schedulers is empty, as it is if the programmer is not IPVS.
func (v *View) scheduler(s *service) string {
	name := s.object.IPVSScheduler
	switch {
	case slices.Contains(v.options.Schedulers, name):
		return name
	case name != "" && len(v.options.Schedulers) > 0:
		s.problem("the annotation asks for the IPVS scheduler %q: use one of %s; the default scheduler is used instead",
			name, strings.Join(v.options.Schedulers, ", "))
	}
	return ""
}

// updateHealthChecks updates the health checks of a Service.
func (v *View) updateHealthChecks(s *service) {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		id := HealthCheckID{s.key, family}
		before, had := v.health[id]
		now, has := v.healthCheck(s, family)
		switch {
		case has && !(had && now.Equal(before)):
			v.health[id] = now
		case !has && had:
			delete(v.health, id)
		default:
			continue
		}
		v.healthChanged = true
	}
}

// healthCheckPort returns the port of a Service's health check in an IP family, or 0 if it has
// none.
func healthCheckPort(o *model.Service, family model.Family) uint16 {
	if o == nil || o.Type != model.LoadBalancer || o.ExternalTrafficPolicy != model.TrafficLocal ||
		!slices.ContainsFunc(o.ClusterIPs, func(a netip.Addr) bool { return model.FamilyOf(a) == family }) {
		return 0
	}
	return o.HealthCheckNodePort
}

func (v *View) healthCheck(s *service, family model.Family) (check HealthCheck, ok bool) {
	port := healthCheckPort(s.object, family)
	if port == 0 {
		return HealthCheck{}, false
	}
	var counted []netip.Addr
	ids := make(map[ServicePortID]struct{})
	for _, slice := range s.slices {
		for _, p := range slice.Ports {
			ids[ServicePortID{s.key, p.Name, p.Protocol, family}] = struct{}{}
		}
	}
	if v.displaced(s, family) {
		clear(ids)
	}
	for id := range ids {
		for _, e := range v.reader.read(s.slices, id, netip.Addr{}) {
			if e.local && e.ready() {
				counted = append(counted, e.Address)
			}
		}
	}
	slices.SortFunc(counted, netip.Addr.Compare)
	addresses := slices.Compact(slices.Collect(vips(s.object, family)))
	return HealthCheck{
		Port: port, LocalEndpoints: len(slices.Compact(counted)), Addresses: addresses[:min(len(addresses), maxCheckAddresses)],
	}, true
}

// displaced reports whether a Service asks for addresses of a load balancer or for NodePorts in a
// family, and other Services have all of them. No load balancer should lead traffic here for it.
func (v *View) displaced(s *service, family model.Family) bool {
	for _, id := range s.ids {
		for _, f := range v.ports[id].Frontends {
			if id.Family == family && (f.Kind == LoadBalancer || f.Kind == NodePort) {
				return false
			}
		}
	}
	for range vips(s.object, family) {
		return true
	}
	return slices.ContainsFunc(s.object.Ports, func(p model.ServicePort) bool { return p.NodePort != 0 })
}
