package nftables

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
)

// changes are elements to add or remove, by set.
type changes struct {
	sets    [setCount]*nft.Elements
	touched []setID
}

func (c *changes) of(s setID) *nft.Elements {
	if c.sets[s] == nil {
		c.sets[s] = &nft.Elements{}
	}
	if len(c.sets[s].Buf) == 0 {
		c.touched = append(c.touched, s)
	}
	return c.sets[s]
}

// keptBuffer is how many bytes of a buffer are kept for the next transaction.
const keptBuffer = 1 << 18

func (c *changes) reset() {
	for _, s := range c.touched {
		if cap(c.sets[s].Buf) > keptBuffer {
			c.sets[s] = nil
			continue
		}
		c.sets[s].Reset()
	}
	c.touched = c.touched[:0]
}

// forget leaves the elements of a set out.
func (c *changes) forget(s setID) {
	if i := slices.Index(c.touched, s); i >= 0 {
		c.sets[s] = nil
		c.touched = slices.Delete(c.touched, i, i+1)
	}
}

// length returns about how many bytes add and remove append.
func (c *changes) length() (n int) {
	for _, s := range c.touched {
		n += c.sets[s].Length()
	}
	return n
}

func (c *changes) add(m *nft.Messages) {
	for _, s := range c.touched {
		m.AddElements(s.String(), c.sets[s])
	}
}

func (c *changes) remove(m *nft.Messages) {
	for _, s := range c.touched {
		m.RemoveElements(s.String(), c.sets[s])
	}
}

// script is what a transaction writes. Its fields are in the order in which they are written.
//
// Invariants:
//
//  1. Nothing leads to the elements of early before the transaction.
//  2. Nothing leads to the elements of late after it.
//  3. Whatever leads packets elsewhere is in define, removed, added and undefine.
//  4. One transaction creates chains before elements. For each rule that is added, the kernel looks
//     at all elements of the maps that the rule refers to.
type script struct {
	sets           nft.Messages // creates sets
	define         nft.Messages // creates chains and their rules
	early          changes
	removed, added changes
	undefine       nft.Messages // removes chains and sets
	late           changes
}

// reset empties the script, and keeps only the memory that a small one needs.
func (s *script) reset(t nft.Table) {
	for _, m := range []*nft.Messages{&s.sets, &s.define, &s.undefine} {
		*m = nft.Messages{Table: t}
	}
	for _, c := range []*changes{&s.early, &s.removed, &s.added, &s.late} {
		c.reset()
	}
}

// steps writes what leads packets elsewhere, apart from define.
func (s *script) steps(m *nft.Messages) {
	s.removed.remove(m)
	s.added.add(m)
	m.Append(&s.undefine)
}

// commitParts commits the prefix and the script in several transactions. Only what packets see at
// once is committed at once: see invariant 4 of family. If that alone is too long, nothing is
// committed.
func (s *script) commitParts(conn *nft.Conn, prefix *nft.Messages) error {
	var first, early, main, late nft.Messages
	for _, m := range []*nft.Messages{&first, &early, &main, &late} {
		m.Table = prefix.Table
	}
	first.Append(prefix, &s.sets)
	s.early.add(&early)
	main.Append(&s.define)
	s.steps(&main)
	s.late.remove(&late)
	if !conn.Fits(main.Batch()) {
		return &netlink.Error{Errno: unix.EMSGSIZE}
	}
	for _, m := range []*nft.Messages{&first, &early, &main, &late} {
		if err := conn.CommitParts(m); err != nil {
			return fmt.Errorf("%w: %w", errPartly, err)
		}
	}
	return nil
}

// errPartly reports that some transactions of a large change were committed and others were not.
var errPartly = errors.New("a large change was committed in part")
