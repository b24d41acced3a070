package nftables

import (
	"net/netip"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
)

// port is what the table holds of a Service port.
type port struct {
	id    uint32
	slots [backendSets][]slot
	// part is the part that holds the slots. It is 0 if the slots have numbers.
	part uint8
	// sticky means that the Service port has affinity. Its slots have numbers then.
	sticky bool
	// wanted is the Service port that this state was made for. nil means that the state was read from
	// the table, and found holds its elements.
	wanted *view.ServicePort
	found  []element
}

func (p *port) elements() []element {
	switch {
	case p == nil:
		return nil
	case p.wanted == nil:
		return p.found
	}
	return elementsOf(p.wanted, p.id, p.part)
}

// load returns how many elements the Service port has in its part.
func (p *port) load() int {
	if p == nil || p.sticky {
		return 0
	}
	return len(p.slots[cluster]) + len(p.slots[local])
}

// change is a step from the held state of a Service port to the wanted one. nil means that it does
// not exist.
type change struct {
	id     view.ServicePortID
	before *port
	after  *view.ServicePort
	// renumber requests a new id, so that a change which is too long for one transaction can be made
	// in several. Only the elements that lead to the id then have to change in one transaction.
	renumber bool
	// refused is why the kernel refuses the step, once it has.
	refused error
}

// key returns the key of the slot with an index, or of the backend with a number.
func (p *port) key(number uint32) []byte {
	return appendInteger(appendInteger(make([]byte, 0, 8), p.id), number)
}

func (p *port) addSlot(c *changes, set backendSet, index int, s slot) {
	if p.sticky {
		c.of(numbers+set).Add(p.key(uint32(index)), nft.Integer(s.number), "")
		return
	}
	c.of(endpoints(set, p.part)).Add(p.key(uint32(index)), appendBackend(make([]byte, 0, maxBackend), s.address()), "")
}

func (p *port) removeSlot(c *changes, set backendSet, index int) {
	s := endpoints(set, p.part)
	if p.sticky {
		s = numbers + set
	}
	c.of(s).Add(p.key(uint32(index)), nil, "")
}

func (p *port) addBackend(c *changes, set backendSet, s slot) {
	if p.sticky {
		c.of(backends+set).Add(p.key(s.number), appendBackend(make([]byte, 0, maxBackend), s.address()), "")
	}
}

func (p *port) removeBackend(c *changes, set backendSet, s slot) {
	if p.sticky && !s.empty() {
		c.of(backends+set).Add(p.key(s.number), nil, "")
	}
}

func addresses(backends view.Backends) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, backends.Len())
	for b := range backends.All() {
		out = append(out, b.Address)
	}
	return out
}
