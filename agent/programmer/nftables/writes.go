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

// commitParts commits the prefix and the script in several transactions, most of which are short.
// Only what packets see at once is committed at once: see invariant 4 of family. If that alone is
// too long, nothing is committed.
//
// A script that only adds, or only removes, leaves no Service port without its elements in between
// if its sets are committed in order. So even that is committed in parts.
func (s *script) commitParts(conn *nft.Conn, prefix *nft.Messages) error {
	messages := func() *nft.Messages { return &nft.Messages{Table: prefix.Table} }
	first, early, main, late := messages(), messages(), messages(), messages()
	first.Append(prefix, &s.sets)
	s.early.add(early)
	s.late.remove(late)
	parts := []*nft.Messages{early}
	switch adds, removes := len(s.added.touched) > 0, len(s.removed.touched) > 0; {
	case !removes && len(s.undefine.Buf) == 0:
		first.Append(&s.define)
		for rank := range ranks {
			m := messages()
			s.added.ranked(rank, m.AddElements)
			parts = append(parts, m)
		}
	case !adds && len(s.define.Buf) == 0:
		for rank := range ranks {
			m := messages()
			s.removed.ranked(ranks-1-rank, m.RemoveElements)
			parts = append(parts, m)
		}
		main.Append(&s.undefine)
	default:
		main.Append(&s.define)
		s.steps(main)
	}
	if !conn.Fits(main.Batch()) {
		return &netlink.Error{Errno: unix.EMSGSIZE}
	}
	err := conn.CommitParts(first, conn.Limit)
	for _, m := range parts {
		if err == nil {
			err = conn.CommitParts(m, nft.PartLength)
		}
	}
	if err == nil {
		err = conn.Commit(main.Batch())
	}
	if err == nil {
		err = conn.CommitParts(late, nft.PartLength)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errPartly, err)
	}
	return nil
}

// ranked calls write with the elements of each set of a rank.
func (c *changes) ranked(rank int, write func(set string, e *nft.Elements)) {
	for _, s := range c.touched {
		if s.rank() == rank {
			write(s.String(), c.sets[s])
		}
	}
}

// shortTransaction is the length in bytes up to which a script is one transaction.
const shortTransaction = 2 * nft.PartLength

// errPartly reports that some transactions of a large change were committed and others were not.
var errPartly = errors.New("a large change was committed in part")
