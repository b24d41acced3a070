package model

import (
	"net/netip"
	"unsafe"
)

// The methods below return about the memory, in bytes, that only a reference to an object keeps
// alive. They return no less than that, so that bounds on memory can count it. Strings count for
// each object, although objects may share them.

// sizeOf returns the bytes of a list with room for n elements. The allocator rounds up by at most
// an eighth, and by 16 bytes for small lists.
func sizeOf[T any](n int) int {
	if n == 0 {
		return 0
	}
	var element T
	return 16 + n*int(unsafe.Sizeof(element))*9/8
}

func stringSize(s string) int { return sizeOf[byte](len(s)) }

// Memory returns about the memory of a Service in bytes.
func (s *Service) Memory() int {
	size := sizeOf[Service](1) + stringSize(s.Namespace) + stringSize(s.Name) + stringSize(s.TrafficDistribution) +
		stringSize(s.IPVSScheduler) + sizeOf[netip.Addr](cap(s.ClusterIPs)+cap(s.ExternalIPs)) +
		sizeOf[LoadBalancerIngress](cap(s.LoadBalancerIngress)) + sizeOf[ServicePort](cap(s.Ports)) +
		sizeOf[netip.Prefix](cap(s.LoadBalancerSourceRanges))
	for i := range s.Ports {
		size += stringSize(s.Ports[i].Name)
	}
	return size
}

// Memory returns about the memory of a slice in bytes.
func (s *Slice) Memory() int {
	size := sizeOf[Slice](1) + stringSize(s.Namespace) + stringSize(s.Name) + stringSize(s.Service) +
		sizeOf[SlicePort](cap(s.Ports)) + sizeOf[hash](cap(s.leaves)) + endpointsSize(s.Endpoints)
	for i := range s.Ports {
		size += stringSize(s.Ports[i].Name)
	}
	return size
}

func endpointsSize(endpoints []Endpoint) int {
	size := sizeOf[Endpoint](cap(endpoints))
	for i := range endpoints {
		e := &endpoints[i]
		size += stringSize(e.NodeName) + stringSize(e.Zone)
		for _, hints := range [...][]string{e.ZoneHints, e.NodeHints} {
			size += sizeOf[string](cap(hints))
			for _, h := range hints {
				size += stringSize(h)
			}
		}
	}
	return size
}

// Memory returns about the memory of a delta in bytes, with that of the slice before it.
func (d *SliceDelta) Memory() int {
	size := sizeOf[SliceDelta](1) + stringSize(d.Namespace) + stringSize(d.Name) + stringSize(d.Service) +
		endpointsSize(d.Endpoints) + sizeOf[EndpointConditions](cap(d.Conditions)) + sizeOf[netip.Addr](cap(d.Removed))
	if d.Before != nil {
		size += d.Before.Memory()
	}
	return size
}

func (k Key) memory() int { return stringSize(k.Namespace) + stringSize(k.Name) }

// Memory returns about the memory of an Update in bytes, with all objects in it.
func (u *Update) Memory() int {
	size := sizeOf[Update](1) + sizeOf[uint32](cap(u.FullBuckets)) +
		sizeOf[*Service](cap(u.Services)+cap(u.Slices)+cap(u.Deltas)) + sizeOf[Key](cap(u.Removed)) +
		sizeOf[Departure](cap(u.Left)) + sizeOf[Unreadable](cap(u.Unreadable)) + sizeOf[Unverified](cap(u.Unverified))
	for _, s := range u.Services {
		size += s.Memory()
	}
	for _, s := range u.Slices {
		size += s.Memory()
	}
	for _, d := range u.Deltas {
		size += d.Memory()
	}
	for _, k := range u.Removed {
		size += k.memory()
	}
	for _, d := range u.Left {
		size += d.Key.memory() + stringSize(d.Service.Namespace) + stringSize(d.Service.Name)
	}
	for _, o := range u.Unreadable {
		size += o.Key.memory()
	}
	for _, o := range u.Unverified {
		size += o.Key.memory()
	}
	return size
}
