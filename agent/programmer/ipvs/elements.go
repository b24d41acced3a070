package ipvs

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// role is one of a Service port's two sets of backends, each of which has a virtual service in
// IPVS.
type role int

const (
	clusterRole role = iota
	localRole
	roles // number of roles
)

func (r role) String() string { return [...]view.Target{view.Cluster, view.Local}[r].String() }

// backends returns the set.
func (r role) backends(port *view.ServicePort) view.Backends {
	return [...]view.Backends{port.Cluster, port.Local}[r]
}

// ids are the numbers of a Service port's virtual services. 0 means that there is none.
type ids [roles]uint32

// identity says which virtual services a Service port has. It keeps them as long as it exists.
// Those that it no longer needs because affinity was added or removed have no backends, but their
// connections may go on.
type identity struct {
	numbers   ids
	addressed bool // there is one for each of its addresses
}

// estate holds the virtual services that removed Service ports leave behind, by frontend. A new
// Service port with one of these frontends inherits them, for example when a port is renamed, so
// that open connections go on.
type estate map[elementKey]*identity

// leaveAll adds everything that a removed Service port has.
func (e estate) leaveAll(of *programmed) {
	left := of.identity
	for _, f := range of.port.Frontends {
		e[others.element(of.port.ID.Protocol, f)] = &left
	}
}

// inherit moves what a removed Service port has left behind to a new one, unless another one has
// inherited it.
func (e estate) inherit(now *programmed) {
	for _, f := range now.port.Frontends {
		if left := e[others.element(now.port.ID.Protocol, f)]; left != nil && *left != (identity{}) {
			now.identity, *left = *left, identity{}
			return
		}
	}
}

// numbersOf returns the numbers of the virtual services of the Service port with this name.
func numbersOf(name string, numbers map[string]uint32) (of ids) {
	for r := range roles {
		of[r] = numbers[serviceComment(name, r)]
	}
	return of
}

// leftIn returns what Service ports leave behind that the table holds and the state lacks.
func leftIn(held found, state view.State) estate {
	stay, used := make(map[string]bool, len(state.Ports)), map[uint32]bool{}
	for id := range state.Ports {
		name := id.String()
		stay[name] = true
		for _, number := range numbersOf(name, held.numbers) {
			used[number] = true // also if a Replace that failed assigned it
		}
	}
	inheritance, left := estate{}, map[string]*identity{}
	for k, e := range held.elements {
		name := e.comment
		if k.set != others.frontends() && k.set != others.nodePorts() || stay[name] {
			continue
		}
		if left[name] == nil {
			left[name] = &identity{}
			for r, number := range numbersOf(name, held.numbers) {
				if !used[number] {
					left[name].numbers[r] = number
				}
			}
		}
		inheritance[k] = left[name]
	}
	return inheritance
}

// serviceComment returns the comment of a virtual service. Operators see it, and a new process
// finds the virtual service of a Service port by it.
func serviceComment(name string, r role) string { return name + " " + r.String() }

// portKey returns the encoding of a protocol and a port in keys, each in four bytes.
func portKey(protocol byte, port uint16) string {
	return string([]byte{protocol, 0, 0, 0, byte(port >> 8), byte(port), 0, 0})
}

func addressKey(a netip.Addr) string { return string(a.AsSlice()) }

// address returns the address that an element stands for. ok is false in other sets.
func (k elementKey) address() (a netip.Addr, ok bool) {
	if k.set != setAddresses {
		return a, false
	}
	return netip.AddrFromSlice([]byte(k.key))
}

// element returns the key of a frontend in the class's maps.
func (c class) element(protocol model.Protocol, f view.Frontend) elementKey {
	if f.Kind == view.NodePort {
		return elementKey{c.nodePorts(), portKey(nft.ProtocolNumber(protocol), f.Port)}
	}
	return elementKey{c.frontends(), addressKey(f.Address) + portKey(nft.ProtocolNumber(protocol), f.Port)}
}

// own adds the elements that belong to this Service port alone: its frontends, the sources of
// frontends that have some, and its virtual services.
func own(to elements, port *view.ServicePort, numbers ids, withPods bool) {
	name, protocol, marks := port.ID.String(), nft.ProtocolNumber(port.ID.Protocol), numbers
	if port.Affinity > 0 {
		marks = ids{}
	}
	for _, f := range port.Frontends {
		for c := range classes {
			e := element{mark: markOf(c.route(f), marks)}
			if c == others {
				e.comment = name
			}
			if c != pods || withPods {
				to[c.element(port.ID.Protocol, f)] = e
			}
		}
		if len(f.Sources) == 0 {
			continue
		}
		key := addressKey(f.Address) + portKey(protocol, f.Port)
		to[elementKey{setFiltered, key}] = element{}
		for _, p := range disjoint(f.Sources) {
			first, last := bounds(p)
			to[elementKey{setSources, key + addressKey(first)}] = element{end: key + addressKey(last), comment: name}
		}
	}
	for r, number := range numbers {
		if number != 0 {
			to[elementKey{setServices, string(nft.Integer(markTag | number))}] = element{comment: serviceComment(name, role(r))}
		}
	}
}

// shared adds by to the count of each element that other Service ports may have as well: cluster
// IPs, the port for health checks of a load balancer's addresses, and local backends' hairpins.
// Only cluster IPs belong to Services alone. An external address may be another machine's, from
// which the node would be cut off if it took the address.
func shared(counts map[elementKey]int, port *view.ServicePort, by int) {
	for _, f := range port.Frontends {
		if f.Kind == view.ClusterIP {
			counts[elementKey{setAddresses, addressKey(f.Address)}] += by
		}
		if f.Kind == view.LoadBalancer && port.HealthCheckPort != 0 {
			counts[elementKey{setHealth, addressKey(f.Address) + portKey(unix.IPPROTO_TCP, port.HealthCheckPort)}] += by
		}
	}
	for r := range roles {
		for b := range r.backends(port).All() {
			if b.Local {
				counts[hairpin(b)] += by
			}
		}
	}
}

// hairpin returns the key of the element for connections that a backend makes to itself.
func hairpin(b view.Backend) elementKey {
	a := addressKey(b.Address.Addr())
	return elementKey{setHairpins, a + a}
}

// markOf returns the value that a map holds for a route.
func markOf(r view.Route, numbers ids) uint32 {
	mark := markTag
	switch r.To {
	case view.Reject:
		return mark | flagReject
	case view.Drop:
		return mark | flagDrop
	case view.Cluster:
		mark |= numbers[clusterRole]
	case view.Local:
		mark |= numbers[localRole]
	}
	if r.Masquerade {
		mark |= flagMasquerade
	}
	return mark
}

// disjoint returns the prefixes without those that are contained in another one, because a set
// accepts no overlapping intervals.
func disjoint(prefixes []netip.Prefix) []netip.Prefix {
	var kept []netip.Prefix
	for _, p := range slices.SortedFunc(slices.Values(prefixes), netip.Prefix.Compare) {
		if len(kept) == 0 || !kept[len(kept)-1].Contains(p.Addr()) {
			kept = append(kept, p.Masked())
		}
	}
	return kept
}

// bounds returns a prefix's first and last address.
func bounds(p netip.Prefix) (first, last netip.Addr) {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	last, _ = netip.AddrFromSlice(b)
	return p.Masked().Addr(), last
}
