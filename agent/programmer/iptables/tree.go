package iptables

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

const (
	// leafKeys is how many keys a chain holds before it is split by the next digit.
	leafKeys = 16
	// maxDepth bounds the splitting: 65,536 leaves. Keys that share all these digits share a leaf, of any size. Jumps
	// may be nested 16 deep in nf_tables.
	maxDepth = 4
	fanout   = 16
)

// tree is the dispatch from a key (an address, a port number) to the rules for it, as chains of at most about fanout
// rules each, so that a packet passes few rules and a change rewrites few. A chain with more than leafKeys keys is
// replaced by one with a goto for each value of the next digit (four bits) that some key has, and chains for these. Its
// shape depends on the keys only, never on the order in which they came.
type tree[K comparable] struct {
	table table
	// name is the root chain's; the chains below have the digits appended. The root chain always exists.
	name string
	// digit gives a key's digit at a level from 0, each below fanout.
	digit func(key K, level int) int
	// match gives the match of packets whose key begins with the digits of path, given that all but the last match.
	match func(path string) string
	// compare orders the keys in a leaf.
	compare func(a, b K) int
	// rules writes the rules for the entries under one key.
	rules func(w *bytes.Buffer, chain string, entries []entry)

	root  *node[K]
	dirty map[string]bool // paths (digits) of chains to write or remove
}

// node is a chain: a leaf with entries or a fork with children.
type node[K comparable] struct {
	keys     int // distinct ones here and below
	entries  map[K][]entry
	children *[fanout]*node[K] // nil in a leaf
}

func newTree[K comparable](t table, name string, digit func(K, int) int, match func(string) string, compare func(a, b K) int,
	rules func(*bytes.Buffer, string, []entry),
) *tree[K] {
	return &tree[K]{
		table: t, name: name, digit: digit, match: match, compare: compare, rules: rules,
		root: newLeaf[K](), dirty: map[string]bool{},
	}
}

func newLeaf[K comparable]() *node[K] { return &node[K]{entries: map[K][]entry{}} }

const digits = "0123456789ABCDEF"

// add adds an entry under a key.
func (t *tree[K]) add(key K, e entry) {
	t.root = t.addTo(t.root, "", key, []entry{e})
}

func (t *tree[K]) addTo(n *node[K], path string, key K, entries []entry) *node[K] {
	if n == nil {
		n = newLeaf[K]()
	}
	t.dirty[path] = true
	if n.children != nil {
		d := t.digit(key, len(path))
		before := 0
		if c := n.children[d]; c != nil {
			before = c.keys
		}
		n.children[d] = t.addTo(n.children[d], path+digits[d:d+1], key, entries)
		n.keys += n.children[d].keys - before
		return n
	}
	n.entries[key] = append(n.entries[key], entries...)
	n.keys = len(n.entries)
	if n.keys > leafKeys && len(path) < maxDepth {
		all := n.entries
		n.entries, n.keys, n.children = nil, 0, new([fanout]*node[K])
		for k, e := range all {
			n = t.addTo(n, path, k, e)
		}
	}
	return n
}

// remove removes an entry that was added under a key.
func (t *tree[K]) remove(key K, e entry) {
	t.root = t.removeFrom(t.root, "", key, e)
	if t.root == nil {
		t.root = newLeaf[K]()
	}
}

// removeFrom gives nil if nothing is left.
func (t *tree[K]) removeFrom(n *node[K], path string, key K, e entry) *node[K] {
	t.dirty[path] = true
	if n.children == nil {
		n.entries[key] = slices.DeleteFunc(n.entries[key], func(o entry) bool { return o == e })
		if len(n.entries[key]) == 0 {
			delete(n.entries, key)
		}
		n.keys = len(n.entries)
	} else {
		d := t.digit(key, len(path))
		n.keys -= n.children[d].keys
		n.children[d] = t.removeFrom(n.children[d], path+digits[d:d+1], key, e)
		if n.children[d] != nil {
			n.keys += n.children[d].keys
		}
		if n.keys <= leafKeys {
			leaf := newLeaf[K]()
			t.gather(n, path, leaf)
			n = leaf
		}
	}
	if n.keys == 0 {
		return nil
	}
	return n
}

// gather moves the entries of n and below to the leaf.
func (t *tree[K]) gather(n *node[K], path string, leaf *node[K]) {
	t.dirty[path] = true
	for k, e := range n.entries {
		leaf.entries[k] = e
	}
	leaf.keys = len(leaf.entries)
	if n.children == nil {
		return
	}
	for d, c := range n.children {
		if c != nil {
			t.gather(c, path+digits[d:d+1], leaf)
		}
	}
}

// chain gives the name of the chain at a path.
func (t *tree[K]) chain(path string) string {
	if path == "" {
		return t.name
	}
	return t.name + "-" + path
}

// find gives the node at a path, nil if there is none.
func (t *tree[K]) find(path string) *node[K] {
	n := t.root
	for i := range len(path) {
		if n == nil || n.children == nil {
			return nil
		}
		n = n.children[strings.IndexByte(digits, path[i])]
	}
	return n
}

// write puts the dirty chains, or all of them, into the transaction.
func (t *tree[K]) write(x *transaction, all bool) {
	if all {
		t.writeBelow(x, t.root, "")
	} else {
		for path := range t.dirty {
			if n := t.find(path); n != nil {
				t.writeNode(x, n, path)
			} else {
				x.remove(t.table, t.chain(path))
			}
		}
	}
	clear(t.dirty)
}

func (t *tree[K]) writeBelow(x *transaction, n *node[K], path string) {
	t.writeNode(x, n, path)
	if n.children == nil {
		return
	}
	for d, c := range n.children {
		if c != nil {
			t.writeBelow(x, c, path+digits[d:d+1])
		}
	}
}

func (t *tree[K]) writeNode(x *transaction, n *node[K], path string) {
	name := t.chain(path)
	x.put(t.table, name, func(w *bytes.Buffer) {
		if n.children != nil {
			for d, c := range n.children {
				if c != nil {
					below := path + digits[d:d+1]
					fmt.Fprintf(w, "-A %s %s -g %s\n", name, t.match(below), t.chain(below))
				}
			}
			return
		}
		keys := make([]K, 0, len(n.entries))
		for k := range n.entries {
			keys = append(keys, k)
		}
		slices.SortFunc(keys, t.compare)
		for _, k := range keys {
			t.rules(w, name, n.entries[k])
		}
	})
}
