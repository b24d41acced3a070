package fleet

import (
	"sync/atomic"
	"time"
)

// Sync is how nodes come to the server's state, each on a new stream: what they receive until the server says that they
// have everything, and when that is.
type Sync struct {
	group *Group
	begun time.Time
	nodes []nodeSync
	count int
	left  atomic.Int64
	done  chan struct{}
}

// nodeSync is a node's part; its client's goroutine writes it.
type nodeSync struct {
	awaited bool
	before  Synced // what it had received already
	took    Synced
	inSync  atomic.Bool // took is there
}

// Synced is what coming to the server's state took for one node.
type Synced struct {
	// Bytes received, below TLS, and in messages, before HTTP/2 and TLS.
	Bytes, MessageBytes int64
	// Duration since AwaitSync was called or, where that is later, since the node first tried to connect.
	Duration time.Duration
}

// AwaitSync begins to wait for nodes to come to the server's state on a stream that starts from now on: those for which
// awaited is true, or, if it is nil, all.
func (g *Group) AwaitSync(awaited func(*Member) bool) *Sync {
	s := &Sync{group: g, begun: time.Now(), nodes: make([]nodeSync, len(g.Members)), done: make(chan struct{})}
	for i, m := range g.Members {
		n := &s.nodes[i]
		n.awaited = awaited == nil || awaited(m)
		n.before = Synced{Bytes: m.Traffic.Received.Load(), MessageBytes: m.Messages.Load()}
		if n.awaited {
			s.count++
		}
	}
	s.left.Store(int64(s.count))
	if s.count == 0 {
		close(s.done)
	}
	g.sync.Store(s)
	return s
}

// Sync is the one that was begun last.
func (g *Group) Sync() *Sync { return g.sync.Load() }

// reached takes note that a node is in sync.
func (s *Sync) reached(m *Member) {
	mine := &s.nodes[m.Index]
	if !mine.awaited || mine.inSync.Load() {
		return
	}
	since := s.begun
	if m.Started.After(since) {
		since = m.Started
	}
	mine.took = Synced{
		Bytes:        m.Traffic.Received.Load() - mine.before.Bytes,
		MessageBytes: m.Messages.Load() - mine.before.MessageBytes,
		Duration:     time.Since(since),
	}
	mine.inSync.Store(true)
	if s.left.Add(-1) == 0 {
		close(s.done)
	}
}

// Done is closed once every node is in sync.
func (s *Sync) Done() <-chan struct{} { return s.done }

// Count is how many nodes are waited for.
func (s *Sync) Count() int { return s.count }

// Reached is how many of them are in sync.
func (s *Sync) Reached() int { return s.count - int(s.left.Load()) }

// Missing names a node that is not in sync; "": there is none.
func (s *Sync) Missing() string {
	for i := range s.nodes {
		if n := &s.nodes[i]; n.awaited && !n.inSync.Load() {
			return s.group.Members[i].Name
		}
	}
	return ""
}

// Nodes gives what it took for each node. All must be in sync.
func (s *Sync) Nodes() []Synced {
	out := make([]Synced, 0, s.count)
	for i := range s.nodes {
		if s.nodes[i].awaited {
			out = append(out, s.nodes[i].took)
		}
	}
	return out
}
