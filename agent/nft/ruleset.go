package nft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
)

// Held is everything that the kernel holds of a table of any program.
type Held struct {
	Table
	// Flags are NFT_TABLE_F_*. A dormant table does nothing.
	Flags  uint32
	Chains map[string]*HeldRules
	Sets   map[string]*HeldElements
}

// HeldRules are a chain's Hook and its rules, in their order.
type HeldRules struct {
	Hook Hook
	// Handle is higher than those of the table's older chains.
	Handle uint64
	Rules  []HeldRule
}

// HeldRule is a rule as the kernel holds it.
type HeldRule struct {
	Handle uint64
	// Expressions is the attribute NFTA_RULE_EXPRESSIONS.
	Expressions []byte
	Comment     string
}

// HeldElements are a set's or a map's definition and its elements.
type HeldElements struct {
	// Flags are NFT_SET_*. KeyType is nft's number for the type of keys; see Field.
	Flags, KeyType uint32
	// KeyLen and DataLen are in bytes.
	KeyLen, DataLen uint32
	// Timeout is how long elements last that name no timeout of their own; 0 means that they stay.
	Timeout time.Duration
	// Elements are in no particular order. They are not read of sets that packets change.
	Elements []HeldElement
}

// HeldElement is an element of a set that stays valid.
type HeldElement struct {
	// Key is the key, or the first key of an interval. End is the last key of an interval that has
	// several fields.
	Key, End string
	Data     string
	// IsEnd means that the interval which begins with an earlier key ends before Key.
	IsEnd bool
	// Verdict is what happens to packets that lead to the element. Kind is 0 in other maps.
	Verdict HeldVerdict
}

// HeldVerdict is the verdict of a rule or an element. Kind is NF_* or NFT_*.
type HeldVerdict struct {
	Kind  int32
	Chain string
	Valid bool
}

// Dynamic reports whether packets change the set.
func (h *HeldElements) Dynamic() bool {
	return h.Flags&(unix.NFT_SET_EVAL|unix.NFT_SET_TIMEOUT) != 0
}

// Inet returns the family of tables whose rules see packets of both IP families.
func (f Family) Inet() Family {
	f.Number = unix.NFPROTO_INET
	return f
}

// maxRereads is how often a ruleset that keeps changing is read.
const maxRereads = 5

// ReadTables returns the tables of families for which wanted returns true, as of one generation of
// the ruleset. If the ruleset keeps changing, it returns netlink.ErrInterrupted.
func (c *Conn) ReadTables(families []Family, wanted func(Table) bool) ([]*Held, error) {
	for range maxRereads {
		before, err := c.Generation()
		if err != nil {
			return nil, err
		}
		held, err := c.readTables(families, wanted)
		if err != nil && !errors.Is(err, netlink.ErrInterrupted) && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
		after, errAfter := c.Generation()
		if errAfter != nil {
			return nil, errAfter
		}
		if err == nil && before == after {
			return held, nil
		}
	}
	return nil, netlink.ErrInterrupted
}

func (c *Conn) readTables(families []Family, wanted func(Table) bool) (all []*Held, err error) {
	for _, f := range families {
		tables, err := c.Tables(f)
		if err != nil {
			return nil, err
		}
		for name, flags := range tables {
			t := Table{f, name}
			if !wanted(t) {
				continue
			}
			h := &Held{Table: t, Flags: flags, Chains: map[string]*HeldRules{}, Sets: map[string]*HeldElements{}}
			if err := c.readTable(h); err != nil {
				return nil, err
			}
			all = append(all, h)
		}
	}
	return all, nil
}

func (c *Conn) readTable(h *Held) error {
	err := c.eachChain(h.Table, func() { clear(h.Chains) }, func(name string, attributes []byte) {
		h.Chains[name] = &HeldRules{Hook: hookOf(attributes)}
		if handle := netlink.Attribute(attributes, unix.NFTA_CHAIN_HANDLE); len(handle) == 8 {
			h.Chains[name].Handle = binary.BigEndian.Uint64(handle)
		}
	})
	if err != nil {
		return err
	}
	err = c.read(requestOf(unix.NFT_MSG_GETRULE, h.Table, 0, ""), func() {
		for _, chain := range h.Chains {
			chain.Rules = nil
		}
	}, func(attributes []byte) {
		chain := h.Chains[netlink.Text(netlink.Attribute(attributes, unix.NFTA_RULE_CHAIN))]
		if chain == nil {
			return
		}
		r := HeldRule{
			Expressions: bytes.Clone(netlink.Attribute(attributes, unix.NFTA_RULE_EXPRESSIONS)),
			Comment:     commentOf(netlink.Attribute(attributes, unix.NFTA_RULE_USERDATA)),
		}
		if handle := netlink.Attribute(attributes, unix.NFTA_RULE_HANDLE); len(handle) == 8 {
			r.Handle = binary.BigEndian.Uint64(handle)
		}
		chain.Rules = append(chain.Rules, r)
	})
	if err != nil {
		return err
	}
	err = c.read(requestOf(unix.NFT_MSG_GETSET, h.Table, 0, ""), func() { clear(h.Sets) }, func(attributes []byte) {
		if netlink.Text(netlink.Attribute(attributes, unix.NFTA_SET_TABLE)) != h.Name {
			return
		}
		name := netlink.Text(netlink.Attribute(attributes, unix.NFTA_SET_NAME))
		h.Sets[name] = &HeldElements{
			Flags:   netlink.BigUint32(netlink.Attribute(attributes, unix.NFTA_SET_FLAGS)),
			KeyType: netlink.BigUint32(netlink.Attribute(attributes, unix.NFTA_SET_KEY_TYPE)),
			KeyLen:  netlink.BigUint32(netlink.Attribute(attributes, unix.NFTA_SET_KEY_LEN)),
			DataLen: netlink.BigUint32(netlink.Attribute(attributes, unix.NFTA_SET_DATA_LEN)),
		}
		if timeout := netlink.Attribute(attributes, unix.NFTA_SET_TIMEOUT); len(timeout) == 8 {
			h.Sets[name].Timeout = time.Duration(binary.BigEndian.Uint64(timeout)) * time.Millisecond
		}
	})
	if err != nil {
		return err
	}
	for name, set := range h.Sets {
		if set.Dynamic() {
			continue
		}
		if set.Elements, err = c.readSet(h.Table, name); err != nil {
			return err
		}
	}
	return nil
}

// readSet returns the elements of a set.
func (c *Conn) readSet(t Table, name string) ([]HeldElement, error) {
	type key struct {
		key, end string
		isEnd    bool
	}
	found := map[key]HeldElement{}
	err := c.Elements(t, name, func(e Element) (isNew bool) {
		held := HeldElement{Key: string(e.Key), End: string(e.End), Data: string(e.Data), IsEnd: e.IsEnd, Verdict: e.Verdict}
		k := key{held.Key, held.End, held.IsEnd}
		_, known := found[k]
		found[k] = held
		return !known
	})
	elements := make([]HeldElement, 0, len(found))
	for e := range maps.Values(found) {
		elements = append(elements, e)
	}
	return elements, err
}

// verdictOf decodes the content of a verdict's attribute.
func verdictOf(b []byte) HeldVerdict {
	code := netlink.Attribute(b, unix.NFTA_VERDICT_CODE)
	return HeldVerdict{
		Kind: int32(netlink.BigUint32(code)), Chain: netlink.Text(netlink.Attribute(b, unix.NFTA_VERDICT_CHAIN)),
		Valid: len(code) == 4,
	}
}

// VerdictOf decodes the verdict in an expression's data. It is not Valid if the data have none.
func VerdictOf(data []byte) HeldVerdict {
	return verdictOf(netlink.Attribute(data, unix.NFTA_DATA_VERDICT))
}
