package nft

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
)

// Reference is a rule that leads to a chain.
type Reference struct {
	// Chain is the chain that the rule is in, and Target the one that it leads to.
	Chain, Target string
	Handle        uint64
}

// FindChains returns the names of the chains of a table that own accepts, and the rules in other
// chains that lead to them. It does so whatever else the table holds: iptables' programs print
// nothing of a table with a rule that they do not know. exists reports whether the table exists.
func (c *Conn) FindChains(t Table, own func(chain string) bool) (names []string, refs []Reference, exists bool, _ error) {
	tables, err := c.Tables(t.Family)
	if err != nil {
		return nil, nil, false, err
	}
	if _, exists = tables[t.Name]; !exists {
		return nil, nil, false, nil
	}
	err = c.eachChain(t, func() { names = nil }, func(name string, _ []byte) {
		if own(name) {
			names = append(names, name)
		}
	})
	if err != nil || len(names) == 0 { // then no rule can lead to one
		return nil, nil, exists, err
	}
	slices.Sort(names)
	err = c.read(requestOf(unix.NFT_MSG_GETRULE, t, 0, ""), func() { refs = nil }, func(attributes []byte) {
		chain := netlink.Text(netlink.Attribute(attributes, unix.NFTA_RULE_CHAIN))
		if own(chain) {
			return
		}
		handle := netlink.Attribute(attributes, unix.NFTA_RULE_HANDLE)
		if target := targetOf(netlink.Attribute(attributes, unix.NFTA_RULE_EXPRESSIONS)); own(target) && len(handle) == 8 {
			refs = append(refs, Reference{chain, target, binary.BigEndian.Uint64(handle)})
		}
	})
	return slices.Compact(names), refs, exists, err
}

// targetOf returns the chain that the expressions of a rule lead to, or "".
func targetOf(expressions []byte) string {
	for _, e := range netlink.Attributes(expressions) {
		if netlink.Text(netlink.Attribute(e, unix.NFTA_EXPR_NAME)) == "immediate" {
			data := netlink.Attribute(netlink.Attribute(e, unix.NFTA_EXPR_DATA), unix.NFTA_IMMEDIATE_DATA)
			if v := VerdictOf(data); v.Chain != "" {
				return v.Chain
			}
		}
	}
	return ""
}

// RemoveReferences removes rules, at once.
func (c *Conn) RemoveReferences(t Table, refs []Reference) error {
	b := NewBatch(t)
	for _, r := range refs {
		b.write(unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, r.Chain, func() {
			b.Bytes(unix.NFTA_RULE_HANDLE, binary.BigEndian.AppendUint64(nil, r.Handle))
		})
	}
	return c.Commit(b)
}

// RemoveChains removes the chains of a table that own accepts, and the rules in other chains that
// lead to them. Everything else stays. It is no error if there is none.
func (c *Conn) RemoveChains(t Table, own func(chain string) bool) error {
	names, refs, _, err := c.FindChains(t, own)
	if err != nil || len(names) == 0 {
		return err
	}
	if err := c.RemoveReferences(t, refs); err != nil {
		return err
	}
	for _, remove := range []func(*Messages, string){(*Messages).RemoveRules, (*Messages).RemoveChain} {
		m := &Messages{Table: t}
		for _, name := range names {
			remove(m, name)
		}
		// Nothing leads to these chains any more, so they need not go at once.
		if err := c.CommitParts(m, PartLength); err != nil {
			return err
		}
	}
	return nil
}
