package model

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
)

// hasher builds the canonical encoding of an object. Its version is the hash of this encoding. Each
// field is encoded as its number, its length and its bytes, so that no two objects have the same
// encoding. Fields with their zero value are left out, so that a field added later does not change
// the version of objects that do not use it.
type hasher struct {
	buf []byte
}

func (h *hasher) field(number byte, b []byte) {
	if len(b) == 0 {
		return
	}
	h.buf = append(h.buf, number)
	h.buf = binary.AppendUvarint(h.buf, uint64(len(b)))
	h.buf = append(h.buf, b...)
}

func (h *hasher) str(number byte, s string) {
	if s != "" {
		h.elem(number, s)
	}
}

// elem encodes a string of a list. Unlike str, it encodes an empty string, too.
func (h *hasher) elem(number byte, s string) {
	h.buf = append(h.buf, number)
	h.buf = binary.AppendUvarint(h.buf, uint64(len(s)))
	h.buf = append(h.buf, s...)
}

func (h *hasher) num(number byte, v uint64) {
	if v == 0 {
		return
	}
	h.buf = append(h.buf, number)
	h.buf = binary.AppendUvarint(h.buf, v)
}

func (h *hasher) bool(number byte, v bool) {
	if v {
		h.num(number, 1)
	}
}

func (h *hasher) addr(number byte, a netip.Addr) {
	if a.Is4() {
		v4 := a.As4()
		h.field(number, v4[:])
		return
	}
	b := a.As16()
	h.field(number, b[:])
}

func (h *hasher) sum() Version { return Version(hashOf(h.buf)) }

// NewService completes a Service: it sorts the lists, removes duplicates and sets the version. It
// takes ownership of s.
func NewService(s Service) *Service {
	slices.SortFunc(s.ClusterIPs, netip.Addr.Compare)
	slices.SortFunc(s.ExternalIPs, netip.Addr.Compare)
	slices.SortFunc(s.LoadBalancerIngress, func(a, b LoadBalancerIngress) int {
		return cmp.Or(a.IP.Compare(b.IP), compareTrueFirst(a.ProxyMode, b.ProxyMode))
	})
	slices.SortFunc(s.LoadBalancerSourceRanges, netip.Prefix.Compare)
	slices.SortFunc(s.Ports, func(a, b ServicePort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port),
			cmp.Compare(a.NodePort, b.NodePort))
	})
	s.ClusterIPs, s.ExternalIPs = slices.Compact(s.ClusterIPs), slices.Compact(s.ExternalIPs)
	s.LoadBalancerIngress, s.LoadBalancerSourceRanges = slices.Compact(s.LoadBalancerIngress), slices.Compact(s.LoadBalancerSourceRanges)
	s.Ports = slices.Compact(s.Ports)
	s.version = s.hash()
	return &s
}

func (s *Service) hash() Version {
	h := hasher{buf: make([]byte, 0, 256)}
	h.num(1, uint64(KindService))
	h.str(2, s.Namespace)
	h.str(3, s.Name)
	h.num(4, uint64(s.Type))
	for _, a := range s.ClusterIPs {
		h.addr(5, a)
	}
	for _, a := range s.ExternalIPs {
		h.addr(6, a)
	}
	for _, i := range s.LoadBalancerIngress {
		h.addr(7, i.IP)
		h.bool(8, i.ProxyMode)
	}
	for _, p := range s.Ports {
		h.elem(9, p.Name)
		h.num(10, uint64(p.Protocol))
		h.num(11, uint64(p.Port))
		h.num(12, uint64(p.NodePort))
	}
	h.bool(13, s.InternalTrafficPolicy == TrafficLocal)
	h.bool(14, s.ExternalTrafficPolicy == TrafficLocal)
	h.num(15, uint64(s.ClientIPAffinitySeconds))
	for _, p := range s.LoadBalancerSourceRanges {
		h.addr(16, p.Addr())
		h.num(17, uint64(p.Bits()+1))
	}
	h.num(18, uint64(s.HealthCheckNodePort))
	h.str(19, s.TrafficDistribution)
	h.num(20, uint64(s.CreationTimeSeconds))
	h.str(21, s.IPVSScheduler)
	return h.sum()
}

// NewSlice completes a Slice: it sorts the lists, removes duplicates and sets the version. If
// several endpoints have the same address, it keeps the first one in the order of
// Conditions.Compare. It takes ownership of s.
func NewSlice(s Slice) *Slice {
	slices.SortFunc(s.Ports, func(a, b SlicePort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	s.Ports = slices.Compact(s.Ports)
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		slices.Sort(e.ZoneHints)
		slices.Sort(e.NodeHints)
		e.ZoneHints, e.NodeHints = slices.Compact(e.ZoneHints), slices.Compact(e.NodeHints)
	}
	slices.SortStableFunc(s.Endpoints, func(a, b Endpoint) int {
		return cmp.Or(a.Address.Compare(b.Address), a.Conditions.Compare(b.Conditions),
			cmp.Compare(a.NodeName, b.NodeName), cmp.Compare(a.Zone, b.Zone),
			slices.Compare(a.ZoneHints, b.ZoneHints), slices.Compare(a.NodeHints, b.NodeHints))
	})
	s.Endpoints = slices.CompactFunc(s.Endpoints, func(a, b Endpoint) bool { return a.Address == b.Address })
	s.leaves = hashLeaves(s.Endpoints, nil)
	s.version = s.hash()
	return &s
}

// Compare orders the conditions of endpoints that share an address; the endpoint to use comes
// first. Endpoints that do not terminate come before those that do, as in kube-proxy. Among the
// rest, where kube-proxy uses any one, ready endpoints come first, then serving ones.
func (c Conditions) Compare(o Conditions) int {
	return cmp.Or(compareTrueFirst(!c.Terminating, !o.Terminating), compareTrueFirst(c.Ready, o.Ready), compareTrueFirst(c.Serving, o.Serving))
}

func compareTrueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// leafEndpoints is the number of endpoints that share a leaf of a slice's hash tree. A delta hashes
// only the leaves that it changes, which are about 1 KiB each with this number.
const leafEndpoints = 16

// hashLeaves returns the leaves of a list of endpoints. It reuses the leaves of like, an earlier
// state of the slice, that hold the same endpoints. like may be nil.
func hashLeaves(endpoints []Endpoint, like *Slice) []hash {
	count := (len(endpoints) + leafEndpoints - 1) / leafEndpoints
	out := make([]hash, 0, count)
	var space [leafEndpoints * 96]byte
	h := hasher{buf: space[:0]}
	for i := range count {
		leaf := endpoints[i*leafEndpoints : min((i+1)*leafEndpoints, len(endpoints))]
		if like != nil && like.hasLeaf(i, leaf) {
			out = append(out, like.leaves[i])
			continue
		}
		h.buf = append(h.buf[:0], tagLeaf)
		for j := range leaf {
			leaf[j].encode(&h)
		}
		out = append(out, hashOf(h.buf))
	}
	return out
}

// hasLeaf reports whether leaf i of the slice holds exactly these endpoints.
func (s *Slice) hasLeaf(i int, leaf []Endpoint) bool {
	if i >= len(s.leaves) {
		return false
	}
	have := s.Endpoints[i*leafEndpoints : min((i+1)*leafEndpoints, len(s.Endpoints))]
	return slices.EqualFunc(have, leaf, func(a, b Endpoint) bool { return a.Equal(&b) })
}

// hash returns the hash of the slice's header and leaves.
func (s *Slice) hash() Version {
	var space [512]byte
	h := hasher{buf: space[:0]}
	h.num(1, uint64(KindSlice))
	h.str(2, s.Namespace)
	h.str(3, s.Name)
	h.str(4, s.Service)
	h.num(5, uint64(s.Family))
	for _, p := range s.Ports {
		h.elem(6, p.Name)
		h.num(7, uint64(p.Protocol))
		h.num(8, uint64(p.Port))
	}
	for i := range s.leaves {
		h.field(9, s.leaves[i][:])
	}
	return h.sum()
}

// encode appends the canonical encoding of an endpoint. The encoding begins with the address, which
// every endpoint has, so that consecutive endpoints are separable.
func (e *Endpoint) encode(h *hasher) {
	h.addr(1, e.Address)
	h.bool(2, e.Conditions.Ready)
	h.bool(3, e.Conditions.Serving)
	h.bool(4, e.Conditions.Terminating)
	h.str(5, e.NodeName)
	h.str(6, e.Zone)
	for _, z := range e.ZoneHints {
		h.elem(7, z)
	}
	for _, n := range e.NodeHints {
		h.elem(8, n)
	}
}

// Equal reports whether two endpoints are the same in every field.
func (e *Endpoint) Equal(o *Endpoint) bool {
	return e.Address == o.Address && e.Conditions == o.Conditions && e.sameButConditions(o)
}

func (e *Endpoint) sameButConditions(o *Endpoint) bool {
	return e.NodeName == o.NodeName && e.Zone == o.Zone &&
		slices.Equal(e.ZoneHints, o.ZoneHints) && slices.Equal(e.NodeHints, o.NodeHints)
}

// ContentVersion returns a hash of the Node's content, like the versions of other objects. It
// computes the hash on each call.
func (n *Node) ContentVersion() Version {
	h := hasher{buf: make([]byte, 0, 512)}
	h.num(1, uint64(KindNode))
	h.str(2, n.Name)
	for _, k := range slices.Sorted(maps.Keys(n.Labels)) {
		h.elem(3, k)
		h.elem(4, n.Labels[k])
	}
	for _, a := range n.Addresses {
		h.addr(5, a)
	}
	for _, p := range n.PodCIDRs {
		h.addr(6, p.Addr())
		h.num(7, uint64(p.Bits()+1))
	}
	h.bool(8, n.Deleting)
	h.bool(9, n.TaintedForDeletion)
	for _, p := range n.ServiceCIDRs {
		h.addr(10, p.Addr())
		h.num(11, uint64(p.Bits()+1))
	}
	return h.sum()
}

// Equal reports whether two Nodes are the same in every field. A nil Node equals only nil.
func (n *Node) Equal(o *Node) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.Name == o.Name && n.Deleting == o.Deleting && n.TaintedForDeletion == o.TaintedForDeletion &&
		slices.Equal(n.Addresses, o.Addresses) && slices.Equal(n.PodCIDRs, o.PodCIDRs) &&
		slices.Equal(n.ServiceCIDRs, o.ServiceCIDRs) && maps.Equal(n.Labels, o.Labels)
}
