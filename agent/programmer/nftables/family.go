package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
)

// family is one IP family's table: what it holds, and how to change that.
type family struct {
	*dialect
	conn *conn
	log  *slog.Logger

	// known: what follows is what the kernel holds. Else a Replace must come.
	known bool
	node  view.Node
	ports map[view.ServicePortID]*port
	ids   map[uint32]struct{} // of ports, and of what else there is
	// held counts the Service ports that need each part of the table that is there.
	held map[ref]int
	// The last ones given; 0: none yet by this process. What was given is not given again for as long as can be, whatever has become of
	// it: a packet may be between two lookups, and affinity holds numbers of backends that are gone.
	lastID, lastNumber uint32
	// loads are how many backends each part has, and partSize is how many one has at most, as long as another has room.
	loads    [parts]int
	partSize int

	// prefix is what the next transaction has to do before all else.
	prefix      objects
	transaction transaction // reused, as are the two below
	buf         []byte
	steps       []change
}

// lengths gives the lengths of sources' prefixes that there are when some parts come or go.
func (f *family) lengths(by map[ref]int) []int {
	var out []int
	for bits := range f.bits + 1 {
		r := ref{kind: refSources, number: uint32(bits)}
		if f.held[r]+by[r] > 0 {
			out = append(out, bits)
		}
	}
	return out
}

// replace makes the table hold a state, whatever it holds.
func (f *family) replace(ctx context.Context, state view.State) error {
	f.known = false
	f.node = state.Node
	// Who sets this has packets of connections go ways that conntrack does not see, and wants none dropped for that.
	f.liberal = isOne("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	c, err := f.read()
	switch {
	case errors.Is(err, errInterrupted):
		f.log.Warn("the nftables table can't be read, as something changes the ruleset all the time", "family", f.family)
		c = &content{foreign: true}
	case err != nil:
		return err
	}
	f.lastNumber = max(f.lastNumber, c.lastNumber)
	if !c.foreign && f.lastNumber < 1<<31 {
		err = f.replaceFrom(ctx, c, state)
		if _, ok := programmer.PortErrors(err); ok {
			if c.standIn { // it was left when a table could not be made anew
				err = errors.Join(err, f.conn.removeTable(f.of(StandInTable)))
			}
			return err
		}
		if k := (*kernelError)(nil); !errors.As(err, &k) || errors.Is(err, errNoServicePort) {
			return err
		}
		f.log.Warn("the nftables table can't be changed to what is wanted", "family", f.family, "err", err)
	}
	return f.anew(ctx, state)
}

// anew makes the table hold a state, without anything of what it holds.
func (f *family) anew(ctx context.Context, state view.State) error {
	f.log.Warn("the nftables table is made anew, and affinity is lost", "family", f.family)
	f.lastNumber = 0
	// A packet that is on its way through the table when it is replaced would find nothing. So another one stands in meanwhile.
	standIn := &family{dialect: f.of(StandInTable), conn: f.conn, log: f.log, node: f.node, partSize: f.partSize}
	anew := &content{exists: true, foreign: true}
	held, err := standIn.read() // there may be one that serves, since this failed before
	if err != nil || held.foreign || held.lastNumber >= 1<<31 {
		held = anew
	}
	standIn.lastNumber = held.lastNumber
	errStandIn := standIn.replaceFrom(ctx, held, state)
	if _, ok := programmer.PortErrors(errStandIn); !ok {
		f.log.Warn("a connection may be lost while the nftables table is made anew", "family", f.family, "err", errStandIn)
	} else if _, err := f.conn.removeRules(f.dialect); err != nil {
		return err
	}
	err = f.replaceFrom(ctx, anew, state)
	if _, ok := programmer.PortErrors(err); !ok {
		return err // the other one goes on: nobody else serves
	}
	return errors.Join(err, f.conn.removeTable(f.of(StandInTable)))
}

// replaceFrom makes the table hold a state, given what it holds.
func (f *family) replaceFrom(ctx context.Context, c *content, state view.State) error {
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
		if id.Family != f.family {
			continue
		}
		name := label(id)
		before := byName[name]
		steps = append(steps, change{id: id, before: before, after: wanted})
		if before != nil {
			f.ports[id] = before // which it remains if it is refused
			delete(byName, name)
		}
	}
	for _, left := range byName {
		steps = append(steps, change{before: left})
	}
	return f.perform(ctx, steps, slices.Collect(maps.Keys(f.held)))
}

// adopt takes what was read as what is held, and prepares what must be changed apart from Service ports. Each part of the
// table that Service ports need is counted once, as if for one more Service port.
func (f *family) adopt(c *content) {
	f.ports, f.ids, f.held = map[view.ServicePortID]*port{}, map[uint32]struct{}{}, map[ref]int{}
	f.loads = [parts]int{}
	if f.lastID == 0 {
		f.lastID = c.lastID
	}
	for _, addresses := range c.addresses {
		for r := range addresses {
			f.held[r] = 1
		}
	}
	p := &f.prefix
	*p = objects{dialect: f.dialect}
	if c.foreign {
		p.addTable() // so that it can be removed
		p.removeTable()
	}
	if c.foreign || !c.exists {
		p.addTable()
	}
	unknown := maps.Clone(c.sets)
	for s := range setCount {
		switch {
		case s.String() == "":
		case c.sets[s.String()] != nil:
			delete(unknown, s.String())
			if r, ok := refOfSet(s); ok {
				f.held[r] = 1
			}
		case s.always():
			p.addSet(s)
		}
	}
	wanted := f.fixedChains(f.node)
	wanted[sourcesChain] = f.sourcesRules(f.lengths(nil))
	for s, elements := range c.vmaps {
		for key, chain := range elements {
			if r, ok := refOf(s, key, chain); ok {
				f.held[r] = 1
				wanted[chain] = f.rules(r)
			} else {
				c.drop(s, integer(key))
			}
		}
	}
	f.adoptChains(c, wanted, unknown)
}

// adoptChains prepares what must be changed in chains and in stray elements.
func (f *family) adoptChains(c *content, wanted map[string][]rule, unknown map[string][]byte) {
	p := &f.prefix
	names := slices.SortedFunc(maps.Keys(wanted), compareChains)
	for _, name := range names {
		if c.chains[name] == nil {
			p.addChain(name)
		}
	}
	for _, name := range names {
		rules := wanted[name]
		hashes := make([]uint64, len(rules))
		for i, r := range rules {
			_, hashes[i] = f.encode(r)
		}
		if held := c.chains[name]; held == nil || !slices.Equal(held.rules, hashes) {
			p.setRules(name, rules)
		}
	}
	for name := range c.chains {
		if wanted[name] == nil {
			p.setRules(name, nil)
		}
	}
	for s, keys := range c.stray {
		e := &elements{}
		for key := range keys {
			e.add([]byte(key), nil, "")
		}
		e.write(&p.writer, unix.NFT_MSG_DELSETELEM, f.dialect, s)
	}
	for name := range unknown { // after the rules that use them, and before the chains that they lead to
		p.removeSet(name)
	}
	for name := range c.chains {
		if wanted[name] == nil {
			p.removeChain(name)
		}
	}
}

var errReplaceFirst = errors.New("what the table holds is not known: Replace must come first")

// apply moves the table by changes of Service ports.
func (f *family) apply(ctx context.Context, changes []view.Change) error {
	steps := f.steps[:0]
	for _, c := range changes {
		id := c.ID()
		if id.Family == f.family {
			steps = append(steps, change{id: id, before: f.ports[id], after: c.After})
		}
	}
	f.steps = steps
	if len(steps) == 0 {
		return nil
	}
	if !f.known {
		return errReplaceFirst
	}
	return f.perform(ctx, steps, nil)
}

// perform takes steps, all at once if the kernel lets that be, and gives up the given parts of the table. What it gives
// are PortErrors unless nothing is known after it.
func (f *family) perform(ctx context.Context, steps []change, give []ref) error {
	f.known = false
	err := f.attempt(ctx, steps, give)
	if !refused(err) {
		f.known = err == nil
		return err
	}
	// Something in it is refused: first of all, find out whether it may be single Service ports.
	if err := f.checkOrdinary(); err != nil {
		return fmt.Errorf("%w: %w", errNoServicePort, err)
	}
	// What comes before all else must work in any case.
	if err := f.attempt(ctx, nil, nil); err != nil {
		return err
	}
	failed, err := f.bisect(ctx, steps)
	// One Service port may wait for another's address.
	for progress := true; progress && err == nil && len(failed) > 0; {
		var still []failure
		still, err = f.bisectEach(ctx, failed)
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
	for _, x := range failed {
		all = append(all, &programmer.PortError{ID: x.id, Err: x.err})
	}
	return errors.Join(all...)
}

var errNoServicePort = errors.New("an ordinary Service port, tried by itself, can't be programmed either")

// checkOrdinary returns an error if the kernel does not take a table with an ordinary Service port
// and nothing else. It has no effect.
func (f *family) checkOrdinary() error {
	alone := &family{dialect: f.of(Table + "-check"), conn: f.conn, log: f.log, node: f.node, partSize: f.partSize}
	alone.adopt(&content{})
	x := alone.begin()
	p := programmer.Ordinary(f.family)
	if err := x.change(change{id: p.ID, after: p}); err != nil {
		return err
	}
	x.finish()
	return x.conn.check(x.batch())
}

type failure struct {
	change
	err error
}

// refused tells that the kernel refuses what one Service port wants, while the rest might do.
func refused(err error) bool {
	if errors.Is(err, errNoID) || errors.Is(err, errTooManyBackends) {
		return true
	}
	var k *kernelError
	if !errors.As(err, &k) || errors.Is(err, errPartly) {
		return false
	}
	switch k.errno {
	case unix.ENOENT, unix.EPERM, unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EOPNOTSUPP:
		return false // not a matter of what is wanted, or the table is not what it is taken for
	}
	return true
}

// bisect takes steps in halves, until those that are refused stand alone.
func (f *family) bisect(ctx context.Context, steps []change) ([]failure, error) {
	var failed []failure
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
			failed = append(failed, failure{half[0], err})
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

func (f *family) bisectEach(ctx context.Context, failed []failure) ([]failure, error) {
	steps := make([]change, len(failed))
	for i, x := range failed {
		steps[i] = x.change
	}
	return f.bisect(ctx, steps)
}

// attempt takes steps at once.
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
