// This test proves that the ring counts what it holds, and that both of its bounds hold.
package fanout

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSizeOfTheRing(t *testing.T) {
	var r ring
	for range ringEntries + 3 {
		r.add(entry{held: 10})
	}
	entries, held := r.size()
	require.Equal(t, []int{ringEntries, 10 * ringEntries}, []int{entries, held})
	r.add(entry{held: ringBytes - 20})
	entries, held = r.size()
	require.Equal(t, []int{3, ringBytes}, []int{entries, held}, "the oldest entries are dropped")
	r.add(entry{held: ringBytes + 1})
	entries, held = r.size()
	require.Equal(t, []int{1, ringBytes + 1}, []int{entries, held}, "a single entry may be larger")
}
