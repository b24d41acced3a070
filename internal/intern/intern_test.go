// These tests prove that Strings keeps one copy of each short string in use, and forgets those that
// are no longer seen.
package intern

import (
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

func TestStringsKeepsOneCopyAndForgets(t *testing.T) {
	var i Strings
	node := func() string { return string([]byte("node-1")) } // a new copy each time
	first := i.Get(node())
	require.Equal(t, unsafe.StringData(first), unsafe.StringData(i.Get(node())))
	for n := range 3 * generation {
		i.Get(fmt.Sprint(n))
		if n%1000 == 0 {
			require.Equal(t, unsafe.StringData(first), unsafe.StringData(i.Get(node())), "what is in use stays")
		}
	}
	require.LessOrEqual(t, len(i.young)+len(i.old), 2*generation)
}

// TestStringsKeepsNoLongOnes asserts that a string longer than longest is not kept, however often
// it is seen.
func TestStringsKeepsNoLongOnes(t *testing.T) {
	var i Strings
	for _, size := range []int{longest, longest + 1} {
		s := strings.Repeat("a", size)
		require.Equal(t, s, i.Get(s))
	}
	require.Len(t, i.young, 1)
}
