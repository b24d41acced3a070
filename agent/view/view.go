// Package view decides what this node does for each Service. It is the only place with Service semantics: programmers
// get virtual addresses, backends and policies already decided. It is pure: objects in, Service ports out.
//
// What it decides is what kube-proxy 1.37 does, and where kube-proxy's modes differ, the better of them. Beyond that, no two
// Service ports ever have the same address and port: of several Services that ask for it, one has it as its cluster IP before one has it as its
// load balancer's and that before an external IP, of these the oldest, and the others get it in their turn. On the node's
// own addresses NodePorts come first.
//
// It is incremental: a Service that is set costs as much as that Service is large, however many there are, and where a few endpoints of
// many change, little more than looking at the slices that they are in. What becomes of a sequence of calls of Set is what
// a new view would make of the last of them.
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

// View holds the Service ports of this node. It is for one goroutine.
type View struct {
	options  Options
	object   *model.Node
	node     node
	services map[model.ServiceKey]*service
	claims   claims
	ports    map[ServicePortID]*ServicePort
	health   map[HealthCheckID]HealthCheck
	// dirty are the Services to look at in the next Changes, each once.
	dirty []*service
	// problematic are the Services with problems.
	problematic map[model.ServiceKey]*service
	// told is State().Node as of the last Changes.
	told Node
	// healthChanged: HealthChecks has something new to tell.
	healthChanged bool

	// Space for what is under way.
	endpointSpace, sortedSpace []endpoint
	endSpace                   []int // of the lists in endpointSpace
	keySpace                   [2][]endpointKey
	// several are the addresses that several slices have of what endpoints gave last.
	several      []netip.Addr
	backendSpace []Backend
	idSpace      []ServicePortID
}

// service is a Service that there is, or was when Changes was last called.
type service struct {
	key model.ServiceKey
	// object and slices are as they were last set; no object: there is none.
	object *model.Service
	slices []*model.Slice
	// claimed is the object whose claims are in View.claims.
	claimed *model.Service
	dirty   bool
	// reconsider: more may be new than slices.
	reconsider bool
	// ids are its ports in View.ports.
	ids      []ServicePortID
	problems []string
	// seen is nil where all endpoints are to be looked at.
	seen *seen
}

// maxProblems bounds what is told of one Service: a hundred ports may each have one.
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

// New makes a view without Services, on a node without a Node object.
func New(o Options) *View {
	nodeless := o.node(&model.Node{})
	return &View{
		options:     o,
		node:        nodeless,
		told:        nodeless.programmed,
		services:    make(map[model.ServiceKey]*service),
		claims:      newClaims(),
		ports:       make(map[ServicePortID]*ServicePort),
		health:      make(map[HealthCheckID]HealthCheck),
		problematic: make(map[model.ServiceKey]*service),
	}
}

// SetNode sets the Node. What a Node has said holds until one says otherwise: nil, for a Node that is
// gone or has never been, changes nothing.
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

// Set takes a Service, nil: there is none, and the slices that name it, of any family. It keeps both. They count with the next
// Changes.
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
	v.look(s)
}

// touch has a Service looked at for whatever may be new.
func (v *View) touch(s *service) {
	s.reconsider = true
	v.look(s)
}

func (v *View) look(s *service) {
	if !s.dirty {
		s.dirty = true
		v.dirty = append(v.dirty, s)
	}
}

// touchNode touches those for whom a NodePort that comes or goes makes a difference: who wants it on one of the node's addresses.
func (v *View) touchNode(c claim) {
	if c.address.IsValid() {
		return
	}
	for _, ip := range v.node.ips {
		if c.address = ip; model.FamilyOf(ip) != c.family {
			continue
		}
		if owner, ok := v.claims.owners[c]; ok {
			v.touch(owner.service)
		}
		for _, r := range v.claims.rivals[c] {
			v.touch(r.service)
		}
	}
}

// Changes gives the difference that SetNode and Set have made since the last call, one Change for each Service port that
// differs. An address that goes from one Service to another is a Change of both. node tells that State().Node differs: then
// everything is to be programmed anew.
func (v *View) Changes() (changes []Change, node bool) {
	// First who has what: that may touch others, which are looked at too.
	for i := 0; i < len(v.dirty); i++ {
		s := v.dirty[i]
		if s.claimed == s.object {
			continue
		}
		for c := range v.options.claimed(s.claimed) {
			v.claims.release(c, s, v.touch)
			v.touchNode(c)
		}
		s.claimed = s.object
		for c, as := range v.options.claimed(s.claimed) {
			v.claims.take(c, claimant{s, as}, v.touch)
			v.touchNode(c)
		}
	}
	for _, s := range v.dirty {
		changes = v.update(s, changes)
		s.dirty, s.reconsider = false, false
		if s.object == nil {
			delete(v.services, s.key)
		}
	}
	clear(v.dirty)
	v.dirty = v.dirty[:0]
	v.forgetEndpoints() // they would keep slices that are gone
	node = !v.told.equal(v.node.programmed)
	v.told, v.healthChanged = v.node.programmed, v.healthChanged || node
	return changes, node
}

// State is what a programmer should hold, as of the last Changes. The map is the view's own: it is to be read before the next
// Changes.
func (v *View) State() State { return State{Node: v.node.programmed, Ports: v.ports} }

// PortsOf returns the Service ports that this node would have if there were these Services and nothing
// else, so none with a backend. The View stays as it is.
func (v *View) PortsOf(services []*model.Service) map[ServicePortID]*ServicePort {
	alone := New(v.options)
	alone.node = v.node
	for _, s := range services {
		alone.Set(s.ServiceKey(), s, nil)
	}
	alone.Changes()
	return alone.ports
}

// HealthChecks gives all health checks as of the last Changes, and whether any of them, or State().Node, has changed since the last
// call; if none has, it gives nothing.
func (v *View) HealthChecks() (checks map[HealthCheckID]HealthCheck, changed bool) {
	if !v.healthChanged {
		return nil, false
	}
	v.healthChanged = false
	return maps.Clone(v.health), true
}

// Problems gives the Services with problems as of the last Changes, in no order, each once.
func (v *View) Problems() []Problem {
	out := make([]Problem, 0, len(v.problematic))
	for key, s := range v.problematic {
		out = append(out, Problem{key, strings.Join(s.problems, "; ")})
	}
	return out
}

// update brings what there is of a Service up to date, and appends what differs.
func (v *View) update(s *service, changes []Change) []Change {
	switch {
	case len(s.slices) < manySlices:
		s.seen = nil
	case s.seen == nil:
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
	v.check(s)
	return changes
}

// updateSets is for a Service of which nothing is new but its slices: it has the ports and frontends that it had.
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

// updateAll looks at everything.
func (v *View) updateAll(s *service, changes []Change) []Change {
	ids := v.idSpace[:0]
	s.problems = nil
	if s.object != nil {
		scheduler := v.scheduler(s)
		for family, ip := range families(s.object) {
			w := v.options.want(s.object, family, ip)
			w.problems(s)
			sources := v.sources(s.object, family)
			checkPort := healthCheckPort(s.object, family)
			for _, port := range w.ports {
				id := ServicePortID{s.key, port.Name, port.Protocol, family}
				before := v.ports[id]
				p := v.port(s, id, v.frontends(s, &w, port, sources), scheduler, checkPort, before)
				if p == nil {
					continue
				}
				checkPort = 0 // the first one has it
				ids = append(ids, id)
				if p != before {
					v.ports[id] = p
					changes = append(changes, Change{before, p})
				}
			}
			if len(w.ports)+w.leftPorts < len(s.object.Ports) {
				s.problem("some of its ports have the same name and protocol: the first one counts")
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
	if len(s.problems) == 0 {
		delete(v.problematic, s.key)
	} else {
		v.problematic[s.key] = s
	}
	return changes
}

// port gives a Service port with these frontends, whose Routes it sets, as it is now, before if that is the same; nil: it is nowhere to be reached.
func (v *View) port(s *service, id ServicePortID, frontends []Frontend, scheduler string, checkPort uint16, before *ServicePort) *ServicePort {
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
	v.route(p, s.object, v.sets(s, p, before))
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

// scheduler gives the IPVS scheduler that a Service asks for, empty: none that there is.
func (v *View) scheduler(s *service) string {
	name := s.object.IPVSScheduler
	switch {
	case slices.Contains(v.options.Schedulers, name):
		return name
	case name != "" && len(v.options.Schedulers) > 0:
		s.problem("its annotation asks for the IPVS scheduler %q, which is none of %s: the default serves it", name, strings.Join(v.options.Schedulers, ", "))
	}
	return ""
}

// check brings the health checks of a Service up to date.
func (v *View) check(s *service) {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		id := HealthCheckID{s.key, family}
		before, had := v.health[id]
		now, has := v.healthCheck(s, family)
		switch {
		case has && now != before:
			v.health[id] = now
		case !has && had:
			delete(v.health, id)
		default:
			continue
		}
		v.healthChanged = true
	}
}

// healthCheckPort gives where a Service's health check in a family is; 0: it has none.
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
	for name, protocol := range slicePorts(s.slices, family) {
		for _, e := range v.endpoints(s.slices, ServicePortID{s.key, name, protocol, family}, netip.Addr{}) {
			if e.local && e.ready() {
				counted = append(counted, e.Address)
			}
		}
	}
	slices.SortFunc(counted, netip.Addr.Compare)
	return HealthCheck{Port: port, LocalEndpoints: len(slices.Compact(counted))}, true
}
