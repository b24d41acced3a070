package iptables

import (
	"context"
	"fmt"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Differences returns what the rules of an IP family should have instead of what they have, in the
// network namespace of the calling thread. It changes nothing.
func Differences(ctx context.Context, family model.Family, options Options, state view.State) (different []string, err error) {
	p, err := New(options)
	if err != nil {
		return nil, err
	}
	f := p.families[family]
	if f == nil {
		return nil, nil
	}
	if err := f.load(ctx); err != nil {
		return nil, err
	}
	f.reset(state.Node)
	f.counters = f.held.counted
	for id, port := range state.Ports {
		if id.Family == family {
			f.set(id, port)
		}
	}
	add := func(t table, format string, args ...any) {
		different = append(different, fmt.Sprintf(format, args...)+fmt.Sprintf(" in table %v of %s", t, f.tool.name))
	}
	x := f.transaction(true)
	if _, differs := x.parts[filter].written[forwardChain]; differs {
		// The setting may have changed since the chain was written.
		f.liberal = !f.liberal
		if other := f.transaction(true); !other.parts[filter].declare[forwardChain] {
			x = other
		}
	}
	for t := range x.parts {
		for chain := range x.parts[t].written {
			add(table(t), "other rules in chain %s", chain)
		}
		for chain := range x.parts[t].removed {
			add(table(t), "no chain %s", chain)
		}
	}
	for _, h := range f.hooks() {
		if !slices.Contains(f.held.hooks, h) && !f.held.mayHave(h) {
			add(h.table, "a rule %q", h.rule)
		}
	}
	slices.Sort(different)
	return different, nil
}
