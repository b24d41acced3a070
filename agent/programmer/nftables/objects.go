package nftables

import (
	"golang.org/x/sys/unix"
)

// objects writes messages that add and remove parts of a table.
type objects struct {
	*dialect
	writer
}

func (o *objects) message(kind int, flags uint16, attrs func()) {
	at := o.writer.message(kind, flags, o.nfproto)
	attrs()
	o.end(at)
}

func (o *objects) addTable() {
	o.message(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func() { o.text(unix.NFTA_TABLE_NAME, o.table) })
}

func (o *objects) removeTable() {
	o.message(unix.NFT_MSG_DELTABLE, 0, func() { o.text(unix.NFTA_TABLE_NAME, o.table) })
}

// addChain adds a chain unless it exists.
func (o *objects) addChain(name string) {
	o.message(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func() {
		o.text(unix.NFTA_CHAIN_TABLE, o.table)
		o.text(unix.NFTA_CHAIN_NAME, name)
		if h, base := hooks[name]; base {
			at := o.nest(unix.NFTA_CHAIN_HOOK)
			o.uint32(unix.NFTA_HOOK_HOOKNUM, h.number)
			o.uint32(unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
			o.close(at)
			o.text(unix.NFTA_CHAIN_TYPE, h.kind)
		}
	})
}

// setRules replaces the rules of an existing chain.
func (o *objects) setRules(chain string, rules []rule) {
	o.removeRules(chain)
	for _, r := range rules {
		o.addRule(chain, r)
	}
}

// removeRules removes the rules of a chain. An empty name means all chains.
func (o *objects) removeRules(chain string) {
	o.message(unix.NFT_MSG_DELRULE, 0, func() {
		o.text(unix.NFTA_RULE_TABLE, o.table)
		if chain != "" {
			o.text(unix.NFTA_RULE_CHAIN, chain)
		}
	})
}

func (o *objects) addRule(chain string, r rule) {
	o.message(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func() {
		o.text(unix.NFTA_RULE_TABLE, o.table)
		o.text(unix.NFTA_RULE_CHAIN, chain)
		attrs, _ := o.encode(r)
		o.buf = append(o.buf, attrs...)
	})
}

func (o *objects) removeChain(name string) {
	o.message(unix.NFT_MSG_DELCHAIN, 0, func() {
		o.text(unix.NFTA_CHAIN_TABLE, o.table)
		o.text(unix.NFTA_CHAIN_NAME, name)
	})
}

func (o *objects) addSet(s setID) {
	o.message(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, func() {
		o.text(unix.NFTA_SET_TABLE, o.table)
		o.text(unix.NFTA_SET_NAME, s.String())
		// the kernel requires it, but only rules of the same transaction would refer to it
		o.uint32(unix.NFTA_SET_ID, uint32(s)+1)
		o.define(s).write(&o.writer)
	})
}

func (o *objects) removeSet(name string) {
	o.message(unix.NFT_MSG_DELSET, 0, func() {
		o.text(unix.NFTA_SET_TABLE, o.table)
		o.text(unix.NFTA_SET_NAME, name)
	})
}

// elements is a list of elements of one set, to be added or removed, encoded as attributes of
// messages.
type elements struct {
	writer
	// cuts are the positions in buf at which a new message begins, because an attribute cannot be
	// longer than 64 KiB.
	cuts []int
	open int // where the last message begins in buf
}

// maxElement is an upper bound for the length of an element in bytes.
const maxElement = 512

func (e *elements) begin() int {
	if len(e.buf)-e.open > maxAttrLen-maxElement {
		e.cuts = append(e.cuts, len(e.buf))
		e.open = len(e.buf)
	}
	return e.nest(unix.NFTA_LIST_ELEM)
}

// add appends an element. data is nil if the set has none, or if the element is to be removed.
func (e *elements) add(key, data []byte, comment string) {
	at := e.begin()
	e.value(unix.NFTA_SET_ELEM_KEY, key)
	if data != nil {
		e.value(unix.NFTA_SET_ELEM_DATA, data)
	}
	if comment != "" {
		userdata := make([]byte, 0, 2+maxComment+1)
		e.bytes(unix.NFTA_SET_ELEM_USERDATA, appendComment(userdata, comment))
	}
	e.close(at)
}

// addChain appends an element that leads to a chain.
func (e *elements) addChain(key []byte, chain string) {
	at := e.begin()
	e.value(unix.NFTA_SET_ELEM_KEY, key)
	data := e.nest(unix.NFTA_SET_ELEM_DATA)
	verdict := e.nest(unix.NFTA_DATA_VERDICT)
	e.uint32(unix.NFTA_VERDICT_CODE, verdictGoto)
	e.text(unix.NFTA_VERDICT_CHAIN, chain)
	e.close(verdict)
	e.close(data)
	e.close(at)
}

// verdictGoto is NFT_GOTO.
const verdictGoto = 0xfffffffc

func (e *elements) value(kind uint16, data []byte) {
	at := e.nest(kind)
	e.bytes(unix.NFTA_DATA_VALUE, data)
	e.close(at)
}

func (e *elements) reset() {
	e.buf, e.cuts, e.open = e.buf[:0], e.cuts[:0], 0
}

// write appends the messages that add the elements to a set or remove them, depending on kind.
func (e *elements) write(w *writer, kind int, d *dialect, s setID) {
	flags := uint16(0)
	if kind == unix.NFT_MSG_NEWSETELEM {
		flags = unix.NLM_F_CREATE
	}
	from := 0
	for i := range len(e.cuts) + 1 {
		to := len(e.buf)
		if i < len(e.cuts) {
			to = e.cuts[i]
		}
		at := w.message(kind, flags, d.nfproto)
		w.text(unix.NFTA_SET_ELEM_LIST_TABLE, d.table)
		w.text(unix.NFTA_SET_ELEM_LIST_SET, s.String())
		list := w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		w.buf = append(w.buf, e.buf[from:to]...)
		w.close(list)
		w.end(at)
		from = to
	}
}
