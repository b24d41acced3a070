// Package takeover has one programmer take a node over from others, which an earlier run of the agent used: their rules stay,
// and lead connections, until the new one's are complete; then they go.
//
// # The moment with both
//
// No connection is translated twice. Whatever programs a destination's translation, nftables or either variant of iptables, does it at the
// same point of the kernel's nat hooks, which go on to the next only as long as none has translated; and a packet that is translated
// never comes to IPVS as a Service's. So connections to Service ports that both have are led by one of them. What the old rules
// refuse or drop that the new ones would serve, as it came since the old agent ended, is refused as it was
// before, until they go: that is a part of the time that a change takes while the agent restarts, and nothing is acknowledged before it is over.
//
// # Open connections
//
// Connections that nat leads go on, as conntrack has their translation, also when new ones are IPVS'. Those that IPVS leads need it
// for as long as they are open: so it goes in steps, see ipvs.Retirement.
package takeover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

const (
	// patience is how long the others' rules stay for Service ports that the new programmer has not got into the kernel: what fails longer than
	// that will probably never work, and rules that nobody changes do more harm with each change of a Service.
	patience = time.Minute
	// retryAfter is when what could not be removed is tried again.
	retryAfter = 10 * time.Second
)

// Other is what another programmer may have left on the node.
type Other struct {
	// Name is the programmer's.
	Name string
	// Cleanup removes what there is of it, and costs little where there is nothing. If it gives programmer.ErrDraining it is called
	// again for as long as it does.
	Cleanup func(context.Context) error
	// Serves reports whether what it has left serves an IP family. nil means that it serves none.
	Serves func(model.Family) (bool, error)

	draining bool // it has been logged
}

// Programmer is a programmer that takes over.
type Programmer struct {
	programmer.Monitor

	log *slog.Logger
	// ready: the node is this programmer's. It is set with mu held.
	ready atomic.Bool

	mu sync.Mutex // guards what follows: Watch tries again, which may take its time
	// programmed means that since the last Replace the kernel holds the state, but for the Service ports
	// in failed, which it has not taken. It is false if that Replace left an IP family out.
	programmed bool
	failed     map[view.ServicePortID]struct{}
	// partlySince is when there first were some; zero: not yet.
	partlySince time.Time
	others      []Other // that may have left something
}

var _ programmer.Monitor = (*Programmer)(nil)

// New has p take over from the others.
func New(p programmer.Monitor, others []Other, log *slog.Logger) *Programmer {
	return &Programmer{Monitor: p, others: others, log: log}
}

// Replace is that of the programmer. When all is programmed, or after a while all that the kernel
// takes, what the others have left is removed. While nothing of an IP family is programmed, all of
// it stays. What can't be removed is logged, and tried again by Watch. An IP family that the
// programmer lacks counts as failed if Services want it and one of the others serves it: it would
// be served no more.
func (p *Programmer) Replace(ctx context.Context, state view.State) error {
	err := p.Monitor.Replace(ctx, state)
	if p.ready.Load() {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed, p.programmed = map[view.ServicePortID]struct{}{}, true
	if lost := p.lost(state); lost != nil {
		err = errors.Join(lost, err) // what the programmer says of the same family comes last and counts
	}
	p.done(ctx, err)
	return err
}

// lost returns a FamilyError for an IP family that one of the others serves, Services want and the
// programmer lacks.
func (p *Programmer) lost(state view.State) error {
	has := p.Families()
	wanted := func(family model.Family) bool {
		for id := range state.Ports {
			if id.Family == family {
				return true
			}
		}
		return false
	}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		if slices.Contains(has, family) || !wanted(family) {
			continue
		}
		for _, o := range p.others {
			if o.Serves == nil {
				continue
			}
			serves, err := o.Serves(family)
			switch {
			case err != nil:
				return &programmer.FamilyError{Family: family, Err: fmt.Errorf("the programmer lacks it, and whether %s has served it is not known: %w", o.Name, err)}
			case serves:
				return &programmer.FamilyError{Family: family, Err: fmt.Errorf("the programmer lacks it, and %s, whose rules stay for that, has served it; "+
					"the agent's log has from its start what is missing: install it or load its kernel module and restart the agent, "+
					"choose the former programmer, or give the family up with slicecast-agent cleanup", o.Name)}
			}
		}
	}
	return nil
}

// Apply is that of the programmer. It may program the last of what Replace could not.
func (p *Programmer) Apply(ctx context.Context, changes []view.Change) error {
	err := p.Monitor.Apply(ctx, changes)
	if p.ready.Load() {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range changes {
		delete(p.failed, c.ID())
	}
	p.done(ctx, err)
	return err
}

// done takes note of what came of an operation, and advances. p.mu is held.
func (p *Programmer) done(ctx context.Context, err error) {
	failed, out := programmer.Split(err, p.Families())
	for _, f := range failed {
		p.failed[f.ID] = struct{}{}
	}
	p.programmed = p.programmed && len(out) == 0
	if p.programmed && len(p.failed) > 0 && p.partlySince.IsZero() {
		p.partlySince = time.Now()
	}
	p.advance(ctx)
}

// advance removes what the others have left if it is time. p.mu is held.
func (p *Programmer) advance(ctx context.Context) {
	complete := len(p.failed) == 0 || time.Since(p.partlySince) >= patience
	if !p.ready.Load() && p.programmed && complete {
		p.ready.Store(true)
		p.clean(ctx)
	}
}

// clean removes what the others have left. p.mu is held.
func (p *Programmer) clean(ctx context.Context) {
	var left []Other
	for _, o := range p.others {
		err := o.Cleanup(ctx)
		if err != nil {
			left = append(left, o)
		}
		switch {
		case errors.Is(err, programmer.ErrDraining):
			if left[len(left)-1].draining = true; !o.draining {
				p.log.Info("The node is programmed otherwise now; what leads connections that are still open is removed when they have ended", "programmer", o.Name)
			}
		case err != nil:
			p.log.Error("What another programmer has left on this node can't be removed, and may lead connections astray. It is tried again",
				"programmer", o.Name, "in", retryAfter, "err", err)
		case o.draining:
			p.log.Info("What was left of another programmer is removed", "programmer", o.Name)
		}
	}
	p.others = left
}

// Watch is that of the programmer, and removes what could not be removed or was not to be yet.
func (p *Programmer) Watch(ctx context.Context, lost func(reason string)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { p.Monitor.Watch(ctx, lost) })
	ticker := time.NewTicker(retryAfter)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if !p.retry(ctx) {
			return
		}
	}
}

// retry removes what could not be removed, and tells whether there may be more to do later.
func (p *Programmer) retry(ctx context.Context) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ready.Load() {
		p.clean(ctx)
	} else {
		p.advance(ctx)
	}
	return !p.ready.Load() || len(p.others) > 0
}
