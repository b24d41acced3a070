// Package takeover lets one programmer take a node over from the programmers that an earlier run of
// the agent used. The old rules stay and lead connections until the new programmer's rules are
// complete. Then they are removed.
//
// # While both are in place
//
// No connection is translated twice. nftables and both variants of iptables translate a destination
// at the same point of the kernel's nat hooks. There, the kernel calls nat chains one after the
// other until one of them has translated the connection. A translated packet never reaches IPVS as
// a packet for a Service. So for Service ports that both programmers hold, exactly one of them
// leads each connection.
//
// The old rules may refuse or drop something that the new ones serve, because it was added after
// the old agent ended. It stays refused until the old rules are removed. That delay is part of the
// time that a change takes while the agent restarts, and nothing is acknowledged before it is over.
//
// # Open connections
//
// Connections that nat translates go on even if IPVS leads the new ones, because conntrack holds
// their translation. Connections that IPVS leads need IPVS as long as they are open, so IPVS is
// removed in steps: see ipvs.Retirement.
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
	// patience is how long the others' rules stay because of Service ports that the new programmer
	// could not get into the kernel. A Service port that fails for longer will probably never work.
	// With each change of a Service, rules that nobody updates do more harm.
	patience = time.Minute
	// retryAfter is the time between two attempts to remove what could not be removed.
	retryAfter = 10 * time.Second
)

// Other describes what another programmer may have left on the node.
type Other struct {
	// Name is the name of that programmer.
	Name string
	// Cleanup removes everything that the programmer left, and costs little if there is nothing. As
	// long as it returns programmer.ErrDraining, it is called again.
	Cleanup func(context.Context) error
	// Serves reports whether the rules that were left serve an IP family. nil means that they serve
	// none.
	Serves func(model.Family) (bool, error)

	draining bool // whether the log already says that connections are still open
}

// Programmer is a programmer that takes a node over from others.
//
// Invariants:
//
//  1. Nothing that the others left is removed while ready is false.
//  2. ready becomes true once the kernel holds the state in all IP families, apart from Service
//     ports that have failed for longer than patience. It never becomes false again.
type Programmer struct {
	programmer.Monitor

	log *slog.Logger
	// ready means that the node is this programmer's alone. It is set with mu held.
	ready atomic.Bool

	mu sync.Mutex // guards the fields below, because Watch retries on a goroutine of its own
	// programmed means that since the last Replace the kernel holds the state, except for the Service
	// ports in failed. It is false if that Replace left an IP family out.
	programmed bool
	failed     map[view.ServicePortID]struct{}
	// partlySince is when the first Service port failed after all families were programmed. Zero means
	// not yet.
	partlySince time.Time
	others      []Other // that may have left something on the node
}

var _ programmer.Monitor = (*Programmer)(nil)

// New returns a Programmer that lets p take the node over from others.
func New(p programmer.Monitor, others []Other, log *slog.Logger) *Programmer {
	return &Programmer{Monitor: p, others: others, log: log}
}

// Replace calls the programmer's Replace. Once everything is programmed, or patience has passed for
// the Service ports that the kernel refuses, Replace removes what the others left. It leaves all of
// that in place while nothing of an IP family is programmed. What cannot be removed is logged, and
// Watch tries again.
//
// If the programmer lacks an IP family that one of the others serves and Services want, the family
// counts as failed, because nothing would serve it after the removal.
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

// lost returns a FamilyError for the first IP family that one of the others serves, that Services
// want and that the programmer lacks.
func (p *Programmer) lost(state view.State) error {
	has := p.Families()
	wanted := map[model.Family]bool{}
	for id := range state.Ports {
		wanted[id.Family] = true
	}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		if slices.Contains(has, family) || !wanted[family] {
			continue
		}
		for _, o := range p.others {
			if o.Serves == nil {
				continue
			}
			serves, err := o.Serves(family)
			switch {
			case err != nil:
				return &programmer.FamilyError{Family: family, Err: fmt.Errorf(
					"the programmer does not support it, and it is not known whether %s has served it: %w",
					o.Name, err)}
			case serves:
				return &programmer.FamilyError{Family: family, Err: fmt.Errorf(
					"the programmer does not support it, but %s has served it, so its rules stay: install what the "+
						"agent's log reports as missing at the start and restart the agent, use the former "+
						"programmer, or remove the rules with slicecast-agent cleanup", o.Name)}
			}
		}
	}
	return nil
}

// Apply calls the programmer's Apply. If it programs the last of the Service ports that Replace
// could not, it also removes what the others left.
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

// done records the result of an operation and calls advance. The caller holds p.mu.
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

// advance removes what the others left if it is time to. The caller holds p.mu.
func (p *Programmer) advance(ctx context.Context) {
	complete := len(p.failed) == 0 || time.Since(p.partlySince) >= patience
	if !p.ready.Load() && p.programmed && complete {
		p.ready.Store(true)
		p.clean(ctx)
	}
}

// clean removes what the others left, and keeps those for which that failed. The caller holds p.mu.
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
				p.log.Info("Took over from another programmer, whose rules stay until open connections end",
					"programmer", o.Name)
			}
		case err != nil:
			p.log.Error("Cannot remove the rules of another programmer, which may misdirect connections; trying again",
				"programmer", o.Name, "retry_after", retryAfter, "err", err)
		case o.draining:
			p.log.Info("Removed the rules of another programmer", "programmer", o.Name)
		}
	}
	p.others = left
}

// Intact calls the programmer's Intact, if it has one.
func (p *Programmer) Intact(ctx context.Context, state view.State) bool {
	k, ok := p.Monitor.(programmer.Keeper)
	return ok && k.Intact(ctx, state)
}

// Watch calls the programmer's Watch. Beside it, it removes what the others left, if that failed
// before or was too early.
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

// retry tries to remove what the others left, and reports whether there may be more to do later.
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
