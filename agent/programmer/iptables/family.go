package iptables

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// servicePorts are Service ports, of which nil ones are to be removed. plans are what was written
// of Service ports, and nil if nothing was.
type (
	servicePorts = map[view.ServicePortID]*view.ServicePort
	plans        = map[view.ServicePortID]*plan
)

// kernelFamily is one IP family's rules: what they should be, and what the kernel holds of them.
//
// Invariants:
//
//  1. While held is not nil, it has the hash of every chain of this package in the kernel, and
//     ports holds what was written.
//  2. The trees index exactly the frontends and local backends of ports, except after a failed
//     operation. A Replace rebuilds them.
//  3. changed holds each Service port that differs from what was written, until a transaction
//     includes it.
type kernelFamily struct {
	*dialect
	tool    *tool
	log     *slog.Logger
	metrics *Metrics // nil means none
	support support

	// held is what the kernel holds. nil means that this is not known, and that a Replace must come
	// next.
	held *saved

	ports plans
	// changed holds the Service ports that are not written yet, as they were before. nil means that a
	// Service port is new.
	changed plans
	// refused are the Service ports that the kernel refused the last time they were wanted. It
	// survives reset.
	refused map[view.ServicePortID]bool

	// The next two fields are in nat and hold frontends that lead to backends.
	vips, external *tree[netip.Addr, frontend]
	nodePorts      map[model.Protocol]*tree[uint16, frontend]
	// The next two fields are in filter and hold frontends that some or all clients must not reach.
	rejectVIPs      *tree[netip.Addr, frontend]
	rejectNodePorts map[model.Protocol]*tree[uint16, frontend]
	// hairpins holds the addresses of local backends, with the Service ports that lead to them.
	hairpins *tree[netip.Addr, hairpin]
}

// reset sets the wanted state to a node without Services.
func (f *kernelFamily) reset(node view.Node) {
	f.setNode(node)
	f.ports, f.changed = plans{}, plans{}
	byAddress := keys[netip.Addr]{addressBit, f.matchAddress, netip.Addr.Compare}
	inNat := entries[frontend]{f.natWeight, f.natRules}
	inFilter := entries[frontend]{one[frontend], f.filterRules} // seldom more than one rule
	f.vips = newTree(nat, vipsChain, byAddress, inNat)
	f.external = newTree(nat, externalChain, byAddress, inNat)
	f.rejectVIPs = newTree(filter, rejectChain, byAddress, inFilter)
	f.hairpins = newTree(nat, hairpinChain, byAddress, entries[hairpin]{one[hairpin], f.hairpinRules})
	f.nodePorts = map[model.Protocol]*tree[uint16, frontend]{}
	f.rejectNodePorts = map[model.Protocol]*tree[uint16, frontend]{}
	for _, p := range protocols {
		byPort := keys[uint16]{portBit, matchPorts(p), cmp.Compare[uint16]}
		f.nodePorts[p] = newTree(nat, nodePortsTree(p), byPort, inNat)
		f.rejectNodePorts[p] = newTree(filter, rejectTree(p), byPort, inFilter)
	}
}

// set changes the wanted state of a Service port. nil removes it.
func (f *kernelFamily) set(id view.ServicePortID, port *view.ServicePort) {
	before := f.ports[id]
	if before != nil {
		f.index(before, false)
		delete(f.ports, id)
	}
	if port != nil {
		p := f.plan(port)
		f.index(p, true)
		f.ports[id] = p
	}
	if _, again := f.changed[id]; !again {
		f.changed[id] = before
	}
}

// index adds the frontends and local backends of a Service port to the trees, or removes them.
func (f *kernelFamily) index(port *plan, add bool) {
	for i, g := range port.Frontends {
		entry := frontend{port, i}
		way := entry.way().way
		switch {
		case way == nowhere:
		case g.Kind == view.NodePort:
			f.nodePorts[port.ID.Protocol].change(add, g.Port, entry)
		case way == offPods:
			f.vips.change(add, g.Address, entry)
		default:
			f.external.change(add, g.Address, entry)
		}
		if f.filtered(g) {
			f.indexFiltered(entry, add)
		}
	}
	if port.HealthCheckPort != 0 {
		f.rejectNodePorts[model.TCP].change(add, port.HealthCheckPort, frontend{port, healthCheck})
	}
	for _, a := range port.localAddresses() {
		f.hairpins.change(add, a, hairpin{port, a})
	}
}

// indexFiltered adds a frontend to a tree of filter, or removes it.
func (f *kernelFamily) indexFiltered(e frontend, add bool) {
	if g := e.get(); g.Kind == view.NodePort {
		f.rejectNodePorts[e.port.ID.Protocol].change(add, g.Port, e)
	} else {
		f.rejectVIPs.change(add, g.Address, e)
	}
}

// leaving returns the frontends that have rules in filter and that changed Service ports do not
// have any more. What these rules refuse may reach filter until nat is written.
func (f *kernelFamily) leaving() (out []frontend) {
	for id, before := range f.changed {
		if before == nil {
			continue
		}
		after := f.ports[id]
		for i, g := range before.Frontends {
			if f.filtered(g) && (after == nil || !slices.ContainsFunc(after.Frontends, g.Equal)) {
				out = append(out, frontend{before, i})
			}
		}
	}
	return out
}

// transaction returns a transaction with everything that is wanted, or with what has changed.
func (f *kernelFamily) transaction(all bool) *transaction {
	x := newTransaction(f.held.chains)
	if all {
		f.fixedChains(x)
		for _, port := range f.ports {
			f.putChains(x, nil, port)
		}
	} else {
		for id, before := range f.changed {
			f.putChains(x, before, f.ports[id])
		}
	}
	f.vips.write(x, all)
	f.external.write(x, all)
	f.hairpins.write(x, all)
	for _, p := range protocols {
		f.nodePorts[p].write(x, all)
	}
	f.writeFiltered(x, all)
	clear(f.changed)
	if all {
		x.removeOthers(f.held)
	}
	return x
}

// writeFiltered adds the trees of filter to the transaction.
func (f *kernelFamily) writeFiltered(x *transaction, all bool) {
	f.rejectVIPs.write(x, all)
	for _, p := range protocols {
		f.rejectNodePorts[p].write(x, all)
	}
}

// putChains adds the chains of a Service port to the transaction. nil means that the Service port
// did not exist before, or does not exist any more. Chains in filter stay, as those in leaving do.
func (f *kernelFamily) putChains(x *transaction, before, after *plan) {
	is := f.chainsOf(after)
	for _, c := range is {
		x.put(c.table, c.name, c.write)
	}
	for _, c := range f.chainsOf(before) {
		if !slices.ContainsFunc(is, func(o portChain) bool { return o.table == c.table && o.name == c.name }) {
			if c.table == filter {
				x.leaving = append(x.leaving, c.name)
			} else {
				x.remove(c.table, c.name)
			}
		}
	}
}

// load reads what the kernel holds.
func (f *kernelFamily) load(ctx context.Context) error {
	s, err := f.tool.saved(ctx, f.allHooks())
	if err != nil {
		return err
	}
	f.hold(&s)
	return nil
}

// hold sets what the kernel holds. If others remove the guard, it is still wanted.
func (f *kernelFamily) hold(s *saved) {
	f.held = s
	_, guarded := s.chains[filter][localnetChain]
	f.guarded = (f.guarded || guarded) && programmer.SysctlIs(programmer.RouteLocalnet, "1")
}

// write makes the kernel hold the wanted state. What packets see at once is one iptables-restore,
// which changes filter before nat. So what nat has not translated any more is refused at once. What
// filter does not refuse any more is translated at once, because another iptables-restore removes
// these rules after nat has changed. With all, it is not known which rules these are.
func (f *kernelFamily) write(ctx context.Context, all bool) error {
	var leaving []frontend
	if !all {
		leaving = f.leaving()
	}
	for _, e := range leaving {
		f.indexFiltered(e, true)
	}
	x := f.transaction(all)
	for _, e := range leaving {
		f.indexFiltered(e, false)
	}
	if all {
		if err := f.removeRefs(x); err != nil {
			return err
		}
	}
	if err := f.restore(ctx, x); err != nil || len(leaving)+len(x.leaving) == 0 {
		return err
	}
	last := newTransaction(f.held.chains)
	f.writeFiltered(last, false)
	for _, chain := range x.leaving {
		last.remove(filter, chain)
	}
	return f.restore(ctx, last)
}

// restore carries out a transaction.
func (f *kernelFamily) restore(ctx context.Context, x *transaction) error {
	start := time.Now()
	var inputs [][]byte
	if f.tool.variant == NFT {
		inputs = x.texts()
	} else if text := x.text(); len(text) > 0 { // each input replaces the whole table
		inputs = [][]byte{text}
	}
	size := 0
	for _, input := range inputs {
		if err := f.tool.restore(ctx, input); err != nil {
			return err
		}
		size += len(input)
	}
	f.held.done(x)
	f.metrics.wrote(f, x)
	if size > 0 {
		f.log.Debug("Wrote rules", "family", f.family, "bytes", size, "transactions", len(inputs), "duration", time.Since(start))
	}
	return nil
}

// removeRefs removes what leads to chains that go, and what may not be a hook although it is in the
// place of one, in tables of which the program does not print everything. The hooks are in place.
func (f *kernelFamily) removeRefs(x *transaction) error {
	for t := range tables {
		var remove []nft.Reference
		f.held.refs[t] = slices.DeleteFunc(f.held.refs[t], func(r reference) bool {
			if !r.unsure && x.parts[t].put[r.Target] {
				return false
			}
			remove = append(remove, r.Reference)
			return true
		})
		if err := f.tool.removeRefs(t, remove); err != nil {
			return err
		}
	}
	return nil
}

// hook adds the hooks that are missing. If a hook's chain is missing as well, it adds the chain
// without rules. The hooks come before the rules, because iptables gets slow when tables are full.
func (f *kernelFamily) hook() error {
	for _, h := range slices.Backward(f.hooks()) { // each is inserted at the head
		if slices.Contains(f.held.hooks, h) {
			continue
		}
		_, ok := f.held.chains[h.table][h.target()]
		if err := f.tool.hook(h, !ok); err != nil {
			return err
		}
		if !ok {
			f.held.chains[h.table][h.target()] = emptyChain
		}
	}
	return nil
}

// guardLocalnet adds the guard of loopback addresses and changes nothing else.
func (f *kernelFamily) guardLocalnet(ctx context.Context) error {
	if err := f.load(ctx); err != nil {
		return err
	}
	x := newTransaction(f.held.chains)
	putLocalnet(x)
	if err := f.tool.restore(ctx, x.text()); err != nil {
		return err
	}
	if h := f.localnetHook(); !slices.Contains(f.held.hooks, h) {
		return f.tool.hook(h, false)
	}
	return nil
}

// intact is Intact for one IP family.
func (f *kernelFamily) intact(ctx context.Context, state view.State) bool {
	f.setNode(state.Node)
	held, err := f.tool.saved(ctx, f.allHooks())
	if err != nil {
		return false
	}
	for _, h := range f.hooks() {
		if !slices.Contains(held.hooks, h) && !held.mayHave(h) {
			return false
		}
	}
	x := newTransaction(held.chains)
	f.fixedChains(x)
	for t := range x.parts {
		for chain, wanted := range x.parts[t].written {
			if found, ok := held.chains[t][chain]; !ok || found.rules == 0 && wanted.rules > 0 {
				return false
			}
		}
	}
	// One of these trees has each frontend with an address.
	frontends := held.chains[nat][vipsChain].rules + held.chains[nat][externalChain].rules + held.chains[filter][rejectChain].rules
	return programmer.HoldsSome(state, f.family, func(view.ServicePortID) bool { return frontends > 0 })
}

// replace makes the kernel hold exactly the state's Service ports of this family. It returns
// PortErrors for those that the kernel refuses. Such a Service port stays as the last Replace or
// Apply programmed it, if one did.
func (f *kernelFamily) replace(ctx context.Context, state view.State) error {
	last, ports := f.ports, servicePorts{}
	f.reset(state.Node)
	for id, port := range state.Ports {
		if id.Family == f.family {
			ports[id] = port
			f.set(id, port)
		}
	}
	err := func() error {
		f.held = nil
		if err := f.load(ctx); err != nil {
			return err
		}
		f.chooseCounters(ctx)
		if err := f.hook(); err != nil {
			return err
		}
		return f.writeOrReject(ctx, true, ports, last)
	}()
	if _, written := programmer.PortErrors(err); !written {
		f.held, f.ports = nil, last // what was written last
	}
	return err
}

// apply carries out the changes of this family. It returns PortErrors for the Service ports that
// the kernel refuses, which stay as they were.
func (f *kernelFamily) apply(ctx context.Context, changes []view.Change) error {
	last, ports := plans{}, servicePorts{}
	for _, c := range changes {
		if c.ID().Family == f.family {
			last[c.ID()], ports[c.ID()] = f.ports[c.ID()], c.After
		}
	}
	switch {
	case len(ports) == 0:
		return nil
	case f.held == nil:
		return programmer.ErrReplaceFirst
	}
	for id, port := range ports {
		f.set(id, port)
	}
	err := f.writeOrReject(ctx, false, ports, last)
	if _, written := programmer.PortErrors(err); !written {
		f.held = nil
		for id, p := range last { // what was written last
			if f.ports[id] = p; p == nil {
				delete(f.ports, id)
			}
		}
	}
	return err
}
