package fleet

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/slicecast/slicecast/loadtest/usage"
)

// Member holds what is measured of a node, for any kind of client. Fields that are not atomic are
// set before the node connects.
type Member struct {
	Index   int
	Name    string
	Traffic usage.Traffic
	// Messages is the number of bytes in messages that the node has received, before HTTP/2 and
	// TLS.
	Messages atomic.Int64
	// Streams is the number of streams that a server has answered. Moves is the number of these
	// that replaced a stream that was in sync.
	Streams, Moves atomic.Int64
	// Delay is how long a slow node pauses each time before it reads what has arrived. It is 0 if
	// the node is not slow.
	Delay time.Duration
	// Started is the time of the first attempt to connect.
	Started time.Time

	// connecting holds a place for the node from Started until reached is done.
	connecting chan struct{}
	reached    sync.Once

	mu   sync.Mutex // guards conn
	conn net.Conn   // latest connection
}

// Group is the set of nodes of a process, for measurements.
type Group struct {
	Members []*Member

	sync   atomic.Pointer[Sync]
	window atomic.Pointer[Window]
}

// Connect calls start for each node, until the context ends. At most atATime nodes are between
// start and their first Reached; 0 means no limit.
func (g *Group) Connect(ctx context.Context, atATime int, start func(*Member)) {
	places := make(chan struct{}, cmp.Or(atATime, len(g.Members)))
	for _, m := range g.Members {
		select {
		case <-ctx.Done():
			return
		case places <- struct{}{}:
		}
		m.connecting, m.Started = places, time.Now()
		start(m)
	}
}

// Cut cuts the connections of all nodes, as if the network failed.
func (g *Group) Cut() {
	for _, m := range g.Members {
		m.mu.Lock()
		if m.conn != nil {
			m.conn.Close()
		}
		m.mu.Unlock()
	}
}

// Traffic returns the bytes below TLS that all nodes together have received and sent.
func (g *Group) Traffic() (received, sent int64) {
	for _, m := range g.Members {
		received += m.Traffic.Received.Load()
		sent += m.Traffic.Sent.Load()
	}
	return received, sent
}

// Reconnects returns the number of streams that replaced broken streams.
func (g *Group) Reconnects() (n int64) {
	for _, m := range g.Members {
		n += max(0, m.Streams.Load()-m.Moves.Load()-1)
	}
	return n
}

// Stay waits until every node has been up once, which proves that none is away for good. If the
// context ends before, the error wraps ErrDiverged.
func (g *Group) Stay(ctx context.Context, up func(*Member) bool) error {
	away := slices.Clone(g.Members)
	for {
		if away = slices.DeleteFunc(away, up); len(away) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %d nodes, one of them %s, are not connected any more: %w", ErrDiverged, len(away), away[0].Name, ctx.Err())
		case <-time.After(retryCheck):
		}
	}
}

// Open makes a window measure from now on. It replaces the window before.
func (g *Group) Open(w *Window) { g.window.Store(w) }

// Window returns the window that was opened last, or nil if there was none.
func (g *Group) Window() *Window { return g.window.Load() }

// Reached records that a node is in sync on a new stream.
func (g *Group) Reached(m *Member) {
	m.reached.Do(func() {
		if m.connecting != nil {
			<-m.connecting
		}
	})
	g.sync.Load().reached(m)
}
