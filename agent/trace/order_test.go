// These tests prove in which orders chains with the same hook and priority are followed: each order
// that the kernel may ask them in, as far as it may make a difference, and no other one.
package trace

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// names returns the names of the chains in each of the orders.
func names(orders [][]*base) (all []string) {
	for _, order := range orders {
		var names []string
		for _, b := range order {
			names = append(names, b.name)
		}
		all = append(all, strings.Join(names, " "))
	}
	return all
}

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
		require.ElementsMatch(t, []string{"new old other out filter", "new other old out filter", "other new old out filter"}, names(r.orders))
		require.Equal(t, "chain new of one and chain other of two; chain old of one and chain other of two", r.ties)
	}
	r.bases = slices.DeleteFunc(r.bases, func(b *base) bool { return b.name == "other" })
	r.order()
	require.Len(t, r.orders, 1)
	require.Empty(t, r.ties)
}

// TestOrdersOfRefusals proves that of chains that filter, only the order of those of proxies is
// followed that may refuse a packet in different ways, in each order of those that translate.
func TestOrdersOfRefusals(t *testing.T) {
	t.Parallel()
	ends := func(proxys bool, kinds ...resultKind) *chain {
		c := &chain{proxys: proxys, firewalls: !proxys}
		for _, k := range kinds {
			c.rules = append(c.rules, &Rule{steps: []step{verdict{result{kind: k}}}})
		}
		return c
	}
	to := func(proxys bool, c *chain) *chain {
		return &chain{proxys: proxys, firewalls: !proxys, rules: []*Rule{{steps: []step{verdict{result{kind: call, chain: c}}}}}}
	}
	filter := func(table string, c *chain, priority int32, firewall bool) *base {
		c.table, c.name = table, table
		return &base{chain: c, hook: unix.NF_INET_FORWARD, priority: priority, firewall: firewall}
	}
	nat := func(table string) *base {
		return &base{chain: &chain{table: table, name: table}, hook: unix.NF_INET_PRE_ROUTING, priority: -100, nat: true}
	}
	unknown := ends(true, reject)
	unknown.rules[0].unknown = "cannot be judged"
	for name, c := range map[string]struct {
		bases  []*base
		orders []string
	}{
		"one drops, one rejects": {
			[]*base{filter("a", ends(true, drop), 0, false), filter("b", ends(false, drop), 0, true), filter("c", ends(true, reject), 0, false)},
			[]string{"a b c", "c b a"},
		},
		"by a chain of iptables that a proxy's rules are in": {
			[]*base{filter("a", ends(true, drop), 0, false), filter("b", to(false, ends(true, reject)), 0, false)}, []string{"a b", "b a"},
		},
		"by the policy": {
			[]*base{filter("a", &chain{proxys: true, drops: true}, 0, false), filter("b", ends(true, accept, reject), 0, false)}, []string{"a b", "b a"},
		},
		"three": {
			[]*base{filter("a", ends(true, drop), 0, false), filter("b", ends(true, drop), 0, false), filter("c", ends(true, reject), 0, false)},
			[]string{"a b c", "c b a", "b c a", "a c b", "c a b", "b a c"},
		},
		"in each order of translation": {
			[]*base{nat("x"), nat("y"), filter("a", ends(true, drop), 0, false), filter("b", ends(true, reject), 0, false)},
			[]string{"x y a b", "y x a b", "x y b a", "y x b a"},
		},
		"both drop":                    {[]*base{filter("a", ends(true, drop), 0, false), filter("b", ends(true, drop), 0, false)}, []string{"a b"}},
		"one only accepts":             {[]*base{filter("a", ends(true, drop, reject), 0, false), filter("b", ends(true, accept), 0, false)}, []string{"a b"}},
		"at different priorities":      {[]*base{filter("a", ends(true, drop), 0, false), filter("b", ends(true, reject), 1, false)}, []string{"a b"}},
		"rules of a firewall":          {[]*base{filter("a", ends(true, drop), 0, false), filter("b", ends(false, reject), 0, false)}, []string{"a b"}},
		"a firewall":                   {[]*base{filter("a", ends(true, drop), 0, false), filter("b", ends(false, reject), 0, true)}, []string{"a b"}},
		"a rule that cannot be judged": {[]*base{filter("a", ends(true, drop), 0, false), filter("b", unknown, 0, false)}, []string{"a b"}},
		"one table":                    {[]*base{filter("a", ends(true, drop), 0, false), filter("a", ends(true, reject), 0, false)}, []string{"a a"}},
	} {
		r := newRules(model.IPv4, Facts{})
		r.bases = c.bases
		r.order()
		require.ElementsMatch(t, c.orders, names(r.orders), name)
		require.Equal(t, c.orders[0], names(r.orders)[0], name)
		require.Equal(t, len(c.orders) > 1, r.ties != "", name)
	}
}
