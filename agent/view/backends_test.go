// These tests prove that a set of backends that was derived from others equals the one built from
// its list, and that deriving shares parts without changing earlier sets. The sequences of changes
// are random.
package view

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func numbered(i int) Backend {
	a := binary.BigEndian.AppendUint32(nil, 10<<24|uint32(i/2))
	return Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte(a)), uint16(8080+i%2)), Local: i%7 == 0}
}

// TestBackends asserts that a set derived from others equals the set built from its list, whatever
// joined and left before. It also asserts that derived sets leave earlier ones unchanged, and that
// Differences reports exactly what differs.
func TestBackends(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		held := map[netip.AddrPort]Backend{}
		list := func() []Backend { return slices.SortedFunc(maps.Values(held), compareBackends) }
		for _, i := range rapid.SliceOfN(rapid.IntRange(0, 2000), 0, 1000).Draw(t, "first") {
			held[numbered(i).Address] = numbered(i)
		}
		was := NewBackends(slices.Collect(maps.Values(held))...)
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			before := list()
			require.Equal(t, before, slices.Collect(was.All()))
			removed := before
			if rapid.IntRange(0, 9).Draw(t, "all go") > 0 {
				removed = nil
				for _, i := range rapid.SliceOfN(rapid.IntRange(0, max(len(before)-1, 0)), 0, min(20, len(before))).Draw(t, "removed") {
					removed = append(removed, before[i])
				}
				slices.SortFunc(removed, compareBackends)
				removed = slices.Compact(removed)
			}
			for _, b := range removed {
				delete(held, b.Address)
			}
			var inserted []Backend
			for _, i := range rapid.SliceOfN(rapid.IntRange(0, 2000), 0, 20).Draw(t, "inserted") {
				b := numbered(i)
				b.Local = rapid.Bool().Draw(t, "local")
				if _, there := held[b.Address]; !there {
					held[b.Address] = b
					inserted = append(inserted, b)
				}
			}
			slices.SortFunc(inserted, compareBackends)
			is := was.with(removed, inserted)
			require.Equal(t, NewBackends(list()...), is)
			require.Equal(t, len(held), is.Len())
			require.Equal(t, list(), append([]Backend(nil), is.List()...))
			require.Equal(t, before, append([]Backend(nil), was.List()...), "what was made stays as it was")
			require.True(t, is.is(list()))

			here, there := map[netip.AddrPort]Backend{}, maps.Clone(held)
			for _, b := range before {
				here[b.Address] = b
			}
			var last netip.AddrPort
			for old, now := range is.Differences(was) {
				at := old.Address
				if !at.IsValid() {
					at = now.Address
				}
				require.Negative(t, last.Compare(at), "ascending")
				last = at
				require.NotEqual(t, old, now)
				require.Equal(t, here[at], old)
				require.Equal(t, there[at], now)
				delete(here, at)
				delete(there, at)
			}
			require.Equal(t, here, there, "nothing else differs")
			for i := 0; i < 2000; i += 50 {
				_, there := held[numbered(i).Address]
				require.Equal(t, there, is.Contains(numbered(i).Address))
			}
			was = is
		}
	})
}

// TestBackendsShare asserts that nearly all parts are shared when one of many backends leaves.
func TestBackendsShare(t *testing.T) {
	t.Parallel()
	var list []Backend
	for i := range 5000 {
		list = append(list, numbered(2*i))
	}
	all := NewBackends(list...)
	require.InDelta(t, 5000>>partBits, len(all.parts), 20)
	for i, b := range list {
		less := all.with([]Backend{b}, nil)
		again := less.with(nil, []Backend{b})
		require.Equal(t, all, again)
		require.False(t, all.Same(again))
		require.True(t, all.Same(all.with([]Backend{b}, []Backend{b})))
		known := map[*Backend]bool{}
		for _, part := range all.parts {
			known[&part[0]] = true
		}
		fresh := 0
		for _, part := range less.parts {
			if !known[&part[0]] {
				fresh++
			}
		}
		require.LessOrEqual(t, fresh, 1, "of %d", i)
	}
}

// TestNewBackends asserts that the order of the list does not matter, and that the first of several
// backends with the same address and port counts.
func TestNewBackends(t *testing.T) {
	t.Parallel()
	a, b := numbered(1), numbered(2)
	given := []Backend{b, a, {Address: b.Address, Local: true}}
	require.Equal(t, NewBackends(a, b), NewBackends(given...))
	require.Equal(t, []Backend{b, a, {Address: b.Address, Local: true}}, given, "what is given stays as it is")
	require.Zero(t, NewBackends())
	require.Empty(t, NewBackends().List())
	require.False(t, NewBackends().Contains(a.Address))
}
