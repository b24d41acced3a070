package nft

import (
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
)

// Table identifies a table.
type Table struct {
	Family
	Name string
}

// Messages are messages that change parts of a table. They take effect when they are committed.
type Messages struct {
	Table
	netlink.Writer
}

// Append adds other messages.
func (m *Messages) Append(others ...*Messages) {
	for _, o := range others {
		m.Buf = append(m.Buf, o.Buf...)
	}
}

// Batch returns a transaction with the messages.
func (m *Messages) Batch() *Batch {
	b := NewBatch(m.Table)
	b.Append(m)
	return b
}

func (m *Messages) begin(kind, flags uint16) (at int) {
	at = m.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags)
	m.Buf = append(m.Buf, m.Number, unix.NFNETLINK_V0, 0, 0)
	return at
}

// write writes a message with the table's name, whose attribute has the same number in all types of
// messages, and with the name of a part of it.
func (m *Messages) write(kind, flags, nameKind uint16, name string, rest func()) {
	at := m.begin(kind, flags)
	m.Text(unix.NFTA_TABLE_NAME, m.Name)
	if name != "" {
		m.Text(nameKind, name)
	}
	if rest != nil {
		rest()
	}
	m.End(at)
}

// AddTable adds the table unless it exists.
func (m *Messages) AddTable() { m.write(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, "", nil) }

// RemoveTable removes the table, which must exist.
func (m *Messages) RemoveTable() { m.write(unix.NFT_MSG_DELTABLE, 0, 0, "", nil) }

// AfterFilter is the priority of chains that drop what no proxy has led elsewhere or refused. Other
// proxies refuse packets at the priority 0, in nf_tables as in iptables' table filter. Of chains
// with the same priority, the kernel calls first the one that was registered last.
const AfterFilter int32 = 1

// Hook is where the kernel calls a base chain. The zero Hook is that of a chain which only others
// lead to.
type Hook struct {
	// Kind is nat or filter.
	Kind     string
	Number   uint32
	Priority int32
	// Drops means that the chain drops what passes it. It is so only in a chain that others
	// changed.
	Drops bool
}

// AddChain adds a chain unless it exists. A base chain accepts what passes it.
func (m *Messages) AddChain(name string, h Hook) {
	m.write(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME, name, func() {
		if h == (Hook{}) {
			return
		}
		at := m.Nest(unix.NFTA_CHAIN_HOOK)
		m.BigUint32(unix.NFTA_HOOK_HOOKNUM, h.Number)
		m.BigUint32(unix.NFTA_HOOK_PRIORITY, uint32(h.Priority))
		m.Close(at)
		m.BigUint32(unix.NFTA_CHAIN_POLICY, accept)
		m.Text(unix.NFTA_CHAIN_TYPE, h.Kind)
	})
}

// accept is NF_ACCEPT, and drop is NF_DROP.
const (
	drop   = 0
	accept = 1
)

// RemoveChain removes a chain, which must be empty and which nothing may lead to.
func (m *Messages) RemoveChain(name string) {
	m.write(unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, name, nil)
}

// SetRules replaces the rules of an existing chain.
func (m *Messages) SetRules(chain string, rules []Rule) {
	m.RemoveRules(chain)
	for _, r := range rules {
		m.AddRule(chain, r)
	}
}

// RemoveRules removes the rules of a chain. An empty name means all chains.
func (m *Messages) RemoveRules(chain string) {
	m.write(unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, chain, nil)
}

// AddRule appends a rule to a chain.
func (m *Messages) AddRule(chain string, r Rule) { m.rule(chain, r, unix.NLM_F_APPEND) }

// InsertRule adds a rule before the others of a chain.
func (m *Messages) InsertRule(chain string, r Rule) { m.rule(chain, r, 0) }

func (m *Messages) rule(chain string, r Rule, flags uint16) {
	m.write(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, unix.NFTA_RULE_CHAIN, chain, func() {
		attributes, _ := r.encode(m.Number)
		m.Buf = append(m.Buf, attributes...)
	})
}

// AddSet adds a set, which must not exist in another form.
func (m *Messages) AddSet(name string, d Definition) {
	m.write(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFTA_SET_NAME, name, func() {
		// The kernel requires an id, but only rules refer to it, and only for sets without a name.
		m.BigUint32(unix.NFTA_SET_ID, 1)
		d.write(&m.Writer)
	})
}

// RemoveSet removes a set, which no rule may refer to.
func (m *Messages) RemoveSet(name string) {
	m.write(unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, name, nil)
}

// AddElements adds elements to a set.
func (m *Messages) AddElements(set string, e *Elements) {
	m.elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, set, e)
}

// RemoveElements removes elements from a set, all of which must exist.
func (m *Messages) RemoveElements(set string, e *Elements) {
	m.elements(unix.NFT_MSG_DELSETELEM, 0, set, e)
}

func (m *Messages) elements(kind, flags uint16, set string, e *Elements) {
	from := 0
	for i := range len(e.cuts) + 1 {
		to := len(e.Buf)
		if i < len(e.cuts) {
			to = e.cuts[i]
		}
		at := m.begin(kind, flags)
		m.Text(unix.NFTA_SET_ELEM_LIST_TABLE, m.Name)
		m.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
		list := m.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		m.Buf = append(m.Buf, e.Buf[from:to]...)
		m.Close(list)
		m.End(at)
		from = to
	}
}

// Elements are elements of one set, to be added or removed, encoded as attributes of messages.
type Elements struct {
	netlink.Writer
	// cuts are the positions in Buf at which a new message begins, so that CommitParts can divide
	// the elements.
	cuts []int
	open int // where the last message begins in Buf
}

// maxList is the length in bytes from which on a list of elements gets no more of them. Its
// message, with the last element of up to 512 bytes, is no longer than PartLength.
const maxList = PartLength - 1<<10

func (e *Elements) begin() (at int) {
	if len(e.Buf)-e.open > maxList {
		e.cuts = append(e.cuts, len(e.Buf))
		e.open = len(e.Buf)
	}
	return e.Nest(unix.NFTA_LIST_ELEM)
}

// Add appends an element. data is nil if the set has none, or if the element is to be removed.
func (e *Elements) Add(key, data []byte, comment string) {
	at := e.begin()
	e.value(unix.NFTA_SET_ELEM_KEY, key)
	if data != nil {
		e.value(unix.NFTA_SET_ELEM_DATA, data)
	}
	e.comment(comment)
	e.Close(at)
}

// AddInterval appends an element of a set of intervals. end is the last key that belongs to it.
func (e *Elements) AddInterval(key, end []byte, comment string) {
	at := e.begin()
	e.value(unix.NFTA_SET_ELEM_KEY, key)
	e.value(elementKeyEnd, end)
	e.comment(comment)
	e.Close(at)
}

// elementKeyEnd is NFTA_SET_ELEM_KEY_END.
const elementKeyEnd = 10

// AddChain appends an element that leads to a chain.
func (e *Elements) AddChain(key []byte, chain string) {
	at := e.begin()
	e.value(unix.NFTA_SET_ELEM_KEY, key)
	data := e.Nest(unix.NFTA_SET_ELEM_DATA)
	verdict := e.Nest(unix.NFTA_DATA_VERDICT)
	e.BigUint32(unix.NFTA_VERDICT_CODE, verdictGoto)
	e.Text(unix.NFTA_VERDICT_CHAIN, chain)
	e.Close(verdict)
	e.Close(data)
	e.Close(at)
}

// verdictGoto is NFT_GOTO.
const verdictGoto = 0xfffffffc

func (e *Elements) value(kind uint16, data []byte) {
	at := e.Nest(kind)
	e.Bytes(unix.NFTA_DATA_VALUE, data)
	e.Close(at)
}

func (e *Elements) comment(comment string) {
	if comment != "" {
		userdata := make([]byte, 0, 2+MaxComment+1)
		e.Bytes(unix.NFTA_SET_ELEM_USERDATA, appendComment(userdata, comment))
	}
}

// Reset removes all elements and keeps the memory.
func (e *Elements) Reset() { e.Buf, e.cuts, e.open = e.Buf[:0], e.cuts[:0], 0 }

// Length returns about how many bytes AddElements and RemoveElements append.
func (e *Elements) Length() int { return len(e.Buf) + (len(e.cuts)+1)*(headerLen+64) }
