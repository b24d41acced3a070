// This test proves in which orders chains with the same hook and priority are followed: each order
// that the kernel may ask them in, and no other one.
package trace

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

func TestOrders(t *testing.T) {
	t.Parallel()
	r := newRules(model.IPv4, Facts{})
	add := func(table, name string, handle uint64, hook uint32, nat bool) {
		r.bases = append(r.bases, &base{chain: &chain{table: table, name: name}, hook: hook, priority: -100, nat: nat, handle: handle})
	}
	const pre, out = unix.NF_INET_PRE_ROUTING, unix.NF_INET_LOCAL_OUT
	add("one", "old", 5, pre, true)
	add("two", "other", 0, pre, true)
	add("one", "new", 9, pre, true)
	add("one", "out", 3, out, true)
	add("two", "filter", 0, out, false)
	for range 10 { // whatever the order of the tables' chains is
		r.bases[0], r.bases[2] = r.bases[2], r.bases[0]
		r.order()
		orders := map[string]bool{}
		for _, order := range r.orders {
			var names []string
			for _, b := range order {
				names = append(names, b.name)
			}
			orders[strings.Join(names, " ")] = true
		}
		require.Equal(t, map[string]bool{
			"new old other out filter": true, "new other old out filter": true, "other new old out filter": true,
		}, orders)
		require.Equal(t, "chain new of one and chain other of two; chain old of one and chain other of two", r.ties)
	}
	r.bases = slices.DeleteFunc(r.bases, func(b *base) bool { return b.name == "other" })
	r.order()
	require.Len(t, r.orders, 1)
	require.Empty(t, r.ties)
}
