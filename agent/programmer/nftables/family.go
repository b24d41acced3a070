package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
)

// family is one IP family's table: what the kernel holds of it, and the transaction that changes
// it.
//
// Invariants while known is true:
//
//  1. holdings describe exactly what the kernel's table holds. They change only after the kernel
//     has committed a transaction.
//  2. The slots of a set have indices from 0 without gaps.
//  3. A part of the table that is counted in held exists in the kernel. It may be unused, with a
//     count of 0, only if its kind is kept.
//  4. A new id, and everything under it, is in the table before a frontend leads to it. An old one
//     is removed after nothing leads to it any more.
type family struct {
	*dialect
	conn *nft.Conn
	log  *slog.Logger
	node view.Node

	// known means that holdings describe what the kernel holds. Otherwise the next operation must
	// be a Replace.
	known bool
	holdings
	// lastID and lastNumber are the last id and number that were assigned. 0 means that this
	// process has assigned none yet. Both are reused as late as possible, because a packet may be
	// between two lookups, and affinity holds numbers of backends that are gone.
	lastID, lastNumber uint32
	// partSize is the number of backends that a part may hold as long as another one has room.
	partSize int
	// atOnce makes long transactions as long as the kernel accepts them. Then it refuses all of a
	// change or nothing.
	atOnce bool

	// prefix holds what the next transaction has to do before everything else.
	prefix      nft.Messages
	transaction transaction // reused by each transaction, as are batch and steps
	batch       nft.Batch
	steps       []change
}

type holdings struct {
	ports map[view.ServicePortID]*port
	ids   map[uint32]struct{} // of ports, and of Service ports without a name that were read
	// held counts the Service ports that need each part of the table that exists.
	held map[ref]int
	// loads is the number of backends in each part.
	loads [parts]int
}

// lengths returns the prefix lengths of sources in use after the counts of parts change by the
// given numbers.
func (f *family) lengths(by map[ref]int) []int {
	var out []int
	for bits := range f.Bits() + 1 {
		r := ref{kind: refSources, number: uint32(bits)}
		if f.held[r]+by[r] > 0 {
			out = append(out, bits)
		}
	}
	return out
}

// intact is Intact for one IP family. While another table stands in, the table is not intact.
func (f *family) intact(state view.State) bool {
	c, err := f.read()
	if err != nil || !c.exists || c.foreign || c.standIn {
		return false
	}
	for name, rules := range f.fixedChains(state.Node, false) {
		if held := c.chains[name]; held == nil || len(held.Rules) == 0 && len(rules) > 0 {
			return false
		}
	}
	names := map[string]bool{}
	for _, found := range c.found {
		names[found.name] = true
	}
	return programmer.HoldsSome(state, f.IP, func(id view.ServicePortID) bool { return names[label(id)] })
}

// replace makes the table hold a state, whatever it holds now.
func (f *family) replace(ctx context.Context, state view.State) error {
	f.known = false
	f.node = state.Node
	f.liberal = programmer.TCPIsLiberal()
	c, err := f.read()
	switch {
	case errors.Is(err, netlink.ErrInterrupted):
		f.log.Warn("Cannot read the nftables table, because the ruleset keeps changing", "family", f.IP)
		c = &content{foreign: true}
	case err != nil:
		return err
	}
	f.lastNumber = max(f.lastNumber, c.lastNumber)
	if !c.foreign && f.lastNumber < 1<<31 {
		err = f.replaceFrom(ctx, c, state)
		if _, ok := programmer.PortErrors(err); ok {
			if c.standIn { // left by an earlier run that could not create the table again
				err = errors.Join(err, f.conn.RemoveTable(f.of(StandInTable).Table))
			}
			return err
		}
		if k := (*netlink.Error)(nil); !errors.As(err, &k) || errors.Is(err, programmer.ErrOrdinary) {
			return err
		}
		f.log.Warn("Cannot update the nftables table", "family", f.IP, "err", err)
	}
	return f.anew(ctx, state)
}

// beside returns a family for another table of the same IP family.
func (f *family) beside(table string) *family {
	return &family{dialect: f.of(table), conn: f.conn, log: f.log, node: f.node, partSize: f.partSize}
}

// anew removes the table and creates it with a state, without using anything that it holds.
func (f *family) anew(ctx context.Context, state view.State) error {
	f.log.Warn("Recreating the nftables table, client affinity is lost", "family", f.IP)
	f.lastNumber = 0
	// A packet that is between two lookups when the table is removed would find nothing. So another
	// table stands in meanwhile.
	standIn := f.beside(StandInTable)
	anew := &content{exists: true, foreign: true}
	held, err := standIn.read() // an earlier attempt may have failed and left one that serves
	if err != nil || held.foreign || held.lastNumber >= 1<<31 {
		held = anew
	}
	standIn.lastNumber = held.lastNumber
	errStandIn := standIn.replaceFrom(ctx, held, state)
	if _, ok := programmer.PortErrors(errStandIn); !ok {
		f.log.Warn("New connections may fail while the nftables table is recreated", "family", f.IP, "err", errStandIn)
	} else if _, err := f.conn.RemoveRules(f.Table); err != nil {
		return err
	}
	err = f.replaceFrom(ctx, anew, state)
	if _, ok := programmer.PortErrors(err); !ok {
		return err // the stand-in stays, because nothing else serves
	}
	return errors.Join(err, f.conn.RemoveTable(f.of(StandInTable).Table))
}

// replaceFrom makes the table hold a state, given what it holds now.
func (f *family) replaceFrom(ctx context.Context, c *content, state view.State) error {
	err := f.replaceOnce(ctx, c, state)
	if !errors.Is(err, errPartly) {
		return err
	}
	// Single Service ports may be at fault. Only a transaction that the kernel refuses as a whole
	// shows which.
	c, errRead := f.read()
	if errRead != nil || c.foreign {
		return err
	}
	f.lastNumber = max(f.lastNumber, c.lastNumber)
	f.atOnce = true
	defer func() { f.atOnce = false }()
	return f.replaceOnce(ctx, c, state)
}

func (f *family) replaceOnce(ctx context.Context, c *content, state view.State) error {
	f.adopt(c)
	steps := make([]change, 0, len(state.Ports))
	byName := map[string]*port{}
	for id, found := range c.found {
		f.ids[id] = struct{}{}
		p := &port{id: id, sticky: found.sticky(), slots: found.slots, part: found.part, found: found.elements}
		f.loads[p.part] += p.load()
		if found.name == "" || byName[found.name] != nil {
			steps = append(steps, change{before: p})
			continue
		}
		byName[found.name] = p
	}
	for id, wanted := range state.Ports {
		if id.Family != f.IP {
			continue
		}
		name := label(id)
		before := byName[name]
		steps = append(steps, change{id: id, before: before, after: wanted})
		if before != nil {
			f.ports[id] = before // stays there if the change is refused
			delete(byName, name)
		}
	}
	for _, left := range byName {
		steps = append(steps, change{before: left})
	}
	return f.perform(ctx, steps, slices.Collect(maps.Keys(f.held)))
}

// adopt records what was read as what the kernel holds, and prepares in prefix what must change
// apart from Service ports. It returns the rules of the chains that there should be, and the sets
// that there should not be. It counts each part of the table that Service ports may need once, as
// if an additional Service port needed it. The caller gives these counts up at the end, which
// removes the parts that nothing needs.
func (f *family) adopt(c *content) (wanted map[string][]nft.Rule, unknown map[string]nft.HeldSet) {
	f.holdings = holdings{ports: map[view.ServicePortID]*port{}, ids: map[uint32]struct{}{}, held: map[ref]int{}}
	if f.lastID == 0 {
		f.lastID = c.lastID
	}
	for r := range c.shared {
		f.held[r] = 1
	}
	p := &f.prefix
	*p = nft.Messages{Table: f.Table}
	if c.foreign {
		p.AddTable() // so that removing it does not fail
		p.RemoveTable()
	}
	if c.foreign || !c.exists {
		p.AddTable()
	}
	unknown = maps.Clone(c.sets)
	for s := range setCount {
		name := s.String()
		_, held := unknown[name]
		switch {
		case name == "":
		case held:
			delete(unknown, name)
			if r, ok := refOfSet(s); ok {
				f.held[r] = 1
			}
		case s.always():
			f.addSet(p, s)
		}
	}
	wanted = f.fixedChains(f.node, f.held[ref{kind: refAffinity}] > 0)
	wanted[sourcesChain] = f.sourcesRules(f.lengths(nil))
	for k, chain := range c.vmaps {
		if r, ok := refOfChain(k, chain); ok {
			f.held[r] = 1
			wanted[chain] = f.rules(r)
		} else {
			c.stray[k] = struct{}{}
		}
	}
	f.adoptChains(c, wanted, unknown)
	return wanted, unknown
}

// adoptChains prepares the changes of chains, their rules, unknown sets and stray elements.
func (f *family) adoptChains(c *content, wanted map[string][]nft.Rule, unknown map[string]nft.HeldSet) {
	p := &f.prefix
	names := slices.SortedFunc(maps.Keys(wanted), compareChains)
	for _, name := range names {
		if c.chains[name] == nil {
			p.AddChain(name, hooks[name])
		}
	}
	for _, name := range names {
		rules := wanted[name]
		if held := c.chains[name]; held == nil || !slices.Equal(held.Rules, nft.Hashes(rules, f.Family)) {
			p.SetRules(name, rules)
		}
	}
	for name := range c.chains {
		if wanted[name] == nil {
			p.SetRules(name, nil)
		}
	}
	stray := &changes{}
	for k := range c.stray {
		stray.of(k.set).Add([]byte(k.key), nil, "")
	}
	stray.remove(p)
	for name := range unknown { // after the rules that use them, before the chains that they lead to
		p.RemoveSet(name)
	}
	for name := range c.chains {
		if wanted[name] == nil {
			p.RemoveChain(name)
		}
	}
}

// apply moves the table by changes of Service ports.
func (f *family) apply(ctx context.Context, changes []view.Change) error {
	steps := f.steps[:0]
	for _, c := range changes {
		id := c.ID()
		if id.Family == f.IP {
			steps = append(steps, change{id: id, before: f.ports[id], after: c.After})
		}
	}
	f.steps = steps
	if len(steps) == 0 {
		return nil
	}
	if !f.known {
		return programmer.ErrReplaceFirst
	}
	return f.perform(ctx, steps, nil)
}

// perform carries out steps, in one transaction if the kernel accepts it, and gives up one count of
// each of the given parts of the table. Unless it returns only PortErrors, the state of the table
// is unknown afterwards.
func (f *family) perform(ctx context.Context, steps []change, give []ref) error {
	f.known = false
	err := f.attempt(ctx, steps, give)
	if !refused(err) {
		f.known = err == nil
		return err
	}
	// The kernel refuses something. First find out whether single Service ports can be at fault.
	if err := f.checkOrdinary(); err != nil {
		return fmt.Errorf("%w: %w", programmer.ErrOrdinary, err)
	}
	// The prefix must work in any case.
	if err := f.attempt(ctx, nil, nil); err != nil {
		return err
	}
	failed, err := f.bisect(ctx, steps)
	// A Service port may have to wait for an address that another one still has.
	for progress := true; progress && err == nil && len(failed) > 0; {
		var still []change
		still, err = f.bisect(ctx, failed)
		progress = len(still) < len(failed)
		failed = still
	}
	if err == nil && len(failed) == 0 {
		err = f.attempt(ctx, nil, give)
	}
	if err != nil {
		return err
	}
	f.known = true
	var all []error
	for _, c := range failed {
		all = append(all, &programmer.PortError{ID: c.id, Err: c.refused})
	}
	return errors.Join(all...)
}

// checkOrdinary returns an error if the kernel refuses a table with an ordinary Service port and
// nothing else. It does not change anything.
func (f *family) checkOrdinary() error {
	alone := f.beside(checkTable)
	alone.adopt(&content{})
	x := alone.begin()
	p := programmer.Ordinary(f.IP)
	if err := x.change(change{id: p.ID, after: p}); err != nil {
		return err
	}
	x.finish()
	return x.conn.Check(x.whole())
}

// refused reports that the kernel refuses something that a single Service port wants, so that the
// others may still be programmed.
func refused(err error) bool {
	if errors.Is(err, errNoID) || errors.Is(err, errTooManyBackends) {
		return true
	}
	var k *netlink.Error
	if !errors.As(err, &k) || errors.Is(err, errPartly) {
		return false
	}
	switch k.Errno {
	case unix.ENOENT, unix.EPERM, unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EOPNOTSUPP:
		return false // the cause is not the wanted state, or the table differs from what is known
	}
	return true
}

// bisect carries out steps in halves, until each refused step is alone. It returns the refused
// ones.
func (f *family) bisect(ctx context.Context, steps []change) (failed []change, _ error) {
	for _, half := range [][]change{steps[:len(steps)/2], steps[len(steps)/2:]} {
		if len(half) == 0 {
			continue
		}
		err := f.attempt(ctx, half, nil)
		if len(half) == 1 && errors.Is(err, unix.EMSGSIZE) {
			half[0].renumber = true
			err = f.attempt(ctx, half, nil)
		}
		switch {
		case err == nil:
		case !refused(err):
			return nil, err
		case len(half) == 1:
			half[0].refused = err
			failed = append(failed, half[0])
		default:
			more, err := f.bisect(ctx, half)
			if err != nil {
				return nil, err
			}
			failed = append(failed, more...)
		}
	}
	return failed, nil
}

// attempt carries out steps in one transaction, and gives up one count of each of the given parts.
func (f *family) attempt(ctx context.Context, steps []change, give []ref) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	x := f.begin()
	defer x.end()
	for _, s := range steps {
		if err := x.change(s); err != nil {
			return err
		}
	}
	for _, r := range give {
		x.refs[r]--
		x.clean = true
	}
	x.finish()
	if err := x.commit(); err != nil {
		return err
	}
	x.settle()
	return nil
}
