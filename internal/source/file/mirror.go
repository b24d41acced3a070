package file

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

const (
	// maxEndpointsPerSlice bounds the addresses of a mirrored slice.
	maxEndpointsPerSlice = 100
	// maxEndpointsPerSubset bounds the mirrored addresses of a subset. Ready ones come first. The
	// cluster's mirroring controller has the same limit.
	maxEndpointsPerSubset = 1000
	// leaderAnnotation marks Endpoints that are a lock of client-go's leader election. Importing
	// its constant would import client-go's whole clientset.
	leaderAnnotation = "control-plane.alpha.kubernetes.io/leader"
)

// endpoints is what mirroring uses of an Endpoints object.
type endpoints struct {
	skip   bool // set if its labels or annotations exclude it from mirroring
	groups []group
}

// group is a set of addresses of one family with the same ports. Slices are made from groups.
type group struct {
	family    model.Family
	ports     []model.SlicePort
	endpoints []model.Endpoint // ascending by address
}

func (g *group) key() string { return fmt.Sprint(g.family, g.ports) }

// newEndpoints brings the subsets into canonical form, as the mirroring controller does. Ports with
// the same addresses are joined. An address that is ready in one subset and not ready in another is
// not ready. If there are skips, the object is invalid.
func newEndpoints(o *corev1.Endpoints) (*endpoints, []source.Skip) {
	_, electsLeader := o.Annotations[leaderAnnotation]
	_, headless := o.Labels[corev1.IsHeadlessService]
	e := &endpoints{skip: o.Labels[discoveryv1.LabelSkipMirror] == "true" || electsLeader || headless}

	var skips source.SkipList
	byPort := map[model.SlicePort]map[netip.Addr]model.Endpoint{}
	for i, subset := range o.Subsets {
		at := fmt.Sprintf("subsets[%d].", i)
		ports := subsetPorts(subset.Ports, at, &skips)
		endpoints := append(
			subsetEndpoints(subset.Addresses, true, at+"addresses[%d]", &skips),
			subsetEndpoints(subset.NotReadyAddresses, false, at+"notReadyAddresses[%d]", &skips)...)
		for _, p := range ports {
			if byPort[p] == nil {
				byPort[p] = map[netip.Addr]model.Endpoint{}
			}
			for _, e := range endpoints {
				if seen, ok := byPort[p][e.Address]; !ok || seen.Conditions.Ready && !e.Conditions.Ready {
					byPort[p][e.Address] = e
				}
			}
		}
	}
	e.groups = groups(byPort)
	return e, skips
}

// subsetPorts returns the ports of a subset. A subset without ports has one empty port.
func subsetPorts(given []corev1.EndpointPort, at string, skips *source.SkipList) (ports []model.SlicePort) {
	if len(given) == 0 {
		return []model.SlicePort{{}}
	}
	for i, p := range given {
		field := fmt.Sprintf("%sports[%d]", at, i)
		if protocol, number, ok := skips.Port(p.Protocol, p.Port, field); ok && skips.PortName(p.Name, field) {
			ports = append(ports, model.SlicePort{Name: p.Name, Protocol: protocol, Port: number})
		}
	}
	return ports
}

func subsetEndpoints(
	given []corev1.EndpointAddress, ready bool, at string, skips *source.SkipList,
) (out []model.Endpoint) {
	for i, address := range given {
		a, ok := skips.Address(address.IP, model.ForEndpoints, at+".ip", i)
		name := ptr.Deref(address.NodeName, "")
		if name != "" && !model.IsSubdomain(name) {
			skips.Add(source.InvalidText, fmt.Sprintf(at+".nodeName", i), "%.80q is not a valid Node name", name)
		} else if ok {
			// Endpoints have no serving condition, and its default is true.
			conditions := model.Conditions{Ready: ready, Serving: true}
			out = append(out, model.Endpoint{Address: a, Conditions: conditions, NodeName: name})
		}
	}
	return out
}

// groups joins ports that have the same addresses, limits the addresses, and splits them by family.
// It never joins ports with the same name and protocol, as a name has one number in a slice.
func groups(byPort map[model.SlicePort]map[netip.Addr]model.Endpoint) []group {
	type set struct {
		ports     []model.SlicePort
		endpoints []model.Endpoint
	}
	sets := map[string]*set{}
	for _, port := range slices.SortedFunc(maps.Keys(byPort), comparePorts) {
		endpoints := slices.SortedFunc(maps.Values(byPort[port]), func(a, b model.Endpoint) int { return a.Address.Compare(b.Address) })
		var key strings.Builder
		for _, e := range endpoints {
			fmt.Fprint(&key, e.Address, e.Conditions.Ready, " ")
		}
		s := sets[key.String()]
		for s != nil && slices.ContainsFunc(s.ports, func(p model.SlicePort) bool { return p.Name == port.Name && p.Protocol == port.Protocol }) {
			key.WriteByte('+')
			s = sets[key.String()]
		}
		if s == nil {
			s = &set{endpoints: endpoints}
			sets[key.String()] = s
		}
		if port != (model.SlicePort{}) {
			s.ports = append(s.ports, port)
		}
	}
	var all []group
	for _, s := range sets {
		if len(s.endpoints) > maxEndpointsPerSubset {
			slices.SortStableFunc(s.endpoints, func(a, b model.Endpoint) int {
				return cmp.Compare(notReady(a), notReady(b))
			})
			s.endpoints = s.endpoints[:maxEndpointsPerSubset]
			slices.SortFunc(s.endpoints, func(a, b model.Endpoint) int { return a.Address.Compare(b.Address) })
		}
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			g := group{family: family, ports: s.ports}
			for _, e := range s.endpoints {
				if model.FamilyOf(e.Address) == family {
					g.endpoints = append(g.endpoints, e)
				}
			}
			if len(g.endpoints) > 0 {
				all = append(all, g)
			}
		}
	}
	slices.SortFunc(all, func(a, b group) int { return cmp.Compare(a.key(), b.key()) })
	return all
}

func notReady(e model.Endpoint) int {
	if e.Conditions.Ready {
		return 0
	}
	return 1
}

func comparePorts(a, b model.SlicePort) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}

// mirrors has the slices of Endpoints objects, by their Services. It remembers in which slice each
// address is, so that a change of one address changes one slice.
type mirrors map[model.ServiceKey]*mirror

type mirror struct {
	of     *endpoints // the object from which the slices were made
	parts  []*part
	slices []*model.Slice
}

// part describes the content of one slice.
type part struct {
	number    int // the number in the slice's name
	group     string
	addresses map[netip.Addr]bool
	changed   bool
}

// slices returns the slices for a Service's Endpoints object.
func (m mirrors) slices(service model.ServiceKey, e *endpoints) []*model.Slice {
	if m[service] == nil {
		m[service] = &mirror{}
	}
	if m[service].of != e {
		m[service].update(service, e)
	}
	return m[service].slices
}

func (m *mirror) update(service model.ServiceKey, e *endpoints) {
	m.of, m.slices = e, nil
	m.parts = slices.DeleteFunc(m.parts, func(p *part) bool {
		return !slices.ContainsFunc(e.groups, func(g group) bool { return g.key() == p.group })
	})
	for _, g := range e.groups {
		m.place(g)
	}
	m.parts = slices.DeleteFunc(m.parts, func(p *part) bool { return len(p.addresses) == 0 })
	for _, g := range e.groups {
		for _, p := range m.parts {
			if p.group != g.key() {
				continue
			}
			s := model.Slice{
				Namespace: service.Namespace, Name: fmt.Sprintf("%s-mirrored-%d", service.Name, p.number), Service: service.Name,
				Family: g.family, Ports: slices.Clone(g.ports),
			}
			for _, endpoint := range g.endpoints {
				if p.addresses[endpoint.Address] {
					s.Endpoints = append(s.Endpoints, endpoint)
				}
			}
			m.slices = append(m.slices, model.NewSlice(s))
		}
	}
}

// place distributes a group's addresses over its slices. Addresses stay in their slices. New
// addresses fill slices that others have left, then the fullest slices with room, and then new
// slices.
func (m *mirror) place(g group) {
	missing := map[netip.Addr]bool{}
	for _, e := range g.endpoints {
		missing[e.Address] = true
	}
	var parts []*part
	for _, p := range m.parts {
		if p.group != g.key() {
			continue
		}
		p.changed = false
		for a := range p.addresses {
			if missing[a] {
				delete(missing, a)
			} else {
				delete(p.addresses, a)
				p.changed = true
			}
		}
		parts = append(parts, p)
	}
	slices.SortStableFunc(parts, func(a, b *part) int {
		if a.changed == b.changed {
			return cmp.Compare(len(b.addresses), len(a.addresses))
		} else if a.changed {
			return -1
		}
		return 1
	})
	for _, a := range slices.SortedFunc(maps.Keys(missing), netip.Addr.Compare) {
		i := slices.IndexFunc(parts, func(p *part) bool { return len(p.addresses) < maxEndpointsPerSlice })
		if i < 0 {
			i = len(parts)
			parts = append(parts, m.newPart(g.key()))
		}
		parts[i].addresses[a] = true
	}
}

func (m *mirror) newPart(group string) *part {
	p := &part{number: 1, group: group, addresses: map[netip.Addr]bool{}}
	for slices.ContainsFunc(m.parts, func(o *part) bool { return o.number == p.number }) {
		p.number++
	}
	m.parts = append(m.parts, p)
	return p
}
