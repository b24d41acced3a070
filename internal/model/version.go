package model

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/cespare/xxhash/v2"
)

// hasher feeds the canonical encoding of an object to a hash: each field as its number, its length and its bytes, fields
// at their zero value left out, so that a field that is added later changes no version where it is not used.
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
	if s == "" {
		return
	}
	h.buf = append(h.buf, number)
	h.buf = binary.AppendUvarint(h.buf, uint64(len(s)))
	h.buf = append(h.buf, s...)
}

// elem is a string in a list, where an empty one counts.
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
	b := a.As16()
	if a.Is4() {
		v4 := a.As4()
		h.field(number, v4[:])
		return
	}
	h.field(number, b[:])
}

func (h *hasher) sum() uint64 { return xxhash.Sum64(h.buf) }

// mix makes of a sum of hashes a hash: without it, sums of versions could not tell which slice an endpoint is in.
// (The finaliser of MurmurHash3.)
func mix(v uint64) Version {
	v ^= v >> 33
	v *= 0xff51afd7ed558ccd
	v ^= v >> 33
	v *= 0xc4ceb9fe1a85ec53
	v ^= v >> 33
	if v == 0 {
		v = 1
	}
	return Version(v)
}

// NewService completes a Service: sorts what has no order and sets the version. It takes ownership of s.
func NewService(s Service) *Service {
	slices.SortFunc(s.ClusterIPs, netip.Addr.Compare)
	slices.SortFunc(s.ExternalIPs, netip.Addr.Compare)
	slices.SortFunc(s.LoadBalancerIngress, func(a, b LoadBalancerIngress) int {
		return cmp.Or(a.IP.Compare(b.IP), compareTrueFirst(a.ProxyMode, b.ProxyMode))
	})
	slices.SortFunc(s.LoadBalancerSourceRanges, ComparePrefix)
	slices.SortFunc(s.Ports, func(a, b ServicePort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port),
			cmp.Compare(a.NodePort, b.NodePort))
	})
	s.version, s.exact = mix(s.hash()), true
	return &s
}

// WithVersion sets the version that the wire gave instead of the content's own, which may hold more than this software
// knows of. Where they differ, unknown tells whether that is so: that what came has fields which this software does not know; nil: it has none.
// It is for decoders, before the object is shared.
func (s *Service) WithVersion(v Version, unknown func() bool) *Service {
	s.exact = s.version == v
	s.newer = !s.exact && unknown != nil && unknown()
	s.version = v
	return s
}

// WithOwnVersion gives the Service with its content's own version; itself, if it has that, or came from newer software. Else it came by way of
// software that is older than its source, which may have left out fields that this software knows.
func (s *Service) WithOwnVersion() *Service {
	if s.exact || s.newer {
		return s
	}
	own := *s
	own.version, own.exact = mix(s.hash()), true
	return &own
}

func (s *Service) hash() uint64 {
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

// NewSlice completes a Slice: sorts ports and endpoints, keeps one endpoint of each address and sets the version. Of
// several endpoints with one address the first by Conditions.Compare stays.
// It takes ownership of s.
func NewSlice(s Slice) *Slice {
	slices.SortFunc(s.Ports, func(a, b SlicePort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	for i := range s.Endpoints {
		slices.Sort(s.Endpoints[i].ZoneHints)
		slices.Sort(s.Endpoints[i].NodeHints)
	}
	slices.SortStableFunc(s.Endpoints, func(a, b Endpoint) int {
		return cmp.Or(a.Address.Compare(b.Address), a.Conditions.Compare(b.Conditions),
			cmp.Compare(a.NodeName, b.NodeName), cmp.Compare(a.Zone, b.Zone),
			slices.Compare(a.ZoneHints, b.ZoneHints), slices.Compare(a.NodeHints, b.NodeHints))
	})
	s.Endpoints = slices.CompactFunc(s.Endpoints, func(a, b Endpoint) bool { return a.Address == b.Address })
	s.sum = s.headerHash()
	for i := range s.Endpoints {
		s.sum += s.Endpoints[i].hash()
	}
	s.version, s.exact = mix(s.sum), true
	return &s
}

// WithVersion sets the version that the wire gave instead of the content's own; see Service.WithVersion.
func (s *Slice) WithVersion(v Version, unknown func() bool) *Slice {
	s.exact = s.version == v
	s.newer = !s.exact && unknown != nil && unknown()
	s.version = v
	return s
}

// WithOwnVersion gives the slice with its content's own version; see Service.WithOwnVersion.
func (s *Slice) WithOwnVersion() *Slice {
	if s.exact || s.newer {
		return s
	}
	own := *s
	own.version, own.exact = mix(s.sum), true
	return &own
}

// Compare orders the conditions of several endpoints with one address: first what counts, which is one that does not terminate, as in kube-proxy, and
// of several, where kube-proxy takes any, the readiest.
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

func (s *Slice) headerHash() uint64 {
	h := hasher{buf: make([]byte, 0, 256)}
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
	return h.sum()
}

func (e *Endpoint) hash() uint64 {
	var space [128]byte
	h := hasher{buf: space[:0]}
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
	return h.sum()
}

// Equal tells whether two endpoints are the same in every field.
func (e *Endpoint) Equal(o *Endpoint) bool {
	return e.Address == o.Address && e.Conditions == o.Conditions && e.sameButConditions(o)
}

func (e *Endpoint) sameButConditions(o *Endpoint) bool {
	return e.NodeName == o.NodeName && e.Zone == o.Zone &&
		slices.Equal(e.ZoneHints, o.ZoneHints) && slices.Equal(e.NodeHints, o.NodeHints)
}

// ContentVersion is a hash of the Node's content, as versions of other objects are. It is computed with each call.
func (n *Node) ContentVersion() Version {
	h := hasher{buf: make([]byte, 0, 512)}
	h.num(1, uint64(KindNode))
	h.str(2, n.Name)
	for _, k := range slices.Sorted(maps.Keys(n.Labels)) {
		h.elem(3, k)
		h.elem(4, n.Labels[k])
	}
	for _, a := range n.InternalIPs {
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
	return mix(h.sum())
}

// Equal tells whether two Nodes are the same in every field; a nil Node equals only nil.
func (n *Node) Equal(o *Node) bool {
	if n == nil || o == nil {
		return n == o
	}
	if n.Name != o.Name || n.Deleting != o.Deleting || n.TaintedForDeletion != o.TaintedForDeletion ||
		!slices.Equal(n.InternalIPs, o.InternalIPs) || !slices.Equal(n.PodCIDRs, o.PodCIDRs) ||
		!slices.Equal(n.ServiceCIDRs, o.ServiceCIDRs) || len(n.Labels) != len(o.Labels) {
		return false
	}
	for k, v := range n.Labels {
		if ov, ok := o.Labels[k]; !ok || ov != v {
			return false
		}
	}
	return true
}

// ComparePrefix orders prefixes by address, then by length.
func ComparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// String gives 16 hexadecimal digits.
func (v Version) String() string { return fmt.Sprintf("%016x", uint64(v)) }
