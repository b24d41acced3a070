package nftables

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// content is what a family's table holds.
type content struct {
	exists bool
	chains map[string]*heldChain
	sets   map[string][]byte // the attributes of their definitions

	vmaps     map[setID]map[uint32]string // policies and picks: the chain, or "" where there is none
	addresses map[ref]struct{}            // clusterIPs and hairpins
	found     map[uint32]*found           // by id
	sources   []element
	backends  [backendSets]map[uint32]netip.AddrPort // by number
	// stray are elements that this package never wrote together with the others, by set and key.
	stray map[setID]map[string]struct{}
	// lastID and lastNumber are the highest that there are.
	lastID, lastNumber uint32
	// foreign: this package never made the table as it is, or an earlier version did.
	foreign bool
}

// heldChain is what is held of a chain: its hook, if it is a base chain, and the hashes of its rules.
type heldChain struct {
	hook  hook
	rules []uint64
}

// found is what is held under an id.
type found struct {
	name     string // of the Service port, from the comment of a frontend
	elements []element
	// slots are those in endpoints, and numbered those in numbers, without addresses.
	slots, numbered [backendSets][]slot
}

// maxSlots is more than any set of backends has.
const maxSlots = 1 << 20

// attempts is how often what was interrupted is read again.
const attempts = 10

// read reads the table. errInterrupted: it changed all the time.
func (f *family) read() (*content, error) {
	c := &content{
		chains: map[string]*heldChain{}, sets: map[string][]byte{},
		vmaps: map[setID]map[uint32]string{}, addresses: map[ref]struct{}{}, found: map[uint32]*found{},
		stray: map[setID]map[string]struct{}{},
	}
	err := f.dump(unix.NFT_MSG_GETTABLE, func(*writer) {}, func() {}, func(attrs []byte) int {
		c.exists = c.exists || textOf(attribute(attrs, unix.NFTA_TABLE_NAME)) == Table
		return 1
	})
	if err != nil || !c.exists {
		return c, err
	}
	// All objects of a table are asked for by its name in the same attribute.
	table := func(w *writer) { w.text(unix.NFTA_TABLE_NAME, Table) }
	err = errors.Join(
		f.dump(unix.NFT_MSG_GETSET, table, func() {}, func(attrs []byte) int {
			c.sets[textOf(attribute(attrs, unix.NFTA_SET_NAME))] = append([]byte(nil), attrs...)
			return 1
		}),
		f.dump(unix.NFT_MSG_GETCHAIN, table, func() {}, func(attrs []byte) int {
			if textOf(attribute(attrs, unix.NFTA_CHAIN_TABLE)) == Table {
				c.chains[textOf(attribute(attrs, unix.NFTA_CHAIN_NAME))] = &heldChain{hook: hookOf(attrs)}
			}
			return 1
		}))
	if err != nil {
		return nil, err
	}
	err = f.dump(unix.NFT_MSG_GETRULE, table, func() {
		for _, chain := range c.chains {
			chain.rules = nil
		}
	}, func(attrs []byte) int {
		if chain := c.chains[textOf(attribute(attrs, unix.NFTA_RULE_CHAIN))]; chain != nil {
			chain.rules = append(chain.rules, hashOf(attribute(attrs, unix.NFTA_RULE_USERDATA)))
		}
		return 1
	})
	if err != nil {
		return nil, err
	}
	for name, attrs := range c.sets {
		s, ok := f.setOf(name)
		if ok && !f.define(s).equals(attrs) {
			c.foreign = true
		}
		if !ok || c.foreign || s == affinity { // packets change that all the time
			continue
		}
		ask := func(w *writer) {
			table(w)
			w.text(unix.NFTA_SET_ELEM_LIST_SET, name)
		}
		// What is read again is the same.
		err := f.dump(unix.NFT_MSG_GETSETELEM, ask, func() {}, func(attrs []byte) (n int) {
			for _, e := range attributes(attribute(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
				c.element(f.dialect, s, e)
				n++
			}
			return n
		})
		if err != nil {
			return nil, err
		}
	}
	c.assign(f.dialect)
	return c, nil
}

// dump asks for objects, again when that was interrupted. reset comes before each attempt; each gives how many it got. An
// interruption hardly ever means that something was missed, as it is enough that others change something of their own:
// two attempts with the same number are good.
func (f *family) dump(kind int, ask func(*writer), reset func(), each func(attrs []byte) int) error {
	var err error
	before := -1
	for range attempts {
		reset()
		got := 0
		err = f.conn.dump(kind, f.nfproto, ask, func(attrs []byte) { got += each(attrs) })
		if !errors.Is(err, errInterrupted) {
			return err
		}
		if got == before {
			return nil
		}
		before = got
	}
	return err
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
	}
}

// element takes in an element of a set.
func (c *content) element(d *dialect, s setID, attrs []byte) {
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
	definition := d.define(s)
	_, keyLen := typeAndLength(definition.key)
	_, dataLen := typeAndLength(definition.data)
	switch {
	case uint32(len(key)) != keyLen || uint32(len(data)) != dataLen:
		c.foreign = true
	case !c.understand(d, s, key, data, chain, commentOf(userdata)):
		c.drop(s, key)
	}
}

// drop makes an element stray.
func (c *content) drop(s setID, key []byte) {
	if c.stray[s] == nil {
		c.stray[s] = map[string]struct{}{}
	}
	c.stray[s][string(key)] = struct{}{}
}

// understand takes in an element, unless it can't be one of ours.
func (c *content) understand(d *dialect, s setID, key, data []byte, chain, comment string) bool {
	switch {
	case s == clusterIPs:
		a, _ := netip.AddrFromSlice(key)
		c.addresses[ref{kind: refClusterIP, address: a}] = struct{}{}
	case s == hairpins:
		a, _ := netip.AddrFromSlice(key[:d.address.length])
		r := ref{kind: refHairpin, address: a}
		if _, expected := r.key(); string(expected) != string(key) {
			return false
		}
		c.addresses[r] = struct{}{}
	case s == policies, s >= firstPick && s < sources:
		if c.vmaps[s] == nil {
			c.vmaps[s] = map[uint32]string{}
		}
		c.vmaps[s][integerOf(key)] = chain
	case s == frontends, s == nodePorts:
		value := integerOf(data)
		found := c.of(value & idBits)
		if found == nil {
			return false
		}
		if found.name == "" {
			found.name = nameOf(comment)
		}
		found.elements = append(found.elements, element{s, string(key), value, comment})
	case s == sizes+cluster, s == sizes+local:
		found := c.of(integerOf(key))
		if found == nil {
			return false
		}
		found.elements = append(found.elements, element{set: s, key: string(key), data: integerOf(data)})
	case s >= sources:
		c.sources = append(c.sources, element{set: s, key: string(key)})
	case s == backends+cluster, s == backends+local:
		set := s - backends
		if c.backends[set] == nil {
			c.backends[set] = map[uint32]netip.AddrPort{}
		}
		c.backends[set][integerOf(key)] = d.backendOf(data)
	default: // endpoints or numbers
		found, index := c.of(integerOf(key)), integerOf(key[4:])
		if found == nil || index >= maxSlots {
			return false
		}
		if s < numbers {
			found.slots[s-endpoints] = put(found.slots[s-endpoints], index, slot{address: d.backendOf(data)})
		} else {
			found.numbered[s-numbers] = put(found.numbered[s-numbers], index, slot{number: integerOf(data)})
		}
	}
	return true
}

// of gives what is found under an id; nil: it is none.
func (c *content) of(id uint32) *found {
	if id == 0 || id&policyBits != 0 {
		return nil
	}
	if c.found[id] == nil {
		c.found[id] = &found{}
	}
	return c.found[id]
}

func put(slots []slot, index uint32, s slot) []slot {
	for uint32(len(slots)) <= index {
		slots = append(slots, slot{})
	}
	slots[index] = s
	return slots
}

// assign gives what does not name an id to where it belongs.
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
		for _, e := range c.sources {
			if owner := owners[e.key[:4*d.keyWords()]]; owner != nil {
				owner.elements = append(owner.elements, e)
			} else {
				c.drop(e.set, []byte(e.key))
			}
		}
	}
	for id, found := range c.found {
		c.lastID = max(c.lastID, id)
		slices.SortFunc(found.elements, compareElements)
		found.elements = slices.Compact(found.elements) // some may have been read again
		if found.sticky() {
			c.number(&port{id: id}, found)
		}
	}
	for set, left := range c.backends {
		for n := range left {
			c.drop(backends+backendSet(set), integer(n))
			c.lastNumber = max(c.lastNumber, n)
		}
	}
}

func (f *found) sticky() bool { return len(f.numbered[cluster]) > 0 || len(f.numbered[local]) > 0 }

// number finds the backends of a Service port with affinity. It has slots of one sort only.
func (c *content) number(p *port, found *found) {
	for set := range backendSets {
		for i, s := range found.slots[set] {
			if !s.empty() {
				c.drop(endpoints+set, p.slotKey(i))
			}
		}
		for i := range found.numbered[set] {
			s := &found.numbered[set][i]
			c.lastNumber = max(c.lastNumber, s.number)
			address, ok := c.backends[set][s.number]
			switch {
			case ok:
				s.address = address
				delete(c.backends[set], s.number)
			case s.number != 0:
				c.drop(numbers+set, p.slotKey(i))
				*s = slot{}
			}
		}
		found.slots[set] = found.numbered[set]
	}
}

func integerOf(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// hashOf gives the hash in a rule's user data; 0: it has none.
func hashOf(userdata []byte) uint64 {
	if v := userdataOf(userdata, userdataHash); len(v) == 8 {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}
