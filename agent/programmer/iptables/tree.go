package iptables

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
)

const (
	// A chain holds at most leafKeys keys, or more if their rules are at most leafRules in total. Both
	// are compromises. A larger chain saves the rules that lead to two smaller ones, but packets pass
	// more rules in it.
	leafKeys  = 5
	leafRules = 64
	// digitBits is the number of bits of a key by which one chain branches.
	digitBits = 4
	// maxBits limits splitting to 65,536 leaves, four chains away from the root. Keys that share all
	// of these bits share a leaf, whatever its size. nf_tables allows jumps to be nested 16 deep.
	maxBits = 16
	// maxName is the number of characters that iptables accepts in a chain's name. A tree's chains
	// have a hyphen and at most one character per digit after the root's name.
	maxName     = 28
	maxRootName = maxName - len("-") - maxBits/digitBits
)

// tree leads from a key (an address or a port number) to the rules for it, through small chains, so
// that a packet passes few rules and a change rewrites few. It is a binary trie: a node with too
// much in it is split by the next bit.
//
// If each node were a chain, packets would go from chain to chain for each bit. So only leaves are
// chains, and forks at each digitBits-th bit. A fork's chain has a goto for each chain directly
// below it. E is the type of the entries under a key.
//
// Invariants:
//
//  1. The shape depends only on the content, not on the order in which entries were added and
//     removed.
//  2. A node is a leaf if it fits or has maxBits bits of path, and a fork otherwise.
//  3. No chain's name is longer than maxName, because the root's is not longer than maxRootName.
//  4. dirty holds the path of each chain that differs from what was written last.
type tree[K, E comparable] struct {
	table table
	// name is the name of the root chain, which always exists.
	name string
	keys[K]
	entries[E]
	root  *node[K, E]
	dirty map[string]bool // paths (strings of bits) of chains to write or remove
}

// keys describes keys of a type.
type keys[K comparable] struct {
	// bit returns a bit of a key, counted from 0.
	bit func(key K, i int) int
	// match returns the match of packets whose key has the bits of path after its last full digit.
	match func(path string) match
	// compare orders the keys in a leaf.
	compare func(a, b K) int
}

// entries describes entries of a type.
type entries[E comparable] struct {
	// weight returns how many rules an entry has, or about how many.
	weight func(E) int
	// rules writes the rules for the entries under one key.
	rules func(w *bytes.Buffer, chain string, entries []E)
}

// one is the weight of entries that have one rule each.
func one[E comparable](E) int { return 1 }

// node is a leaf with entries or a fork with children.
type node[K, E comparable] struct {
	keys, weight int // number of keys and sum of weights, here and below
	entries      map[K][]E
	children     *[2]*node[K, E] // nil in a leaf
}

// newTree returns an empty tree. It panics if the root's name, which is one of few constants, is
// too long.
func newTree[K, E comparable](t table, name string, k keys[K], e entries[E]) *tree[K, E] {
	if len(name) > maxRootName {
		panic(fmt.Sprintf("chains below %s have names that iptables does not accept", name))
	}
	return &tree[K, E]{t, name, k, e, newLeaf[K, E](), map[string]bool{}}
}

func newLeaf[K, E comparable]() *node[K, E] { return &node[K, E]{entries: map[K][]E{}} }

func (n *node[K, E]) fits() bool { return n.keys <= leafKeys || n.weight <= leafRules }

// change adds an entry under a key, or removes one that was added.
func (t *tree[K, E]) change(add bool, key K, e E) {
	if add {
		t.root = t.addTo(t.root, "", key, []E{e})
	} else if t.root = t.removeFrom(t.root, "", key, e); t.root == nil {
		t.root = newLeaf[K, E]()
	}
}

func (t *tree[K, E]) addTo(n *node[K, E], path string, key K, entries []E) *node[K, E] {
	if n == nil {
		n = newLeaf[K, E]()
	}
	t.dirty[path] = true
	if n.children != nil {
		t.addBelow(n, path, key, entries)
		return n
	}
	n.entries[key] = append(n.entries[key], entries...)
	n.keys = len(n.entries)
	for _, e := range entries {
		n.weight += t.weight(e)
	}
	if !n.fits() && len(path) < maxBits {
		all := n.entries
		n.entries, n.children = nil, new([2]*node[K, E])
		for k, e := range all {
			t.addBelow(n, path, k, e)
		}
	}
	return n
}

func (t *tree[K, E]) addBelow(n *node[K, E], path string, key K, entries []E) {
	b := t.bit(key, len(path))
	n.children[b] = t.addTo(n.children[b], path+"01"[b:b+1], key, entries)
	n.sum()
}

// sum adds up what is below a fork.
func (n *node[K, E]) sum() {
	n.keys, n.weight = 0, 0
	for _, c := range n.children {
		if c != nil {
			n.keys += c.keys
			n.weight += c.weight
		}
	}
}

// removeFrom returns the node that is left, or nil if nothing is.
func (t *tree[K, E]) removeFrom(n *node[K, E], path string, key K, e E) *node[K, E] {
	t.dirty[path] = true
	if n.children == nil {
		n.entries[key] = slices.DeleteFunc(n.entries[key], func(o E) bool { return o == e })
		if len(n.entries[key]) == 0 {
			delete(n.entries, key)
		}
		n.keys = len(n.entries)
		n.weight -= t.weight(e)
	} else {
		b := t.bit(key, len(path))
		n.children[b] = t.removeFrom(n.children[b], path+"01"[b:b+1], key, e)
		n.sum()
		if n.fits() {
			leaf := newLeaf[K, E]()
			t.gather(n, path, leaf)
			leaf.keys, leaf.weight = n.keys, n.weight
			n = leaf
		}
	}
	if n.keys == 0 {
		return nil
	}
	return n
}

// gather moves the entries of n and of the nodes below it to the leaf.
func (t *tree[K, E]) gather(n *node[K, E], path string, leaf *node[K, E]) {
	t.dirty[path] = true
	maps.Copy(leaf.entries, n.entries)
	if n.children == nil {
		return
	}
	for b, c := range n.children {
		if c != nil {
			t.gather(c, path+"01"[b:b+1], leaf)
		}
	}
}

// digits has a letter for each value of one to digitBits bits. Its index is the value with an
// additional 1 bit before the first bit. The values of four bits, which are seen most, are
// hexadecimal digits.
const digits = "__GHIJKLMNOPQRST0123456789ABCDEF"

// chain returns the name of the chain at a path.
func (t *tree[K, E]) chain(path string) string {
	if path == "" {
		return t.name
	}
	name := []byte(t.name + "-")
	for digit := range slices.Chunk([]byte(path), digitBits) {
		value := 1
		for _, bit := range digit {
			value = value<<1 | int(bit-'0')
		}
		name = append(name, digits[value])
	}
	return string(name)
}

// find returns the node at a path, or nil if there is none.
func (t *tree[K, E]) find(path string) *node[K, E] {
	n := t.root
	for i := range len(path) {
		if n == nil || n.children == nil {
			return nil
		}
		n = n.children[path[i]-'0']
	}
	return n
}

// isChain reports whether the node at a path is a chain.
func (n *node[K, E]) isChain(path string) bool { return n.children == nil || len(path)%digitBits == 0 }

// write adds the dirty chains, or all chains, to the transaction.
func (t *tree[K, E]) write(x *transaction, all bool) {
	if all {
		t.writeBelow(x, t.root, "")
	} else {
		for path := range t.dirty {
			if n := t.find(path); n != nil && n.isChain(path) {
				t.writeNode(x, n, path)
			} else {
				x.remove(t.table, t.chain(path))
			}
		}
	}
	clear(t.dirty)
}

func (t *tree[K, E]) writeBelow(x *transaction, n *node[K, E], path string) {
	t.writeNode(x, n, path)
	n.eachNext(path, func(path string, c *node[K, E]) { t.writeBelow(x, c, path) })
}

// eachNext calls visit with each chain that a fork leads to, and its path.
func (n *node[K, E]) eachNext(path string, visit func(string, *node[K, E])) {
	if n.children == nil {
		return
	}
	for b, c := range n.children {
		switch below := path + "01"[b:b+1]; {
		case c == nil:
		case c.isChain(below):
			visit(below, c)
		default:
			c.eachNext(below, visit)
		}
	}
}

func (t *tree[K, E]) writeNode(x *transaction, n *node[K, E], path string) {
	name := t.chain(path)
	x.put(t.table, name, func(w *bytes.Buffer) {
		n.eachNext(path, func(below string, _ *node[K, E]) {
			w.WriteString(t.match(below).rule(name, "-g "+t.chain(below)))
		})
		for _, k := range slices.SortedFunc(maps.Keys(n.entries), t.compare) {
			t.rules(w, name, n.entries[k])
		}
	})
}
