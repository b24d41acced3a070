// Package view decides what this node does for each Service. It is the only place with Service semantics: programmers
// get virtual addresses, backends and policies already decided. It is pure: objects in, Service ports out.
package view

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// Options are the node's settings that decide how Services look from it.
type Options struct {
	// NodeName tells which endpoints are local.
	NodeName string
	// ClusterCIDRs are the pods' addresses, for telling traffic from pods from other traffic (kube-proxy's detect-local
	// mode ClusterCIDR).
	ClusterCIDRs []netip.Prefix
}

// View holds the Service ports of this node. It is for one goroutine.
type View struct {
	options Options
	ports   map[ServicePortID]*ServicePort
	// of tells the ports of each Service that has any.
	of map[model.ServiceKey][]ServicePortID
}

// New makes an empty view.
func New(o Options) *View {
	return &View{
		options: o,
		ports:   make(map[ServicePortID]*ServicePort),
		of:      make(map[model.ServiceKey][]ServicePortID),
	}
}

// State is what a programmer should hold now. The map is the view's own: it is to be read before the next Update.
func (v *View) State() State {
	return State{Node: Node{LocalPods: v.options.ClusterCIDRs}, Ports: v.ports}
}

// Update recomputes one Service from its object (nil: there is none) and its slices, and gives the Service ports that
// differ. The slices are those that name the Service, of any family.
func (v *View) Update(key model.ServiceKey, service *model.Service, endpointSlices []*model.Slice) []Change {
	var changes []Change
	var ids []ServicePortID
	for _, p := range v.compute(service, endpointSlices) {
		before := v.ports[p.ID]
		ids = append(ids, p.ID)
		if before != nil && before.equal(p) {
			continue
		}
		v.ports[p.ID] = p
		changes = append(changes, Change{before, p})
	}
	for _, id := range v.of[key] {
		if !slices.Contains(ids, id) {
			changes = append(changes, Change{Before: v.ports[id]})
			delete(v.ports, id)
		}
	}
	if len(ids) == 0 {
		delete(v.of, key)
	} else {
		v.of[key] = ids
	}
	return changes
}

func (p *ServicePort) equal(o *ServicePort) bool {
	return p.ID == o.ID && slices.Equal(p.Frontends, o.Frontends) && slices.Equal(p.Backends, o.Backends)
}

// compute gives the Service ports of a Service: for each of its cluster IPs' families, each of its ports.
func (v *View) compute(service *model.Service, endpointSlices []*model.Slice) []*ServicePort {
	if service == nil {
		return nil
	}
	var out []*ServicePort
	for _, ip := range service.ClusterIPs {
		family := model.FamilyOf(ip)
		for _, port := range service.Ports {
			p := &ServicePort{
				ID:        ServicePortID{service.ServiceKey(), port.Name, port.Protocol, family},
				Frontends: []Frontend{{ClusterIP, ip, port.Port, MasqueradeNonLocal}},
				Backends:  v.backends(family, port, endpointSlices),
			}
			if port.NodePort != 0 {
				p.Frontends = append(p.Frontends, Frontend{Kind: NodePort, Port: port.NodePort, Masquerade: MasqueradeAlways})
			}
			if !slices.ContainsFunc(out, func(o *ServicePort) bool { return o.ID == p.ID }) {
				out = append(out, p) // the API server takes no two ports of one name and protocol
			}
		}
	}
	return out
}

// backends gives the endpoints of a family that take traffic for a port: ready (which publishNotReadyAddresses may make
// of a terminating one too, as in kube-proxy), joined by the port's name and protocol.
func (v *View) backends(family model.Family, port model.ServicePort, endpointSlices []*model.Slice) []Backend {
	var out []Backend
	for _, s := range endpointSlices {
		if s.Family != family {
			continue
		}
		for _, p := range s.Ports {
			if p.Name != port.Name || p.Protocol != port.Protocol || p.Port == 0 {
				continue
			}
			for i := range s.Endpoints {
				if e := &s.Endpoints[i]; e.Conditions.Ready {
					out = append(out, Backend{
						Address: netip.AddrPortFrom(e.Address, p.Port),
						Local:   e.NodeName != "" && e.NodeName == v.options.NodeName,
					})
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b Backend) int {
		if c := a.Address.Compare(b.Address); c != 0 {
			return c
		}
		if a.Local == b.Local {
			return 0
		} else if a.Local {
			return -1
		}
		return 1
	})
	return slices.CompactFunc(out, func(a, b Backend) bool { return a.Address == b.Address })
}
