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
		begin := rapid.IntRange(0, 1000).Draw(t, "begin")
		for i := range rapid.SampledFrom([]int{0, 3, onePart - 1, onePart, onePart + 1, 400, 1000}).Draw(t, "size") {
			held[numbered(begin+i).Address] = numbered(begin + i)
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

// TestBackendsAtTheBound asserts what the parts of sets are around the size up to which a set is a
// single part, and of a set whose last backend ends a part.
func TestBackendsAtTheBound(t *testing.T) {
	t.Parallel()
	end := 200
	for !numbered(end).endsPart() {
		end++
	}
	list := func(from, to int) (out []Backend) {
		for i := from; i < to; i++ {
			out = append(out, numbered(i))
		}
		return out
	}
	for size := onePart - 2; size <= onePart+2; size++ {
		all := list(end-50, end-50+size)
		want := NewBackends(all...)
		require.Equal(t, size <= onePart, len(want.parts) == 1)
		require.Equal(t, want, NewBackends(list(end-50, end-49+size)...).with([]Backend{numbered(end - 50 + size)}, nil))
		require.Equal(t, want, NewBackends(all[1:]...).with(nil, all[:1]))
	}
	ending := list(end-199, end+1)
	want := NewBackends(ending...)
	for _, part := range want.parts {
		require.NotEmpty(t, part)
	}
	require.Equal(t, want, Backends{}.with(nil, ending))
	require.Equal(t, want, NewBackends(append(ending, numbered(end+1))...).with([]Backend{numbered(end + 1)}, nil))
}

// TestPartsAreEven asserts that large sets have parts of the expected size, whether their backends
// differ in the last or other bits of their addresses, or in their ports only. Larger parts would
// make each change cost more.
func TestPartsAreEven(t *testing.T) {
	t.Parallel()
	for name, one := range map[string]func(i int) Backend{
		"neighbors": func(i int) Backend { return numbered(2 * i) },
		"one of each node": func(i int) Backend {
			return Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 7}), 8080)}
		},
		"ports": func(i int) Backend {
			return Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, 1}), uint16(i))}
		},
	} {
		var list []Backend
		for i := range 5000 {
			list = append(list, one(i))
		}
		require.InDelta(t, 5000>>partBits, len(NewBackends(list...).parts), 20, name)
	}
}

// TestSharedPartsAreSkipped asserts that the parts which two sets share are skipped as a whole when
// the sets are compared, and only these.
func TestSharedPartsAreSkipped(t *testing.T) {
	t.Parallel()
	var list []Backend
	for i := range 1000 {
		list = append(list, numbered(i))
	}
	a, b := NewBackends(list...), NewBackends(list...)
	begin := cursor{parts: a.parts}
	require.True(t, begin.atSamePart(cursor{parts: a.parts}))
	require.False(t, begin.atSamePart(cursor{parts: b.parts}), "it is another part, though it is equal")
	require.False(t, begin.atSamePart(cursor{parts: a.parts, at: 1}))
	require.False(t, (&cursor{parts: a.parts, at: 1}).atSamePart(begin))
	require.False(t, begin.atSamePart(cursor{}))
	require.False(t, (&cursor{}).atSamePart(begin))
}

// TestBackendsShare asserts that nearly all parts are shared when one of many backends leaves.
func TestBackendsShare(t *testing.T) {
	t.Parallel()
	var list []Backend
	for i := range 5000 {
		list = append(list, numbered(2*i))
	}
	all := NewBackends(list...)
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
	require.Equal(t, NewBackends(b), NewBackends(b, Backend{Address: b.Address, Local: true}), "they are in order, but not ascending")
	require.Zero(t, NewBackends())
	require.Empty(t, NewBackends().List())
	require.False(t, NewBackends().Contains(a.Address))
}
