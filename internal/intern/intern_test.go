// These tests prove that Strings keeps one copy of each short string in use, and forgets those that
// are no longer seen.
package intern

import (
	"fmt"
	"runtime"
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

// TestHeapOfStrings fills both generations with the longest strings.
func TestHeapOfStrings(t *testing.T) {
	heap := func() int {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	var i Strings
	before := heap()
	for n := range 3 * generation {
		i.Get(fmt.Sprint(strings.Repeat("n", longest-7), 1_000_000+n))
	}
	held := heap() - before
	t.Logf("%d KiB are held", held>>10)
	require.Len(t, i.old, generation)
	require.Len(t, i.young, generation)
	require.Less(t, held, 64<<20)
	runtime.KeepAlive(&i)
}
