package generate

import (
	"cmp"
	"iter"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// Kind is a kind of change.
type Kind string

// Kinds of changes. Unless stated otherwise, they affect the pods of the Services that change.
const (
	// Flip makes a ready endpoint not ready, or the other way round.
	Flip Kind = "flip"
	// Roll replaces all pods. New pods become ready; then as many old pods terminate and go.
	Roll Kind = "roll"
	// Drain moves all pods off nodes. The pods terminate and go, and new pods are ready elsewhere.
	// It affects all Services.
	Drain Kind = "drain"
	// Scale adds all pods to Services that have none.
	Scale Kind = "scale"
	// None changes nothing.
	None Kind = "none"
)

// handover is the time from when a new pod is ready until an old one terminates.
const handover = 100 * time.Millisecond

// Plan says which changes happen when.
type Plan struct {
	Kind Kind `json:"kind"`
	// Schedule is the schedule of flips, of new pods, or of node drains, depending on Kind. Roll
	// and Scale ignore Count and add all pods.
	Schedule
	// Batch is the number of pods in one sync of the EndpointSlice controller, for Roll and Scale.
	Batch int `json:"batch"`
	// Grace is how long a pod terminates.
	Grace time.Duration `json:"grace"`
}

// Change is what one sync of the EndpointSlice controller does to one slice.
type Change struct {
	// Due is when the change has to happen.
	Due time.Time
	// Key is the key of the slice.
	Key model.Key
	// TriggerMS is the slice's last-change-trigger-time after the change, in milliseconds since
	// 1970. It is Due, or a later time if the slice has had that one already. It travels with the
	// slice, so slice and time together identify the change.
	TriggerMS int64
	// Slice is the slice after the change. It is nil if the slice is removed.
	Slice   *model.Slice
	Removed bool
}

// Play returns the changes of a plan in the order in which they are due. It applies each change to
// the cluster before it yields the change. It does not wait for any due time.
func (g *Cluster) Play(p Plan) iter.Seq[Change] {
	return func(yield func(Change) bool) {
		for _, step := range g.steps(p) {
			for _, c := range step.make(step.due) {
				if !yield(c) {
					return
				}
			}
		}
	}
}

// step is what happens at one point in time.
type step struct {
	due  time.Time
	make func(due time.Time) []Change
}

func (g *Cluster) steps(p Plan) (out []step) {
	due := p.times()
	switch p.Kind {
	case Flip:
		if len(g.order) == 0 {
			g.walk()
		}
		for i := range p.Count {
			out = append(out, step{due(i), g.flipNext})
		}
	case Scale:
		pods := 0
		for _, s := range g.changing {
			for first := 0; first < s.wanted; first += p.Batch {
				batch := min(p.Batch, s.wanted-first)
				out = append(out, step{due(pods), func(due time.Time) []Change {
					return changes(s, due, nil, nil, g.pods.some(batch))
				}})
				pods += batch
			}
		}
	case Roll:
		pods := 0
		for _, s := range g.changing {
			old := s.addresses()
			g.random(pods).Shuffle(len(old), func(i, j int) { old[i], old[j] = old[j], old[i] })
			for batch := range slices.Chunk(old, p.Batch) {
				at := due(pods)
				out = append(out,
					step{at, func(due time.Time) []Change { return changes(s, due, nil, nil, g.pods.some(len(batch))) }},
					step{at.Add(handover), func(due time.Time) []Change { return changes(s, due, nil, terminating(batch), nil) }},
					step{at.Add(handover + p.Grace), func(due time.Time) []Change { return changes(s, due, set(batch), nil, nil) }},
				)
				pods += len(batch)
			}
		}
	case Drain:
		nodes := slices.Clone(g.nodes)
		g.random(0).Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		for i, node := range nodes[:min(p.Count, len(nodes)/2)] {
			at := due(i)
			out = append(out,
				step{at, func(due time.Time) []Change { return g.evict(node.Name, due) }},
				step{at.Add(p.Grace), func(due time.Time) []Change { return g.replace(node.Name, due) }})
		}
	}
	slices.SortStableFunc(out, func(a, b step) int { return a.due.Compare(b.due) })
	return out
}

// random returns a source of randomness for an order. It is the same for the same seed and the same
// which.
func (g *Cluster) random(which int) *rand.Rand {
	return rand.New(rand.NewPCG(g.config.Seed, 3+uint64(which)))
}

// flipNext flips the next endpoint in the order that still exists.
func (g *Cluster) flipNext(due time.Time) []Change {
	for range g.order {
		p := g.order[g.flipped%len(g.order)]
		g.flipped++
		if p.endpoint < len(p.slice.endpoints) {
			g.flip(p)
			return []Change{changed(p.service, p.slice, due)}
		}
	}
	return nil
}

func (g *Cluster) flip(p place) {
	c := &p.slice.endpoints[p.endpoint].Conditions
	c.Ready = !c.Ready
	c.Serving = c.Ready
}

// evict makes the pods of a node terminate, and keeps new pods off the node.
func (g *Cluster) evict(node string, due time.Time) (out []Change) {
	g.pods.away[node] = struct{}{}
	for _, s := range g.services {
		if pods := s.on(node); len(pods) > 0 {
			out = append(out, changes(s, due, nil, terminating(pods), nil)...)
		}
	}
	return out
}

// replace removes the pods of a node, and adds as many elsewhere.
func (g *Cluster) replace(node string, due time.Time) (out []Change) {
	for _, s := range g.services {
		if pods := s.on(node); len(pods) > 0 {
			out = append(out, changes(s, due, set(pods), nil, g.pods.some(len(pods)))...)
		}
	}
	return out
}

func (p *placement) some(n int) (out []model.Endpoint) {
	for range n {
		out = append(out, p.next())
	}
	return out
}

func (s *service) addresses() []netip.Addr { return s.on("") }

// on returns the addresses of a Service's endpoints on a node, or of all of them if node is empty.
func (s *service) on(node string) (out []netip.Addr) {
	for _, slice := range s.slices {
		for i := range slice.endpoints {
			if e := &slice.endpoints[i]; node == "" || e.NodeName == node {
				out = append(out, e.Address)
			}
		}
	}
	return out
}

func set(addresses []netip.Addr) map[netip.Addr]struct{} {
	out := make(map[netip.Addr]struct{}, len(addresses))
	for _, a := range addresses {
		out[a] = struct{}{}
	}
	return out
}

// terminating returns the conditions of pods that terminate but still serve.
func terminating(addresses []netip.Addr) map[netip.Addr]model.Conditions {
	out := make(map[netip.Addr]model.Conditions, len(addresses))
	for _, a := range addresses {
		out[a] = model.Conditions{Serving: true, Terminating: true}
	}
	return out
}

// changes performs one sync of the controller, and returns its changes.
func changes(s *service, due time.Time, gone map[netip.Addr]struct{}, conditions map[netip.Addr]model.Conditions, come []model.Endpoint) (out []Change) {
	now, removed := s.sync(gone, conditions, come)
	slices.SortFunc(now, func(a, b *slice) int { return cmp.Compare(a.name, b.name) })
	for _, slice := range now {
		out = append(out, changed(s, slice, due))
	}
	for _, slice := range removed {
		out = append(out, Change{Due: due, Key: slice.object(s).Key(), TriggerMS: max(due.UnixMilli(), slice.triggerMS+1), Removed: true})
	}
	return out
}

func changed(s *service, slice *slice, due time.Time) Change {
	slice.triggerMS = max(due.UnixMilli(), slice.triggerMS+1)
	o := slice.object(s)
	return Change{Due: due, Key: o.Key(), TriggerMS: o.LastChangeTriggerTimeMS, Slice: o}
}
