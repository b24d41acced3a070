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

// maxNacks bounds the open nacks that are remembered of a stream that is no relay's; see wire.MaxRelayedNacks. maxNackKey bounds the
// names in each: Kubernetes' are not longer.
const maxNacks, maxNackKey = 256, 63 + 253

// Messages of a client beside its hello, a second and at once: many more than acks, nacks and the answers to a question for
// all shards' buckets are; and requests for state that are no such answers, which cost more. An Ack counts as one more for each
// positionsPerMessage that it has.
const (
	messagesPerSecond, messagesBurst = 200, 8192
	resyncsPerSecond, resyncsBurst   = 10, 256
	positionsPerMessage              = 64
)

// maxRelayNodes bounds how many nodes a relay may stand for: many more than a cluster has, and few enough to be added up.
const maxRelayNodes = 1 << 20

// maxPositions bounds the positions in an Ack: clients do not send more.
const maxPositions = 4096

// reports are what a client tells of itself.
type reports struct {
	// greeted is for the receiving side only.
	greeted bool
	// allowance is the identity's, and limiters are the stream's own; set before the client is admitted.
	allowance *allowance
	limiters

	sentBytes atomic.Uint64

	mu sync.Mutex
	// member is nil before the client is in sync, and for clients whose acks do not count.
	member *member
	// told is how many of its nodes upstream knows of, on a relay.
	told int
	// left: the stream does not count any more, whatever it still says.
	left bool
	// reported: an Ack has come, so that what the client had in sync is programmed too.
	reported bool
	nacks    map[string]openNack // by object and node
	lastNack Nack
	// dropped: there were too many nacks to remember them all.
	dropped bool
}

// openNack is a nack that stands.
type openNack struct {
	Nack
	key model.Key // without a name where the client's makes no sense
	// untold: upstream had no room for it.
	untold bool
}

// of tells whether it is of a Service, or of one of its slices in a snapshot, or of all that there is.
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

// Nack is an object that a node could not program.
type Nack struct {
	// Object as logs have it: "Service default/web".
	Object string
	Reason string
	// Node behind a relay; else empty.
	Node string
	At   time.Time
}

// join makes the stream's node count. Of a relay's nodes it is not known yet how many there are.
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

// leave takes the stream's nodes out. Whether they can program something is not for this server to say any more.
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

// tellNodesLocked tells upstream, on a relay, how many nodes hold what the relay acknowledges. An agent that has come waits
// with nobody until it has what was published before; other relays count their nodes likewise. Upstream hears of nodes that
// leave before it hears of what the others have without them.
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

// ack takes an Ack.
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

// nack takes a Nack.
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
	if key.Kind == model.KindNode { // nobody speaks for another node
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

// passOnLocked tells upstream, on a relay, of a nack that stands or does not stand any more. An observer programs nothing that
// would count there. It is false where upstream has no room; Hub.retell tries again.
func (s *stream) passOnLocked(n openNack, resolved bool) bool {
	up := s.hub.options.Upstream
	if up == nil || s.reports.left || s.kind == pb.ClientKind_CLIENT_KIND_OBSERVER || n.key.Name == "" {
		return true
	}
	told := up.Nack(&pb.Nack{
		// What a relay itself can't make sense of has its address.
		Key: wire.KeyToProto(n.key), Reason: n.Reason, NodeName: cmp.Or(n.Node, s.node, s.peer), Resolved: resolved,
	})
	if !told {
		s.hub.untold.Store(true)
	}
	return told
}

// retell tells upstream of nacks that it had no room for.
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

// retell is false once upstream has no room.
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

// clip bounds what a client says.
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
