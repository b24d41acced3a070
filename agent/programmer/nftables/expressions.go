package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cespare/xxhash/v2"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// rule is the content of a rule: expressions that the kernel evaluates in order.
type rule struct {
	exprs   []expr.Any
	comment string
}

// encode returns a rule's attributes as the kernel expects them, and a hash of its expressions. The
// kernel returns rules in a form of its own but keeps user data, which holds the hash. So an equal
// hash means that the rule is still the same.
func (d *dialect) encode(r rule) (attrs []byte, hash uint64) {
	w := &writer{}
	at := w.nest(unix.NFTA_RULE_EXPRESSIONS)
	for _, e := range r.exprs {
		b, err := expr.Marshal(d.nfproto, e)
		if err != nil {
			panic(fmt.Sprintf("encode %T: %v", e, err))
		}
		w.bytes(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
	}
	w.close(at)
	hash = xxhash.Sum64(w.buf)
	var userdata []byte
	if r.comment != "" {
		userdata = appendComment(userdata, r.comment)
	}
	w.bytes(unix.NFTA_RULE_USERDATA, binary.BigEndian.AppendUint64(append(userdata, userdataHash, 8), hash))
	return w.buf, hash
}

// do returns a rule with the expressions of all parts.
func do(parts ...[]expr.Any) rule { return rule{exprs: slices.Concat(parts...)} }

func (r rule) because(comment string) rule {
	r.comment = comment
	return r
}

// registers is the number of registers that a rule has, of 4 bytes each. A longer value occupies
// several registers, starting at the given one. Since 6.4, the kernel refuses rules that read a
// register which they have not written, so no value is passed from rule to rule.
const registers = 16

// register returns the kernel's number for the nth register, counted from 0.
func register(n int) uint32 { return unix.NFT_REG32_00 + uint32(n) }

// words returns the number of registers that an address occupies.
func (d *dialect) words() int { return d.address.length / 4 }

// keyWords returns the number of registers that a frontend's key occupies.
func (d *dialect) keyWords() int { return d.words() + 2 }

func (d *dialect) source(to int) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: register(to), Base: expr.PayloadBaseNetworkHeader, Offset: d.saddr, Len: uint32(d.address.length)}}
}

func (d *dialect) destination(to int) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: register(to), Base: expr.PayloadBaseNetworkHeader, Offset: d.daddr, Len: uint32(d.address.length)}}
}

func protocol(to int) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register(to)}}
}

// nodePortKey loads the protocol and the destination port. key loads the destination address before
// them.
func nodePortKey(to int) []expr.Any {
	return append(protocol(to), &expr.Payload{DestRegister: register(to + 1), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
}

func (d *dialect) key(to int) []expr.Any {
	return append(d.destination(to), nodePortKey(to+d.words())...)
}

// lookup replaces a key by its value in a map. If the map does not hold the key, the rule ends.
func lookup(s setID, key, to int) []expr.Any {
	return []expr.Any{&expr.Lookup{SetName: s.String(), SourceRegister: register(key), DestRegister: register(to), IsDestRegSet: true}}
}

// lookupInteger looks up an integer that is part of another lookup's key. No version of nft so far
// (1.1.6) can list such a rule: it does not know how long the first lookup's result is, and aborts.
// So the integer goes through the packet's mark, whose length nft knows. The mark is restored in
// the same rule, before anything else can see it.
func lookupInteger(s setID, key, to int) []expr.Any {
	const saved = registers - 1
	mark := func(n int, set bool) expr.Any {
		return &expr.Meta{Key: expr.MetaKeyMARK, Register: register(n), SourceRegister: set}
	}
	return append(lookup(s, key, to), mark(saved, false), mark(to, true), mark(to, false), mark(saved, true))
}

// lookupChain goes to the chain that a map holds for the key in register 0.
func lookupChain(s setID) []expr.Any {
	return []expr.Any{&expr.Lookup{SetName: s.String(), SourceRegister: register(0), DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true}}
}

// in ends the rule if a set does not hold the key in register 0.
func in(s setID) []expr.Any {
	return []expr.Any{&expr.Lookup{SetName: s.String(), SourceRegister: register(0)}}
}

// compare ends the rule if the comparison of register 0 with data is false.
func compare(op expr.CmpOp, data []byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: op, Register: register(0), Data: data}}
}

func verdict(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: kind, Chain: chain}}
}

func jump(chain string) []expr.Any   { return verdict(expr.VerdictJump, chain) }
func gotoTo(chain string) []expr.Any { return verdict(expr.VerdictGoto, chain) }
func drop() []expr.Any               { return verdict(expr.VerdictDrop, "") }

// mask returns n bytes of which the first bits are set.
func mask(bits, n int) []byte {
	b := make([]byte, n)
	for i := range bits {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return b
}

// masked keeps only the first bits of the address in register n.
func (d *dialect) masked(n, bits int) []expr.Any {
	return []expr.Any{&expr.Bitwise{
		SourceRegister: register(n), DestRegister: register(n), Len: uint32(d.address.length),
		Mask: mask(bits, d.address.length), Xor: make([]byte, d.address.length),
	}}
}

// inPrefix ends the rule if the address that load loads is not in a prefix. With CmpOpNeq, it ends
// the rule if the address is in the prefix. A prefix of length 0 matches everything.
func (d *dialect) inPrefix(load func(int) []expr.Any, op expr.CmpOp, p netip.Prefix) []expr.Any {
	switch p = p.Masked(); p.Bits() {
	case 0:
		return nil
	case d.bits:
		return append(load(0), compare(op, p.Addr().AsSlice())...)
	}
	return slices.Concat(load(0), d.masked(0, p.Bits()), compare(op, p.Addr().AsSlice()))
}

func integer(n uint32) []byte { return appendInteger(nil, n) }

// isLocal ends the rule if an address is not one of the node's own.
func isLocal(fib expr.Fib) []expr.Any {
	fib.Register, fib.ResultADDRTYPE = register(0), true
	return append([]expr.Any{&fib}, compare(expr.CmpOpEq, integer(unix.RTN_LOCAL))...)
}

// andMask keeps only some bits of the integer in register n.
func andMask(n int, mask uint32) []expr.Any { return copyMasked(n, n, mask) }

// copyMasked copies some bits of an integer to another register.
func copyMasked(from, to int, mask uint32) []expr.Any {
	return []expr.Any{&expr.Bitwise{SourceRegister: register(from), DestRegister: register(to), Len: 4, Mask: integer(mask), Xor: integer(0)}}
}

// setMark sets or clears the masquerade bit of the packet mark.
func (d *dialect) setMark(set bool) []expr.Any {
	xor := uint32(0)
	if set {
		xor = d.mark
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)},
		&expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4, Mask: integer(^d.mark), Xor: integer(xor)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: register(0), SourceRegister: true},
	}
}

func (d *dialect) marked() []expr.Any {
	return slices.Concat([]expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)}}, andMask(0, d.mark), compare(expr.CmpOpNeq, integer(0)))
}

func masquerade() []expr.Any { return []expr.Any{&expr.Masq{FullyRandom: true}} }

// ctHas ends the rule if none of the bits is set in the value that conntrack has for the packet.
func ctHas(key expr.CtKey, some uint32) []expr.Any {
	return slices.Concat([]expr.Any{&expr.Ct{Key: key, Register: register(0)}}, andMask(0, some), compare(expr.CmpOpNeq, integer(0)))
}

// dnat translates the connection to the backend in the registers from n on.
func (d *dialect) dnat(n int) []expr.Any {
	address, port := register(n), register(n+d.words())
	return []expr.Any{&expr.NAT{
		Type: expr.NATTypeDestNAT, Family: uint32(d.nfproto),
		RegAddrMin: address, RegAddrMax: address, RegProtoMin: port, RegProtoMax: port,
	}}
}
