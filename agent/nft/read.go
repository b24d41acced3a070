package nft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/internal/model"
)

// request returns a request for objects of a kind.
func request(kind uint16, family byte) *netlink.Writer {
	m := &Messages{Table: Table{Family: Family{Number: family}}}
	m.End(m.begin(kind, 0))
	return &m.Writer
}

// requestOf returns a request for objects of a kind in a table, with the name of a part of it.
func requestOf(kind uint16, t Table, nameKind uint16, name string) *netlink.Writer {
	m := &Messages{Table: t}
	m.write(kind, 0, nameKind, name, nil)
	return &m.Writer
}

// read is netlink.Socket.Read with the attributes of each object.
func (c *Conn) read(w *netlink.Writer, reset func(), each func(attributes []byte)) error {
	return reading(c.Read(w, reset, func(m netlink.Message) { each(m.Attributes(genLen)) }))
}

// reading adds to an error that it occurred while reading.
func reading(err error) error {
	if e := (*netlink.Error)(nil); errors.As(err, &e) {
		e.Operation = "read the ruleset"
	}
	return err
}

// Tables returns the flags of all tables of an IP family, by name. A table with flags is dormant or
// has an owner. A kernel that lacks nf_tables or the family has none.
func (c *Conn) Tables(f Family) (map[string]uint32, error) {
	tables := map[string]uint32{}
	err := c.read(request(unix.NFT_MSG_GETTABLE, f.Number), func() { clear(tables) }, func(attributes []byte) {
		name := netlink.Text(netlink.Attribute(attributes, unix.NFTA_TABLE_NAME))
		tables[name] = netlink.BigUint32(netlink.Attribute(attributes, unix.NFTA_TABLE_FLAGS))
	})
	if isAny(err, lacking...) {
		return nil, nil
	}
	return tables, err
}

// lacking are the errors of a kernel that lacks nf_tables or an IP family, and so holds nothing.
var lacking = []unix.Errno{unix.EPROTONOSUPPORT, unix.EOPNOTSUPP, unix.EINVAL, unix.EAFNOSUPPORT}

// HeldChain is what the kernel holds of a chain: its Hook, and the hashes of its rules in their
// order. The hash of a rule that this package has not made is 0.
type HeldChain struct {
	Hook  Hook
	Rules []uint64
}

// Chains returns the chains of a table, by name.
func (c *Conn) Chains(t Table) (map[string]*HeldChain, error) {
	chains := map[string]*HeldChain{}
	err := c.eachChain(t, func() { clear(chains) }, func(name string, attributes []byte) { chains[name] = &HeldChain{Hook: hookOf(attributes)} })
	if err != nil {
		return nil, err
	}
	err = c.read(requestOf(unix.NFT_MSG_GETRULE, t, 0, ""), func() {
		for _, chain := range chains {
			chain.Rules = nil
		}
	}, func(attributes []byte) {
		if chain := chains[netlink.Text(netlink.Attribute(attributes, unix.NFTA_RULE_CHAIN))]; chain != nil {
			chain.Rules = append(chain.Rules, hashOf(netlink.Attribute(attributes, unix.NFTA_RULE_USERDATA)))
		}
	})
	return chains, err
}

// eachChain calls each with the name and the attributes of every chain of a table, after
// reset. It may begin anew.
func (c *Conn) eachChain(t Table, reset func(), each func(name string, attributes []byte)) error {
	return c.read(requestOf(unix.NFT_MSG_GETCHAIN, t, 0, ""), reset, func(attributes []byte) {
		// The kernel returns the chains of all tables.
		if netlink.Text(netlink.Attribute(attributes, unix.NFTA_CHAIN_TABLE)) == t.Name {
			each(netlink.Text(netlink.Attribute(attributes, unix.NFTA_CHAIN_NAME)), attributes)
		}
	})
}

func hookOf(attributes []byte) Hook {
	h := netlink.Attribute(attributes, unix.NFTA_CHAIN_HOOK)
	if h == nil {
		return Hook{}
	}
	return Hook{
		Kind:     netlink.Text(netlink.Attribute(attributes, unix.NFTA_CHAIN_TYPE)),
		Number:   netlink.BigUint32(netlink.Attribute(h, unix.NFTA_HOOK_HOOKNUM)),
		Priority: int32(netlink.BigUint32(netlink.Attribute(h, unix.NFTA_HOOK_PRIORITY))),
		Drops:    netlink.BigUint32(netlink.Attribute(attributes, unix.NFTA_CHAIN_POLICY)) != accept,
	}
}

// HeldSet is a set as the kernel holds it, for Definition.Is.
type HeldSet []byte

// Sets returns the sets and maps of a table, by name, without those that belong to a rule.
func (c *Conn) Sets(t Table) (map[string]HeldSet, error) {
	sets := map[string]HeldSet{}
	err := c.read(requestOf(unix.NFT_MSG_GETSET, t, 0, ""), func() { clear(sets) }, func(attributes []byte) {
		if netlink.BigUint32(netlink.Attribute(attributes, unix.NFTA_SET_FLAGS))&unix.NFT_SET_ANONYMOUS == 0 {
			sets[netlink.Text(netlink.Attribute(attributes, unix.NFTA_SET_NAME))] = bytes.Clone(attributes)
		}
	})
	return sets, err
}

// Element is an element of a set as the kernel holds it. It is valid only during the call that it
// is passed to.
type Element struct {
	// End is the last key of an interval. It is nil in other sets.
	Key, End []byte
	Data     []byte
	// Chain is the chain that the element goes to, or "".
	Chain   string
	Comment string
	// IsEnd and Verdict are as in HeldElement.
	IsEnd   bool
	Verdict HeldVerdict
}

// Elements calls each with every element of a set, some of them several times, until each has had
// all of them. each reports whether an element is new to it.
//
// For each message, the kernel walks the hash table again and skips as many elements as it sent
// before. If the table is resized meanwhile, which it is for a while after large changes, some
// elements are left out and as many are sent twice. Other changes do not matter, because nothing
// else changes this set.
func (c *Conn) Elements(t Table, set string, each func(Element) (isNew bool)) error {
	w := requestOf(unix.NFT_MSG_GETSETELEM, t, unix.NFTA_SET_ELEM_LIST_SET, set)
	distinct := 0
	for range netlink.Attempts {
		returned := 0
		err := c.Dump(w, func(m netlink.Message) {
			for _, e := range netlink.Attributes(netlink.Attribute(m.Attributes(genLen), unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
				returned++
				if each(elementOf(e)) {
					distinct++
				}
			}
		})
		if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
			return reading(err)
		}
		if returned == distinct {
			return nil
		}
	}
	return netlink.ErrInterrupted
}

func elementOf(b []byte) (e Element) {
	for kind, value := range netlink.Attributes(b) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = netlink.Attribute(value, unix.NFTA_DATA_VALUE)
		case elementKeyEnd:
			e.End = netlink.Attribute(value, unix.NFTA_DATA_VALUE)
		case unix.NFTA_SET_ELEM_DATA:
			e.Data = netlink.Attribute(value, unix.NFTA_DATA_VALUE)
			e.Verdict = VerdictOf(value)
			if uint32(e.Verdict.Kind) == verdictGoto {
				e.Chain = e.Verdict.Chain
			}
		case unix.NFTA_SET_ELEM_FLAGS:
			e.IsEnd = netlink.BigUint32(value)&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_USERDATA:
			e.Comment = commentOf(value)
		}
	}
	return e
}

// Generation returns the generation number of the ruleset in the network namespace of the calling
// thread. See Conn.Generation.
func Generation() (generation uint32, err error) {
	err = with(func(c *Conn) (err error) {
		generation, err = c.Generation()
		return err
	})
	return generation, err
}

// HasChain reports whether a table has a chain, in the network namespace of the calling thread. It
// reports false if the kernel lacks nf_tables.
func HasChain(family model.Family, table, chain string) (has bool, err error) {
	_, has, err = FindChain(family, table, chain)
	return has, err
}

// FindChain returns the hook of a table's chain, in the network namespace of the calling thread. It
// finds none if the kernel lacks nf_tables.
func FindChain(family model.Family, table, chain string) (hook Hook, exists bool, err error) {
	t := Table{FamilyOf(family), table}
	err = with(func(c *Conn) error {
		return c.Get(requestOf(unix.NFT_MSG_GETCHAIN, t, unix.NFTA_CHAIN_NAME, chain), func(m netlink.Message) {
			hook, exists = hookOf(m.Attributes(genLen)), true
		})
	})
	if err != nil && !errors.Is(err, unix.ENOENT) && !isAny(err, lacking...) {
		return Hook{}, false, fmt.Errorf("look for the %v chain %s in table %s of nf_tables: %w", family, chain, table, err)
	}
	return hook, exists, nil
}

// LastHandle returns the highest handle of a table's chain and its rules, in the network namespace
// of the calling thread. It grows whenever somebody makes the chain or a rule of it again. It is 0
// if there is no such chain.
func LastHandle(family model.Family, table, chain string) (last uint64, err error) {
	t := Table{FamilyOf(family), table}
	note := func(handle []byte) {
		if len(handle) == 8 {
			last = max(last, binary.BigEndian.Uint64(handle))
		}
	}
	err = with(func(c *Conn) error {
		err := c.Get(requestOf(unix.NFT_MSG_GETCHAIN, t, unix.NFTA_CHAIN_NAME, chain), func(m netlink.Message) {
			note(netlink.Attribute(m.Attributes(genLen), unix.NFTA_CHAIN_HANDLE))
		})
		if err != nil {
			return err
		}
		return c.read(requestOf(unix.NFT_MSG_GETRULE, t, unix.NFTA_RULE_CHAIN, chain), func() {}, func(attributes []byte) {
			if netlink.Text(netlink.Attribute(attributes, unix.NFTA_RULE_CHAIN)) == chain {
				note(netlink.Attribute(attributes, unix.NFTA_RULE_HANDLE))
			}
		})
	})
	if errors.Is(err, unix.ENOENT) || isAny(err, lacking...) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the handles of the %v chain %s in table %s of nf_tables: %w", family, chain, table, err)
	}
	return last, nil
}

func with(use func(*Conn) error) error {
	c, err := Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return use(c)
}
