package ipvs

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// role is one of a Service port's two sets of backends: each is a virtual service of IPVS.
type role int

const (
	clusterRole role = iota
	localRole
	roles // how many
)

func (r role) target() view.Target { return [...]view.Target{view.Cluster, view.Local}[r] }

// backends gives the set.
func (r role) backends(port *view.ServicePort) view.Backends {
	if port == nil {
		return view.Backends{}
	}
	return [...]view.Backends{port.Cluster, port.Local}[r]
}

// ids are the numbers of a Service port's virtual services; 0: there is none.
type ids [roles]uint32

// identity tells which virtual services a Service port has. It keeps them as long as it is there: those that it does not need any more, as
// affinity came or went, have no backends, but their connections may go on.
type identity struct {
	numbers   ids
	addressed bool // there is one for each of its addresses
}

// estate is what Service ports that go leave to those that come with one of their frontends, as when a port is renamed: with the virtual
// services, open connections go on.
type estate map[elementKey]*identity

// leaveAll has a Service port leave all that it has.
func (e estate) leaveAll(of *programmed) {
	left := of.identity
	for _, f := range of.port.Frontends {
		e[others.element(of.port.ID.Protocol, f)] = &left
	}
}

// inherit gives a Service port what one that goes has left, if nobody else got it.
func (e estate) inherit(now *programmed) {
	for _, f := range now.port.Frontends {
		if left := e[others.element(now.port.ID.Protocol, f)]; left != nil && *left != (identity{}) {
			now.identity, *left = *left, identity{}
			return
		}
	}
}

// serviceComment names a virtual service of the Service port with this name, for operators and to find it again after a restart.
func serviceComment(name string, r role) string {
	return name + " " + r.target().String()
}

func protocolNumber(p model.Protocol) byte {
	switch p {
	case model.UDP:
		return unix.IPPROTO_UDP
	case model.SCTP:
		return unix.IPPROTO_SCTP
	default:
		return unix.IPPROTO_TCP
	}
}

// portKey is how sets have a protocol and a port: each in four bytes.
func portKey(p model.Protocol, port uint16) string {
	return string([]byte{protocolNumber(p), 0, 0, 0, byte(port >> 8), byte(port), 0, 0})
}

func addressKey(a netip.Addr) string { return string(a.AsSlice()) }

// element names the element that a frontend has in the class's maps.
func (c class) element(protocol model.Protocol, f view.Frontend) elementKey {
	if f.Kind == view.NodePort {
		return elementKey{c.nodePorts(), portKey(protocol, f.Port)}
	}
	return elementKey{c.frontends(), addressKey(f.Address) + portKey(protocol, f.Port)}
}

// own calls add for each element that no other Service port has: its frontends, the sources of those that not everybody
// may use, and its virtual services.
func own(port *view.ServicePort, numbers ids, withPods bool, add func(elementKey, element)) {
	name, marks := port.ID.String(), numbers
	if port.Affinity > 0 {
		marks = ids{}
	}
	for _, f := range port.Frontends {
		for c := range classes {
			if c == pods && !withPods {
				continue
			}
			e := element{mark: markOf(c.route(f), marks)}
			if c == others {
				e.comment = name
			}
			add(c.element(port.ID.Protocol, f), e)
		}
		if len(f.Sources) > 0 {
			key := addressKey(f.Address) + portKey(port.ID.Protocol, f.Port)
			add(elementKey{setFiltered, key}, element{})
			for _, p := range disjoint(f.Sources) {
				first, last := bounds(p)
				add(elementKey{setSources, key + addressKey(first)}, element{end: key + addressKey(last), comment: name})
			}
		}
	}
	for r, number := range numbers {
		if number != 0 {
			add(elementKey{setServices, string(host32(markTag | number))}, element{comment: serviceComment(name, role(r))})
		}
	}
}

// shared calls add for each element that other Service ports may have as well, perhaps more than once: addresses, and local
// backends' hairpins.
func shared(port *view.ServicePort, add func(elementKey)) {
	for _, f := range port.Frontends {
		if f.Kind != view.NodePort {
			add(elementKey{setAddresses, addressKey(f.Address)})
		}
	}
	for r := range roles {
		for b := range r.backends(port).All() {
			if b.Local {
				add(hairpin(b))
			}
		}
	}
}

// hairpin gives the element for connections that a backend makes to itself.
func hairpin(b view.Backend) elementKey {
	a := addressKey(b.Address.Addr())
	return elementKey{setHairpins, a + a}
}

// markOf gives what a map holds for a route.
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

// disjoint leaves out the prefixes that are in another one: a set takes no overlapping intervals.
func disjoint(prefixes []netip.Prefix) []netip.Prefix {
	sorted := slices.Clone(prefixes)
	for i, p := range sorted {
		sorted[i] = p.Masked()
	}
	slices.SortFunc(sorted, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	kept := sorted[:0]
	for _, p := range sorted {
		if len(kept) == 0 || !kept[len(kept)-1].Contains(p.Addr()) {
			kept = append(kept, p)
		}
	}
	return kept
}

// bounds gives a prefix's first and last address.
func bounds(p netip.Prefix) (first, last netip.Addr) {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	last, _ = netip.AddrFromSlice(b)
	return p.Masked().Addr(), last
}
