package iptables

import (
	"bytes"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/slicecast/slicecast/agent/nft"
)

// table is one of the kernel's tables that hold chains of this package.
type table int

// These are the tables, in the order in which a transaction changes them.
const (
	filter table = iota
	nat
	tables // number of tables
)

func (t table) String() string { return [...]string{"filter", "nat"}[t] }

// chainHashes describes the chains of this package in the kernel.
type chainHashes [tables]map[string]chainHash

// chainHash describes the rules of a chain, as iptables-save prints them. The rules themselves
// would take too much memory.
type chainHash struct {
	hash  uint64
	rules int // their number
}

// emptyChain describes a chain without rules.
var emptyChain = hashOf(nil)

func hashOf(rules []byte) chainHash {
	return chainHash{xxhash.Sum64(rules), bytes.Count(rules, []byte("\n"))}
}

func newChainHashes() (h chainHashes) {
	for t := range h {
		h[t] = map[string]chainHash{}
	}
	return h
}

// rules returns the number of rules in a table.
func (h *chainHashes) rules(t table) (n int) {
	for _, chain := range h[t] {
		n += chain.rules
	}
	return n
}

// transaction collects what has to be written so that chains become as wanted. It leaves out those
// that already are.
type transaction struct {
	held  chainHashes
	parts [tables]transactionPart
	// leaving are chains of filter to be removed after nat has changed.
	leaving []string
}

type transactionPart struct {
	unhook  []string // lines that remove rules from others' chains
	declare map[string]bool
	// fresh holds the rules of chains that the kernel does not hold yet, and rules those of others.
	// Nothing but rules leads to a fresh chain.
	fresh, rules bytes.Buffer
	put          map[string]bool // chains that put was called for, whether they differ or not
	written      map[string]chainHash
	removed      map[string]bool
}

func newTransaction(held chainHashes) *transaction {
	x := &transaction{held: held}
	for t := range x.parts {
		p := &x.parts[t]
		p.declare, p.put = map[string]bool{}, map[string]bool{}
		p.written, p.removed = map[string]chainHash{}, map[string]bool{}
	}
	return x
}

// put sets the rules of a chain. write writes them as iptables-save prints them.
func (x *transaction) put(t table, chain string, write func(*bytes.Buffer)) {
	p := &x.parts[t]
	held, ok := x.held[t][chain]
	rules := &p.rules
	if !ok {
		rules = &p.fresh
	}
	start := rules.Len()
	write(rules)
	hash := hashOf(rules.Bytes()[start:])
	p.put[chain] = true
	if ok && held == hash {
		rules.Truncate(start)
		return
	}
	p.declare[chain] = true
	p.written[chain] = hash
}

// remove removes a chain if the kernel holds it.
func (x *transaction) remove(t table, chain string) {
	if _, ok := x.held[t][chain]; ok {
		x.parts[t].declare[chain] = true
		x.parts[t].removed[chain] = true
	}
}

// removeOthers removes all chains of this package that were not put, and the hooks that lead to
// such chains.
func (x *transaction) removeOthers(held *saved) {
	for _, h := range held.hooks {
		if !x.parts[h.table].put[h.target()] && held.refs[h.table] == nil {
			x.unhook(h)
		}
	}
	for t := range x.held {
		for chain := range x.held[t] {
			if !x.parts[t].put[chain] {
				x.remove(table(t), chain)
			}
		}
	}
}

// unhook removes a rule that refers to a chain of this package from a chain that does not belong to
// it.
func (x *transaction) unhook(h hook) {
	p := &x.parts[h.table]
	p.unhook = append(p.unhook, "-D"+strings.TrimPrefix(h.rule, "-A"))
}

// text returns the input for iptables-restore --noflush. It is empty if there is nothing to do.
func (x *transaction) text() []byte {
	var out bytes.Buffer
	size := 0
	for t := range x.parts {
		size += x.parts[t].fresh.Len() + x.parts[t].rules.Len() + 40*len(x.parts[t].declare)
	}
	out.Grow(size)
	for t := range x.parts {
		p := &x.parts[t]
		p.text(&out, table(t), slices.Sorted(maps.Keys(p.declare)), p.fresh.Bytes())
	}
	return out.Bytes()
}

// text writes what changes a table, except for the chains that are not declared here and the fresh
// rules that are not given.
func (p *transactionPart) text(out *bytes.Buffer, t table, declare []string, fresh []byte) {
	if len(declare) == 0 && len(p.unhook) == 0 {
		return
	}
	out.WriteString("*" + t.String() + "\n")
	// Declaring a chain creates or empties it. So nothing refers to a chain that is removed.
	for _, chain := range declare {
		out.WriteString(":" + chain + " - [0:0]\n")
	}
	for _, rule := range p.unhook {
		out.WriteString(rule + "\n")
	}
	out.Write(fresh)
	out.Write(p.rules.Bytes())
	for _, chain := range slices.Sorted(maps.Keys(p.removed)) {
		out.WriteString("-X " + chain + "\n")
	}
	out.WriteString("COMMIT\n")
}

// partLines is the number of lines of a short transaction. A kernel without preemption runs no
// other thread on a CPU until a transaction is complete, which takes a few milliseconds for this
// number, and more than a second for the largest clusters as a whole.
const partLines = 250

// texts returns several inputs for iptables-restore --noflush, to be written one after the other.
// If there are many fresh chains, they come first, in inputs of at most partLines lines, because no
// packet reaches them before the last input is written.
func (x *transaction) texts() (inputs [][]byte) {
	lines := 0
	for t := range x.parts {
		lines += bytes.Count(x.parts[t].fresh.Bytes(), []byte("\n"))
	}
	if lines <= partLines {
		if text := x.text(); len(text) > 0 {
			inputs = append(inputs, text)
		}
		return inputs
	}
	var last bytes.Buffer
	for t := range x.parts {
		p := &x.parts[t]
		var declare []string
		var create bytes.Buffer
		for _, chain := range slices.Sorted(maps.Keys(p.declare)) {
			if _, held := x.held[t][chain]; held {
				declare = append(declare, chain)
			} else {
				create.WriteString(":" + chain + " - [0:0]\n")
			}
		}
		for _, lines := range [][]byte{create.Bytes(), p.fresh.Bytes()} {
			for part := range chunks(lines, partLines) {
				inputs = append(inputs, slices.Concat([]byte("*"+table(t).String()+"\n"), part, []byte("COMMIT\n")))
			}
		}
		p.text(&last, table(t), declare, nil)
	}
	if last.Len() > 0 {
		inputs = append(inputs, last.Bytes())
	}
	return inputs
}

// chunks divides text into parts of count lines.
func chunks(text []byte, count int) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		start, at, lines := 0, 0, 0
		for line := range bytes.Lines(text) {
			at += len(line)
			if lines++; lines == count {
				if !yield(text[start:at]) {
					return
				}
				start, lines = at, 0
			}
		}
		if start < at {
			yield(text[start:at])
		}
	}
}

// done records that the kernel has accepted the transaction: see invariant 1 of kernelFamily.
func (s *saved) done(x *transaction) {
	for t := range x.parts {
		for chain, hash := range x.parts[t].written {
			s.rules[t] += hash.rules - s.chains[t][chain].rules
			s.chains[t][chain] = hash
		}
		for chain := range x.parts[t].removed {
			s.rules[t] -= s.chains[t][chain].rules
			delete(s.chains[t], chain)
		}
	}
}

// hook is a rule that leads to a chain of this package from a chain that does not belong to it.
type hook struct {
	table table
	rule  string // as iptables-save prints it
}

// chain returns the name of the chain that the hook is in.
func (h hook) chain() string { return strings.Fields(h.rule)[1] }

// target returns the name of the chain that the hook leads to.
func (h hook) target() string {
	_, after, _ := strings.Cut(h.rule, " "+ChainPrefix)
	name, _, _ := strings.Cut(after, " ")
	return ChainPrefix + name
}

// saved is what the output of iptables-save holds of this package.
type saved struct {
	chains chainHashes
	// rules are the numbers of rules in chains.
	rules [tables]int
	hooks []hook
	// refs are all rules that lead to chains of this package from others' chains, in tables of which
	// the program does not print everything. There, hooks serves only to see which are missing.
	refs [tables][]reference
	// drops means that the policy of FORWARD is DROP.
	drops bool
	// counted means that a rule counts packets.
	counted bool
	// texts holds the hashes of the rules, without their chains, and of their comments. nil means that
	// they are not collected.
	texts map[uint64]bool
}

// reference is a rule that leads to a chain of this package. unsure means that it is in the place
// of a hook, but the program does not say whether it is the hook.
type reference struct {
	nft.Reference
	unsure bool
}

// mayHave reports whether there is a rule in the place of a hook, of which the program does not say
// what it is.
func (s *saved) mayHave(h hook) bool {
	return slices.ContainsFunc(s.refs[h.table], func(r reference) bool {
		return r.unsure && r.Chain == h.chain() && r.Target == h.target()
	})
}

// textHash returns the hash of a text in a table, as in saved.texts.
func textHash(t table, text []byte) uint64 { return xxhash.Sum64(text) + uint64(t) }

// unchained returns a rule without the chain that it is in.
func unchained(rule []byte) []byte {
	_, rest, _ := bytes.Cut(rule[len("-A "):], []byte(" "))
	return rest
}

var commentText = regexp.MustCompile(`-m comment --comment "[^"]*"`)

// collect adds a rule to texts.
func (s *saved) collect(t table, rule []byte) {
	if s.texts == nil {
		return
	}
	s.texts[textHash(t, unchained(rule))] = true
	if text := commentText.Find(rule); text != nil {
		s.texts[textHash(t, text)] = true
	}
}

// parseSave parses the output of iptables-save for one or several tables, and ignores what does not
// belong to this package.
func parseSave(output []byte) saved {
	s := saved{chains: newChainHashes()}
	s.parse(output)
	return s
}

func (s *saved) parse(output []byte) {
	current := tables // a table of no interest
	var hashes map[string]*xxhash.Digest
	counts := map[string]int{}
	end := func() {
		for chain, h := range hashes {
			s.chains[current][chain] = chainHash{h.Sum64(), counts[chain]}
		}
		clear(counts)
	}
	for line := range bytes.Lines(output) {
		switch {
		case line[0] == '*':
			end()
			hashes, current = map[string]*xxhash.Digest{}, tables
			for t := range tables {
				if string(bytes.TrimSpace(line[1:])) == t.String() {
					current = t
				}
			}
		case current == tables:
		case line[0] == ':':
			name, rest, _ := strings.Cut(string(line[1:]), " ")
			if isOwn(name) {
				hashes[name] = xxhash.New()
			}
			s.drops = s.drops || current == filter && name == "FORWARD" && strings.HasPrefix(rest, "DROP ")
		case bytes.HasPrefix(line, []byte("-A ")):
			chain, _, _ := bytes.Cut(line[3:], []byte(" "))
			if h := hashes[string(chain)]; h != nil {
				line = unspaced(line)
				_, _ = h.Write(line)
				s.collect(current, line)
				counts[string(chain)]++
				s.counted = s.counted || bytes.Contains(line, []byte(" --nfacct-name "))
			} else if bytes.Contains(line, []byte(" -j "+ChainPrefix)) || bytes.Contains(line, []byte(" -g "+ChainPrefix)) {
				s.hooks = append(s.hooks, hook{current, strings.TrimSpace(string(line))})
			}
		}
	}
	end()
	for t := range tables {
		s.rules[t] = s.chains.rules(t)
	}
}

// unspaced returns a line of iptables-save with single spaces only. iptables 1.8.9 prints two
// spaces before the name of a counter. No comment of this package has two.
func unspaced(line []byte) []byte {
	twice := []byte("  ")
	if !bytes.Contains(line, twice) {
		return line
	}
	return bytes.ReplaceAll(line, twice, twice[:1])
}
