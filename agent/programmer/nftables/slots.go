package nftables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
)

// slot is where the table holds a backend of a set: its index is the slot's. It has no pointers, as there are many, and one of
// thousands is looked for in the time of a change.
type slot struct {
	high, low uint64 // of the address as 16 bytes
	// number is the backend's, with affinity; else 0.
	number uint32
	port   uint16
	// length is that of the address in bytes; 0 where there is no backend, which is only so in what was read from a table that others changed.
	length uint8
}

func slotOf(a netip.AddrPort) slot {
	b := a.Addr().As16()
	return slot{
		high: binary.BigEndian.Uint64(b[:8]), low: binary.BigEndian.Uint64(b[8:]), port: a.Port(), length: uint8(a.Addr().BitLen() / 8),
	}
}

// address gives the backend's.
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

// edit is a change of one slot. Either may be empty.
type edit struct {
	index         int
	before, after slot
}

// edits gives the changes of slots when the backends at some indices go and others come, as few as possible: a
// newcomer takes the place of one that goes, else the last one moves into a gap, and the indices stay without gaps.
// removed are ascending.
func edits(slots []slot, removed []int, added []slot) []edit {
	var out []edit
	size := len(slots) - len(removed) + len(added)
	kept := len(slots) - 1 // the last slot that may hold one to be moved
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

// perform changes slots in place.
func perform(slots []slot, changes []edit) []slot {
	size := len(slots)
	for _, e := range changes {
		switch {
		case e.after.empty():
			size = min(size, e.index)
		case e.index >= len(slots):
			slots = append(slots, e.after) // edits gives these last and ascending
			size = len(slots)
		default:
			slots[e.index] = e.after
		}
	}
	clear(slots[size:])
	return slots[:size]
}

// indexOf gives where a backend is, or -1.
func indexOf(slots []slot, address netip.AddrPort) int {
	wanted := slotOf(address)
	for i := range slots {
		if s := &slots[i]; s.low == wanted.low && s.high == wanted.high && s.port == wanted.port && s.length == wanted.length {
			return i
		}
	}
	return -1
}

// compareBackends tells which backends go and which come between two sets, both ascending, and calls local with each whose
// place on this node changes: 1 if it came to be on this node, -1 if it no longer is.
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

// locate gives the ascending indices of backends, all of which are there.
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

// compareSlots is compareBackends for slots that were read, and may hold anything: it gives the indices of what is not
// wanted, or not there, or there twice.
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
