package trace

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// at returns the priority at which the kernel calls the chain among all chains of its hook. Those
// that translate are called together (see net/netfilter/nf_nat_core.c).
func (b *base) at() int32 {
	switch {
	case !b.nat:
		return b.priority
	case b.hook == unix.NF_INET_PRE_ROUTING || b.hook == unix.NF_INET_LOCAL_OUT:
		return -100
	}
	return 100
}

// order sets the orders in which the chains may be asked. Chains of one table are asked newest
// first (nf_hook_entries_grow in net/netfilter/core.c), also after the table was dormant.
func (r *Rules) order() {
	slices.SortFunc(r.bases, func(a, b *base) int {
		return cmp.Or(cmp.Compare(a.hook, b.hook), cmp.Compare(a.at(), b.at()), cmp.Compare(a.priority, b.priority),
			strings.Compare(a.table, b.table), -cmp.Compare(a.handle, b.handle), strings.Compare(a.name, b.name))
	})
	r.orders = [][]*base{r.bases}
	var ties []string
	// What is refused depends on what was translated before, so each order of the chains that filter
	// follows each order of those that translate.
	for _, tied := range []func(a, b *base) bool{bothTranslate, r.refuseDifferently()} {
		var groups [][]int
		for from := 0; from < len(r.bases); {
			group, n := r.group(from, tied)
			from += n
			if len(group) == 0 {
				continue
			}
			groups = append(groups, group)
			for i, a := range group {
				for _, b := range group[i+1:] {
					if a, b := r.bases[a], r.bases[b]; a.table != b.table && tied(a, b) {
						ties = append(ties, fmt.Sprintf("chain %s of %s and chain %s of %s", a.name, a.table, b.name, b.table))
					}
				}
			}
		}
		r.multiply(groups)
	}
	r.ties = strings.Join(ties, "; ")
}

// group returns the positions in r.bases of the chains of different tables that are tied, among
// those with the hook and priority of the chain at an index. It also returns the number of chains
// with this hook and priority.
func (r *Rules) group(from int, tied func(a, b *base) bool) (group []int, n int) {
	same := r.bases[from:]
	if end := slices.IndexFunc(same, func(b *base) bool { return b.hook != same[0].hook || b.priority != same[0].priority }); end >= 0 {
		same = same[:end]
	}
	for i, a := range same {
		if slices.ContainsFunc(same, func(b *base) bool { return a.table != b.table && tied(a, b) }) {
			group = append(group, from+i)
		}
	}
	return group, len(same)
}

// multiply replaces each of r.orders by those in which groups of tied chains, by their positions,
// are arranged in all orders. Each group has all of its orders, but not each of them with each of
// another group.
func (r *Rules) multiply(groups [][]int) {
	variants := make([][][]int, len(groups))
	most := 1
	for i, g := range groups {
		variants[i] = slices.Collect(permutations(len(g)))
		most = max(most, len(variants[i]))
	}
	before := r.orders
	r.orders = nil
	for v := range most {
		for _, order := range before {
			order = slices.Clone(order)
			for i, g := range groups {
				if v >= len(variants[i]) {
					continue
				}
				var chains []*base
				for _, at := range g {
					chains = append(chains, order[at])
				}
				for j, b := range arranged(chains, variants[i][v]) {
					order[g[j]] = b
				}
			}
			if !slices.ContainsFunc(r.orders, func(o []*base) bool { return slices.Equal(o, order) }) {
				r.orders = append(r.orders, order)
			}
		}
	}
}

// bothTranslate reports whether two chains translate. Only the first one that does counts.
func bothTranslate(a, b *base) bool { return a.nat && b.nat }

// refuseDifferently returns a function that reports whether one of two chains that filter may drop,
// by the rules of a proxy, what the other one may reject.
func (r *Rules) refuseDifferently() func(a, b *base) bool {
	known := map[*base]*consequence{}
	of := func(b *base) *consequence {
		c := known[b]
		if c == nil {
			c = &consequence{drops: b.drops}
			refusalsOf(b.chain, c, map[*chain]struct{}{})
			known[b] = c
		}
		return c
	}
	return func(a, b *base) bool {
		if a.nat || b.nat || a.firewall || b.firewall {
			return false
		}
		return of(a).drops && of(b).rejects || of(a).rejects && of(b).drops
	}
}

// arranged returns chains in the order of ranks, except that those of one table keep their order
// among themselves.
func arranged(chains []*base, ranks []int) []*base {
	out := make([]*base, len(chains))
	of := map[string][]*base{}
	for i, b := range chains {
		out[ranks[i]] = b
		of[b.table] = append(of[b.table], b)
	}
	for i, b := range out {
		out[i], of[b.table] = of[b.table][0], of[b.table][1:]
	}
	return out
}

// permutations yields the numbers below n in different orders: rotated, in both directions. These
// are all orders of up to three numbers. Of more, each number is the first one of some.
func permutations(n int) iter.Seq[[]int] {
	return func(yield func([]int) bool) {
		numbers := make([]int, n)
		for i := range numbers {
			numbers[i] = i
		}
		for range max(n, 1) {
			if !yield(slices.Clone(numbers)) {
				return
			}
			if n > 2 {
				reversed := slices.Clone(numbers)
				slices.Reverse(reversed)
				if !yield(reversed) {
					return
				}
			}
			if n > 0 {
				numbers = append(numbers[1:], numbers[0])
			}
		}
	}
}
