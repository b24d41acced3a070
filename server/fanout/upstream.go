package fanout

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Upstream is the stream that feeds a relay. Programmed, Nodes and Nack must not wait.
type Upstream interface {
	// Path returns the epochs in Welcome.path, and a context that ends with the stream, as the path
	// may then change. The context is nil while there is no stream or its initial state is
	// incomplete.
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
// none. It records which of the relay's Updates include which upstream positions, so that the relay
// can acknowledge a position once all of its nodes have it. Its invariants, under mu:
//
//  1. open has the Updates of a shard that some node lacks, oldest first; maxOpen at most.
//  2. reported is the position of a shard last reported to upstream. Within an epoch of upstream,
//     it only grows.
type upward struct {
	Upstream
	// untold is set when Upstream had no room for a nack.
	untold atomic.Bool

	mu     sync.Mutex // guards the fields below
	nodes  int        // last reported to Upstream
	shards []shardMarks
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

// newUpward returns nil if upstream is nil.
func newUpward(upstream Upstream, shards uint32) *upward {
	if upstream == nil {
		return nil
	}
	return &upward{Upstream: upstream, shards: make([]shardMarks, shards)}
}

func (u *upward) addNodes(by int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.nodes += by
	u.Nodes(u.nodes)
}

func (h *Hub) tellNacksAgain() {
	if h.upward == nil || !h.upward.untold.Swap(false) {
		return
	}
	for _, s := range h.sessions.list() {
		s.reports.tellAgain() // upstream may have no room for this client's, and have some for others'
	}
}

// before returns the upstream positions that the publish about to begin will include at least.
func (u *upward) before() []model.Position {
	out := make([]model.Position, len(u.shards))
	for i := range out {
		out[i] = u.Mark(uint32(i))
	}
	return out
}

// updated records an Update of the publish and the upstream position that it includes.
func (u *upward) updated(shard uint32, sequence uint64, position model.Position) {
	u.mu.Lock()
	defer u.mu.Unlock()
	s := &u.shards[shard]
	if len(s.open) == maxOpen {
		s.open = slices.Delete(s.open, 0, 1)
	}
	s.open = append(s.open, mark{sequence: sequence, upstream: position})
}

// after records the positions of shards in which the publish changed nothing. Nodes have such a
// position as soon as they have the shard's latest Update.
func (u *upward) after(positions []model.Position) {
	now := time.Now()
	u.mu.Lock()
	defer u.mu.Unlock()
	for i, position := range positions {
		if s := &u.shards[i]; len(s.open) > 0 {
			if last := &s.open[len(s.open)-1]; last.upstream != position {
				last.upstream, last.since = position, now
			}
		} else {
			u.reportLocked(uint32(i), position, completed{at: now})
		}
	}
}

// programmed reports to upstream that all nodes have a shard up to an Update, and since when the
// last of them has it.
func (u *upward) programmed(shard uint32, c completed) {
	u.mu.Lock()
	defer u.mu.Unlock()
	s := &u.shards[shard]
	position := s.reported
	for len(s.open) > 0 && s.open[0].sequence <= c.sequence {
		position = s.open[0].upstream
		if since := s.open[0].since; since.After(c.at) { // no node can have had it before it came
			c.at = since
		}
		s.open = s.open[1:]
	}
	u.reportLocked(shard, position, c)
}

func (u *upward) reportLocked(shard uint32, position model.Position, c completed) {
	if s := &u.shards[shard]; position.Epoch != s.reported.Epoch || position.Sequence > s.reported.Sequence {
		s.reported = position
		u.Programmed(shard, position, c.at, c.last)
	}
}
