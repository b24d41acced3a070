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
	// watchInterval is how often Watch checks whether anything has changed, which costs very little.
	watchInterval = time.Second
	// readShare limits the time that Watch spends on reading all rules, which is expensive, to
	// 1/readShare of the total.
	readShare = 20
)

// watch is what is known about changes to the kernel's tables by others. Stamps show at low cost
// whether the tables changed at all. If this Programmer does not explain a change, the rules are
// read and compared with what they should be. Programmer.mu guards it.
//
// Invariants:
//
//  1. While trusted is set and the stamp is last, the kernel holds what it should.
//  2. trusted is set again only once the rules were read: by a Replace, or by readBack.
type watch struct {
	last    stamp
	trusted bool // at the time of last, the kernel held what it should
	// operations counts the operations of this Programmer.
	operations int
	// unreadable counts the attempts to get a stamp that failed.
	unreadable uint32
}

// forget discards what is known. The operation that follows reads what the kernel holds.
func (w *watch) forget() { w.last, w.trusted = stamp{}, true }

// operated records that this Programmer has changed tables, with this number of commits, each of
// one table.
func (w *watch) operated(before, after stamp, commits int) {
	fresh := w.trusted && w.last == stamp{}
	w.trusted = w.trusted && (fresh || before == w.last) && after.follows(before, commits)
	w.last = after
	w.operations++
}

// Watch calls lost when others have removed or changed rules of this package or rules that lead to
// them.
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
		if time.Now().Before(next) || !p.noticeChanges() {
			continue
		}
		start := time.Now()
		reason, err := p.readBack(ctx)
		next = time.Now().Add(readShare * time.Since(start))
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			p.log.Warn("Cannot check whether others have changed the rules, trying again", "err", err)
			next = time.Now().Add(time.Minute)
		case reason != "":
			lost(reason)
		}
	}
}

// noticeChanges checks the stamps, and reports whether others may have changed something.
func (p *Programmer) noticeChanges() bool {
	if !p.mu.TryLock() {
		return false // rules are being written; check later
	}
	defer p.mu.Unlock()
	return p.noticeChangesLocked()
}

func (p *Programmer) noticeChangesLocked() bool {
	if p.stamp() != p.watch.last {
		p.watch.trusted = false
	}
	return !p.watch.trusted
}

// readBack reads the rules and returns what others changed. It returns "" if they changed nothing,
// or if this Programmer changed something meanwhile.
func (p *Programmer) readBack(ctx context.Context) (reason string, err error) {
	p.mu.Lock()
	before, operations, families := p.stamp(), p.watch.operations, maps.Clone(p.families)
	// A family without held has a Replace due anyway, and its tables may be out of order.
	maps.DeleteFunc(families, func(_ model.Family, f *kernelFamily) bool { return f.held == nil })
	hooks := map[*kernelFamily][]hook{}
	for _, f := range families {
		hooks[f] = f.allHooks()
	}
	p.mu.Unlock()
	found := map[*kernelFamily]saved{}
	for f, wanted := range hooks {
		if found[f], err = f.tool.saved(ctx, wanted); err != nil {
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
			continue // Cleanup ran meanwhile
		}
		if difference := f.difference(found[f]); difference != "" {
			reason = fmt.Sprintf("%v: %s", f.family, difference)
			f.held = nil
		}
	}
	p.watch.last, p.watch.trusted = before, true
	return reason, nil
}

// difference returns the first difference between the rules that were read and what they should be,
// or "".
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
				return fmt.Sprintf("table %v: the chain %s has changed", t, chain)
			}
		}
		for chain := range found.chains[t] {
			if _, ok := f.held.chains[t][chain]; !ok {
				return fmt.Sprintf("table %v: there is an unexpected chain %s", t, chain)
			}
		}
	}
	return ""
}
