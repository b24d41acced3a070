package iptables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// kernelFamily is one IP family's rules: what they should be, and what the kernel holds of them.
type kernelFamily struct {
	*dialect
	tool *tool
	log  *slog.Logger

	// held is what the kernel holds; nil while that is not known and a Replace must come.
	held *saved

	localPods []netip.Prefix
	ports     map[view.ServicePortID]*view.ServicePort
	changed   map[view.ServicePortID]*view.ServicePort // ports not written yet, as they were before; nil: were not

	// For Service ports with backends.
	vips      *tree[netip.Addr]
	nodePorts map[model.Protocol]*tree[uint16]
	// For those without.
	rejectVIPs      *tree[netip.Addr]
	rejectNodePorts map[model.Protocol]*tree[uint16]
	// Addresses of local backends, with an entry for each Service port that leads there.
	hairpins *tree[netip.Addr]
}

// reset makes the wanted state that of a node without Services.
func (f *kernelFamily) reset(localPods []netip.Prefix) {
	f.ports, f.changed = map[view.ServicePortID]*view.ServicePort{}, map[view.ServicePortID]*view.ServicePort{}
	f.localPods = nil
	for _, p := range localPods {
		if model.FamilyOf(p.Addr()) == f.family {
			f.localPods = append(f.localPods, p.Masked())
		}
	}
	byAddress := func(t table, name string, rules func(*bytes.Buffer, string, []entry)) *tree[netip.Addr] {
		return newTree(t, name, addressDigit, f.matchAddress, netip.Addr.Compare, rules)
	}
	f.vips = byAddress(nat, vipsChain, f.frontendRules(view.MasqueradeNonLocal))
	f.rejectVIPs = byAddress(filter, rejectChain, f.rejectRules)
	f.hairpins = byAddress(nat, hairpinChain, f.hairpinRule)
	f.nodePorts, f.rejectNodePorts = map[model.Protocol]*tree[uint16]{}, map[model.Protocol]*tree[uint16]{}
	for _, p := range protocols {
		byPort := func(t table, name string, rules func(*bytes.Buffer, string, []entry)) *tree[uint16] {
			return newTree(t, name+"-"+p.String(), portDigit, matchPorts(p), cmp.Compare[uint16], rules)
		}
		f.nodePorts[p] = byPort(nat, nodePortsChain, f.frontendRules(view.MasqueradeAlways))
		f.rejectNodePorts[p] = byPort(filter, rejectChain, f.rejectRules)
	}
}

// set changes what is wanted of a Service port; nil: nothing.
func (f *kernelFamily) set(id view.ServicePortID, port *view.ServicePort) {
	before := f.ports[id]
	if before != nil {
		f.index(before, (*tree[netip.Addr]).remove, (*tree[uint16]).remove)
		delete(f.ports, id)
	}
	if port != nil {
		f.index(port, (*tree[netip.Addr]).add, (*tree[uint16]).add)
		f.ports[id] = port
	}
	if _, again := f.changed[id]; !again {
		f.changed[id] = before
	}
}

// index adds a Service port to the trees, or removes it.
func (f *kernelFamily) index(port *view.ServicePort, address func(*tree[netip.Addr], netip.Addr, entry), number func(*tree[uint16], uint16, entry)) {
	vips, nodePorts := f.vips, f.nodePorts
	if len(port.Backends) == 0 {
		vips, nodePorts = f.rejectVIPs, f.rejectNodePorts
	}
	for _, frontend := range port.Frontends {
		if frontend.Kind == view.NodePort {
			number(nodePorts[port.ID.Protocol], frontend.Port, entry{port, frontend})
		} else {
			address(vips, frontend.Address, entry{port, frontend})
		}
	}
	var last netip.Addr
	for _, b := range port.Backends {
		if b.Local && b.Address.Addr() != last { // ascending, so that the same come together
			address(f.hairpins, b.Address.Addr(), hairpinEntry(port, b))
			last = b.Address.Addr()
		}
	}
}

// transaction gathers what must be written of all that is wanted, or of what has changed.
func (f *kernelFamily) transaction(all bool) *transaction {
	x := newTransaction(f.held.chains)
	if all {
		f.fixedChains(x, f.localPods)
		for _, port := range f.ports {
			portChains(x, nil, port)
		}
	} else {
		for id, before := range f.changed {
			portChains(x, before, f.ports[id])
		}
	}
	f.vips.write(x, all)
	f.rejectVIPs.write(x, all)
	f.hairpins.write(x, all)
	for _, p := range protocols {
		f.nodePorts[p].write(x, all)
		f.rejectNodePorts[p].write(x, all)
	}
	clear(f.changed)
	if all {
		x.removeOthers(f.held.hooks)
	}
	return x
}

// load reads what the kernel holds.
func (f *kernelFamily) load(ctx context.Context) error {
	var output []byte
	for t := range tables {
		part, err := f.tool.save(ctx, "-t", t.String())
		if err != nil {
			return err
		}
		output = append(output, part...)
	}
	s := parseSave(output)
	f.held = &s
	return nil
}

// write makes the kernel hold what is wanted, at once.
func (f *kernelFamily) write(ctx context.Context, all bool) error {
	start := time.Now()
	x := f.transaction(all)
	text := x.text()
	if len(text) > 0 {
		if err := f.tool.restore(ctx, text); err != nil {
			return err
		}
		x.done()
		f.log.Debug("wrote rules", "family", f.family, "bytes", len(text), "duration", time.Since(start))
	}
	return nil
}

// hook adds the hooks that are missing, with their chains, empty, where these are missing too. It is done before the
// chains are filled: iptables gets slow in full tables.
func (f *kernelFamily) hook() error {
	for _, h := range slices.Backward(hooks) { // each is put at the head
		if slices.Contains(f.held.hooks, h) {
			continue
		}
		if _, ok := f.held.chains[h.table][h.target()]; !ok {
			if err := f.tool.base.NewChain(h.table.String(), h.target()); err != nil {
				return fmt.Errorf("add the chain %s to table %v: %w", h.target(), h.table, err)
			}
			f.held.chains[h.table][h.target()] = emptyChain
		}
		words := strings.Fields(h.rule)
		if err := f.tool.base.Insert(h.table.String(), words[1], 1, words[2:]...); err != nil {
			return fmt.Errorf("add the rule %q to table %v: %w", h.rule, h.table, err)
		}
	}
	return nil
}

// replace makes the kernel hold exactly these Service ports. It returns PortErrors for those that the kernel does not
// take; such a one is left as the last Replace or Apply programmed it, if one did.
func (f *kernelFamily) replace(ctx context.Context, node view.Node, ports map[view.ServicePortID]*view.ServicePort) error {
	last := f.ports
	f.reset(node.LocalPods)
	for id, port := range ports {
		f.set(id, port)
	}
	f.held = nil
	if err := f.load(ctx); err != nil {
		return err
	}
	if err := f.hook(); err != nil {
		f.held = nil
		return err
	}
	return f.writeOrReject(ctx, true, ports, last)
}

// apply changes some Service ports. It returns PortErrors for those that the kernel does not take, which stay as they
// were.
func (f *kernelFamily) apply(ctx context.Context, changes []view.Change) error {
	if f.held == nil {
		return errors.New("what the kernel holds is not known: call Replace first")
	}
	ports := map[view.ServicePortID]*view.ServicePort{}
	for _, c := range changes {
		ports[c.ID()] = c.After
		f.set(c.ID(), c.After)
	}
	return f.writeOrReject(ctx, false, ports, maps.Clone(f.changed))
}

// writeOrReject is write, and if that is rejected it finds the Service ports to blame, sets them back to what they were
// last, and writes the rest.
func (f *kernelFamily) writeOrReject(ctx context.Context, all bool, ports, last map[view.ServicePortID]*view.ServicePort) error {
	err := f.write(ctx, all)
	if err == nil {
		return nil
	}
	f.held = nil
	if rejected := (*rejectedError)(nil); !errors.As(err, &rejected) {
		return err
	}
	bad, checkErr := f.findRejected(ctx, ports)
	if checkErr != nil {
		return fmt.Errorf("%w; no Service port is known to be the cause: %w", err, checkErr)
	}
	if len(bad) == 0 {
		return err
	}
	for _, b := range bad {
		before := last[b.ID]
		if before != nil && f.check(ctx, []*view.ServicePort{before}) != nil {
			before = nil // it was wanted, but cannot have been programmed either
		}
		f.set(b.ID, before)
	}
	// Of the tables in the rejected input some may have been written.
	if err := f.load(ctx); err != nil {
		return err
	}
	if err := f.write(ctx, true); err != nil {
		f.held = nil
		return err
	}
	return joinPortErrors(bad)
}

// findRejected tells which Service ports the kernel does not take, by trying their rules in chains that nothing refers
// to.
func (f *kernelFamily) findRejected(ctx context.Context, ports map[view.ServicePortID]*view.ServicePort) ([]*programmer.PortError, error) {
	all := slices.DeleteFunc(slices.Collect(maps.Values(ports)), func(p *view.ServicePort) bool { return p == nil })
	slices.SortFunc(all, func(a, b *view.ServicePort) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	if err := f.check(ctx, nil); err != nil {
		return nil, err // so it is not the Service ports
	}
	var bad []*programmer.PortError
	var search func([]*view.ServicePort) error
	search = func(ports []*view.ServicePort) error {
		err := f.check(ctx, ports)
		rejected := (*rejectedError)(nil)
		switch {
		case err == nil:
			return nil
		case !errors.As(err, &rejected):
			return err
		case len(ports) == 1:
			bad = append(bad, &programmer.PortError{ID: ports[0].ID, Err: err})
			return nil
		}
		half := len(ports) / 2
		if err := search(ports[:half]); err != nil {
			return err
		}
		return search(ports[half:])
	}
	if err := search(all); err != nil {
		return nil, err
	}
	return bad, nil
}

// check tells whether the kernel takes the rules of these Service ports.
func (f *kernelFamily) check(ctx context.Context, ports []*view.ServicePort) error {
	var rules [tables]bytes.Buffer
	for _, port := range ports {
		f.checkRules(&rules, port)
	}
	var try, undo bytes.Buffer
	for t := range tables {
		fmt.Fprintf(&try, "*%v\n:%s - [0:0]\n%sCOMMIT\n", t, checkChain, rules[t].Bytes())
		fmt.Fprintf(&undo, "*%v\n:%s - [0:0]\n-X %s\nCOMMIT\n", t, checkChain, checkChain)
	}
	tried := f.tool.restore(ctx, try.Bytes())
	if err := f.tool.restore(ctx, undo.Bytes()); err != nil {
		return err
	}
	return tried
}

func joinPortErrors(ports []*programmer.PortError) error {
	var all []error
	for _, p := range ports {
		all = append(all, p)
	}
	return errors.Join(all...)
}
