package view

import (
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"
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

// endpoints returns the endpoints of a Service port, ascending, each pair of address and port once.
// If address is valid, it returns only the endpoints with that address. The list is valid until the
// next call.
//
// An endpoint may be in several slices. It may be moving from one to another, or its address may
// have passed to a new pod before the old pod's object was deleted. The copy that sorts first by
// model.Conditions.Compare counts.
func (v *View) endpoints(of []*model.Slice, id ServicePortID, address netip.Addr) []endpoint {
	v.several = v.several[:0]
	v.forgetEndpoints() // a shorter new list would leave pointers to deleted slices behind it
	out, ends := v.endpointSpace, v.endSpace[:0]
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
				out = append(out, endpoint{e, p.Port, e.NodeName != "" && e.NodeName == v.options.NodeName, uint32(i)})
			}
			ends = append(ends, len(out))
		}
	}
	v.endpointSpace, v.endSpace = out, ends
	if len(ends) < 2 {
		return out // a single slice is already sorted
	}
	sorted := v.sortedSpace
	keys := v.mergedKeys()
	for i, k := range keys {
		if i == 0 || !k.same(keys[i-1]) {
			sorted = append(sorted, out[k.index])
		}
		if i > 0 && k.high == keys[i-1].high && k.low == keys[i-1].low {
			v.several = append(v.several, out[k.index].Address)
		}
	}
	v.sortedSpace = sorted
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

// mergedKeys returns the keys of all endpoints in endpointSpace, sorted. Each slice is sorted
// already, so the lists are merged, two at a time.
func (v *View) mergedKeys() []endpointKey {
	from, to, ends := v.keySpace[0][:0], v.keySpace[1][:0], v.endSpace
	for i, e := range v.endpointSpace {
		a := e.Address.As16()
		from = append(from, endpointKey{binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:]), e.port, uint32(i)})
	}
	for len(ends) > 1 {
		merged, next, begin := to[:0], ends[:0], 0
		for i := 0; i < len(ends); i += 2 {
			middle, end := ends[i], ends[min(i+1, len(ends)-1)]
			merged = v.mergeKeys(merged, from[begin:middle], from[middle:end])
			next, begin = append(next, end), end
		}
		from, to, ends = merged, from, next
	}
	v.keySpace = [2][]endpointKey{from, to}
	return from
}

// mergeKeys merges two ascending lists and appends the result to another list.
func (v *View) mergeKeys(to, a, b []endpointKey) []endpointKey {
	for len(a) > 0 && len(b) > 0 {
		if v.before(a[0], b[0]) {
			to, a = append(to, a[0]), a[1:]
		} else {
			to, b = append(to, b[0]), b[1:]
		}
	}
	return append(append(to, a...), b...)
}

// before reports whether endpoint a sorts before b. Among endpoints with the same address and port,
// the one that counts comes first.
func (v *View) before(a, b endpointKey) bool {
	switch {
	case a.high != b.high:
		return a.high < b.high
	case a.low != b.low:
		return a.low < b.low
	case a.port != b.port:
		return a.port < b.port
	}
	x, y := v.endpointSpace[a.index], v.endpointSpace[b.index]
	if c := x.Conditions.Compare(y.Conditions); c != 0 {
		return c < 0
	}
	if x.local != y.local {
		return x.local
	}
	return x.slice < y.slice
}

func (v *View) forgetEndpoints() {
	clear(v.endpointSpace)
	clear(v.sortedSpace)
	v.endpointSpace, v.sortedSpace = v.endpointSpace[:0], v.sortedSpace[:0]
}

// slicePorts returns the names and protocols of the ports that slices of a family have, each once.
func slicePorts(of []*model.Slice, family model.Family) iter.Seq2[string, model.Protocol] {
	return func(yield func(string, model.Protocol) bool) {
		var seen []model.SlicePort
		for _, s := range of {
			if s.Family != family {
				continue
			}
			for _, p := range s.Ports {
				p.Port = 0
				if slices.Contains(seen, p) {
					continue
				}
				if seen = append(seen, p); !yield(p.Name, p.Protocol) {
					return
				}
			}
		}
	}
}
