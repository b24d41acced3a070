package fleet

import (
	"sync/atomic"
	"time"
)

// Sync measures how nodes reach the server's state on new streams: what each receives until the
// server says that the node has everything, and how long that takes.
type Sync struct {
	group *Group
	begun time.Time
	nodes []nodeSync
	left  atomic.Int64
	done  chan struct{}
}

// nodeSync is the part of one node. Its client's goroutine writes took and then inSync.
type nodeSync struct {
	awaited bool
	before  Synced // traffic before AwaitSync
	took    Synced
	inSync  atomic.Bool // took is complete
}

// Synced is what reaching the server's state cost one node.
type Synced struct {
	// Bytes is the traffic received below TLS. MessageBytes is the size of the messages received,
	// before HTTP/2 and TLS.
	Bytes, MessageBytes int64
	// Duration is the time since AwaitSync or, if it was later, since the node's first attempt to
	// connect.
	Duration time.Duration
}

// AwaitSync starts to wait until nodes are in sync on a stream that starts after this call. It
// waits for the nodes for which awaited returns true, or for all nodes if awaited is nil.
func (g *Group) AwaitSync(awaited func(*Member) bool) *Sync {
	s := &Sync{group: g, begun: time.Now(), nodes: make([]nodeSync, len(g.Members)), done: make(chan struct{})}
	for i, m := range g.Members {
		n := &s.nodes[i]
		n.awaited = awaited == nil || awaited(m)
		n.before = Synced{Bytes: m.Traffic.Received.Load(), MessageBytes: m.Messages.Load()}
		if n.awaited {
			s.left.Add(1)
		}
	}
	if s.left.Load() == 0 {
		close(s.done)
	}
	g.sync.Store(s)
	return s
}

// Sync returns the Sync of the last call of AwaitSync.
func (g *Group) Sync() *Sync { return g.sync.Load() }

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

// Done returns a channel that is closed once every awaited node is in sync.
func (s *Sync) Done() <-chan struct{} { return s.done }

// Missing returns the name of an awaited node that is not in sync, or "" if there is none.
func (s *Sync) Missing() string {
	for i := range s.nodes {
		if n := &s.nodes[i]; n.awaited && !n.inSync.Load() {
			return s.group.Members[i].Name
		}
	}
	return ""
}

// Nodes returns the costs for each awaited node. It must not be called before all of them are in
// sync.
func (s *Sync) Nodes() (out []Synced) {
	for i := range s.nodes {
		if s.nodes[i].awaited {
			out = append(out, s.nodes[i].took)
		}
	}
	return out
}
