package app

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"
)

// progressInterval is often enough to see that something happens.
const progressInterval = 3 * time.Second

// progress writes a line about what is under way, now and then.
type progress struct {
	w     io.Writer
	start time.Time

	mu     sync.Mutex
	status func() string // nil: nothing to say
}

// set says what is under way from now on.
func (p *progress) set(status func() string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status = status
	p.writeLocked()
}

func (p *progress) writeLocked() {
	if p.status != nil {
		fmt.Fprintf(p.w, "%5.0fs  %s\n", time.Since(p.start).Seconds(), p.status())
	}
}

// run writes until the context ends.
func (p *progress) run(ctx context.Context) {
	t := time.NewTicker(progressInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			p.mu.Lock()
			p.writeLocked()
			p.mu.Unlock()
		}
	}
}
