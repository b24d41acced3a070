package fanout

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxNacks bounds the open nacks that are remembered of a stream.
const maxNacks = 256

// Messages of a client beside its hello, a second and at once: many more than acks, nacks and the answers to a question for
// all shards' buckets are; and requests for state, which cost more.
const (
	messagesPerSecond, messagesBurst = 200, 8192
	resyncsPerSecond, resyncsBurst   = 10, 256
)

// reports are what a client tells of itself.
type reports struct {
	// What one client reports is logged a few times a minute at most; metrics count all. For the receiving side only.
	greeted                    bool
	nacksLogged, resyncsLogged rate.Sometimes
	messages, resyncs          *rate.Limiter

	sentBytes atomic.Uint64

	mu sync.Mutex
	// member is nil before the client is in sync, and for clients whose acks do not count.
	member *member
	// left: the stream does not count any more, whatever it still says.
	left bool
	// reported: an Ack has come, so that what the client had in sync is programmed too.
	reported bool
	nacks    map[string]Nack // open ones, by object and node
	lastNack Nack
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
	nodes := 0
	switch s.kind {
	case pb.ClientKind_CLIENT_KIND_AGENT:
		nodes = 1
	case pb.ClientKind_CLIENT_KIND_RELAY:
	default:
		return
	}
	r := &s.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.left {
		return
	}
	r.member = s.hub.convergence.join(nodes)
	s.hub.nodes.Add(int64(nodes))
	s.hub.tellNodes()
}

// leave takes the stream's nodes out.
func (s *stream) leave() {
	r := &s.reports
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left = true
	if r.member != nil {
		s.resizeLocked(0)
		r.member = nil
	}
}

func (s *stream) resizeLocked(nodes int) {
	by := nodes - s.reports.member.nodes
	if by != 0 {
		s.hub.convergence.resize(s.reports.member, nodes)
		s.hub.nodes.Add(int64(by))
		s.hub.tellNodes()
	}
}

// tellNodes tells upstream, on a relay, how many nodes there are.
func (h *Hub) tellNodes() {
	if h.options.Upstream != nil {
		h.options.Upstream.Nodes(int(h.nodes.Load()))
	}
}

// ack takes an Ack.
func (s *stream) ack(a *pb.Ack) error {
	shards := s.hub.store.Shards()
	for _, p := range a.GetPositions() {
		if p.GetShard() >= shards || p.GetSequence() > s.hub.store.Snapshot(p.GetShard()).Sequence() {
			return status.Errorf(codes.InvalidArgument, "ack of shard %d at %d, which was never sent", p.GetShard(), p.GetSequence())
		}
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
	if s.kind == pb.ClientKind_CLIENT_KIND_RELAY {
		s.resizeLocked(int(a.GetNodes()))
	}
	for _, p := range a.GetPositions() {
		at := now.Add(-time.Duration(p.GetAgeMs()) * time.Millisecond)
		s.hub.convergence.ack(r.member, p.GetShard(), p.GetSequence(), at)
	}
	return nil
}

// nack takes a Nack.
func (s *stream) nack(m *pb.Nack) {
	h := s.hub
	n := Nack{Object: keyString(m.GetKey()), Reason: clip(m.GetReason()), Node: clip(m.GetNodeName()), At: time.Now()}
	id := n.Node + " " + n.Object
	r := &s.reports
	r.mu.Lock()
	old, known := r.nacks[id]
	news := known && (m.GetResolved() || old.Reason != n.Reason)
	switch {
	case m.GetResolved():
		delete(r.nacks, id)
	case known || len(r.nacks) < maxNacks:
		if r.nacks == nil {
			r.nacks = make(map[string]Nack)
		}
		r.nacks[id] = n
		news = news || !known
	}
	if !m.GetResolved() {
		r.lastNack = n
	}
	r.mu.Unlock()
	if news && h.options.Upstream != nil {
		up := &pb.Nack{Key: m.GetKey(), Reason: n.Reason, NodeName: n.Node, Resolved: m.GetResolved()}
		if up.NodeName == "" {
			up.NodeName = s.node
		}
		h.options.Upstream.Nack(up)
	}
	if m.GetResolved() {
		return
	}
	h.metrics.nacks.Inc()
	s.reports.nacksLogged.Do(func() {
		h.log.Warn("A node can't program an object", "node", s.node, "object", n.Object, "reason", n.Reason, "behind", n.Node,
			"shard", m.GetShard(), "sequence", m.GetSequence())
	})
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
	key, err := wire.KeyFromProto(k)
	if err != nil {
		return err.Error()
	}
	return clip(key.String())
}
