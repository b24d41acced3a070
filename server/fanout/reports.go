package fanout

import (
	"cmp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxNacks bounds the open nacks that are remembered of a stream, unless it is a relay's; see
// wire.MaxRelayedNacks. maxNackKey bounds the names in each nack, in bytes, as Kubernetes does.
const maxNacks, maxNackKey = 256, 63 + 253

// These are the limits on a client's messages after its Hello, as the rate per second and the
// burst. They are far above what acks, nacks and the answers to a query for all shards' buckets
// need. Requests for state that are not such answers cost more and have limits of their own. An Ack
// counts as one message, and one more for each positionsPerMessage positions.
const (
	messagesPerSecond, messagesBurst = 200, 8192
	resyncsPerSecond, resyncsBurst   = 10, 256
	positionsPerMessage              = 64
)

// maxRelayNodes bounds how many nodes a relay may stand for. It is far above the size of any
// cluster, and low enough that sums do not overflow.
const maxRelayNodes = 1 << 20

// maxPositions bounds the positions in an Ack. Clients send fewer.
const maxPositions = 4096

// reports is what a client has reported about itself and its nodes.
type reports struct {
	// greeted is set once a Hello has arrived. Only the receiving goroutine uses it.
	greeted bool
	// allowance is that of the client's identity, and limiters are lent to the stream. Both are set
	// before the client is admitted.
	allowance *allowance
	limiters

	sentBytes atomic.Uint64

	mu sync.Mutex // guards the fields below
	// member is nil until the client is in sync, and for clients whose acks do not count.
	member *member
	// told is how many of the stream's nodes were reported to Upstream, on a relay.
	told int
	// left is set when the stream no longer counts, whatever its client still reports.
	left bool
	// reported is set once an Ack has arrived. The client then has programmed the state it had when
	// it was in sync.
	reported bool
	nacks    map[string]openNack // by object and node
	lastNack Nack
	// dropped is set if there were too many nacks to remember them all.
	dropped bool
}

// openNack is a nack that is not resolved.
type openNack struct {
	Nack
	key model.Key // without a name if the client's key is invalid
	// untold is set while Upstream has no room for the nack.
	untold bool
}

// of reports whether the nack concerns a Service: the Service itself, one of its slices in a
// snapshot, or everything on the node.
func (n openNack) of(service model.ServiceKey, in *store.Snapshot) bool {
	if n.key.Kind == model.KindNode {
		return true
	}
	if n.key.Kind == model.KindService {
		return n.key.Namespace == service.Namespace && n.key.Name == service.Name
	}
	slice := in.Get(n.key)
	return slice != nil && slice.ServiceKey() == service
}

// Nack is an object that a node cannot program.
type Nack struct {
	// Object is the object as in logs: "Service default/web".
	Object string
	Reason string
	// Node is the node behind a relay that sent the nack; empty for the stream's own node.
	Node string
	At   time.Time
}

// join makes the stream's nodes count for convergence. A relay has none until its first Ack says
// how many.
func (s *stream) join() {
	r := &s.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.left {
		return
	}
	switch s.kind {
	case pb.ClientKind_CLIENT_KIND_AGENT:
		r.member = s.hub.convergence.joinAgent(s.node)
	case pb.ClientKind_CLIENT_KIND_RELAY:
		r.member = s.hub.convergence.joinRelay("relay " + s.peer)
	default:
		return
	}
	s.hub.nodes.Add(int64(r.member.nodes))
	s.tellNodesLocked(r.member.nodes)
}

// leave stops counting the stream's nodes. It withdraws their nacks from upstream, as this server
// no longer hears from the nodes.
func (s *stream) leave() {
	r := &s.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.nacks {
		s.passOnLocked(n, true)
	}
	r.left = true
	if r.member != nil {
		s.tellNodesLocked(0)
		s.resizeLocked(0)
		r.member = nil
	}
}

func (s *stream) resizeLocked(nodes int) {
	by := nodes - s.reports.member.nodes
	if by != 0 {
		s.hub.convergence.resize(s.reports.member, nodes)
		s.hub.nodes.Add(int64(by))
	}
}

// tellNodesLocked reports to upstream, on a relay, how many nodes hold what the relay acknowledges.
// An agent counts once it has acknowledged everything from before it joined; until then no server
// waits for it. Nodes behind other relays are counted by those relays in the same way. Upstream
// hears that nodes have left before it hears what the remaining nodes have.
func (s *stream) tellNodesLocked(nodes int) {
	r, h := &s.reports, s.hub
	if h.options.Upstream == nil || nodes == r.told {
		return
	}
	if s.kind == pb.ClientKind_CLIENT_KIND_AGENT && nodes > 0 && !h.convergence.caughtUp(r.member) {
		return
	}
	h.programmed.Lock()
	defer h.programmed.Unlock()
	h.programmed.nodes += nodes - r.told
	r.told = nodes
	h.options.Upstream.Nodes(h.programmed.nodes)
}

// ack processes an Ack.
func (s *stream) ack(a *pb.Ack) error {
	shards := s.hub.store.Shards()
	for _, p := range a.GetPositions() {
		if p.GetShard() >= shards || p.GetSequence() > s.hub.store.Snapshot(p.GetShard()).Sequence() {
			return status.Errorf(codes.InvalidArgument, "ack of shard %d at %d, which was never sent", p.GetShard(), p.GetSequence())
		}
	}
	if a.GetNodes() > maxRelayNodes {
		return status.Errorf(codes.InvalidArgument, "ack for %d nodes: a relay may stand for %d", a.GetNodes(), maxRelayNodes)
	}
	s.hub.metrics.acks.Inc()
	now := time.Now()
	r := &s.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.member == nil {
		return nil
	}
	r.reported = true
	relay := s.kind == pb.ClientKind_CLIENT_KIND_RELAY
	if relay {
		nodes := int(a.GetNodes())
		s.tellNodesLocked(min(nodes, r.told))
		s.resizeLocked(nodes)
	}
	for _, p := range a.GetPositions() {
		at, last := now.Add(-time.Duration(p.GetAgeMs())*time.Millisecond), ""
		if relay && len(p.GetLastNode()) <= maxNodeName {
			last = p.GetLastNode()
		}
		s.hub.convergence.ack(r.member, p.GetShard(), p.GetSequence(), at, last)
	}
	s.tellNodesLocked(r.member.nodes)
	return nil
}

// nack processes a Nack.
func (s *stream) nack(m *pb.Nack) {
	h := s.hub
	key, err := wire.NackedFromProto(m.GetKey())
	if err != nil || len(key.Namespace)+len(key.Name) > maxNackKey {
		key = model.Key{}
	}
	n := openNack{Nack: Nack{Object: keyString(m.GetKey()), Reason: clip(m.GetReason()), At: time.Now()}, key: key}
	most := maxNacks
	if s.kind == pb.ClientKind_CLIENT_KIND_RELAY {
		n.Node = clip(m.GetNodeName())
		most = wire.MaxRelayedNacks
	}
	if key.Kind == model.KindNode { // no client speaks for another node
		n.key.Name = cmp.Or(n.Node, s.node, s.peer)
		n.Object = n.key.String()
	}
	id := n.Node + " " + n.Object
	r := &s.reports
	r.mu.Lock()
	old, known := r.nacks[id]
	switch {
	case m.GetResolved() && known:
		delete(r.nacks, id)
		s.passOnLocked(old, true)
	case m.GetResolved():
	case !known && len(r.nacks) >= most:
		r.dropped = true
		h.metrics.droppedNacks.Inc()
	default:
		if r.nacks == nil {
			r.nacks = make(map[string]openNack)
		}
		n.untold = old.untold
		if old.Reason != n.Reason || !known {
			n.untold = !s.passOnLocked(n, false)
		}
		r.nacks[id] = n
	}
	if !m.GetResolved() {
		r.lastNack = n.Nack
	}
	r.mu.Unlock()
	if m.GetResolved() {
		return
	}
	h.metrics.nacks.Inc()
	s.reports.allowance.nacksLogged.Do(func() {
		h.log.Warn("A node can't program an object", "node", s.node, "object", n.Object, "reason", n.Reason, "behind", n.Node,
			"shard", m.GetShard(), "sequence", m.GetSequence())
	})
}

// passOnLocked reports to upstream, on a relay, that a nack is open or resolved. An observer's
// nacks are not passed on, as it programs nothing. It returns false if upstream has no room;
// Hub.retell then tries again.
func (s *stream) passOnLocked(n openNack, resolved bool) bool {
	up := s.hub.options.Upstream
	if up == nil || s.reports.left || s.kind == pb.ClientKind_CLIENT_KIND_OBSERVER || n.key.Name == "" {
		return true
	}
	told := up.Nack(&pb.Nack{
		// A relay that cannot decode an object itself names no node; its address stands in.
		Key: wire.KeyToProto(n.key), Reason: n.Reason, NodeName: cmp.Or(n.Node, s.node, s.peer), Resolved: resolved,
	})
	if !told {
		s.hub.untold.Store(true)
	}
	return told
}

// retell reports nacks to upstream that it had no room for.
func (h *Hub) retell() {
	if !h.untold.Swap(false) {
		return
	}
	for _, s := range h.list() {
		if !s.retell() {
			return
		}
	}
}

// retell returns false if upstream has no room.
func (s *stream) retell() bool {
	r := &s.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, n := range r.nacks {
		if n.untold {
			if n.untold = !s.passOnLocked(n, false); n.untold {
				return false
			}
			r.nacks[id] = n
		}
	}
	return true
}

// clip bounds the length of a client's text.
func clip(s string) string {
	const most = 512
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

func keyString(k *pb.ObjectKey) string {
	key, err := wire.NackedFromProto(k)
	if err != nil {
		return err.Error()
	}
	return clip(key.String())
}
