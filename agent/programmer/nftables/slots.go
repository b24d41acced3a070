package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
)

// slot is where the table holds a backend of a set. Its index in the list is the index in the
// table. It has no pointers, because there are many slots and a change may have to search thousands
// of them for one backend.
type slot struct {
	high, low uint64 // of the address in its 16-byte form
	// number is the backend's number with affinity, and 0 without.
	number uint32
	port   uint16
	// length is the length of the address in bytes. 0 means that there is no backend, which occurs
	// only in a table that others changed.
	length uint8
}

func slotOf(a netip.AddrPort) slot {
	b := a.Addr().As16()
	return slot{
		high: binary.BigEndian.Uint64(b[:8]), low: binary.BigEndian.Uint64(b[8:]),
		port: a.Port(), length: uint8(a.Addr().BitLen() / 8),
	}
}

// address returns the backend's address and port, or the zero value for an empty slot.
func (s slot) address() netip.AddrPort {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], s.high)
	binary.BigEndian.PutUint64(b[8:], s.low)
	if s.length == 0 {
		return netip.AddrPort{}
	}
	a, _ := netip.AddrFromSlice(b[16-s.length:])
	return netip.AddrPortFrom(a, s.port)
}

func (s slot) empty() bool { return s.length == 0 }

// edit is a change of one slot. before, after or both may be empty.
type edit struct {
	index         int
	before, after slot
}

// edits returns the fewest changes of slots that remove the backends at some indices and add
// others. An added backend takes the place of a removed one. If there are none left to add, the
// last backend moves into the gap, so the indices stay without gaps. removed is ascending.
func edits(slots []slot, removed []int, added []slot) []edit {
	var out []edit
	size := len(slots) - len(removed) + len(added)
	kept := len(slots) - 1 // the last slot whose backend may move
	gone := len(removed) - 1
	for _, index := range removed {
		e := edit{index: index, before: slots[index]}
		switch {
		case len(added) > 0:
			e.after, added = added[0], added[1:]
		case index < size:
			for gone >= 0 && removed[gone] == kept {
				gone--
				kept--
			}
			e.after = slots[kept]
			out = append(out, edit{index: kept, before: slots[kept]})
			kept--
		}
		out = append(out, e)
	}
	for i, s := range added {
		out = append(out, edit{index: len(slots) + i, after: s})
	}
	return out
}

// perform applies changes to slots in place.
func perform(slots []slot, changes []edit) []slot {
	size := len(slots)
	for _, e := range changes {
		switch {
		case e.after.empty():
			size = min(size, e.index)
		case e.index >= len(slots):
			slots = append(slots, e.after) // edits returns these last, in ascending order
			size = len(slots)
		default:
			slots[e.index] = e.after
		}
	}
	clear(slots[size:])
	return slots[:size]
}

// indexOf returns the index of a backend, or -1.
func indexOf(slots []slot, address netip.AddrPort) int {
	wanted := slotOf(address)
	for i := range slots {
		s := &slots[i]
		if s.low == wanted.low && s.high == wanted.high && s.port == wanted.port && s.length == wanted.length {
			return i
		}
	}
	return -1
}

// compareBackends returns which backends leave and which join between two sets, both in ascending
// order. It calls local with 1 for each backend that has come to be on this node, and with -1 for
// each that no longer is.
func compareBackends(before, after view.Backends, local func(netip.Addr, int)) (removed, added []netip.AddrPort) {
	for was, is := range after.Differences(before) {
		if was.Local {
			local(was.Address.Addr(), -1)
		}
		if is.Local {
			local(is.Address.Addr(), 1)
		}
		switch {
		case !is.Address.IsValid():
			removed = append(removed, was.Address)
		case !was.Address.IsValid():
			added = append(added, is.Address)
		}
	}
	return removed, added
}

// locate returns the indices of backends in ascending order. All of them must be in slots.
func locate(slots []slot, addresses []netip.AddrPort) []int {
	var indices []int
	if len(addresses) <= 4 {
		for _, a := range addresses {
			indices = append(indices, indexOf(slots, a))
		}
		slices.Sort(indices)
		return indices
	}
	wanted := make(map[netip.AddrPort]struct{}, len(addresses))
	for _, a := range addresses {
		wanted[a] = struct{}{}
	}
	for i, s := range slots {
		if _, ok := wanted[s.address()]; ok {
			indices = append(indices, i)
		}
	}
	return indices
}

// compareSlots is compareBackends for slots that were read, which may hold anything. It returns the
// indices of slots whose backend is not wanted, missing or a duplicate, and the backends to add.
func compareSlots(slots []slot, wanted view.Backends) (removed []int, added []netip.AddrPort) {
	missing := make(map[netip.AddrPort]struct{}, wanted.Len())
	for b := range wanted.All() {
		missing[b.Address] = struct{}{}
	}
	for i, s := range slots {
		if _, ok := missing[s.address()]; ok {
			delete(missing, s.address())
		} else {
			removed = append(removed, i)
		}
	}
	for b := range wanted.All() {
		if _, ok := missing[b.Address]; ok {
			added = append(added, b.Address)
		}
	}
	return removed, added
}
