package nftables

import (
	"net/netip"

	"github.com/slicecast/slicecast/agent/view"
)

// port is what the table holds of a Service port.
type port struct {
	id    uint32
	slots [backendSets][]slot
	// part has the slots, unless they have numbers.
	part uint8
	// sticky: with affinity; the slots have numbers.
	sticky bool
	// wanted is the Service port that all this is for. nil: what is held was read, and found are its elements.
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

// load is how many elements it has in its part.
func (p *port) load() int {
	if p == nil || p.sticky {
		return 0
	}
	return len(p.slots[cluster]) + len(p.slots[local])
}

// change is a step from what is held of a Service port to what is wanted; nil: nothing.
type change struct {
	id     view.ServicePortID
	before *port
	after  *view.ServicePort
	// renumber gives it another id, so that what is too long for one transaction can come and go in several: only what
	// leads to it changes in one.
	renumber bool
}

// slotKey is the key of a slot, and backendKey that of a backend with a number.
func (p *port) slotKey(index int) []byte { return p.backendKey(uint32(index)) }

func (p *port) backendKey(number uint32) []byte {
	return appendInteger(appendInteger(make([]byte, 0, 8), p.id), number)
}

func (p *port) addSlot(c *changes, set backendSet, index int, s slot) {
	if p.sticky {
		c.of(numbers+set).add(p.slotKey(index), integer(s.number), "")
		return
	}
	c.of(endpoints(set, p.part)).add(p.slotKey(index), appendBackend(make([]byte, 0, maxBackend), s.address()), "")
}

func (p *port) removeSlot(c *changes, set backendSet, index int) {
	s := endpoints(set, p.part)
	if p.sticky {
		s = numbers + set
	}
	c.of(s).add(p.slotKey(index), nil, "")
}

func (p *port) addBackend(c *changes, set backendSet, s slot) {
	if p.sticky {
		c.of(backends+set).add(p.backendKey(s.number), appendBackend(make([]byte, 0, maxBackend), s.address()), "")
	}
}

func (p *port) removeBackend(c *changes, set backendSet, s slot) {
	if p.sticky && !s.empty() {
		c.of(backends+set).add(p.backendKey(s.number), nil, "")
	}
}

func addresses(backends view.Backends) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, backends.Len())
	for b := range backends.All() {
		out = append(out, b.Address)
	}
	return out
}
