// This test proves that disjoint returns prefixes that cover the same addresses and do not overlap.
package ipvs

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestDisjoint asserts that the prefixes that are left cover the same addresses, and that none of
// them overlap.
func TestDisjoint(t *testing.T) {
	p := netip.MustParsePrefix
	require.Equal(t, []netip.Prefix{p("10.0.0.0/8"), p("11.0.0.0/8")}, disjoint([]netip.Prefix{p("10.1.0.0/16"), p("11.0.0.0/8"), p("10.0.0.0/8"), p("10.2.0.0/16")}))
	rapid.Check(t, func(t *rapid.T) {
		address := rapid.Custom(func(t *rapid.T) netip.Addr {
			return netip.AddrFrom4([4]byte{10, rapid.ByteMax(3).Draw(t, "byte") << 6})
		})
		var in []netip.Prefix
		for _, a := range rapid.SliceOf(address).Draw(t, "addresses") {
			in = append(in, netip.PrefixFrom(a, rapid.IntRange(6, 12).Draw(t, "bits")))
		}
		out := disjoint(in)
		for i, a := range out {
			for _, b := range out[:i] {
				require.False(t, a.Overlaps(b), "%v and %v of %v", a, b, in)
			}
		}
		for _, a := range in {
			found := false
			for _, b := range out {
				found = found || b.Bits() <= a.Bits() && b.Contains(a.Addr())
			}
			require.True(t, found, "%v is not in %v", a, out)
		}
	})
}
