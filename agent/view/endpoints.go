package view

import (
	"cmp"
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// endpoint is an endpoint of one Service port.
type endpoint struct {
	*model.Endpoint
	port  uint16
	local bool
	slice uint32 // which of the Service's slices it is in
}

func (e endpoint) ready() bool { return e.Conditions.Ready }

// stillServing tells whether e is one that is used when there is no ready one.
func (e endpoint) stillServing() bool { return e.Conditions.Serving && e.Conditions.Terminating }

func (e endpoint) backend() Backend {
	return Backend{Address: netip.AddrPortFrom(e.Address, e.port), Local: e.local}
}

// endpoints gives the endpoints of a family that a port of this name and protocol has, ascending, each address and port
// once. The list is good until the next call.
//
// An endpoint may be in several slices: it moves from one to another, or its address was given to a new pod before the old
// one's object was gone. Then one that does not terminate counts, as in kube-proxy, and among several of them, where
// kube-proxy takes any, the readiest.
func (v *View) endpoints(of []*model.Slice, family model.Family, name string, protocol model.Protocol) []endpoint {
	v.forgetEndpoints() // where they are longer than what follows they would keep slices that are gone
	out, ends := v.endpointSpace[:0], v.endSpace[:0]
	for i, s := range of {
		if s.Family != family {
			continue
		}
		for _, p := range s.Ports {
			if p.Name != name || p.Protocol != protocol || p.Port == 0 {
				continue
			}
			for j := range s.Endpoints {
				e := &s.Endpoints[j]
				out = append(out, endpoint{e, p.Port, e.NodeName != "" && e.NodeName == v.options.NodeName, uint32(i)})
			}
			ends = append(ends, len(out))
		}
	}
	v.endpointSpace, v.endSpace = out, ends
	if len(ends) < 2 {
		return out // a slice is in order
	}
	sorted := v.sortedSpace[:0]
	keys := v.mergedKeys()
	for i, k := range keys {
		if i == 0 || !k.same(keys[i-1]) {
			sorted = append(sorted, out[k.index])
		}
	}
	v.sortedSpace = sorted
	return sorted
}

// endpointKey is an endpoint's address and port, and where in a list it is: quick to compare, and to move.
type endpointKey struct {
	high, low uint64
	port      uint16
	index     uint32
}

func (k endpointKey) same(o endpointKey) bool {
	return k.high == o.high && k.low == o.low && k.port == o.port
}

// mergedKeys gives the keys of the list of endpoints in their order. A slice's are in order, so lists are merged, two at a time.
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

// mergeKeys appends two ascending lists to a third, in order.
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

// before tells which of two endpoints comes first: among those with the same address and port the one that counts.
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
	return cmp.Or(falseFirst(x.Conditions.Terminating, y.Conditions.Terminating), falseFirst(!x.ready(), !y.ready()),
		falseFirst(!x.Conditions.Serving, !y.Conditions.Serving), falseFirst(!x.local, !y.local), cmp.Compare(x.slice, y.slice)) < 0
}

func (v *View) forgetEndpoints() {
	clear(v.endpointSpace)
	clear(v.sortedSpace)
}

// slicePorts gives the names and protocols of ports that slices of a family have, each once.
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

func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// topology tells which ready endpoints are for this node, if there is a ready one: those hinted for the node, else those
// hinted for its zone, else all. A kind of hints counts only if every ready endpoint has one of it, and one names this node or
// its zone.
func (v *View) topology(of []endpoint) func(endpoint) bool {
	forNode := func(e endpoint) bool { return slices.Contains(e.NodeHints, v.options.NodeName) }
	forZone := func(e endpoint) bool { return slices.Contains(e.ZoneHints, v.node.zone) }
	nodeHints, nodeHinted, zoneHints, zoneHinted := true, false, true, false
	for _, e := range of {
		if !e.ready() {
			continue
		}
		nodeHints = nodeHints && len(e.NodeHints) > 0
		zoneHints = zoneHints && len(e.ZoneHints) > 0
		if !nodeHints && !zoneHints {
			break
		}
		nodeHinted = nodeHinted || forNode(e)
		zoneHinted = zoneHinted || forZone(e)
	}
	switch {
	case nodeHints && nodeHinted:
		return forNode
	case zoneHints && zoneHinted:
		return forZone
	}
	return func(endpoint) bool { return true }
}

// clusterSet gives where connections go that may go to any node: the ready endpoints that are for this node, or, where none
// is ready, those that still serve.
func (v *View) clusterSet(of []endpoint, before []Backend) []Backend {
	forThisNode := v.topology(of)
	if set := v.choose(of, before, func(e endpoint) bool { return e.ready() && forThisNode(e) }); len(set) > 0 {
		return set
	}
	return v.choose(of, before, endpoint.stillServing)
}

// localSet gives where connections go that stay on this node, by its own endpoints alone; hints do not matter for it.
func (v *View) localSet(of []endpoint, before []Backend) []Backend {
	if set := v.choose(of, before, func(e endpoint) bool { return e.local && e.ready() }); len(set) > 0 {
		return set
	}
	return v.choose(of, before, func(e endpoint) bool { return e.local && e.stillServing() })
}

// choose gives the backends of the chosen endpoints, in before if they are the same.
func (v *View) choose(of []endpoint, before []Backend, chosen func(endpoint) bool) []Backend {
	out := v.backendSpace[:0]
	for _, e := range of {
		if chosen(e) {
			out = append(out, e.backend())
		}
	}
	v.backendSpace = out
	return keep(before, out)
}

// keep gives before if it is the same as now, else a copy of now that is no larger than it must be.
func keep[T comparable](before, now []T) []T {
	switch {
	case len(now) == 0:
		return nil
	case slices.Equal(before, now):
		return before
	}
	return append(make([]T, 0, len(now)), now...)
}

// usable tells whether any endpoint of the cluster takes connections.
func usable(of []endpoint) bool {
	return slices.ContainsFunc(of, func(e endpoint) bool { return e.ready() || e.stillServing() })
}

// serving gives the endpoints that serve, wherever they are, in before if they are the same.
func serving(of []endpoint, before []netip.AddrPort) []netip.AddrPort {
	var out []netip.AddrPort
	for _, e := range of {
		if e.Conditions.Serving {
			out = append(out, e.backend().Address)
		}
	}
	return keep(before, out)
}
