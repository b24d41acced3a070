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
	"regexp"
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

	ports   map[view.ServicePortID]*view.ServicePort
	changed map[view.ServicePortID]*view.ServicePort // ports not written yet, as they were before; nil: were not

	// In nat, frontends that lead to backends.
	vips, external *tree[netip.Addr, frontend]
	nodePorts      map[model.Protocol]*tree[uint16, frontend]
	// In filter, frontends that some or all are kept from.
	rejectVIPs      *tree[netip.Addr, frontend]
	rejectNodePorts map[model.Protocol]*tree[uint16, frontend]
	// Addresses of local backends, with the Service ports that lead there.
	hairpins *tree[netip.Addr, hairpin]
}

// reset makes the wanted state that of a node without Services.
func (f *kernelFamily) reset(node view.Node) {
	f.setNode(node)
	f.ports, f.changed = map[view.ServicePortID]*view.ServicePort{}, map[view.ServicePortID]*view.ServicePort{}
	byAddress := func(t table, name string, weight func(frontend) int, rules func(*bytes.Buffer, string, []frontend)) *tree[netip.Addr, frontend] {
		return newTree(t, name, addressBit, f.matchAddress, netip.Addr.Compare, weight, rules)
	}
	f.vips = byAddress(nat, vipsChain, f.natWeight, f.natRules)
	f.external = byAddress(nat, externalChain, f.natWeight, f.natRules)
	f.rejectVIPs = byAddress(filter, rejectChain, filterWeight, f.filterRules)
	f.hairpins = newTree(nat, hairpinChain, addressBit, f.matchAddress, netip.Addr.Compare,
		func(hairpin) int { return 1 }, f.hairpinRules)
	f.nodePorts, f.rejectNodePorts = map[model.Protocol]*tree[uint16, frontend]{}, map[model.Protocol]*tree[uint16, frontend]{}
	for _, p := range protocols {
		byPort := func(t table, name string, weight func(frontend) int, rules func(*bytes.Buffer, string, []frontend)) *tree[uint16, frontend] {
			return newTree(t, name+"-"+p.String(), portBit, matchPorts(p), cmp.Compare[uint16], weight, rules)
		}
		f.nodePorts[p] = byPort(nat, nodePortsChain, f.natWeight, f.natRules)
		f.rejectNodePorts[p] = byPort(filter, rejectChain, filterWeight, f.filterRules)
	}
}

// set changes what is wanted of a Service port; nil: nothing.
func (f *kernelFamily) set(id view.ServicePortID, port *view.ServicePort) {
	before := f.ports[id]
	if before != nil {
		f.index(before, (*tree[netip.Addr, frontend]).remove, (*tree[uint16, frontend]).remove, (*tree[netip.Addr, hairpin]).remove)
		delete(f.ports, id)
	}
	if port != nil {
		f.index(port, (*tree[netip.Addr, frontend]).add, (*tree[uint16, frontend]).add, (*tree[netip.Addr, hairpin]).add)
		f.ports[id] = port
	}
	if _, again := f.changed[id]; !again {
		f.changed[id] = before
	}
}

// index adds a Service port to the trees, or removes it.
func (f *kernelFamily) index(port *view.ServicePort,
	address func(*tree[netip.Addr, frontend], netip.Addr, frontend),
	number func(*tree[uint16, frontend], uint16, frontend),
	backend func(*tree[netip.Addr, hairpin], netip.Addr, hairpin),
) {
	for i, g := range port.Frontends {
		entry := frontend{port, i}
		way, _ := f.wayOf(g)
		if g.Kind == view.NodePort {
			if way != nowhere {
				number(f.nodePorts[port.ID.Protocol], g.Port, entry)
			}
			if f.filtered(g) {
				number(f.rejectNodePorts[port.ID.Protocol], g.Port, entry)
			}
			continue
		}
		switch way {
		case nowhere:
		case offPods:
			address(f.vips, g.Address, entry)
		default:
			address(f.external, g.Address, entry)
		}
		if f.filtered(g) {
			address(f.rejectVIPs, g.Address, entry)
		}
	}
	for _, a := range f.localAddresses(port) {
		backend(f.hairpins, a, hairpin{port, a})
	}
}

// transaction gathers what must be written of all that is wanted, or of what has changed.
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

// putChains puts the chains of a Service port, given what it was and is; nil: it was not, is not.
func (f *kernelFamily) putChains(x *transaction, before, after *view.ServicePort) {
	is := f.chainsOf(after)
	for _, c := range is {
		x.put(c.table, c.name, c.write)
	}
	for _, c := range f.chainsOf(before) {
		if !slices.ContainsFunc(is, func(o portChain) bool { return o.table == c.table && o.name == c.name }) {
			x.remove(c.table, c.name)
		}
	}
}

// load reads what the kernel holds.
func (f *kernelFamily) load(ctx context.Context) error {
	s, err := f.tool.saved(ctx)
	if err != nil {
		return err
	}
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
	for _, h := range slices.Backward(f.hooks()) { // each is put at the head
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

// replace makes the kernel hold exactly these Service ports. It returns PortErrors for those that the kernel does not
// take; such a one is left as the last Replace or Apply programmed it, if one did.
func (f *kernelFamily) replace(ctx context.Context, node view.Node, ports map[view.ServicePortID]*view.ServicePort) error {
	last := f.ports
	f.reset(node)
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

// references are the ends of rules that lead to chains of ours; comments hold no spaces before such.
var references = regexp.MustCompile(`(?m) -[gj] ` + prefix + `\S+$`)

// checkRules writes all that is particular to a Service port as rules of checkChain that refer to no other chain.
func (d *dialect) checkRules(w *[tables]bytes.Buffer, port *view.ServicePort) {
	var rules [tables]bytes.Buffer
	for i, g := range port.Frontends {
		if way, _ := d.wayOf(g); way != nowhere {
			d.natRules(&rules[nat], checkChain, []frontend{{port, i}})
		}
		if d.filtered(g) {
			d.filterRules(&rules[filter], checkChain, []frontend{{port, i}})
		}
	}
	for _, c := range d.chainsOf(port) {
		var one bytes.Buffer
		c.write(&one)
		rules[c.table].Write(bytes.ReplaceAll(one.Bytes(), []byte("-A "+c.name+" "), []byte("-A "+checkChain+" ")))
	}
	for _, a := range d.localAddresses(port) {
		d.hairpinRules(&rules[nat], checkChain, []hairpin{{port, a}})
	}
	for t := range rules {
		w[t].Write(references.ReplaceAll(rules[t].Bytes(), []byte(" -j RETURN")))
	}
}

func joinPortErrors(ports []*programmer.PortError) error {
	var all []error
	for _, p := range ports {
		all = append(all, p)
	}
	return errors.Join(all...)
}
