package fleet

import (
	"sync/atomic"
	"time"
)

// Sync is how all nodes come to the server's state, each on a new stream: what they receive until the server says that they
// have everything, and when that is.
type Sync struct {
	fleet *Fleet
	begun time.Time
	nodes []nodeSync
	left  atomic.Int64
	done  chan struct{}
}

// nodeSync is a node's part; its client's goroutine writes it.
type nodeSync struct {
	before Synced // what it had received already
	took   Synced
	inSync atomic.Bool // took is there
}

// Synced is what coming to the server's state took for one node.
type Synced struct {
	// Bytes received, below TLS, and in messages, before HTTP/2 and TLS.
	Bytes, MessageBytes int64
	// Duration since AwaitSync was called or, where that is later, since the node first tried to connect.
	Duration time.Duration
}

// AwaitSync begins to wait for every node to come to the server's state on a stream that starts from now on. A new fleet
// does so by itself.
func (f *Fleet) AwaitSync() *Sync {
	s := &Sync{fleet: f, begun: time.Now(), nodes: make([]nodeSync, len(f.nodes)), done: make(chan struct{})}
	for i, n := range f.nodes {
		s.nodes[i].before = Synced{Bytes: n.traffic.Received.Load(), MessageBytes: n.messages.Load()}
	}
	s.left.Store(int64(len(f.nodes)))
	f.sync.Store(s)
	return s
}

// Sync is the one that was begun last.
func (f *Fleet) Sync() *Sync { return f.sync.Load() }

// reached takes note that a node is in sync.
func (s *Sync) reached(n *node) {
	mine := &s.nodes[n.index]
	if mine.inSync.Load() {
		return // on one more stream
	}
	since := s.begun
	if n.started.After(since) {
		since = n.started
	}
	mine.took = Synced{
		Bytes:        n.traffic.Received.Load() - mine.before.Bytes,
		MessageBytes: n.messages.Load() - mine.before.MessageBytes,
		Duration:     time.Since(since),
	}
	mine.inSync.Store(true)
	if s.left.Add(-1) == 0 {
		close(s.done)
	}
}

// Done is closed once every node is in sync.
func (s *Sync) Done() <-chan struct{} { return s.done }

// Reached is how many nodes are in sync.
func (s *Sync) Reached() int { return len(s.nodes) - int(s.left.Load()) }

// Missing names a node that is not in sync; "": there is none.
func (s *Sync) Missing() string {
	for i := range s.nodes {
		if !s.nodes[i].inSync.Load() {
			return s.fleet.nodes[i].name
		}
	}
	return ""
}

// Nodes gives what it took for each node. All must be in sync.
func (s *Sync) Nodes() []Synced {
	out := make([]Synced, len(s.nodes))
	for i := range s.nodes {
		out[i] = s.nodes[i].took
	}
	return out
}
