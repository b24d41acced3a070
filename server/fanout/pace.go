package fanout

import (
	"context"
	"sync"
	"time"
)

// maxCoalesce bounds how long a change waits until earlier changes are sent.
const maxCoalesce = 50 * time.Millisecond

// pacer decides how long a change waits for those before it. Its invariants, under mu:
//
//  1. idle is closed while the sessions that keep up have everything.
//  2. rested is the end of the pause after the latest sending, as long again as the sending took.
type pacer struct {
	mu     sync.Mutex
	idle   chan struct{}
	rested time.Time
}

func newPacer() *pacer {
	p := &pacer{idle: make(chan struct{})}
	close(p.idle)
	return p
}

func (p *pacer) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.idle:
		p.idle = make(chan struct{})
	default:
	}
}

// tryRest records that the sessions that keep up have everything, if done reports so, and returns
// whether it does. took is how long the sending lasted.
func (p *pacer) tryRest(took time.Duration, done func() bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !done() {
		return false
	}
	p.rested = time.Now().Add(took)
	select {
	case <-p.idle: // it is noted already
	default:
		close(p.idle)
	}
	return true
}

// wait waits until what was published before is sent and the pause after it is over. It returns
// earlier after maxCoalesce, or if a change is urgent.
func (p *pacer) wait(ctx context.Context, urgent <-chan struct{}) {
	latest := time.NewTimer(maxCoalesce)
	defer latest.Stop()
	p.mu.Lock()
	idle := p.idle
	p.mu.Unlock()
	select {
	case <-idle:
	case <-latest.C:
		return
	case <-urgent:
		return
	case <-ctx.Done():
		return
	}
	p.mu.Lock()
	pause := time.Until(p.rested)
	p.mu.Unlock()
	select {
	case <-time.After(pause):
	case <-latest.C:
	case <-urgent:
	case <-ctx.Done():
	}
}
