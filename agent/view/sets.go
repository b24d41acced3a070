package view

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// tally counts the endpoints of a Service port by what decides which of them get connections: all that must be known of the others when
// some change.
type tally struct {
	ready, stillServing           uint32
	readyLocal, stillServingLocal uint32 // of these, the ones on this node
	// Of the ready ones, those with hints of either kind, and those that are hinted for this node and its zone.
	nodeHints, forNode, zoneHints, forZone uint32
}

// count adds endpoints to a tally; by -1 it takes them away.
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

// usable tells whether any endpoint of the cluster takes connections.
func (t *tally) usable() bool { return t.ready > 0 || t.stillServing > 0 }

// choice tells which endpoints are in a set of backends.
type choice uint8

const (
	ready choice = iota
	readyForNode
	readyForZone
	stillServing // and not ready, as none is then
	readyLocal
	stillServingLocal
)

// cluster tells where connections go that may go to any node: the ready endpoints that are for this node, or, where none is ready,
// those that still serve. For this node are those hinted for it, else those hinted for its zone, else all. A kind of hints counts only
// if every ready endpoint has one of it, and one names this node or its zone.
func (t *tally) cluster() choice {
	switch {
	case t.ready == 0:
		return stillServing
	case t.nodeHints == t.ready && t.forNode > 0:
		return readyForNode
	case t.zoneHints == t.ready && t.forZone > 0:
		return readyForZone
	}
	return ready
}

// local tells where connections go that stay on this node, by its own endpoints alone; hints do not matter for it.
func (t *tally) local() choice {
	if t.readyLocal > 0 {
		return readyLocal
	}
	return stillServingLocal
}

func (v *View) chooses(c choice, e endpoint) bool {
	switch c {
	case ready:
		return e.ready()
	case readyForNode:
		return e.ready() && slices.Contains(e.NodeHints, v.options.NodeName)
	case readyForZone:
		return e.ready() && slices.Contains(e.ZoneHints, v.node.zone)
	case stillServing:
		return e.stillServing()
	case readyLocal:
		return e.local && e.ready()
	}
	return e.local && e.stillServing()
}

// appendChosen appends the backends of the chosen endpoints.
func (v *View) appendChosen(out []Backend, of []endpoint, c choice) []Backend {
	for _, e := range of {
		if v.chooses(c, e) {
			out = append(out, e.backend())
		}
	}
	return out
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

// keepBackends gives before if it is the same as now, an ascending list, else a set of it.
func keepBackends(before Backends, now []Backend) Backends {
	if before.is(now) {
		return before
	}
	return ascending(now)
}

// appendServing appends the backends of endpoints that serve, whether they get new connections or not.
func appendServing(out []Backend, of []endpoint) []Backend {
	for _, e := range of {
		if e.Conditions.Serving {
			out = append(out, e.backend())
		}
	}
	return out
}

// seen is what is remembered of a Service with many slices, so that a change of a few endpoints costs no look at all of them: what its
// ports in View.ports are made of. They are of its present object and of the present Node.
type seen struct {
	slices []*model.Slice
	ports  map[ServicePortID]seenPort
}

// seenPort is what is remembered of a Service port's endpoints: how many there are, and at which addresses there are some in several slices.
type seenPort struct {
	tally
	shared map[netip.Addr]struct{}
}

const (
	// manySlices is from how many slices on a Service has its seen.
	manySlices = 4
	// fewChanges is up to how many addresses are looked up one by one.
	fewChanges = 16
)

// sets fills in the sets of a Service port with these frontends, which are those in before where they are the same, and tells whether any
// endpoint of the cluster takes connections.
func (v *View) sets(s *service, p, before *ServicePort) (usable bool) {
	cluster, local := uses(s.object, p.Frontends)
	old := &ServicePort{}
	var d difference
	known := false // d is what differs from old
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
		now, all = seenPort{}, v.endpoints(s.slices, p.ID, netip.Addr{})
		v.count(&now.tally, all, 1)
	}
	if s.seen != nil {
		if now.shared == nil {
			now.shared = make(map[netip.Addr]struct{})
			for _, a := range v.several {
				now.shared[a] = struct{}{}
			}
		}
		s.seen.ports[p.ID] = now
	}
	set := func(before Backends, appendOf func([]Backend, []endpoint) []Backend) Backends {
		if known {
			return before.with(appendOf(nil, d.before), appendOf(nil, d.after))
		}
		v.backendSpace = appendOf(v.backendSpace[:0], all)
		return keepBackends(before, v.backendSpace)
	}
	chosen := func(c choice) func([]Backend, []endpoint) []Backend {
		return func(out []Backend, of []endpoint) []Backend { return v.appendChosen(out, of, c) }
	}
	if cluster {
		p.Cluster = set(old.Cluster, chosen(now.cluster()))
	}
	if local {
		p.Local = set(old.Local, chosen(now.local()))
	}
	if p.ID.Protocol == model.UDP {
		p.Serving = set(old.Serving, appendServing)
	}
	return now.usable()
}

// difference is what has changed of a Service port's endpoints: those that there were, and those that there are, at some addresses.
type difference struct {
	before, after []endpoint
}

// difference gives what differs in a Service port's endpoints from what was seen; ok is false if that may be too much, or is not known.
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
		// To look in many slices is most of the work. An endpoint that stays in one is in no other, unless it was before.
		if i := changed[0].slice; same == 1 && changed[0].stays && !several {
			was, is = was[i:i+1], is[i:i+1]
		}
		d.before = append(d.before, v.endpoints(was, id, a)...)
		d.after = append(d.after, v.endpoints(is, id, a)...)
		delete(shared, a)
		for _, a := range v.several {
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
	stays bool // both have an endpoint there
}

// appendChanged appends the addresses at which the endpoints of two versions of a slice differ, a few more than fewChanges at most.
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
