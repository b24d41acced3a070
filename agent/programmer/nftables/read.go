package nftables

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// content is what was read of a family's table.
type content struct {
	exists bool
	// standIn means that a StandInTable exists.
	standIn bool
	chains  map[string]*heldChain
	sets    map[string][]byte // the attributes of their definitions, by name

	// elements of policies and picks: the chain, or "" if the element leads to none
	vmaps     map[setID]map[uint32]string
	addresses map[setID]map[ref]struct{} // elements of clusterIPs and hairpins
	found     map[uint32]*found          // by id
	sources   map[setID]map[string]struct{}
	backends  map[setID]map[string]netip.AddrPort
	// stray holds elements, by set and key, that this package cannot have written beside the others.
	stray map[setID]map[string]struct{}
	// lastID and lastNumber are the highest id and number in the table.
	lastID, lastNumber uint32
	// foreign means that this version of the package cannot have made the table. Others changed it, or
	// an earlier version made it.
	foreign bool
}

// heldChain is what the table holds of a chain: its hook if it is a base chain, and the hashes of
// its rules.
type heldChain struct {
	hook  hook
	rules []uint64
}

// found is what the table holds under an id.
type found struct {
	name     string // of the Service port, from a frontend's comment; "" if there is none
	elements []element
	// slots are those in endpoints, all of which are in one part.
	slots, numbered [backendSets][]slot
	part            uint8
}

// attempts is how often an interrupted dump is attempted.
const attempts = 10

// read reads the table. It returns errInterrupted if the table kept changing.
func (f *family) read() (*content, error) {
	c := &content{
		chains: map[string]*heldChain{}, sets: map[string][]byte{},
		vmaps: map[setID]map[uint32]string{}, addresses: map[setID]map[ref]struct{}{}, found: map[uint32]*found{},
		sources: map[setID]map[string]struct{}{}, backends: map[setID]map[string]netip.AddrPort{}, stray: map[setID]map[string]struct{}{},
	}
	err := f.dump(unix.NFT_MSG_GETTABLE, func(*writer) {}, func() {}, func(attrs []byte) {
		switch textOf(attribute(attrs, unix.NFTA_TABLE_NAME)) {
		case f.table:
			c.exists = true
			// it is dormant or owned by another process
			c.foreign = uint32Of(attribute(attrs, unix.NFTA_TABLE_FLAGS)) != 0
		case StandInTable:
			c.standIn = true
		}
	})
	if err != nil || !c.exists {
		return c, err
	}
	// Requests for every kind of object have the table's name in the same attribute.
	table := func(w *writer) { w.text(unix.NFTA_TABLE_NAME, f.table) }
	err = errors.Join(
		f.dump(unix.NFT_MSG_GETSET, table, func() {}, func(attrs []byte) {
			// A set without a name of its own belongs to a rule.
			if uint32Of(attribute(attrs, unix.NFTA_SET_FLAGS))&unix.NFT_SET_ANONYMOUS == 0 {
				c.sets[textOf(attribute(attrs, unix.NFTA_SET_NAME))] = append([]byte(nil), attrs...)
			}
		}),
		f.dump(unix.NFT_MSG_GETCHAIN, table, func() {}, func(attrs []byte) {
			if textOf(attribute(attrs, unix.NFTA_CHAIN_TABLE)) == f.table {
				name, held := textOf(attribute(attrs, unix.NFTA_CHAIN_NAME)), hookOf(attrs)
				c.chains[name] = &heldChain{hook: held}
				if wanted, base := hooks[name]; base && held != wanted {
					c.foreign = true
				}
			}
		}))
	if err != nil {
		return nil, err
	}
	err = f.dump(unix.NFT_MSG_GETRULE, table, func() {
		for _, chain := range c.chains {
			chain.rules = nil
		}
	}, func(attrs []byte) {
		if chain := c.chains[textOf(attribute(attrs, unix.NFTA_RULE_CHAIN))]; chain != nil {
			chain.rules = append(chain.rules, hashOf(attribute(attrs, unix.NFTA_RULE_USERDATA)))
		}
	})
	if err != nil {
		return nil, err
	}
	for name, attrs := range c.sets {
		s, ok := f.setOf(name)
		if ok && !f.define(s).equals(attrs) {
			c.foreign = true
		}
		if !ok || c.foreign || s == affinity { // packets change affinity all the time
			continue
		}
		ask := func(w *writer) {
			table(w)
			w.text(unix.NFTA_SET_ELEM_LIST_SET, name)
		}
		if err := f.readElements(c, s, ask); err != nil {
			return nil, err
		}
	}
	c.assign(f.dialect)
	return c, nil
}

// dump requests objects, and repeats an interrupted request. It calls reset before each attempt. On
// a node where others change their tables all the time, every attempt may be interrupted. So two
// attempts in a row that return the same number of objects count as complete.
func (f *family) dump(kind int, ask func(*writer), reset func(), each func(attrs []byte)) error {
	before := -1
	for range attempts {
		reset()
		given := 0
		err := f.conn.dump(kind, f.nfproto, ask, func(attrs []byte) {
			given++
			each(attrs)
		})
		if !errors.Is(err, errInterrupted) {
			return err
		}
		if given == before {
			return nil
		}
		before = given
	}
	return errInterrupted
}

// readElements reads a set until it has all elements. For each message, the kernel walks the hash
// table again and skips as many elements as it sent before. If the table is resized meanwhile,
// which it is for a while after large changes, some elements are left out and as many are sent
// twice. Other changes do not matter, because nothing else changes this set.
func (f *family) readElements(c *content, s setID, ask func(*writer)) error {
	definition := f.define(s)
	_, keyLen := typeAndLength(definition.key)
	_, dataLen := typeAndLength(definition.data)
	distinct := 0
	for range attempts {
		given := 0
		err := f.conn.dump(unix.NFT_MSG_GETSETELEM, f.nfproto, ask, func(attrs []byte) {
			for _, e := range attributes(attribute(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
				given++
				if c.element(f.dialect, s, keyLen, dataLen, e) {
					distinct++
				}
			}
		})
		if err != nil && !errors.Is(err, errInterrupted) {
			return err
		}
		if given == distinct {
			return nil
		}
	}
	return errInterrupted
}

func hookOf(attrs []byte) hook {
	h := attribute(attrs, unix.NFTA_CHAIN_HOOK)
	if h == nil {
		return hook{}
	}
	return hook{
		kind:     textOf(attribute(attrs, unix.NFTA_CHAIN_TYPE)),
		number:   uint32Of(attribute(h, unix.NFTA_HOOK_HOOKNUM)),
		priority: int32(uint32Of(attribute(h, unix.NFTA_HOOK_PRIORITY))),
		drops:    uint32Of(attribute(attrs, unix.NFTA_CHAIN_POLICY)) != uint32(expr.VerdictAccept),
	}
}

// element records an element of a set whose keys and data have these lengths in bytes. It reports
// whether the element is new.
func (c *content) element(d *dialect, s setID, keyLen, dataLen uint32, attrs []byte) bool {
	var key, data, userdata []byte
	chain := ""
	for kind, value := range attributes(attrs) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			key = attribute(value, unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			data = attribute(value, unix.NFTA_DATA_VALUE)
			if v := attribute(value, unix.NFTA_DATA_VERDICT); uint32Of(attribute(v, unix.NFTA_VERDICT_CODE)) == verdictGoto {
				chain = textOf(attribute(v, unix.NFTA_VERDICT_CHAIN))
			}
		case unix.NFTA_SET_ELEM_USERDATA:
			userdata = value
		}
	}
	if uint32(len(key)) != keyLen || uint32(len(data)) != dataLen {
		c.foreign = true
		return true
	}
	return c.take(d, s, key, data, chain, commentOf(userdata))
}

// drop makes an element stray, and reports whether it was not stray before.
func (c *content) drop(s setID, key []byte) bool { return put(c.stray, s, string(key), struct{}{}) }

// put sets an element of a map within a map, and reports whether its key is new.
func put[M ~map[K]V, O, K comparable, V any](maps map[O]M, of O, key K, value V) bool {
	if maps[of] == nil {
		maps[of] = M{}
	}
	_, held := maps[of][key]
	maps[of][key] = value
	return !held
}

// take records an element, and reports whether it is new. Elements that this package cannot have
// written become stray.
func (c *content) take(d *dialect, s setID, key, data []byte, chain, comment string) (isNew bool) {
	switch {
	case s == clusterIPs, s == hairpins:
		a, _ := netip.AddrFromSlice(key[:d.address.length])
		r := ref{kind: refClusterIP, address: a}
		if s == hairpins {
			r.kind = refHairpin
		}
		if _, expected := r.key(); string(expected) != string(key) {
			return c.drop(s, key)
		}
		return put(c.addresses, s, r, struct{}{})
	case s == policies, s >= firstPick && s < otherSets:
		return put(c.vmaps, s, integerOf(key), chain)
	case s == backends+cluster, s == backends+local:
		return put(c.backends, s, string(key), d.backendOf(data))
	case s >= sources:
		return put(c.sources, s, string(key), struct{}{})
	}
	id := integerOf(key)
	if s == frontends || s == nodePorts {
		id = integerOf(data) & idBits
	}
	if id == 0 || id&policyBits != 0 {
		return c.drop(s, key)
	}
	f := c.found[id]
	if f == nil {
		f = &found{}
		c.found[id] = f
	}
	switch s {
	case frontends, nodePorts:
		if f.name == "" {
			f.name = nameOf(comment)
		}
		return f.element(element{s, string(key), integerOf(data), comment})
	case sizes + cluster, sizes + local:
		return f.element(element{set: s, key: string(key), data: integerOf(data)})
	}
	index := integerOf(key[4:])
	if index >= maxBackends {
		return c.drop(s, key)
	}
	if part, ok := s.part(); ok {
		if len(f.slots[cluster])+len(f.slots[local]) > 0 && part != f.part {
			return c.drop(s, key)
		}
		f.part = part
		return fill(&f.slots[s%backendSets], index, slotOf(d.backendOf(data)))
	}
	if integerOf(data) == 0 { // the set is numbers
		return c.drop(s, key)
	}
	return fill(&f.numbered[s-numbers], index, slot{number: integerOf(data)})
}

// element records an element, and reports whether it is new.
func (f *found) element(e element) bool {
	if slices.ContainsFunc(f.elements, func(o element) bool { return compareElements(e, o) == 0 }) {
		return false
	}
	f.elements = append(f.elements, e)
	return true
}

// fill sets a slot, and reports whether it was empty.
func fill(slots *[]slot, index uint32, s slot) bool {
	for uint32(len(*slots)) <= index {
		*slots = append(*slots, slot{})
	}
	isNew := (*slots)[index] == slot{}
	(*slots)[index] = s
	return isNew
}

// assign attributes the elements whose keys do not begin with an id to the Service port that they
// belong to.
func (c *content) assign(d *dialect) {
	if len(c.sources) > 0 {
		owners := map[string]*found{}
		for _, found := range c.found {
			for _, e := range found.elements {
				if e.set == frontends {
					owners[e.key] = found
				}
			}
		}
		for s, keys := range c.sources {
			for key := range keys {
				if owner := owners[key[:4*d.keyWords()]]; owner != nil {
					owner.elements = append(owner.elements, element{set: s, key: key})
				} else {
					c.drop(s, []byte(key))
				}
			}
		}
	}
	for id, found := range c.found {
		c.lastID = max(c.lastID, id)
		slices.SortFunc(found.elements, compareElements)
		if found.sticky() {
			c.number(&port{id: id}, found)
		}
	}
	for s, left := range c.backends {
		for key := range left {
			c.drop(s, []byte(key))
			c.lastNumber = max(c.lastNumber, integerOf([]byte(key[4:])))
		}
	}
}

func (f *found) sticky() bool { return len(f.numbered[cluster]) > 0 || len(f.numbered[local]) > 0 }

// number finds the backends of a Service port with affinity. Its slots must all have numbers, so
// slots in endpoints become stray.
func (c *content) number(p *port, found *found) {
	for set := range backendSets {
		for i, s := range found.slots[set] {
			if !s.empty() {
				c.drop(endpoints(set, found.part), p.slotKey(i))
			}
		}
		for i := range found.numbered[set] {
			s := &found.numbered[set][i]
			c.lastNumber = max(c.lastNumber, s.number)
			key := string(p.backendKey(s.number))
			address, ok := c.backends[backends+set][key]
			switch {
			case ok:
				n := s.number
				*s = slotOf(address)
				s.number = n
				delete(c.backends[backends+set], key)
			case s.number != 0:
				c.drop(numbers+set, p.slotKey(i))
				*s = slot{}
			}
		}
		found.slots[set] = found.numbered[set]
	}
}

func integerOf(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// hashOf returns the hash in a rule's user data, or 0 if there is none.
func hashOf(userdata []byte) uint64 {
	if v := userdataOf(userdata, userdataHash); len(v) == 8 {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}
