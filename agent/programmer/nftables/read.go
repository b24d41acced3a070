package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/nft"
)

// content is what was read of a family's table.
type content struct {
	exists bool
	// standIn means that a StandInTable exists.
	standIn bool
	chains  map[string]*nft.HeldChain
	sets    map[string]nft.HeldSet

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

// found is what the table holds under an id.
type found struct {
	name     string // of the Service port, from a frontend's comment; "" if there is none
	elements []element
	// slots are those in endpoints, all of which are in one part.
	slots, numbered [backendSets][]slot
	part            uint8
}

// read reads the table. It returns netlink.ErrInterrupted if the table kept changing.
func (f *family) read() (*content, error) {
	c := &content{
		vmaps: map[setID]map[uint32]string{}, addresses: map[setID]map[ref]struct{}{}, found: map[uint32]*found{},
		sources: map[setID]map[string]struct{}{}, backends: map[setID]map[string]netip.AddrPort{}, stray: map[setID]map[string]struct{}{},
	}
	tables, err := f.conn.Tables(f.Family)
	if err != nil {
		return nil, err
	}
	flags, exists := tables[f.Name]
	_, c.standIn = tables[StandInTable]
	if c.exists = exists; !exists {
		return c, nil
	}
	c.foreign = flags != 0 // it is dormant or owned by another process
	if c.chains, err = f.conn.Chains(f.Table); err != nil {
		return nil, err
	}
	if c.sets, err = f.conn.Sets(f.Table); err != nil {
		return nil, err
	}
	for name, held := range c.chains {
		if wanted, base := hooks[name]; base && held.Hook != wanted {
			c.foreign = true
		}
	}
	for name, held := range c.sets {
		s, ok := f.setOf(name)
		if ok && !f.define(s).Is(held) {
			c.foreign = true
		}
		if !ok || c.foreign || s == affinity { // packets change affinity all the time
			continue
		}
		definition := f.define(s)
		err := f.conn.Elements(f.Table, name, func(e nft.Element) (isNew bool) {
			if !definition.HasForm(e) {
				c.foreign = true
				return true
			}
			return c.take(f.dialect, s, e)
		})
		if err != nil {
			return nil, err
		}
	}
	c.assign(f.dialect)
	return c, nil
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
func (c *content) take(d *dialect, s setID, e nft.Element) (isNew bool) {
	key, data := e.Key, e.Data
	switch {
	case s == clusterIPs, s == hairpins:
		a, _ := netip.AddrFromSlice(key[:d.Address.Length])
		r := ref{kind: refClusterIP, address: a}
		if s == hairpins {
			r.kind = refHairpin
		}
		if _, expected := r.key(); string(expected) != string(key) {
			return c.drop(s, key)
		}
		return put(c.addresses, s, r, struct{}{})
	case s == policies, s >= firstPick && s < otherSets:
		return put(c.vmaps, s, integerOf(key), e.Chain)
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
			f.name = nameOf(e.Comment)
		}
		return f.element(element{s, string(key), integerOf(data), e.Comment})
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
				if owner := owners[key[:4*d.FrontendWords()]]; owner != nil {
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
