package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

const (
	// watchInterval is how often it is looked whether anything has changed, which is nearly free.
	watchInterval = time.Second
	// After all rules were read to find out what, which is not free, that takes 1/readShare of the time at most.
	readShare = 20
)

// watch is what is known of what others did to the kernel's tables. Their stamps tell cheaply whether they changed at all.
// Where that was not only by this Programmer, the rules are read, and compared with what they should be.
type watch struct {
	last    stamp
	trusted bool // at last, the kernel held what it should
	// operations counts what this Programmer did.
	operations int
	// unreadable counts stamps that could not be had.
	unreadable uint32
}

// forget makes what comes next count as if nothing had been before, since it reads what the kernel holds.
func (w *watch) forget() { w.last, w.trusted = stamp{}, true }

// operated takes note that this Programmer changed some tables, one at a time, so many times.
func (w *watch) operated(before, after stamp, commits int) {
	fresh := w.trusted && w.last == stamp{}
	w.trusted = w.trusted && (fresh || before == w.last) && after.follows(before, commits)
	w.last = after
	w.operations++
}

// Watch calls lost when rules of this package, or those that lead to them, were removed or changed by others.
func (p *Programmer) Watch(ctx context.Context, lost func(reason string)) {
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	var next time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if time.Now().Before(next) || !p.suspicious() {
			continue
		}
		start := time.Now()
		reason, err := p.compare(ctx)
		next = time.Now().Add(readShare * time.Since(start))
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			p.log.Warn("Can't tell whether others have changed the rules of Services; trying again", "err", err)
			next = time.Now().Add(time.Minute)
		case reason != "":
			lost(reason)
		}
	}
}

// suspicious tells whether others may have changed something.
func (p *Programmer) suspicious() bool {
	if !p.mu.TryLock() {
		return false // later: rules are being written
	}
	defer p.mu.Unlock()
	return p.suspiciousLocked()
}

func (p *Programmer) suspiciousLocked() bool {
	if p.stamp() != p.watch.last {
		p.watch.trusted = false
	}
	return !p.watch.trusted
}

// compare reads the rules, and tells what others changed; "" if nothing, or if this Programmer changed something meanwhile.
func (p *Programmer) compare(ctx context.Context) (reason string, err error) {
	p.mu.Lock()
	before, operations, families := p.stamp(), p.watch.operations, maps.Clone(p.families)
	// Others have a Replace due anyway, and may be out of order.
	maps.DeleteFunc(families, func(_ model.Family, f *kernelFamily) bool { return f.held == nil })
	p.mu.Unlock()
	found := map[*kernelFamily]saved{}
	for _, f := range families {
		if found[f], err = f.tool.saved(ctx); err != nil {
			return "", err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watch.operations != operations {
		return "", nil
	}
	for _, f := range families {
		if f.held == nil {
			continue // Cleanup came between
		}
		if difference := f.difference(found[f]); difference != "" {
			reason = fmt.Sprintf("%v: %s", f.family, difference)
			f.held = nil
		}
	}
	p.watch.last, p.watch.trusted = before, true
	return reason, nil
}

// difference tells in what the rules that were read differ from what they should be; "": in nothing.
func (f *kernelFamily) difference(found saved) string {
	for _, h := range f.hooks() {
		if !slices.Contains(found.hooks, h) {
			return fmt.Sprintf("table %v: the rule %q is gone", h.table, h.rule)
		}
	}
	for t := range tables {
		for _, chain := range slices.Sorted(maps.Keys(f.held.chains[t])) {
			if hash, ok := found.chains[t][chain]; !ok {
				return fmt.Sprintf("table %v: the chain %s is gone", t, chain)
			} else if hash != f.held.chains[t][chain] {
				return fmt.Sprintf("table %v: the chain %s was changed", t, chain)
			}
		}
		for chain := range found.chains[t] {
			if _, ok := f.held.chains[t][chain]; !ok {
				return fmt.Sprintf("table %v: there is a chain %s, which should not be", t, chain)
			}
		}
	}
	return ""
}
