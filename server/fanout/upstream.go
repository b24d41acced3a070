package fanout

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Upstream is the stream that feeds a relay. Programmed, Nodes and Nack must not wait.
type Upstream interface {
	// Path returns the epochs in Welcome.path, and a context that ends with the stream, as the path
	// may then change. The context is nil while there is no stream or its initial state is incomplete.
	Path() (path []uint64, stream context.Context)
	// Mark returns the position up to which one of upstream's shards is written to the store.
	Mark(shard uint32) model.Position
	// Programmed reports that all nodes have had a shard programmed up to a Mark since at, which is
	// when the last of them had it. last is the name of that node, or empty.
	Programmed(shard uint32, mark model.Position, at time.Time, last string)
	// Nodes reports how many of the relay's nodes hold what Programmed has reported.
	Nodes(count int)
	// Nack passes on that a node cannot program an object, or that an earlier nack is resolved. It
	// returns false if too many nacks are open already; the hub then tries again with each
	// heartbeat.
	Nack(*pb.Nack) bool
}

// upward reports to a relay's upstream what the relay's nodes have. A server that is no relay has
// none.
type upward struct {
	Upstream
	marks *marks
	// untold is set when Upstream had no room for a nack.
	untold atomic.Bool

	mu    sync.Mutex // guards nodes
	nodes int        // last reported to Upstream
}

// newUpward returns nil if upstream is nil.
func newUpward(upstream Upstream, shards uint32) *upward {
	if upstream == nil {
		return nil
	}
	return &upward{Upstream: upstream, marks: newMarks(upstream, shards)}
}

// addNodes changes the number of nodes that is reported to upstream.
func (u *upward) addNodes(by int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.nodes += by
	u.Nodes(u.nodes)
}

// passOn passes on a nack. It returns false if upstream has no room, and the nack is to be told
// again.
func (u *upward) passOn(n *pb.Nack) bool {
	if u.Nack(n) {
		return true
	}
	u.untold.Store(true)
	return false
}

// tellNacksAgain reports nacks to upstream that it had no room for.
func (h *Hub) tellNacksAgain() {
	if h.upward == nil || !h.upward.untold.Swap(false) {
		return
	}
	for _, s := range h.sessions.list() {
		if !s.reports.tellAgain() {
			return
		}
	}
}

// marks records which of a relay's Updates include which upstream positions, so that the relay can
// acknowledge a position once all of its nodes have it. Its invariants, under mu:
//
//  1. open has the Updates of a shard that some node lacks, oldest first; maxOpen at most.
//  2. reported is the position of a shard last reported to upstream. Within an epoch of upstream,
//     it only grows.
type marks struct {
	upstream Upstream
	mu       sync.Mutex
	shards   []shardMarks
}

type shardMarks struct {
	open     []mark
	reported model.Position
}

// mark is an Update and the upstream position that its state includes.
type mark struct {
	sequence uint64
	upstream model.Position
	// since is when the position was published, if that was later than the Update; otherwise it is
	// zero.
	since time.Time
}

func newMarks(upstream Upstream, shards uint32) *marks {
	return &marks{upstream: upstream, shards: make([]shardMarks, shards)}
}

// before returns the upstream positions that the publish about to begin will include at least.
func (m *marks) before() []model.Position {
	out := make([]model.Position, len(m.shards))
	for i := range out {
		out[i] = m.upstream.Mark(uint32(i))
	}
	return out
}

// updated records an Update of the publish and the upstream position that it includes.
func (m *marks) updated(shard uint32, sequence uint64, position model.Position) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &m.shards[shard]
	if len(s.open) == maxOpen {
		s.open = append(s.open[:0], s.open[1:]...)
	}
	s.open = append(s.open, mark{sequence: sequence, upstream: position})
}

// after records the positions of shards in which the publish changed nothing. Nodes have such a
// position as soon as they have the shard's latest Update.
func (m *marks) after(positions []model.Position) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, position := range positions {
		if s := &m.shards[i]; len(s.open) > 0 {
			if last := &s.open[len(s.open)-1]; last.upstream != position {
				last.upstream, last.since = position, now
			}
		} else {
			m.reportLocked(uint32(i), position, completed{at: now})
		}
	}
}

// programmed reports to upstream that all nodes have a shard up to an Update, and since when the
// last of them has it.
func (m *marks) programmed(shard uint32, c completed) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &m.shards[shard]
	position := s.reported
	for len(s.open) > 0 && s.open[0].sequence <= c.sequence {
		position = s.open[0].upstream
		if since := s.open[0].since; since.After(c.at) { // no node can have had it before it came
			c.at = since
		}
		s.open = s.open[1:]
	}
	m.reportLocked(shard, position, c)
}

func (m *marks) reportLocked(shard uint32, position model.Position, c completed) {
	if s := &m.shards[shard]; position.Epoch != s.reported.Epoch || position.Sequence > s.reported.Sequence {
		s.reported = position
		m.upstream.Programmed(shard, position, c.at, c.last)
	}
}
