package trace

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
)

// The expressions follow net/netfilter/nft_*.c of Linux.

// maxModulus is the largest number of results of a random number that are followed.
const maxModulus = 1 << 18

var errForm = errors.New("it is malformed")

// compileRule decodes a rule. What cannot be judged makes the rule unknown.
func (t *table) compileRule(c *chain, position int, h nft.HeldRule) *Rule {
	r := &Rule{Table: t.name, Chain: c.name, Position: position}
	w := &words{loaded: map[int]string{}, constants: map[int]constant{}}
	t.words = w
	for kind, content := range netlink.Attributes(h.Expressions) {
		if kind != unix.NFTA_LIST_ELEM {
			continue
		}
		name := netlink.Text(netlink.Attribute(content, unix.NFTA_EXPR_NAME))
		s, text, err := t.compile(name, netlink.Attribute(content, unix.NFTA_EXPR_DATA))
		if w.last() == outputInterface && err == nil {
			if c, ok := s.(compare); !ok || c.op > unix.NFT_CMP_NEQ || !bytes.Equal(c.data, nft.InterfaceName("lo")) {
				err = errOutput
			}
		}
		if err == nil {
			r.asksMark |= w.note(s, text)
		}
		if text == sourcePortWord && r.unknownOfClients == "" && r.unknown == "" {
			r.unknownOfClients = fmt.Sprintf("the expression %q cannot be judged: %v", name, errClientPort)
			r.certain = slices.Clone(r.steps)
		}
		w.all = append(w.all, cmp.Or(text, name))
		switch {
		case err != nil && r.unknown == "":
			if r.unknownOfClients == "" {
				r.certain = slices.Clone(r.steps)
			}
			r.unknown = fmt.Sprintf("the expression %q cannot be judged: %v", name, err)
			r.consequence.add(ofUnknown(name))
		case err != nil:
			r.consequence.add(ofUnknown(name))
		case s != nil:
			r.steps = append(r.steps, s)
		}
	}
	r.asksMore = w.asksMore
	if r.why() != "" {
		r.consequence.of(r.steps)
	}
	r.Text = w.String()
	if h.Comment != "" {
		r.Text += fmt.Sprintf(" %q", h.Comment)
	}
	return r
}

// ofUnknown returns what an expression that is not known may do, beside not matching.
func ofUnknown(name string) consequence {
	return consequence{
		drops:   name == "queue", // a program in user space decides
		changes: slices.Contains([]string{"synproxy", "tproxy", "nat", "redir", "target"}, name),
	}
}

// attributes decode the attributes of an expression.
type attributes struct {
	all []byte
	bad bool
}

func (a *attributes) number(kind uint16) uint32 {
	return netlink.BigUint32(netlink.Attribute(a.all, kind))
}

func (a *attributes) has(kind uint16) bool { return netlink.Attribute(a.all, kind) != nil }

func (a *attributes) text(kind uint16) string { return netlink.Text(netlink.Attribute(a.all, kind)) }

func (a *attributes) data(kind uint16) []byte {
	return bytes.Clone(netlink.Attribute(netlink.Attribute(a.all, kind), unix.NFTA_DATA_VALUE))
}

// register returns the offset of a register in run.regs, which has room for length bytes.
func (a *attributes) register(kind uint16, length int) int {
	n := int(a.number(kind))
	var at int
	switch {
	case n >= unix.NFT_REG_1 && n <= unix.NFT_REG_4:
		at = 16 * n
	case n >= unix.NFT_REG32_00 && n <= unix.NFT_REG32_15:
		at = 4 * (n - unix.NFT_REG32_00 + 4)
	default:
		a.bad = true
		return 0
	}
	if length > registers-at || length < 0 {
		a.bad = true
		return 0
	}
	return at
}

// compile decodes an expression. A nil step does nothing. text is empty if the name says it all.
func (t *table) compile(name string, b []byte) (s step, text string, err error) {
	a := &attributes{all: b}
	switch name {
	case "counter", "log", "last", "flow_offload": // an established flow is offloaded
		return nil, "", nil
	case "objref":
		return nil, "", named(a)
	case "notrack":
		s = notrack{}
	case "payload":
		s, text, err = t.payload(a)
	case "meta":
		s, text, err = t.meta(a)
	case "ct":
		s, text, err = t.ct(a)
	case "fib":
		s, text, err = t.fib(a)
	case "cmp":
		data := a.data(unix.NFTA_CMP_DATA)
		op := a.number(unix.NFTA_CMP_OP)
		from := a.register(unix.NFTA_CMP_SREG, len(data))
		s = compare{from, op, data}
		text = [...]string{"==", "!=", "<", "<=", ">", ">="}[min(op, 5)] + " " + valueText(t.words.loaded[from], data)
		a.bad = a.bad || op > unix.NFT_CMP_GTE
	case "range":
		from, to := a.data(unix.NFTA_RANGE_FROM_DATA), a.data(unix.NFTA_RANGE_TO_DATA)
		at, inverted := a.register(unix.NFTA_RANGE_SREG, len(from)), a.number(unix.NFTA_RANGE_OP) != unix.NFT_RANGE_EQ
		s = within{at, from, to, inverted}
		text = valueText(t.words.loaded[at], from) + "-" + valueText(t.words.loaded[at], to)
		if inverted {
			text = "!= " + text
		}
		a.bad = a.bad || len(from) != len(to)
	case "bitwise":
		s, text, err = t.bitwise(a)
	case "immediate":
		s, text, err = t.immediate(a)
	case "lookup":
		s, text, err = t.lookup(a)
	case "numgen":
		s, text, err = numgen(a)
	case "nat":
		s, text, err = t.nat(a)
	case "masq":
		s = masquerade{}
	case "reject":
		s = verdict{result{kind: reject}}
	case "dynset":
		s, text, err = t.dynset(a)
	case "match":
		s, text, err = t.match(a)
	default:
		return nil, "", errors.New("it is not known")
	}
	if err == nil && a.bad {
		err = errForm
	}
	return s, text, err
}

// match decodes a match of iptables, in a chain that iptables does not print because it has rules
// that iptables does not know. Others are not known: most chains are printed.
func (t *table) match(a *attributes) (step, string, error) {
	name, info := a.text(unix.NFTA_MATCH_NAME), netlink.Attribute(a.all, unix.NFTA_MATCH_INFO)
	// These are the fields of the kernel's struct xt_conntrack_mtinfo3, and what it asks.
	const flags, inverted, states, onlyStates = 146, 148, 150, 1
	switch {
	case name == "comment":
		return nil, "", nil
	case name == "conntrack" && a.number(unix.NFTA_MATCH_REV) == 3 && len(info) > states+2 &&
		binary.NativeEndian.Uint16(info[flags:]) == onlyStates && binary.NativeEndian.Uint16(info[inverted:]) == 0:
		mask := uint32(binary.NativeEndian.Uint16(info[states:]))
		return matcher{matches: func(x *run, s *state) bool { return ctState(x, s)&mask != 0 }}, fmt.Sprintf("ct state & %#x != 0x0", mask), nil
	}
	return nil, "", fmt.Errorf("the match %q of iptables is not known here", name)
}

// named returns an error unless a rule's reference to an object by name does nothing to a packet.
func named(a *attributes) error {
	switch a.number(unix.NFTA_OBJREF_IMM_TYPE) {
	case unix.NFT_OBJECT_COUNTER, unix.NFT_OBJECT_CT_HELPER, unix.NFT_OBJECT_CT_TIMEOUT, unix.NFT_OBJECT_CT_EXPECT, unix.NFT_OBJECT_SECMARK:
		return nil
	}
	return errors.New("what it refers to by name may not match or not let packets pass")
}

// store writes a value to registers, and fills up the last one.
func (x *run) store(at int, value []byte) {
	n := copy(x.regs[at:], value)
	for ; n%4 != 0 && at+n < registers; n++ {
		x.regs[at+n] = 0
	}
}

func (x *run) storeNumber(at int, n uint32) { binary.NativeEndian.PutUint32(x.regs[at:], n) }

func (x *run) number(at int) uint32 { return binary.NativeEndian.Uint32(x.regs[at:]) }

// load is a step that stores a value in registers.
type load struct {
	to    int
	value func(x *run, s *state) ([]byte, bool)
}

func (l load) do(x *run, s *state) result {
	if value, ok := l.value(x, s); ok {
		x.store(l.to, value)
		return result{kind: goOn}
	}
	return result{}
}

func numbered(value func(x *run, s *state) uint32) func(*run, *state) ([]byte, bool) {
	return func(x *run, s *state) ([]byte, bool) {
		return binary.NativeEndian.AppendUint32(x.scratch[:0], value(x, s)), true
	}
}

func (t *table) payload(a *attributes) (step, string, error) {
	base, offset, length := a.number(unix.NFTA_PAYLOAD_BASE), a.number(unix.NFTA_PAYLOAD_OFFSET), a.number(unix.NFTA_PAYLOAD_LEN)
	if a.has(unix.NFTA_PAYLOAD_SREG) {
		return nil, "", errors.New("it changes the packet")
	}
	unspecified := netip.IPv4Unspecified()
	if t.Family == model.IPv6 {
		unspecified = netip.IPv6Unspecified()
	}
	probe := &run{packet: Packet{Destination: netip.AddrPortFrom(unspecified, 0), Source: unspecified}}
	probe.setHeaders()
	probe.setDestination(&state{to: probe.packet.Destination})
	from := func(x *run) *headers { return &x.network }
	switch base {
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		from = func(x *run) *headers { return &x.transport }
	default:
		return nil, "", errors.New("it reads a part of the packet that is not known")
	}
	text := payloadText(t.Family, base == unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset, length)
	if _, ok := from(probe).get(offset, length); !ok {
		return nil, "", errors.New("it reads a part of the packet that is not known")
	}
	return load{a.register(unix.NFTA_PAYLOAD_DREG, int(length)), func(x *run, _ *state) ([]byte, bool) {
		return from(x).get(offset, length)
	}}, text, nil
}

func (t *table) meta(a *attributes) (step, string, error) {
	key := a.number(unix.NFTA_META_KEY)
	if a.has(unix.NFTA_META_SREG) {
		switch key {
		case unix.NFT_META_MARK:
		case unix.NFT_META_PRIORITY, unix.NFT_META_NFTRACE, unix.NFT_META_SECMARK:
			return nil, "", nil
		default:
			return nil, "", fmt.Errorf("it sets key %d of meta", key)
		}
		from := a.register(unix.NFTA_META_SREG, 4)
		return setMark{from, false}, strings.TrimSpace("set mark " + t.words.use(from, 4, markWord)), nil
	}
	var value func(x *run, s *state) ([]byte, bool)
	var text string
	length := 4
	switch key {
	case unix.NFT_META_MARK:
		value, text = numbered(func(_ *run, s *state) uint32 { return s.mark }), markWord
	case unix.NFT_META_L4PROTO:
		value = func(x *run, _ *state) ([]byte, bool) {
			return append(x.scratch[:0], protocolNumber(x.packet.Protocol)), true
		}
		text = protocolWord
	case unix.NFT_META_NFPROTO:
		value = func(x *run, _ *state) ([]byte, bool) {
			if x.packet.Family() == model.IPv6 {
				return []byte{unix.NFPROTO_IPV6}, true
			}
			return []byte{unix.NFPROTO_IPV4}, true
		}
		text = familyWord
	case unix.NFT_META_IIFNAME:
		length = unix.IFNAMSIZ
		value = func(x *run, _ *state) ([]byte, bool) {
			name := x.scratch[:unix.IFNAMSIZ]
			clear(name)
			if x.hooked != unix.NF_INET_POST_ROUTING {
				copy(name[:unix.IFNAMSIZ-1], x.over)
			}
			return name, true
		}
		text = inputInterface
	case unix.NFT_META_OIFNAME:
		// It is known only whether it is lo; see compileRule.
		length, text = unix.IFNAMSIZ, outputInterface
		value = func(x *run, s *state) ([]byte, bool) {
			name := x.scratch[:unix.IFNAMSIZ]
			clear(name)
			if x.sent && x.rules.facts.local(s.to.Addr()) {
				copy(name, "lo")
			}
			return name, true
		}
	default:
		return nil, "", fmt.Errorf("it reads key %d of meta", key)
	}
	return load{a.register(unix.NFTA_META_DREG, length), value}, text, nil
}

// setMark sets the mark of the packet or of the connection.
type setMark struct {
	from       int
	connection bool
}

func (m setMark) do(x *run, s *state) result {
	switch {
	case !m.connection:
		s.mark = x.number(m.from)
	case x.tracking(s).known():
		s.ctMark = x.number(m.from)
	}
	return result{kind: goOn}
}

func (t *table) ct(a *attributes) (step, string, error) {
	key := a.number(unix.NFTA_CT_KEY)
	if a.has(unix.NFTA_CT_SREG) {
		if key != unix.NFT_CT_MARK {
			return nil, "", fmt.Errorf("it sets key %d of ct", key)
		}
		from := a.register(unix.NFTA_CT_SREG, 4)
		return setMark{from, true}, strings.TrimSpace("set ct mark " + t.words.use(from, 4, ctMarkWord)), nil
	}
	var value func(*run, *state) uint32
	var text string
	switch key {
	case unix.NFT_CT_STATE:
		text = ctStateWord
		value = ctState
	case unix.NFT_CT_STATUS:
		value, text = func(_ *run, s *state) uint32 {
			if s.translated && !s.balanced() {
				return nft.CtStatusDNAT
			}
			return 0
		}, ctStatusWord
	case unix.NFT_CT_DIRECTION:
		value, text = func(x *run, _ *state) uint32 {
			if x.answers {
				return 1
			}
			return 0
		}, "ct direction"
	case unix.NFT_CT_MARK:
		value, text = func(_ *run, s *state) uint32 { return s.ctMark }, ctMarkWord
	default:
		return nil, "", fmt.Errorf("it reads key %d of ct", key)
	}
	return load{a.register(unix.NFTA_CT_DREG, 4), func(x *run, s *state) ([]byte, bool) {
		if key != unix.NFT_CT_STATE && !x.tracking(s).known() {
			return nil, false // the kernel leaves the rule
		}
		return binary.NativeEndian.AppendUint32(x.scratch[:0], value(x, s)), true
	}}, text, nil
}

// ctState returns the packet's state as conntrack has it.
func ctState(x *run, s *state) uint32 {
	return [...]uint32{tracked: nft.CtStateNew, untracked: ctStateUntracked, invalid: nft.CtStateInvalid, established: ctStateEstablished}[x.tracking(s)]
}

// ctStateEstablished is the state of answers.
const ctStateEstablished = 1 << 1

// ctStateUntracked is the state of packets that conntrack does not track.
const ctStateUntracked = 1 << 6

func (t *table) fib(a *attributes) (step, string, error) {
	flags, result := a.number(unix.NFTA_FIB_FLAGS), a.number(unix.NFTA_FIB_RESULT)
	if flags&unix.NFTA_FIB_F_SADDR != 0 && flags&unix.NFTA_FIB_F_IIF != 0 && result != unix.NFT_FIB_RESULT_ADDRTYPE {
		// Packets come from where the routes to their sources lead; see the package comment.
		return load{a.register(unix.NFTA_FIB_DREG, 4), func(*run, *state) ([]byte, bool) {
			return []byte{1, 0, 0, 0}, true // an index, or that there is one
		}}, "route to the source", nil
	}
	if result != unix.NFT_FIB_RESULT_ADDRTYPE || flags != unix.NFTA_FIB_F_SADDR && flags != unix.NFTA_FIB_F_DADDR {
		return nil, "", errors.New("it asks the routes for something else than the type of an address")
	}
	text := destinationType
	if flags == unix.NFTA_FIB_F_SADDR {
		text = sourceType
	}
	return load{a.register(unix.NFTA_FIB_DREG, 4), numbered(func(x *run, s *state) uint32 {
		address := s.to.Addr()
		if flags == unix.NFTA_FIB_F_SADDR {
			address = x.packet.Source
		}
		return x.rules.facts.kind(address)
	})}, text, nil
}

// kind returns the kernel's type of an address (RTN_*).
func (f Facts) kind(a netip.Addr) uint32 {
	switch {
	case f.local(a):
		return unix.RTN_LOCAL
	case a.IsMulticast():
		return unix.RTN_MULTICAST
	}
	return unix.RTN_UNICAST
}

// compare matches if a comparison is true.
type compare struct {
	from int
	op   uint32
	data []byte
}

func (c compare) do(x *run, s *state) result {
	d := bytes.Compare(x.regs[c.from:c.from+len(c.data)], c.data)
	if [...]bool{d == 0, d != 0, d < 0, d <= 0, d > 0, d >= 0}[c.op] {
		return result{kind: goOn}
	}
	return result{}
}

// within matches if a value is in a range.
type within struct {
	at       int
	from, to []byte
	inverted bool
}

func (w within) do(x *run, s *state) result {
	value := x.regs[w.at : w.at+len(w.from)]
	if (bytes.Compare(value, w.from) >= 0 && bytes.Compare(value, w.to) <= 0) != w.inverted {
		return result{kind: goOn}
	}
	return result{}
}

// masked is a bitwise operation.
type masked struct {
	from, to  int
	mask, xor []byte
}

func (m masked) do(x *run, s *state) result {
	var value [registers]byte
	for i := range m.mask {
		value[i] = x.regs[m.from+i]&m.mask[i] ^ m.xor[i]
	}
	x.store(m.to, value[:len(m.mask)])
	return result{kind: goOn}
}

// bitwiseOp is NFTA_BITWISE_OP. Its value 0 is "and, then xor".
const bitwiseOp = 6

func (t *table) bitwise(a *attributes) (step, string, error) {
	if op := a.number(bitwiseOp); op != 0 {
		return nil, "", fmt.Errorf("it is operation %d", op)
	}
	m := masked{mask: a.data(unix.NFTA_BITWISE_MASK), xor: a.data(unix.NFTA_BITWISE_XOR)}
	if len(m.mask) != len(m.xor) {
		return nil, "", errForm
	}
	m.from, m.to = a.register(unix.NFTA_BITWISE_SREG, len(m.mask)), a.register(unix.NFTA_BITWISE_DREG, len(m.mask))
	of := t.words.loaded[m.from]
	text := "& " + valueText(of, m.mask)
	if slices.ContainsFunc(m.xor, func(b byte) bool { return b != 0 }) {
		text += " ^ " + valueText(of, m.xor)
	}
	return m, text, nil
}

// verdict ends a rule.
type verdict struct{ result }

func (v verdict) do(*run, *state) result { return v.result }

// resultTexts are what resultKinds do.
var resultTexts = [...]string{miss: "break", goOn: "continue", accept: "accept", drop: "drop", reject: "reject", leave: "return", call: "jump", jump: "goto", branches: ""}

func (r result) text() string {
	if r.chain != nil {
		return resultTexts[r.kind] + " " + r.chain.name
	}
	return resultTexts[r.kind]
}

func (t *table) immediate(a *attributes) (step, string, error) {
	if a.number(unix.NFTA_IMMEDIATE_DREG) == unix.NFT_REG_VERDICT {
		v := nft.VerdictOf(netlink.Attribute(a.all, unix.NFTA_IMMEDIATE_DATA))
		r, ok := t.verdict(v)
		if !ok || !v.Valid {
			return nil, "", fmt.Errorf("its verdict is %d", v.Kind)
		}
		return verdict{r}, r.text(), nil
	}
	data := a.data(unix.NFTA_IMMEDIATE_DATA)
	value := func(*run, *state) ([]byte, bool) { return data, true }
	to := a.register(unix.NFTA_IMMEDIATE_DREG, len(data))
	t.words.constant(to, data)
	return load{to, value}, fmt.Sprintf("0x%x", data), nil
}

// find looks a key up in a set or map.
type find struct {
	set      *set
	key, to  int
	length   int
	table    string
	isMap    bool
	verdicts bool
	inverted bool
}

func (f find) do(x *run, s *state) result {
	key := string(x.regs[f.key : f.key+f.length])
	if f.set.dynamic {
		data, ok := s.memory.find(f.table+" "+f.set.name, key)
		if ok != f.inverted {
			if f.isMap {
				x.store(f.to, []byte(data))
			}
			return result{kind: goOn}
		}
		return result{}
	}
	e := f.set.find(key)
	switch {
	case (e != nil) == f.inverted:
		return result{}
	case f.verdicts:
		return e.verdict
	case f.isMap:
		x.store(f.to, []byte(e.data))
	}
	return result{kind: goOn}
}

func (t *table) lookup(a *attributes) (step, string, error) {
	name := a.text(unix.NFTA_LOOKUP_SET)
	s := t.sets[name]
	if s == nil {
		return nil, "", fmt.Errorf("it uses the set %q, which does not exist", name)
	}
	f := find{
		set: s, table: t.name, isMap: a.has(unix.NFTA_LOOKUP_DREG), length: s.keyLen,
		inverted: a.number(unix.NFTA_LOOKUP_FLAGS)&unix.NFT_LOOKUP_F_INV != 0,
	}
	f.key = a.register(unix.NFTA_LOOKUP_SREG, f.length)
	longest := 0
	if f.isMap {
		f.verdicts = a.number(unix.NFTA_LOOKUP_DREG) == unix.NFT_REG_VERDICT
		for e := range s.elements() {
			longest = max(longest, len(e.data))
			if f.verdicts && !e.valid {
				return nil, "", fmt.Errorf("map %q has a verdict that is not known", name)
			}
		}
		if !f.verdicts {
			f.to = a.register(unix.NFTA_LOOKUP_DREG, longest)
		}
	}
	if s.isRange && s.fields == nil {
		return nil, "", fmt.Errorf("the intervals of set %q have fields of a type that is not known", name)
	}
	if f.inverted {
		return f, "lookup != @" + name, nil
	}
	return f, "lookup @" + name, nil
}

// random draws a number.
type random struct {
	to              int
	modulus, offset uint32
}

func (random) do(*run, *state) result { return result{kind: branches} }

func (r random) branch(x *run, s state, next func(*state, result)) {
	s.probability /= float64(r.modulus)
	before, one := x.regs, s
	for i := range r.modulus {
		one, x.regs = s, before
		x.storeNumber(r.to, i+r.offset)
		next(&one, result{kind: goOn})
	}
}

func numgen(a *attributes) (step, string, error) {
	r := random{a.register(unix.NFTA_NG_DREG, 4), a.number(unix.NFTA_NG_MODULUS), a.number(unix.NFTA_NG_OFFSET)}
	if r.modulus == 0 || r.modulus > maxModulus {
		return nil, "", fmt.Errorf("it chooses from %d numbers", r.modulus)
	}
	return r, fmt.Sprintf("numgen mod %d", r.modulus), nil
}

// dnat translates the destination.
type dnat struct{ address, port, length int }

func (d dnat) do(x *run, s *state) result {
	to, _ := netip.AddrFromSlice(x.regs[d.address : d.address+d.length])
	port := s.to.Port()
	if d.port > 0 {
		port = binary.BigEndian.Uint16(x.regs[d.port:])
	}
	s.to, s.translated = netip.AddrPortFrom(to, port), true
	return result{kind: accept}
}

func (t *table) nat(a *attributes) (step, string, error) {
	switch {
	case a.number(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_SNAT:
		return masquerade{}, "snat", nil
	case a.number(unix.NFTA_NAT_REG_ADDR_MIN) != a.number(unix.NFTA_NAT_REG_ADDR_MAX) && a.has(unix.NFTA_NAT_REG_ADDR_MAX),
		a.number(unix.NFTA_NAT_REG_PROTO_MIN) != a.number(unix.NFTA_NAT_REG_PROTO_MAX) && a.has(unix.NFTA_NAT_REG_PROTO_MAX):
		return nil, "", errors.New("it translates to a range")
	case !a.has(unix.NFTA_NAT_REG_ADDR_MIN):
		return nil, "", errors.New("it translates only the port")
	}
	d := dnat{length: nft.FamilyOf(t.Family).Address.Length}
	d.address = a.register(unix.NFTA_NAT_REG_ADDR_MIN, d.length)
	if a.has(unix.NFTA_NAT_REG_PROTO_MIN) {
		d.port = a.register(unix.NFTA_NAT_REG_PROTO_MIN, 4)
	}
	text := "dnat"
	if to := t.words.use(d.address, d.length, destinationAddress); to != "" {
		text += " to " + to
	}
	if port := t.words.use(d.port, 2, destinationPort); d.port > 0 && port != "" {
		text += " port " + port
	}
	return d, text, nil
}

// masquerade translates the source.
type masquerade struct{}

func (masquerade) do(x *run, s *state) result {
	if x.current.Foreign && x.packet.ProxyOnly {
		return result{}
	}
	s.masqueraded, s.masqueradedBy = true, x.current
	return result{kind: accept}
}

// remember adds an element to a set, or removes it.
type remember struct {
	set             *set
	table           string
	key, data       int
	length, dataLen int
	timeout         time.Duration
	remove          bool
}

func (r remember) do(x *run, s *state) result {
	key := string(x.regs[r.key : r.key+r.length])
	if x.packet.Forgetful && !r.remove {
		return result{}
	}
	one := remembered{set: r.table + " " + r.set.name, key: key, timeout: r.timeout, forgotten: r.remove}
	if r.remove {
		if _, known := s.memory.find(one.set, key); !known {
			return result{kind: goOn}
		}
	} else if r.dataLen > 0 {
		one.data = string(x.regs[r.data : r.data+r.dataLen])
	}
	s.memory = s.memory.put(one)
	return result{kind: goOn}
}

func (t *table) dynset(a *attributes) (step, string, error) {
	name := a.text(unix.NFTA_DYNSET_SET_NAME)
	s := t.sets[name]
	if s == nil || !s.dynamic {
		return nil, "", fmt.Errorf("it changes the set %q, which does not exist or which packets do not change", name)
	}
	const remove = 2 // NFT_DYNSET_OP_DELETE
	op := a.number(unix.NFTA_DYNSET_OP)
	if op > remove {
		return nil, "", fmt.Errorf("it is operation %d", op)
	}
	r := remember{set: s, table: t.name, length: s.keyLen, remove: op == remove}
	r.key = a.register(unix.NFTA_DYNSET_SREG_KEY, s.keyLen)
	if a.has(unix.NFTA_DYNSET_SREG_DATA) {
		r.dataLen = s.dataLen
		r.data = a.register(unix.NFTA_DYNSET_SREG_DATA, s.dataLen)
	}
	if b := netlink.Attribute(a.all, unix.NFTA_DYNSET_TIMEOUT); len(b) == 8 {
		r.timeout = time.Duration(binary.BigEndian.Uint64(b)) * time.Millisecond
	}
	if r.timeout == 0 {
		r.timeout = s.timeout
	}
	return r, [...]string{"add to", "update", "delete from"}[op] + " @" + name, nil
}
