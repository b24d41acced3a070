package fleet

import (
	"context"
	"fmt"
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
	// Streams that were answered, and Moves, how many of them took over from one that was in sync.
	Streams, Moves atomic.Int64
	// Delay is how long the node pauses before it reads what has come, again and again; 0: it is not a slow one.
	Delay time.Duration
	// Started is when it first tried to connect.
	Started time.Time
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

// Reconnects is how many streams were opened in the place of ones that broke.
func (g *Group) Reconnects() (n int64) {
	for _, m := range g.Members {
		n += max(0, m.Streams.Load()-m.Moves.Load()-1)
	}
	return n
}

// Stay sees to it that no node is away for good: it returns when each was up once. The error wraps ErrDiverged if the context
// ends before that.
func (g *Group) Stay(ctx context.Context, up func(*Member) bool) error {
	away := g.Members
	for {
		var still []*Member
		for _, m := range away {
			if !up(m) {
				still = append(still, m)
			}
		}
		if away = still; len(away) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %d nodes, one of them %s, are not connected any more: %w", ErrDiverged, len(away), away[0].Name, ctx.Err())
		case <-time.After(retryCheck):
		}
	}
}

// Open has a window measure from now on, in the place of the one before.
func (g *Group) Open(w *Window) { g.window.Store(w) }

// Window is the one that was opened last; nil: there was none.
func (g *Group) Window() *Window { return g.window.Load() }

// Reached takes note that a node has the state, on a new stream.
func (g *Group) Reached(m *Member) { g.sync.Load().reached(m) }
