package view

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// tally counts the endpoints of a Service port by the properties that decide which endpoints
// receive connections. If some endpoints change, the tally is all that must be known about the
// others.
type tally struct {
	ready, stillServing           uint32
	readyLocal, stillServingLocal uint32 // those of the above that are on this node
	// The counters below are of ready endpoints: those with hints of each kind, and those hinted for
	// this node or its zone.
	nodeHints, forNode, zoneHints, forZone uint32
}

// count adds endpoints to a tally if by is 1, and subtracts them if by is -1.
func (v *View) count(t *tally, of []endpoint, by int32) {
	add := func(n *uint32, is bool) {
		if is {
			*n += uint32(by)
		}
	}
	for _, e := range of {
		if !e.ready() {
			add(&t.stillServing, e.stillServing())
			add(&t.stillServingLocal, e.stillServing() && e.local)
			continue
		}
		t.ready += uint32(by)
		add(&t.readyLocal, e.local)
		if len(e.NodeHints) > 0 {
			add(&t.nodeHints, true)
			add(&t.forNode, slices.Contains(e.NodeHints, v.options.NodeName))
		}
		if len(e.ZoneHints) > 0 {
			add(&t.zoneHints, true)
			add(&t.forZone, slices.Contains(e.ZoneHints, v.node.zone))
		}
	}
}

// usable reports whether any endpoint of the cluster accepts connections.
func (t *tally) usable() bool { return t.ready > 0 || t.stillServing > 0 }

// choice is the criterion that selects the endpoints of a set of backends.
type choice uint8

const (
	ready choice = iota
	readyForNode
	readyForZone
	stillServing // terminating endpoints that still serve, used when none is ready
	readyLocal
	stillServingLocal
	serving // whether they receive new connections or not
)

// cluster returns which endpoints receive the connections that may go to any node. If no endpoint
// is ready, these are the terminating endpoints that still serve. Otherwise they are the ready
// endpoints hinted for this node, or else those hinted for its zone, or else all ready ones. A kind
// of hint counts only if every ready endpoint has one, and one of them names this node or its zone.
func (t *tally) cluster() choice {
	switch {
	case t.ready == 0:
		return stillServing
	case t.hints(t.nodeHints, t.forNode) == hintsCount:
		return readyForNode
	case t.hints(t.zoneHints, t.forZone) == hintsCount:
		return readyForZone
	}
	return ready
}

// hintUse says whether hints of a kind count, or why they do not.
type hintUse uint8

const (
	hintsCount hintUse = iota
	noHints
	// someUnhinted means that a ready endpoint has no hint of the kind.
	someUnhinted
	// noneForUs means that no hint names this node or its zone.
	noneForUs
)

// hints returns whether hints of a kind count, given how many ready endpoints have such hints, and
// how many of these are for this node or its zone.
func (t *tally) hints(hinted, forUs uint32) hintUse {
	switch {
	case hinted == 0:
		return noHints
	case hinted != t.ready:
		return someUnhinted
	case forUs == 0:
		return noneForUs
	}
	return hintsCount
}

// local returns which endpoints receive the connections that stay on this node. It considers only
// this node's endpoints, and ignores hints.
func (t *tally) local() choice {
	if t.readyLocal > 0 {
		return readyLocal
	}
	return stillServingLocal
}

// Exclusion is why an endpoint is not in a set of backends. The empty Exclusion means that it is.
type Exclusion string

// These are the reasons for which endpoints are excluded.
const (
	NotReady Exclusion = "not ready"
	// NotServing is the reason if no endpoint is ready, so that those which terminate but still serve
	// are used, of which this is none.
	NotServing Exclusion = "not ready, and not terminating while still serving"
	// OtherNode and OtherZone are the reasons if topology hints count.
	OtherNode Exclusion = "its hints name other nodes"
	OtherZone Exclusion = "its hints name other zones"
	NotLocal  Exclusion = "not on this node"
)

// excludes returns why a criterion does not select an endpoint. It returns the empty Exclusion if
// the criterion does.
func (v *View) excludes(c choice, e endpoint) Exclusion {
	terminating := c == stillServing || c == stillServingLocal
	switch {
	case c == serving && e.Conditions.Serving:
		return ""
	case c == serving:
		return NotServing
	case (c == readyLocal || c == stillServingLocal) && !e.local:
		return NotLocal
	case terminating && !e.stillServing():
		return NotServing
	case !terminating && !e.ready():
		return NotReady
	case c == readyForNode && !slices.Contains(e.NodeHints, v.options.NodeName):
		return OtherNode
	case c == readyForZone && !slices.Contains(e.ZoneHints, v.node.zone):
		return OtherZone
	}
	return ""
}

// appendChosen appends the backends of the endpoints that c selects.
func (v *View) appendChosen(out []Backend, of []endpoint, c choice) []Backend {
	for _, e := range of {
		if v.excludes(c, e) == "" {
			out = append(out, e.backend())
		}
	}
	return out
}

// keep returns before if it equals now, and otherwise a copy of now without spare capacity.
func keep[T comparable](before, now []T) []T {
	switch {
	case len(now) == 0:
		return nil
	case slices.Equal(before, now):
		return before
	}
	return append(make([]T, 0, len(now)), now...)
}

// seen is what the view remembers about a Service that has had many slices: what its ports in
// View.ports were computed from. With it, a change of a few endpoints can be applied without
// reading all of them. It is valid for the present object of the Service and the present Node only.
type seen struct {
	slices []*model.Slice
	ports  map[ServicePortID]seenPort
}

// seenPort is what the view remembers about a Service port's endpoints: their tally, and the
// addresses that several slices have.
type seenPort struct {
	tally
	shared map[netip.Addr]struct{}
}

const (
	// manySlices is the number of slices from which on a Service gets a seen.
	manySlices = 4
	// fewChanges is the largest number of changed addresses that are looked up one by one.
	fewChanges = 16
)

// setBackends sets the sets of backends of a Service port from its frontends. Where a set has not
// changed, it is that of before. usable reports whether any endpoint of the cluster accepts
// connections.
func (v *View) setBackends(s *service, p, before *ServicePort) (usable bool) {
	cluster, local := uses(s.object, p.Frontends)
	old := &ServicePort{}
	var d difference
	known := false // d is the difference from the endpoints of old
	if before != nil {
		old = before
		if wasCluster, wasLocal := uses(s.object, old.Frontends); wasCluster == cluster && wasLocal == local {
			d, known = v.difference(s, p.ID)
		}
	}
	var now seenPort
	if known {
		was := s.seen.ports[p.ID]
		now = was
		v.count(&now.tally, d.before, -1)
		v.count(&now.tally, d.after, 1)
		known = now.cluster() == was.cluster() && now.local() == was.local()
	}
	var all []endpoint
	if !known {
		now, all = seenPort{}, v.reader.read(s.slices, p.ID, netip.Addr{})
		v.count(&now.tally, all, 1)
	}
	if s.seen != nil {
		if now.shared == nil {
			now.shared = make(map[netip.Addr]struct{})
			for _, a := range v.reader.several {
				now.shared[a] = struct{}{}
			}
		}
		s.seen.ports[p.ID] = now
	}
	set := func(before Backends, c choice) Backends {
		if known {
			return before.with(v.appendChosen(nil, d.before, c), v.appendChosen(nil, d.after, c))
		}
		v.backendSpace = v.appendChosen(v.backendSpace[:0], all, c)
		if before.is(v.backendSpace) {
			return before
		}
		return ascending(v.backendSpace)
	}
	if cluster {
		p.Cluster = set(old.Cluster, now.cluster())
	}
	if local {
		p.Local = set(old.Local, now.local())
	}
	if p.ID.Protocol == model.UDP {
		p.Serving = set(old.Serving, serving)
	}
	return now.usable()
}

// difference is what has changed in a Service port's endpoints: the endpoints at the changed
// addresses, before and after the change.
type difference struct {
	before, after []endpoint
}

// difference returns what has changed in a Service port's endpoints since s.seen, which describes
// the port in View.ports (View's invariant 4). ok is false if s.seen is nil, or if too much has
// changed to look it up address by address.
func (v *View) difference(s *service, id ServicePortID) (d difference, ok bool) {
	if s.seen == nil || len(s.seen.slices) != len(s.slices) {
		return difference{}, false
	}
	var changed []changedAddress
	for i, now := range s.slices {
		was := s.seen.slices[i]
		if now == was {
			continue
		}
		if now.Family != was.Family || !slices.Equal(now.Ports, was.Ports) {
			return difference{}, false
		}
		if changed = appendChanged(changed, i, was.Endpoints, now.Endpoints); len(changed) > fewChanges {
			return difference{}, false
		}
	}
	slices.SortFunc(changed, func(a, b changedAddress) int { return a.Compare(b.Addr) })
	shared := s.seen.ports[id].shared
	for len(changed) > 0 {
		a := changed[0].Addr
		same := 1
		for same < len(changed) && changed[same].Addr == a {
			same++
		}
		was, is := s.seen.slices, s.slices
		_, several := shared[a]
		// Searching many slices is most of the work. An endpoint that stays in one slice is in no other
		// slice, unless its address was in several before.
		if i := changed[0].slice; same == 1 && changed[0].stays && !several {
			was, is = was[i:i+1], is[i:i+1]
		}
		d.before = append(d.before, v.reader.read(was, id, a)...)
		d.after = append(d.after, v.reader.read(is, id, a)...)
		delete(shared, a)
		for _, a := range v.reader.several {
			shared[a] = struct{}{}
		}
		changed = changed[same:]
	}
	return d, true
}

// changedAddress is an address at which the endpoints of two versions of a slice differ.
type changedAddress struct {
	netip.Addr
	slice int
	stays bool // both versions have an endpoint at the address
}

// appendChanged appends the addresses at which the endpoints of two versions of a slice differ. It
// stops as soon as there are more than fewChanges.
func appendChanged(to []changedAddress, slice int, before, after []model.Endpoint) []changedAddress {
	for len(to) <= fewChanges && (len(before) > 0 || len(after) > 0) {
		switch {
		case len(before) > 0 && len(after) > 0 && before[0].Address == after[0].Address:
			if !before[0].Equal(&after[0]) {
				to = append(to, changedAddress{after[0].Address, slice, true})
			}
			before, after = before[1:], after[1:]
		case len(after) == 0 || len(before) > 0 && before[0].Address.Less(after[0].Address):
			to, before = append(to, changedAddress{before[0].Address, slice, false}), before[1:]
		default:
			to, after = append(to, changedAddress{after[0].Address, slice, false}), after[1:]
		}
	}
	return to
}
