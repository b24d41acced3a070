package nftables

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
)

// transaction is a step of a family's table while it is being assembled: what to write to the
// kernel, and what to remember once the kernel has committed it.
type transaction struct {
	*family
	script
	ledger
}

// ledger is how a transaction changes what its family remembers. Nothing of it counts before the
// kernel has committed the transaction (invariant 1 of family).
type ledger struct {
	// refs is by how much the number of Service ports that need each part of the table changes.
	refs map[ref]int
	// clean means that unused parts are removed even if their kind is kept.
	clean     bool
	performed []performed
	taken     []uint32   // ids that the transaction assigns
	loads     [parts]int // those of the family afterwards
}

// performed is a step of one Service port.
type performed struct {
	id            view.ServicePortID
	before, after *port // nil means that it does not exist
	// same means that after has before's id and the same sort of slots. Once the transaction is
	// committed, after receives before's slots with these edits. For a set in which before has no
	// slots, after has slots of its own.
	same  bool
	edits [backendSets][]edit
}

// begin returns an empty transaction. The family's previous transaction must not be used any more.
func (f *family) begin() *transaction {
	x := &f.transaction
	x.family = f
	x.end()
	x.refs, x.ledger.loads = map[ref]int{}, f.loads
	return x
}

// end empties the transaction, and keeps only the memory that a small one needs.
func (x *transaction) end() {
	x.script.reset(x.Table)
	x.ledger = ledger{}
	if cap(x.batch.Buf) > keptBuffer {
		x.batch.Buf = nil
	}
}

var (
	errNoID            = errors.New("the table has more than a million Service ports")
	errTooManyBackends = fmt.Errorf("the Service port has more than %d backends", maxBackends)
)

func (x *transaction) change(c change) error {
	x.release(c.before)
	after, err := x.place(c)
	if err != nil {
		return err
	}

	same := c.before != nil && after != nil && c.before.wanted != nil && !c.renumber
	if !same || !sameFrontends(c.before.wanted, c.after) {
		x.diff(c.before.elements(), after.elements())
		if c.before != nil && c.before.wanted != nil {
			refsOf(c.before.wanted, c.before.part, func(r ref) { x.refs[r]-- })
		}
		if after != nil {
			refsOf(c.after, after.part, func(r ref) { x.refs[r]++ })
		}
	}
	p := performed{id: c.id, before: c.before, after: after}
	p.same = c.before != nil && after != nil && c.before.id == after.id && c.before.sticky == after.sticky
	x.backends(&p)
	x.performed = append(x.performed, p)
	return nil
}

// release frees the room that a Service port's backends have in their part.
func (x *transaction) release(p *port) {
	if p != nil {
		x.loads[p.part] -= p.load()
	}
}

// place returns the next state of a Service port with its id and its part, but without slots. nil
// means that the Service port is removed.
func (x *transaction) place(c change) (after *port, err error) {
	if c.after == nil {
		return nil, nil
	}
	if max(c.after.Cluster.Len(), c.after.Local.Len()) > maxBackends {
		return nil, errTooManyBackends
	}
	after = &port{wanted: c.after, sticky: timeout(c.after) > 0}
	if isNew := c.before == nil || c.renumber; !isNew {
		after.id = c.before.id
	} else if after.id, err = x.takeID(); err != nil {
		return nil, err
	}
	if after.sticky {
		return after, nil
	}
	load := c.after.Cluster.Len() + c.after.Local.Len()
	if c.before != nil && !c.before.sticky && !c.renumber {
		after.part = c.before.part
	} else {
		for part, held := range x.loads {
			if held == 0 || held+load <= x.partSize {
				after.part = uint8(part)
				break
			}
			if held < x.loads[after.part] {
				after.part = uint8(part)
			}
		}
	}
	x.loads[after.part] += load
	return after, nil
}

// sameFrontends reports whether two Service ports need the same elements apart from those of their
// backends.
func sameFrontends(a, b *view.ServicePort) bool {
	return classes(a, 0) == classes(b, 0) && slices.EqualFunc(a.Frontends, b.Frontends, view.Frontend.Equal)
}

// diff adds the removal and addition of elements. before and after are sorted.
func (x *transaction) diff(before, after []element) {
	for len(before) > 0 || len(after) > 0 {
		var order int
		switch {
		case len(before) == 0:
			order = 1
		case len(after) == 0:
			order = -1
		case before[0] == after[0]:
			before, after = before[1:], after[1:]
			continue
		default:
			order = compareElements(before[0], after[0])
		}
		if order <= 0 {
			e := before[0]
			x.removed.of(e.set).Add([]byte(e.key), nil, "")
			before = before[1:]
		}
		if order >= 0 {
			e := after[0]
			var data []byte
			if e.set < sources {
				data = nft.Integer(e.data)
			}
			x.added.of(e.set).Add([]byte(e.key), data, e.comment)
			after = after[1:]
		}
	}
}

// backends adds the steps of a Service port's backends.
func (x *transaction) backends(p *performed) {
	var newcomers map[netip.AddrPort]uint32 // numbers assigned to backends in this step
	for set := range backendSets {
		var held []slot
		var was, wanted view.Backends
		if p.before != nil {
			held, was = p.before.slots[set], backendsOf(p.before.wanted, set)
		}
		if p.after != nil {
			wanted = backendsOf(p.after.wanted, set)
		}
		removed, added := compareBackends(was, wanted, func(a netip.Addr, by int) {
			x.refs[ref{kind: refHairpin, address: a}] += by
		})

		var indices []int
		switch {
		case !p.same:
			if p.before != nil {
				x.remove(p, set, held)
			}
			held, added = nil, addresses(wanted)
		case p.before.wanted == nil:
			indices, added = compareSlots(held, wanted)
		case len(removed) > 0:
			indices = locate(held, removed)
		}
		if len(indices) == 0 && len(added) == 0 {
			continue
		}
		if newcomers == nil && p.after.sticky {
			newcomers = map[netip.AddrPort]uint32{}
		}
		x.edit(p, set, held, indices, x.number(p, set, added, newcomers))
	}
}

// number returns the slots of backends that join. With affinity, each gets a number, which is the
// same in both sets.
func (x *transaction) number(
	p *performed, set backendSet, added []netip.AddrPort, newcomers map[netip.AddrPort]uint32,
) []slot {
	out := make([]slot, len(added))
	for i, a := range added {
		out[i] = slotOf(a)
		if !p.after.sticky {
			continue
		}
		n := newcomers[a]
		if n == 0 && p.same {
			if i := indexOf(p.before.slots[1-set], a); i >= 0 {
				n = p.before.slots[1-set][i].number
			}
		}
		if n == 0 {
			x.lastNumber++
			n = x.lastNumber
		}
		newcomers[a], out[i].number = n, n
	}
	return out
}

func (x *transaction) remove(p *performed, set backendSet, held []slot) {
	gone := &x.late
	if p.after != nil && p.after.id == p.before.id {
		gone = &x.removed
	}
	for i, s := range held {
		if !s.empty() {
			p.before.removeSlot(gone, set, i)
			p.before.removeBackend(gone, set, s)
		}
	}
}

// edit changes the slots of a set: the backends at indices leave, and the added ones join.
func (x *transaction) edit(p *performed, set backendSet, held []slot, indices []int, added []slot) {
	come := &x.early
	if p.before != nil && p.before.id == p.after.id {
		come = &x.added
	}
	if len(held) == 0 {
		p.after.slots[set] = added
		for i, s := range added {
			p.after.addSlot(come, set, i, s)
		}
	} else {
		p.edits[set] = edits(held, indices, added)
	}
	for _, e := range p.edits[set] {
		if !e.before.empty() {
			p.after.removeSlot(&x.removed, set, e.index)
		}
		if !e.after.empty() {
			p.after.addSlot(come, set, e.index, e.after)
		}
	}
	for _, i := range indices {
		p.after.removeBackend(&x.removed, set, held[i])
	}
	for _, s := range added {
		p.after.addBackend(come, set, s)
	}
}

// takeID returns an id that no Service port has. It reuses ids as late as possible: see
// family.lastID.
func (x *transaction) takeID() (uint32, error) {
	const step, last = policyBits + 1, idBits
	for range last / step {
		if x.lastID += step; x.lastID == 0 { // the counter has wrapped around
			x.lastID = step
		}
		if _, taken := x.ids[x.lastID]; !taken {
			x.taken = append(x.taken, x.lastID)
			return x.lastID, nil
		}
	}
	return 0, errNoID
}

// finish adds the parts of the table that now have a first Service port that needs them. It removes
// those that no Service port needs any more.
func (x *transaction) finish() {
	var come, gone []ref
	for r, by := range x.refs {
		switch before, held := x.held[r]; {
		case !held && by > 0:
			come = append(come, r)
		case held && before+by == 0 && (x.clean || !r.kind.kept()):
			gone = append(gone, r)
		}
	}
	slices.SortFunc(come, compareRefs)
	slices.SortFunc(gone, func(a, b ref) int { return compareRefs(b, a) })
	lengths := false
	for _, r := range come {
		x.create(r)
		lengths = lengths || r.kind == refSources
	}
	for _, r := range gone {
		x.discard(r)
		lengths = lengths || r.kind == refSources
	}
	if lengths {
		x.define.SetRules(sourcesChain, x.sourcesRules(x.lengths(x.refs)))
	}
}

func (x *transaction) create(r ref) {
	if s, ok := r.set(); ok {
		if x.addSet(&x.sets, s); s == affinity {
			chains := x.targets(true)
			names := slices.SortedFunc(maps.Keys(chains), compareChains)
			for _, name := range names {
				x.define.AddChain(name, nft.Hook{})
			}
			for _, name := range names {
				x.define.SetRules(name, chains[name])
			}
		}
		return
	}
	s, key, chain := r.element()
	if chain == "" {
		x.added.of(s).Add(key, nil, "")
		return
	}
	x.define.AddChain(chain, nft.Hook{})
	x.define.SetRules(chain, x.rules(r))
	x.added.of(s).AddChain(key, chain)
}

func (x *transaction) discard(r ref) {
	if s, ok := r.set(); ok {
		if s == affinity {
			remaining := x.targets(false)
			for name := range x.targets(true) {
				if x.define.SetRules(name, remaining[name]); remaining[name] == nil {
					x.undefine.RemoveChain(name)
				}
			}
		}
		x.undefine.RemoveSet(s.String())
		// Its elements go with the set, which is removed before late is written.
		x.late.forget(s)
		return
	}
	s, key, chain := r.element()
	x.removed.of(s).Add(key, nil, "")
	if chain != "" {
		x.undefine.RemoveChain(chain)
	}
}

// length returns about how many bytes the transaction has as one batch.
func (x *transaction) length() int {
	length := 64 // the messages that delimit a batch
	for _, m := range []*nft.Messages{&x.prefix, &x.sets, &x.define, &x.undefine} {
		length += len(m.Buf)
	}
	for _, c := range []*changes{&x.early, &x.removed, &x.added, &x.late} {
		length += c.length()
	}
	return length
}

// whole returns the transaction as one batch, which is valid until end.
func (x *transaction) whole() *nft.Batch {
	b := &x.batch
	b.Buf = slices.Grow(b.Buf[:0], x.length())
	b.Reset(x.Table)
	b.Append(&x.prefix, &x.sets, &x.define)
	x.early.add(&b.Messages)
	x.script.steps(&b.Messages)
	x.late.remove(&b.Messages)
	return b
}

// commit commits the transaction, in parts if it is long or if the kernel accepts no transaction of
// that length. After a netlink.Error without errPartly, the table is as it was.
func (x *transaction) commit() error {
	if x.atOnce || x.length() <= shortTransaction {
		if all := x.whole(); x.conn.Fits(all) {
			return x.conn.Commit(all)
		}
	}
	return x.commitParts(x.conn, &x.prefix)
}

// settle records what the kernel holds now, as invariant 1 of family requires.
func (x *transaction) settle() {
	for r, by := range x.refs {
		if x.held[r] += by; x.held[r] == 0 && (x.clean || !r.kind.kept()) {
			delete(x.held, r)
		}
	}
	for _, p := range x.performed {
		switch {
		case p.after == nil:
			delete(x.ports, p.id)
		default:
			for set, changes := range p.edits {
				if p.same && len(p.before.slots[set]) > 0 {
					p.after.slots[set] = perform(p.before.slots[set], changes)
				}
			}
			x.ports[p.id] = p.after
		}
		if p.before != nil && (p.after == nil || p.after.id != p.before.id) {
			delete(x.ids, p.before.id)
		}
	}
	for _, id := range x.taken {
		x.ids[id] = struct{}{}
	}
	x.holdings.loads = x.ledger.loads
	x.prefix.Buf = nil
}
