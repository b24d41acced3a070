package view

import (
	"encoding/binary"
	"net/netip"
	"sort"

	"github.com/slicecast/slicecast/internal/model"
)

// endpoint is an endpoint of one Service port.
type endpoint struct {
	*model.Endpoint
	port  uint16
	local bool
	slice uint32 // index of its slice among those of the Service
}

func (e endpoint) ready() bool { return e.Conditions.Ready }

// stillServing reports whether e terminates but still serves. Such endpoints are used if none is
// ready.
func (e endpoint) stillServing() bool { return e.Conditions.Serving && e.Conditions.Terminating }

func (e endpoint) backend() Backend {
	return Backend{Address: netip.AddrPortFrom(e.Address, e.port), Local: e.local}
}

// endpointReader reads the endpoints of Service ports from slices. It keeps its buffers, to save
// allocations.
//
// Invariants:
//
//  1. After forget, the buffers contain no pointers to slices.
//  2. several contains the addresses that more than one slice had, as of the last read.
type endpointReader struct {
	nodeName string // the node whose endpoints are local
	all      []endpoint
	ends     []int // where each list in all ends
	keys     [2][]endpointKey
	sorted   []endpoint
	several  []netip.Addr
}

// read returns the endpoints of a Service port, ascending, each pair of address and port once. If
// address is valid, it returns only the endpoints with that address. The list is valid until the
// next call.
//
// An endpoint may be in several slices. It may be moving from one to another, or its address may
// have passed to a new pod before the old pod's object was deleted. The copy that sorts first by
// model.Conditions.Compare counts.
func (r *endpointReader) read(of []*model.Slice, id ServicePortID, address netip.Addr) []endpoint {
	r.several = r.several[:0]
	r.forget() // a shorter new list would leave pointers to deleted slices behind it
	out, ends := r.all, r.ends[:0]
	for i, s := range of {
		if s.Family != id.Family {
			continue
		}
		for _, p := range s.Ports {
			if p.Name != id.Port || p.Protocol != id.Protocol || p.Port == 0 {
				continue
			}
			in := s.Endpoints
			if address.IsValid() {
				at, found := sort.Find(len(in), func(j int) int { return address.Compare(in[j].Address) })
				if !found {
					continue
				}
				in = in[at : at+1]
			}
			for j := range in {
				e := &in[j]
				out = append(out, endpoint{e, p.Port, e.NodeName != "" && e.NodeName == r.nodeName, uint32(i)})
			}
			ends = append(ends, len(out))
		}
	}
	r.all, r.ends = out, ends
	if len(ends) < 2 {
		return out // a single slice is already sorted
	}
	sorted := r.sorted
	keys := r.mergedKeys()
	for i, k := range keys {
		if i == 0 || !k.same(keys[i-1]) {
			sorted = append(sorted, out[k.index])
		}
		if i > 0 && k.high == keys[i-1].high && k.low == keys[i-1].low {
			r.several = append(r.several, out[k.index].Address)
		}
	}
	r.sorted = sorted
	return sorted
}

// endpointKey is an endpoint's address and port, with its index in a list. It is small, so that
// comparing and moving keys is fast.
type endpointKey struct {
	high, low uint64
	port      uint16
	index     uint32
}

func (k endpointKey) same(o endpointKey) bool {
	return k.high == o.high && k.low == o.low && k.port == o.port
}

// mergedKeys returns the keys of all endpoints in r.all, sorted. Each slice is sorted
// already, so the lists are merged, two at a time.
func (r *endpointReader) mergedKeys() []endpointKey {
	from, to, ends := r.keys[0][:0], r.keys[1][:0], r.ends
	for i, e := range r.all {
		a := e.Address.As16()
		from = append(from, endpointKey{binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:]), e.port, uint32(i)})
	}
	for len(ends) > 1 {
		merged, next, begin := to[:0], ends[:0], 0
		for i := 0; i < len(ends); i += 2 {
			middle, end := ends[i], ends[min(i+1, len(ends)-1)]
			merged = r.mergeKeys(merged, from[begin:middle], from[middle:end])
			next, begin = append(next, end), end
		}
		from, to, ends = merged, from, next
	}
	r.keys = [2][]endpointKey{from, to}
	return from
}

// mergeKeys merges two ascending lists and appends the result to another list.
func (r *endpointReader) mergeKeys(to, a, b []endpointKey) []endpointKey {
	for len(a) > 0 && len(b) > 0 {
		if r.before(a[0], b[0]) {
			to, a = append(to, a[0]), a[1:]
		} else {
			to, b = append(to, b[0]), b[1:]
		}
	}
	return append(append(to, a...), b...)
}

// before reports whether endpoint a sorts before b. Among endpoints with the same address and port,
// the one that counts comes first.
func (r *endpointReader) before(a, b endpointKey) bool {
	switch {
	case a.high != b.high:
		return a.high < b.high
	case a.low != b.low:
		return a.low < b.low
	case a.port != b.port:
		return a.port < b.port
	}
	x, y := r.all[a.index], r.all[b.index]
	if c := x.Conditions.Compare(y.Conditions); c != 0 {
		return c < 0
	}
	if x.local != y.local {
		return x.local
	}
	return x.slice < y.slice
}

func (r *endpointReader) forget() {
	clear(r.all)
	clear(r.sorted)
	r.all, r.sorted = r.all[:0], r.sorted[:0]
}
