package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
)

// content is what was read of a family's table. If foreign is true, its elements are incomplete and
// do not count. Otherwise, each element of the table, except those of affinity, is in exactly one
// of shared, vmaps, found and stray.
type content struct {
	exists bool
	// standIn means that a StandInTable exists.
	standIn bool
	// foreign means that this version of the package cannot have made the table. Others changed it, or
	// an earlier version made it.
	foreign bool
	chains  map[string]*nft.HeldChain
	sets    map[string]nft.HeldSet

	// shared are the elements of clusterIPs and hairpins.
	shared map[ref]struct{}
	// vmaps are the elements of sets that lead to chains, with the chain that each leads to, or "".
	vmaps map[elementKey]string
	// found is what the table holds under each id.
	found map[uint32]*found
	// stray are elements that this package cannot have written beside the others.
	stray map[elementKey]struct{}
	// lastID and lastNumber are the highest id and number in the table.
	lastID, lastNumber uint32
}

type elementKey struct {
	set setID
	key string
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
	tables, err := f.conn.Tables(f.Family)
	if err != nil {
		return nil, err
	}
	c := &content{}
	f.guarded = f.guarded && programmer.SysctlIs(programmer.RouteLocalnet, "1")
	_, c.standIn = tables[StandInTable]
	flags, exists := tables[f.Name]
	if c.exists = exists; !exists {
		return c, nil
	}
	c.foreign = flags != 0 // it is dormant or owned by another process
	if c.chains, err = f.conn.Chains(f.Table); err != nil {
		return nil, err
	}
	if c.chains[guardChain] != nil { // if others remove it, it is still wanted
		f.guarded = programmer.SysctlIs(programmer.RouteLocalnet, "1")
	}
	for name, held := range c.chains {
		if wanted, base := hooks[name]; base && held.Hook != wanted {
			c.foreign = true
		}
	}
	if c.sets, err = f.conn.Sets(f.Table); err != nil {
		return nil, err
	}
	r := &reader{
		dialect: f.dialect, content: c, sources: map[elementKey]struct{}{}, backends: map[elementKey]netip.AddrPort{},
	}
	if err := r.readElements(f.conn); err != nil {
		return nil, err
	}
	return c, nil
}

// reader fills a content with elements.
type reader struct {
	*dialect
	*content
	// sources and backends are the elements of these sets that have not been attributed to a Service
	// port yet.
	sources  map[elementKey]struct{}
	backends map[elementKey]netip.AddrPort
}

// readElements reads the elements of all sets. It ends early if the table turns out to be foreign.
func (r *reader) readElements(conn *nft.Conn) error {
	r.shared, r.vmaps = map[ref]struct{}{}, map[elementKey]string{}
	r.found, r.stray = map[uint32]*found{}, map[elementKey]struct{}{}
	for name, held := range r.sets {
		s, ok := r.setOf(name)
		if !ok {
			continue
		}
		definition := r.define(s)
		r.foreign = r.foreign || !definition.Is(held)
		if r.foreign {
			return nil
		}
		if s == affinity { // packets change it all the time
			continue
		}
		err := conn.Elements(r.Table, name, func(e nft.Element) (isNew bool) {
			if !definition.HasForm(e) {
				r.foreign = true
				return true
			}
			return r.take(s, e)
		})
		if err != nil {
			return err
		}
	}
	r.assign()
	return nil
}

// put sets an element of a map, and reports whether its key is new.
func put[K comparable, V any](m map[K]V, key K, value V) (isNew bool) {
	_, held := m[key]
	m[key] = value
	return !held
}

// drop makes an element stray, and reports whether it was not stray before.
func (c *content) drop(s setID, key []byte) (isNew bool) {
	return put(c.stray, elementKey{s, string(key)}, struct{}{})
}

// take records an element, and reports whether it is new. Elements that this package cannot have
// written become stray.
func (r *reader) take(s setID, e nft.Element) (isNew bool) {
	switch {
	case s == clusterIPs, s == hairpins:
		a, _ := netip.AddrFromSlice(e.Key[:r.Address.Length])
		shared := ref{kind: refClusterIP, address: a}
		if s == hairpins {
			shared.kind = refHairpin
		}
		if _, expected, _ := shared.element(); string(expected) != string(e.Key) {
			return r.drop(s, e.Key)
		}
		return put(r.shared, shared, struct{}{})
	case s.leads():
		return put(r.vmaps, elementKey{s, string(e.Key)}, e.Chain)
	case s == backends+cluster, s == backends+local:
		return put(r.backends, elementKey{s, string(e.Key)}, r.backendOf(e.Data))
	case s >= sources:
		return put(r.sources, elementKey{s, string(e.Key)}, struct{}{})
	}
	return r.takeOfPort(s, e)
}

// takeOfPort is take for elements that belong to one id.
func (r *reader) takeOfPort(s setID, e nft.Element) (isNew bool) {
	id := integerOf(e.Key)
	isFrontend := s == frontends || s == nodePorts
	if isFrontend {
		id = integerOf(e.Data) & idBits
	}
	if id == 0 || id&policyBits != 0 {
		return r.drop(s, e.Key)
	}
	f := r.found[id]
	if f == nil {
		f = &found{}
		r.found[id] = f
	}
	if isFrontend && f.name == "" {
		f.name = nameOf(e.Comment)
	}
	if isFrontend || s == sizes+cluster || s == sizes+local {
		return f.element(element{s, string(e.Key), integerOf(e.Data), e.Comment})
	}
	index := integerOf(e.Key[4:])
	part, isEndpoint := s.part()
	switch {
	case index >= maxBackends,
		isEndpoint && part != f.part && len(f.slots[cluster])+len(f.slots[local]) > 0,
		!isEndpoint && integerOf(e.Data) == 0: // the set is numbers
		return r.drop(s, e.Key)
	case isEndpoint:
		f.part = part
		return fill(&f.slots[s%backendSets], index, slotOf(r.backendOf(e.Data)))
	}
	return fill(&f.numbered[s-numbers], index, slot{number: integerOf(e.Data)})
}

func (f *found) sticky() bool { return len(f.numbered[cluster]) > 0 || len(f.numbered[local]) > 0 }

// element records an element, and reports whether it is new.
func (f *found) element(e element) (isNew bool) {
	if slices.ContainsFunc(f.elements, func(o element) bool { return compareElements(e, o) == 0 }) {
		return false
	}
	f.elements = append(f.elements, e)
	return true
}

// fill sets a slot, and reports whether it was empty.
func fill(slots *[]slot, index uint32, s slot) (isNew bool) {
	for uint32(len(*slots)) <= index {
		*slots = append(*slots, slot{})
	}
	isNew = (*slots)[index] == slot{}
	(*slots)[index] = s
	return isNew
}

// assign attributes the elements whose keys do not begin with an id to the Service port that they
// belong to. Those that belong to none become stray.
func (r *reader) assign() {
	r.assignSources()
	for id, found := range r.found {
		r.lastID = max(r.lastID, id)
		slices.SortFunc(found.elements, compareElements)
		if found.sticky() {
			r.number(&port{id: id}, found)
		}
	}
	for k := range r.backends {
		r.stray[k] = struct{}{}
		r.lastNumber = max(r.lastNumber, integerOf([]byte(k.key[4:])))
	}
}

func (r *reader) assignSources() {
	if len(r.sources) == 0 {
		return
	}
	owners := map[string]*found{}
	for _, found := range r.found {
		for _, e := range found.elements {
			if e.set == frontends {
				owners[e.key] = found
			}
		}
	}
	for k := range r.sources {
		if owner := owners[k.key[:4*r.FrontendWords()]]; owner != nil {
			owner.elements = append(owner.elements, element{set: k.set, key: k.key})
		} else {
			r.stray[k] = struct{}{}
		}
	}
}

// number finds the backends of a Service port with affinity. Its slots must all have numbers, so
// slots in endpoints become stray.
func (r *reader) number(p *port, found *found) {
	for set := range backendSets {
		for i, s := range found.slots[set] {
			if !s.empty() {
				r.drop(endpoints(set, found.part), p.key(uint32(i)))
			}
		}
		for i := range found.numbered[set] {
			s := &found.numbered[set][i]
			r.lastNumber = max(r.lastNumber, s.number)
			key := elementKey{backends + set, string(p.key(s.number))}
			address, ok := r.backends[key]
			switch {
			case ok:
				n := s.number
				*s = slotOf(address)
				s.number = n
				delete(r.backends, key)
			case s.number != 0:
				r.drop(numbers+set, p.key(uint32(i)))
				*s = slot{}
			}
		}
		found.slots[set] = found.numbered[set]
	}
}

func integerOf(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }
