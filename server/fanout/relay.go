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

// errNoUpstream is what a relay that has no stream, or has lost it, tells other relays.
var errNoUpstream = status.Error(codes.Unavailable,
	"this relay has no stream from its own server, and does not feed others until it has one: use another server, or try again later")

// UpstreamEnded ends the streams of other relays, after Upstream.Path has changed: they check the path that a stream begins
// with, and a path that is no longer true hides a circle of relays that feed each other.
func (h *Hub) UpstreamEnded() {
	for _, s := range h.list() {
		if s.kind == pb.ClientKind_CLIENT_KIND_RELAY {
			s.end(errNoUpstream)
		}
	}
}

// tellReached tells a relay how far the cluster's changes have come with all that it was sent: updates are of one shard each, and
// say nothing of the others.
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

// marks are a relay's memory of which of its Updates brought which upstream positions, so that it can tell upstream when all
// of its nodes have them.
type marks struct {
	upstream Upstream
	mu       sync.Mutex
	shards   []shardMarks
}

type shardMarks struct {
	// open are Updates that some node does not have, oldest first.
	open []mark
	told model.Position
}

// mark is an Update, and the upstream position that is reached with it.
type mark struct {
	sequence uint64
	upstream model.Position
	// since is when the publish was that brought the position, if that was later than the Update's.
	since time.Time
}

// before reads, ahead of a publish, the upstream positions that it will include.
func (m *marks) before() []model.Position {
	out := make([]model.Position, len(m.shards))
	for i := range out {
		out[i] = m.upstream.Mark(uint32(i))
	}
	return out
}

// updated takes an Update of the publish.
func (m *marks) updated(shard uint32, sequence uint64, position model.Position) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &m.shards[shard]
	if len(s.open) == maxOpen {
		s.open = append(s.open[:0], s.open[1:]...)
	}
	s.open = append(s.open, mark{sequence: sequence, upstream: position})
}

// after takes the positions of shards to which the publish brought nothing new: they come after what did.
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

// programmed tells upstream what all nodes have, now that they have a shard up to an Update, and since when the last of them has it.
func (m *marks) programmed(shard uint32, c completed) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &m.shards[shard]
	position := s.told
	for len(s.open) > 0 && s.open[0].sequence <= c.sequence {
		position = s.open[0].upstream
		if since := s.open[0].since; since.After(c.at) { // nobody can have had it before it came
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
