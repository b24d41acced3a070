package fanout

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxNacks bounds the open nacks that are remembered of a client, unless it is a relay; see
// wire.MaxRelayedNacks. maxNackKey bounds the names in each nack, in bytes, as Kubernetes does.
const maxNacks, maxNackKey = 256, 63 + 253

// maxRelayNodes bounds how many nodes a relay may stand for. It is far above the size of any
// cluster, and low enough that sums do not overflow.
const maxRelayNodes = 1 << 20

// reports is what a client has reported of its nodes, and what upstream was told of that. The
// session's goroutine joins, and any goroutine may make it leave. Its invariants, under mu:
//
//  1. member is nil unless the session has joined and not left. Those of observers never join, as
//     their acks do not count.
//  2. After the session has left, upstream counts none of its nodes and has none of its nacks,
//     whatever the client still reports.
//  3. nacks has at most maxNacks entries, or wire.MaxRelayedNacks for a relay. If upstream had no
//     room for one of them, the hub's upward.untold is set.
type reports struct {
	hub    *Hub
	client *client

	mu     sync.Mutex
	member *member
	left   bool
	// acked is set once an Ack has arrived. The client then has programmed the state it had when it
	// was in sync.
	acked bool
	// counted is how many of the client's nodes upstream counts.
	counted  int
	nacks    map[string]openNack // by object and node
	lastNack *pb.AgentError
	dropped  bool // whether there were too many nacks to remember them all
}

type openNack struct {
	*pb.AgentError           // is immutable once the nack is recorded
	key            model.Key // without a name if the client's key is invalid
	warning        pb.NodeWarning
	// untold is set while Upstream has no room for the nack.
	untold bool
}

// newOpenNack returns the nack that a client has sent. No client speaks for another node.
func newOpenNack(from *client, m *pb.Nack) openNack {
	n := openNack{
		AgentError: &pb.AgentError{Reason: clip(m.GetReason()), Time: timestamppb.Now()}, warning: m.GetWarning(),
	}
	switch key, err := wire.NackedFromProto(m.GetKey()); {
	case n.warning != 0:
		n.key.Kind = model.KindNode
	case err != nil:
		n.Object = err.Error()
	case len(key.Namespace)+len(key.Name) > maxNackKey:
		n.Object = clip(key.String())
	default:
		n.key, n.Object = key, key.String()
	}
	if from.isRelay() {
		n.NodeName = clip(m.GetNodeName())
	}
	if n.key.Kind == model.KindNode {
		n.key.Name = n.sender(from)
		n.Object = n.key.String()
	}
	return n
}

// sender returns the name of the node that a client's nack comes from. A relay that cannot decode
// an object itself names no node; its address stands in.
func (n openNack) sender(client *client) string { return cmp.Or(n.NodeName, client.node, client.peer) }

// concerns reports whether the nack is of a Service: of the Service itself, of one of its slices in
// a snapshot, or of everything on the node. A warning is of no Service.
func (n openNack) concerns(service model.ServiceKey, in *store.Snapshot) bool {
	switch {
	case n.warning != 0:
		return false
	case n.key.Kind == model.KindNode:
		return true
	case n.key.Kind == model.KindService:
		return n.key.Namespace == service.Namespace && n.key.Name == service.Name
	}
	slice := in.Get(n.key)
	return slice != nil && slice.ServiceKey() == service
}

// join makes the client's nodes count for convergence. A relay has none until its first Ack says
// how many.
func (r *reports) join() {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.left:
	case r.client.isAgent():
		r.member = r.hub.convergence.joinAgent(r.client.node)
		r.hub.servedNodes.Add(1)
		r.countUpstreamLocked(1)
	case r.client.isRelay():
		r.member = r.hub.convergence.joinRelay("relay " + r.client.peer)
	}
}

// leave stops counting the client's nodes. It withdraws their nacks from upstream, as this server
// no longer hears from the nodes.
func (r *reports) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.nacks {
		r.tellUpstreamLocked(n, true)
		r.countWarningLocked(n, -1)
	}
	r.left = true
	if r.member != nil {
		r.countUpstreamLocked(0)
		r.resizeLocked(0)
		r.member = nil
	}
}

func (r *reports) resizeLocked(nodes int) {
	r.hub.servedNodes.Add(int64(nodes - r.member.nodes))
	r.hub.convergence.resize(r.member, nodes)
}

// countUpstreamLocked reports to upstream, on a relay, how many nodes hold what the relay
// acknowledges. An agent counts once it has acknowledged everything from before it joined; until
// then no server waits for it. Nodes behind other relays are counted by those relays in the same
// way. Upstream hears that nodes have left before it hears what the remaining nodes have.
func (r *reports) countUpstreamLocked(nodes int) {
	up := r.hub.upward
	if up == nil || nodes == r.counted {
		return
	}
	if r.client.isAgent() && nodes > 0 && !r.hub.convergence.caughtUp(r.member) {
		return
	}
	up.addNodes(nodes - r.counted)
	r.counted = nodes
}

// ack records an Ack, whose positions must be valid.
func (r *reports) ack(a *pb.Ack) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.member == nil {
		return
	}
	r.acked = true
	relay := r.client.isRelay()
	if relay {
		nodes := int(a.GetNodes())
		r.countUpstreamLocked(min(nodes, r.counted))
		r.resizeLocked(nodes)
	}
	for _, p := range a.GetPositions() {
		at, last := now.Add(-time.Duration(p.GetAgeMs())*time.Millisecond), ""
		if relay && len(p.GetLastNode()) <= maxNodeName {
			last = p.GetLastNode()
		}
		r.hub.convergence.ack(r.member, p.GetShard(), p.GetSequence(), at, last)
	}
	r.countUpstreamLocked(r.member.nodes)
}

func (r *reports) nack(n openNack) {
	id, most := n.id(), maxNacks
	if r.client.isRelay() {
		most = wire.MaxRelayedNacks
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if n.warning == 0 {
		r.lastNack = n.AgentError
	}
	old, known := r.nacks[id]
	if !known && len(r.nacks) >= most {
		r.dropped = true
		r.hub.metrics.droppedNacks.Inc()
		return
	}
	if r.nacks == nil {
		r.nacks = make(map[string]openNack)
	}
	if n.untold = old.untold; !known || old.Reason != n.Reason {
		n.untold = !r.tellUpstreamLocked(n, false)
		r.warnLocked(n)
	}
	if !known {
		r.countWarningLocked(n, 1)
	}
	r.nacks[id] = n
}

// countsLocked reports whether a nack counts as a warning of a node that this server serves. Those
// of observers do not count.
func (r *reports) countsLocked(n openNack) bool {
	return n.warning != 0 && !r.left && r.client.kind != pb.ClientKind_CLIENT_KIND_OBSERVER
}

// countWarningLocked adds to the number of nodes that have a warning.
func (r *reports) countWarningLocked(n openNack, by int64) {
	if r.countsLocked(n) {
		r.hub.warnings[wire.WarningIndex(n.warning)].Add(by)
	}
}

// warnLocked passes on a warning that is new or has another reason.
func (r *reports) warnLocked(n openNack) {
	if r.countsLocked(n) && r.hub.options.Warn != nil {
		r.hub.options.Warn(n.key.Name, n.warning, n.Reason)
	}
}

func (r *reports) resolve(n openNack) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if old, known := r.nacks[n.id()]; known {
		delete(r.nacks, n.id())
		r.tellUpstreamLocked(old, true)
		r.countWarningLocked(old, -1)
	}
}

func (n openNack) id() string { return fmt.Sprintf("%s %s %d", n.NodeName, n.Object, n.warning) }

// tellUpstreamLocked reports to upstream, on a relay, that a nack is open or resolved. An
// observer's nacks are not passed on, as it programs nothing. It returns false if upstream has no
// room; tellAgain then tries again.
func (r *reports) tellUpstreamLocked(n openNack, resolved bool) bool {
	up := r.hub.upward
	if up == nil || r.left || r.client.kind == pb.ClientKind_CLIENT_KIND_OBSERVER || n.key.Name == "" {
		return true
	}
	passed := up.Nack(&pb.Nack{
		Key: wire.KeyToProto(n.key), Reason: n.Reason, NodeName: n.sender(r.client), Resolved: resolved,
		Warning: n.warning,
	})
	if !passed {
		up.untold.Store(true)
	}
	return passed
}

// tellAgain reports the nacks to upstream that it had no room for.
func (r *reports) tellAgain() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, n := range r.nacks {
		if n.untold {
			n.untold = !r.tellUpstreamLocked(n, false)
			r.nacks[id] = n
		}
	}
}

// question asks which clients lack a shard up to a sequence.
type question struct {
	shard    uint32
	sequence uint64
	// nacked reports whether a client with this nack lacks something, too. nil means that nacks do
	// not matter.
	nacked func(openNack) bool
}

// describe sets what the status of a session says of the reports. It returns the answer to the
// question, and false if that is nil.
func (r *reports) describe(to *pb.AgentStatus, about *question, now time.Time) (lacks bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	to.Programmed, to.LastError = r.acked, r.lastNack
	asked := about != nil && about.nacked != nil
	nacked := asked && r.dropped // a dropped nack may matter
	for _, n := range r.nacks {
		if n.warning == 0 {
			to.Errors = append(to.Errors, n.AgentError)
		} else {
			to.Warnings = append(to.Warnings, &pb.AgentWarning{
				Warning: n.warning, Reason: n.Reason, NodeName: n.NodeName, Time: n.Time,
			})
		}
		nacked = nacked || asked && about.nacked(n)
	}
	slices.SortFunc(to.Errors, func(a, b *pb.AgentError) int { return a.GetTime().AsTime().Compare(b.GetTime().AsTime()) })
	slices.SortFunc(to.Warnings, func(a, b *pb.AgentWarning) int {
		return a.GetTime().AsTime().Compare(b.GetTime().AsTime())
	})
	if r.member == nil { // the client has no initial state yet, or programs nothing
		return about != nil && r.client.kind != pb.ClientKind_CLIENT_KIND_OBSERVER
	}
	to.Nodes = uint32(r.member.nodes)
	sequences, lag := r.hub.convergence.lag(r.member, now)
	if to.LagSequences = sequences; lag != 0 {
		to.Lag = durationpb.New(lag)
	}
	return about != nil && (!r.acked || nacked || !r.hub.convergence.has(r.member, about.shard, about.sequence))
}
