package fleet

import (
	"sync/atomic"
	"time"

	"github.com/slicecast/slicecast/loadtest/usage"
)

// Member is what is measured of a node, whatever its client is. What has no other guard is set before the node connects.
type Member struct {
	Index   int
	Name    string
	Traffic usage.Traffic
	// Messages is how many bytes of messages it has received, before HTTP/2 and TLS.
	Messages atomic.Int64
	// Streams that were answered.
	Streams atomic.Int64
	// Delay is how long the node pauses before it reads what has come, again and again; 0: it is not a slow one.
	Delay time.Duration
	// Started is when it first tried to connect.
	Started time.Time

	up atomic.Bool // it has had the state
}

// Group is the nodes of a process, as they are measured.
type Group struct {
	Members []*Member

	sync   atomic.Pointer[Sync]
	window atomic.Pointer[Window]
}

// Traffic is what all nodes together have received and sent, in bytes below TLS.
func (g *Group) Traffic() (received, sent int64) {
	for _, m := range g.Members {
		received += m.Traffic.Received.Load()
		sent += m.Traffic.Sent.Load()
	}
	return received, sent
}

// Reconnects is how many streams were opened beyond the first of each node.
func (g *Group) Reconnects() (n int64) {
	for _, m := range g.Members {
		n += max(0, m.Streams.Load()-1)
	}
	return n
}

// Up is how many nodes have had the state.
func (g *Group) Up() (n int) {
	for _, m := range g.Members {
		if m.up.Load() {
			n++
		}
	}
	return n
}

// Open has a window measure from now on, in the place of the one before.
func (g *Group) Open(w *Window) { g.window.Store(w) }

// Window is the one that was opened last; nil: there was none.
func (g *Group) Window() *Window { return g.window.Load() }

// Reached takes note that a node has the state, on a new stream.
func (g *Group) Reached(m *Member) {
	m.up.Store(true)
	g.sync.Load().reached(m)
}
