package view

import (
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"
)

// Backends is a set of backends, ascending by address and port, each pair once. It is immutable.
// The zero value is the empty set.
//
// Sets that differ in a few of many backends share nearly all of their memory. Deriving one from
// the other, and comparing the two, therefore costs little more than the difference. Equal sets are
// deeply equal, however they were made.
type Backends struct {
	// parts contains the backends in order. No part is empty. In a large set, only a backend's own
	// address and port decide whether a part ends with it. A backend that joins or leaves therefore
	// changes the part that it is in, and at most one neighbor.
	parts [][]Backend
	count int
}

const (
	// onePart is the size up to which a set is a single part.
	onePart = 128
	// partBits is how many bits of a backend's hash must be zero for a part to end with the backend.
	partBits = 6
)

// NewBackends returns a set of backends, which may come in any order. If several have the same
// address and port, the first one counts.
func NewBackends(list ...Backend) Backends {
	for i := range list[:max(len(list)-1, 0)] {
		if compareBackends(list[i], list[i+1]) >= 0 {
			list = slices.Clone(list)
			slices.SortStableFunc(list, compareBackends)
			list = slices.CompactFunc(list, func(a, b Backend) bool { return a.Address == b.Address })
			break
		}
	}
	return ascending(list)
}

// ascending returns a set of the backends in list, which must be ascending and without duplicates.
// It copies the list.
func ascending(list []Backend) Backends {
	b := Backends{count: len(list)}
	switch {
	case len(list) == 0:
	case len(list) <= onePart:
		b.add(list)
	default:
		if rest := b.addEnded(list); len(rest) > 0 {
			b.add(rest)
		}
	}
	return b
}

// add adds a part with a copy of list.
func (b *Backends) add(list []Backend) {
	b.parts = append(b.parts, append(make([]Backend, 0, len(list)), list...))
}

// addEnded adds the parts of list whose end is in list, and returns the rest.
func (b *Backends) addEnded(list []Backend) (rest []Backend) {
	begin := 0
	for i, one := range list {
		if one.endsPart() {
			b.add(list[begin : i+1])
			begin = i + 1
		}
	}
	return list[begin:]
}

func (b Backend) endsPart() bool {
	a := b.Address.Addr().As16()
	const golden = 0x9E3779B97F4A7C15 // multiplying by it spreads neighboring addresses evenly
	return (binary.BigEndian.Uint64(a[8:])^uint64(b.Address.Port())<<48)*golden>>(64-partBits) == 0
}

func compareBackends(a, b Backend) int { return a.Address.Compare(b.Address) }

// Len returns the number of backends.
func (b Backends) Len() int { return b.count }

// All returns the backends in order.
func (b Backends) All() iter.Seq[Backend] {
	return func(yield func(Backend) bool) {
		for _, part := range b.parts {
			for _, one := range part {
				if !yield(one) {
					return
				}
			}
		}
	}
}

// List returns the backends in order. The caller must not change the list.
func (b Backends) List() []Backend {
	if len(b.parts) == 1 {
		return b.parts[0]
	}
	return slices.Concat(b.parts...)
}

// Contains reports whether the set has a backend with this address and port.
func (b Backends) Contains(address netip.AddrPort) bool {
	compare := func(one Backend, a netip.AddrPort) int { return one.Address.Compare(a) }
	i, found := slices.BinarySearchFunc(b.parts, address, func(part []Backend, a netip.AddrPort) int {
		return compare(part[0], a)
	})
	if found || i == 0 {
		return found
	}
	_, found = slices.BinarySearchFunc(b.parts[i-1], address, compare)
	return found
}

// is reports whether the set has the same backends as list, which must be ascending.
func (b Backends) is(list []Backend) bool {
	if b.count != len(list) {
		return false
	}
	for _, part := range b.parts {
		if !slices.Equal(part, list[:len(part)]) {
			return false
		}
		list = list[len(part):]
	}
	return true
}

// Equal reports whether both sets have the same backends.
func (b Backends) Equal(o Backends) bool {
	return b.count == o.count && slices.EqualFunc(b.parts, o.parts, slices.Equal[[]Backend])
}

// Same reports whether both are one set in memory. Equal sets need not be.
func (b Backends) Same(o Backends) bool {
	return len(b.parts) == len(o.parts) && (len(b.parts) == 0 || &b.parts[0] == &o.parts[0])
}

// Differences returns what differs from an earlier set, ascending: for each address and port, the
// backend that was there and the backend that is there now. A backend that is missing on one side
// is the zero Backend.
func (b Backends) Differences(before Backends) iter.Seq2[Backend, Backend] {
	return func(yield func(was, is Backend) bool) {
		if b.Same(before) {
			return
		}
		was, is := cursor{parts: before.parts}, cursor{parts: b.parts}
		for {
			switch {
			case len(was.parts) == 0 && len(is.parts) == 0:
				return
			case was.atSamePart(is):
				was.parts, is.parts = was.parts[1:], is.parts[1:]
				continue
			case len(was.parts) > 0 && len(is.parts) > 0 && was.get() == is.get():
				was.take()
				is.take()
				continue
			}
			var order int
			switch {
			case len(was.parts) == 0:
				order = 1
			case len(is.parts) == 0:
				order = -1
			default:
				order = compareBackends(was.get(), is.get())
			}
			var old, now Backend
			if order <= 0 {
				old = was.take()
			}
			if order >= 0 {
				now = is.take()
			}
			if !yield(old, now) {
				return
			}
		}
	}
}

// cursor is a position in a set: index at of the first of the parts that are left. If no parts are
// left, the cursor is at the end.
type cursor struct {
	parts [][]Backend
	at    int
}

func (c *cursor) get() Backend { return c.parts[0][c.at] }

func (c *cursor) take() Backend {
	b := c.get()
	if c.at++; c.at == len(c.parts[0]) {
		c.parts, c.at = c.parts[1:], 0
	}
	return b
}

// atSamePart reports whether both cursors are at the beginning of a part that their sets share.
func (c *cursor) atSamePart(o cursor) bool {
	return c.at == 0 && o.at == 0 && len(c.parts) > 0 && len(o.parts) > 0 && &c.parts[0][0] == &o.parts[0][0]
}

// with returns a set in which some backends of b are removed and others inserted. Both lists are
// ascending. If they are equal, with returns b itself. A backend may be inserted at the address of
// a removed one.
func (b Backends) with(removed, inserted []Backend) Backends {
	if slices.Equal(removed, inserted) {
		return b
	}
	out := Backends{count: b.count - len(removed) + len(inserted)}
	if out.count <= onePart || b.count == 0 {
		return ascending(patch(nil, slices.Concat(b.parts...), removed, inserted))
	}
	out.parts = make([][]Backend, 0, len(b.parts)+len(inserted))
	var open []Backend // backends after the last part, whose end has not been reached
	for rest := b.parts; len(rest) > 0; {
		if len(open) == 0 {
			same := untouched(rest, removed, inserted)
			out.parts, rest = append(out.parts, rest[:same]...), rest[same:]
			if len(rest) == 0 {
				break
			}
		}
		part, r, n := rest[0], len(removed), len(inserted)
		if rest = rest[1:]; len(rest) > 0 {
			r, n = before(removed, rest[0][0]), before(inserted, rest[0][0])
		}
		open = out.addEnded(patch(open, part, removed[:r], inserted[:n]))
		removed, inserted = removed[r:], inserted[n:]
	}
	if len(open) > 0 {
		out.add(open)
	}
	return out
}

// untouched returns how many parts at the beginning have nothing removed or inserted.
func untouched(parts [][]Backend, removed, inserted []Backend) int {
	count := len(parts)
	for _, list := range [][]Backend{removed, inserted} {
		if len(list) == 0 {
			continue
		}
		i, found := slices.BinarySearchFunc(parts, list[0], func(part []Backend, b Backend) int {
			return compareBackends(part[0], b)
		})
		if !found {
			i = max(i-1, 0)
		}
		count = min(count, i)
	}
	return count
}

// before returns how many backends at the beginning of list sort before next.
func before(list []Backend, next Backend) int {
	i, _ := slices.BinarySearchFunc(list, next, compareBackends)
	return i
}

// patch returns a copy of to, followed by the elements of list, of which some are removed and to
// which others are inserted. All lists are ascending.
func patch(to, list, removed, inserted []Backend) []Backend {
	out := append(make([]Backend, 0, len(to)+len(list)-len(removed)+len(inserted)), to...)
	for len(removed) > 0 || len(inserted) > 0 {
		remove := len(inserted) == 0 || len(removed) > 0 && compareBackends(removed[0], inserted[0]) <= 0
		next := inserted
		if remove {
			next = removed
		}
		i := before(list, next[0])
		out, list = append(out, list[:i]...), list[i:]
		if remove {
			list, removed = list[1:], removed[1:]
		} else {
			out, inserted = append(out, inserted[0]), inserted[1:]
		}
	}
	return append(out, list...)
}
