package fanout

import (
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// errNoUpstream ends the streams of other relays while a relay has no stream from its own server.
var errNoUpstream = status.Error(codes.Unavailable,
	"this relay has no stream from its own server, and does not feed others until it has one: use another server, or try again later")

// UpstreamEnded ends the streams of other relays after Upstream.Path has changed. A relay checks
// the path when its stream begins. A path that is no longer true would hide a circle of relays that
// feed each other.
func (h *Hub) UpstreamEnded() {
	for _, s := range h.list() {
		if s.kind == pb.ClientKind_CLIENT_KIND_RELAY {
			s.end(errNoUpstream)
		}
	}
}

// tellReached sends a relay the resource versions that everything sent so far includes. The relay
// cannot derive them: an update describes one shard and says nothing about the others.
func (s *stream) tellReached() error {
	head, reached := s.hub.ring.now()
	if s.position != head {
		return nil
	}
	return s.sendReached(reached)
}

func (s *stream) sendReached(v model.ResourceVersions) error {
	if s.kind != pb.ClientKind_CLIENT_KIND_RELAY || v == s.reached {
		return nil
	}
	s.reached = v
	return s.send(mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{
		ResourceVersions: wire.ResourceVersionsToProto(v),
	}}}))
}

// marks records which of a relay's Updates include which upstream positions, so that the relay can
// acknowledge a position once all of its nodes have it.
type marks struct {
	upstream Upstream
	mu       sync.Mutex // guards shards
	shards   []shardMarks
}

type shardMarks struct {
	// open are the Updates that some node lacks, oldest first; maxOpen at most.
	open []mark
	// told is the position last reported to upstream.
	told model.Position
}

// mark is an Update and the upstream position that its state includes.
type mark struct {
	sequence uint64
	upstream model.Position
	// since is when the position was published, if that was later than the Update; otherwise it is
	// zero.
	since time.Time
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
			m.tellLocked(uint32(i), position, completed{at: now})
		}
	}
}

// programmed reports to upstream that all nodes have a shard up to an Update, and since when the
// last of them has it.
func (m *marks) programmed(shard uint32, c completed) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &m.shards[shard]
	position := s.told
	for len(s.open) > 0 && s.open[0].sequence <= c.sequence {
		position = s.open[0].upstream
		if since := s.open[0].since; since.After(c.at) { // no node can have had it before it came
			c.at = since
		}
		s.open = s.open[1:]
	}
	m.tellLocked(shard, position, c)
}

func (m *marks) tellLocked(shard uint32, position model.Position, c completed) {
	if s := &m.shards[shard]; position.Epoch != s.told.Epoch || position.Sequence > s.told.Sequence {
		s.told = position
		m.upstream.Programmed(shard, position, c.at, c.last)
	}
}
