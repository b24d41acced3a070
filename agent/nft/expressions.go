package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// Family is what differs between the rules of the two IP families.
type Family struct {
	IP model.Family
	// Number is the kernel's number of the family.
	Number byte
	// Address is the field for addresses.
	Address Field
	// source and destination are the offsets of the addresses in a packet's network header, in bytes.
	source, destination uint32
}

// FamilyOf returns the Family for an IP family.
func FamilyOf(ip model.Family) Family {
	if ip == model.IPv6 {
		return Family{ip, unix.NFPROTO_IPV6, IPv6Type, 8, 24}
	}
	return Family{ip, unix.NFPROTO_IPV4, IPv4Type, 12, 16}
}

// Bits returns the length of an address in bits.
func (f Family) Bits() int { return 8 * f.Address.Length }

// Words returns the number of registers that an address occupies.
func (f Family) Words() int { return f.Address.Length / 4 }

// FrontendWords returns the number of registers that Frontend writes.
func (f Family) FrontendWords() int { return f.Words() + 2 }

// Loopback returns the prefix of loopback addresses.
func (f Family) Loopback() netip.Prefix {
	if f.IP == model.IPv6 {
		return netip.PrefixFrom(netip.IPv6Loopback(), 128)
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)
}

// Registers is the number of registers that a rule has, of 4 bytes each. A longer value occupies
// several registers, starting at the given one. Since 6.4, the kernel refuses rules that read a
// register which they have not written, so no value is passed from rule to rule.
const Registers = 16

// register returns the kernel's number for the nth register, counted from 0.
func register(n int) uint32 { return unix.NFT_REG32_00 + uint32(n) }

// The functions below return expressions. Those that "load" write registers from number to on.
// Those that "match" end the rule if the packet does not match.

// Source loads the packet's source address.
func (f Family) Source(to int) []expr.Any { return f.address(f.source, to) }

// Destination loads the packet's destination address.
func (f Family) Destination(to int) []expr.Any { return f.address(f.destination, to) }

func (f Family) address(offset uint32, to int) []expr.Any {
	return payload(expr.PayloadBaseNetworkHeader, offset, f.Address.Length, to)
}

func payload(base expr.PayloadBase, offset uint32, length, to int) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: register(to), Base: base, Offset: offset, Len: uint32(length)}}
}

// Protocol loads the packet's protocol.
func Protocol(to int) []expr.Any { return Meta(expr.MetaKeyL4PROTO, to) }

// ProtocolNumber returns the number that Protocol loads.
func ProtocolNumber(p model.Protocol) byte {
	switch p {
	case model.TCP:
		return unix.IPPROTO_TCP
	case model.UDP:
		return unix.IPPROTO_UDP
	case model.SCTP:
		return unix.IPPROTO_SCTP
	}
	panic(fmt.Sprintf("protocol %d", p))
}

// Meta loads what the kernel knows of the packet beside its content.
func Meta(key expr.MetaKey, to int) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: register(to)}}
}

// Port loads the packet's protocol and its destination port.
func Port(to int) []expr.Any {
	return append(Protocol(to), payload(expr.PayloadBaseTransportHeader, 2, 2, to+1)...)
}

// Frontend loads the packet's destination address, its protocol and its destination port.
func (f Family) Frontend(to int) []expr.Any {
	return append(f.Destination(to), Port(to+f.Words())...)
}

// Lookup replaces a key by its value in a map, and matches if the map holds the key.
func Lookup(set string, key, to int) []expr.Any {
	return lookup(set, key, register(to))
}

func lookup(set string, key int, to uint32) []expr.Any {
	return []expr.Any{&expr.Lookup{SetName: set, SourceRegister: register(key), DestRegister: to, IsDestRegSet: true}}
}

// LookupInteger looks up an integer that is part of another lookup's key. No version of nft so far
// (1.1.6) can list such a rule: it does not know how long the first lookup's result is, and aborts.
// So the integer goes through the packet's mark, whose length nft knows. The mark is restored in
// the same rule, before anything else can see it.
func LookupInteger(set string, key, to int) []expr.Any {
	const saved = Registers - 1
	return slices.Concat(Lookup(set, key, to), loadMark(saved), StoreMark(to), loadMark(to), StoreMark(saved))
}

// LookupChain goes to the chain that a map holds for the key in register 0, and matches if there is
// none.
func LookupChain(set string) []expr.Any {
	return lookup(set, 0, unix.NFT_REG_VERDICT)
}

// In matches if a set holds the key in register 0.
func In(set string) []expr.Any {
	return []expr.Any{&expr.Lookup{SetName: set, SourceRegister: register(0)}}
}

// NotIn matches if a set does not hold the key in register 0.
func NotIn(set string) []expr.Any {
	return []expr.Any{&expr.Lookup{SetName: set, SourceRegister: register(0), Invert: true}}
}

// Compare matches if the comparison of register 0 with data is true.
func Compare(op expr.CmpOp, data []byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: op, Register: register(0), Data: data}}
}

func verdict(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: kind, Chain: chain}}
}

// Jump leads to a chain, after which the packet comes back.
func Jump(chain string) []expr.Any { return verdict(expr.VerdictJump, chain) }

// Goto leads to a chain, after which the packet does not come back.
func Goto(chain string) []expr.Any { return verdict(expr.VerdictGoto, chain) }

// Return leaves the chain.
func Return() []expr.Any { return verdict(expr.VerdictReturn, "") }

// Drop drops the packet.
func Drop() []expr.Any { return verdict(expr.VerdictDrop, "") }

// mask returns n bytes of which the first bits are set.
func mask(bits, n int) []byte {
	b := make([]byte, n)
	for i := range bits {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return b
}

// Masked keeps only the first bits of the address in register n.
func (f Family) Masked(n, bits int) []expr.Any {
	return bitwise(n, n, mask(bits, f.Address.Length), make([]byte, f.Address.Length))
}

func bitwise(from, to int, mask, xor []byte) []expr.Any {
	return []expr.Any{&expr.Bitwise{
		SourceRegister: register(from), DestRegister: register(to), Len: uint32(len(mask)), Mask: mask, Xor: xor,
	}}
}

// InPrefix matches if the address that load loads is in a prefix. With CmpOpNeq, it matches if the
// address is not. A prefix of length 0 matches everything.
func (f Family) InPrefix(load func(int) []expr.Any, op expr.CmpOp, p netip.Prefix) []expr.Any {
	switch p = p.Masked(); p.Bits() {
	case 0:
		return nil
	case f.Bits():
		return append(load(0), Compare(op, p.Addr().AsSlice())...)
	}
	return slices.Concat(load(0), f.Masked(0, p.Bits()), Compare(op, p.Addr().AsSlice()))
}

// Own returns the prefixes that are of the family.
func (f Family) Own(prefixes []netip.Prefix) []netip.Prefix {
	other := func(p netip.Prefix) bool { return model.FamilyOf(p.Addr()) != f.IP }
	return slices.DeleteFunc(slices.Clone(prefixes), other)
}

// From returns matches for packets whose source is in one of the prefixes, or which come over an
// interface with this name or with a name that begins like this. Empty names stand for no
// interface.
func (f Family) From(prefixes []netip.Prefix, name, begin string) (matches [][]expr.Any) {
	for _, p := range f.Own(prefixes) {
		matches = append(matches, f.InPrefix(f.Source, expr.CmpOpEq, p))
	}
	if name != "" {
		matches = append(matches, InterfaceIs(expr.CmpOpEq, InterfaceName(name)))
	}
	if begin != "" {
		matches = append(matches, InterfaceIs(expr.CmpOpEq, []byte(begin)))
	}
	return matches
}

// Integer returns an integer in the byte order that expressions such as numgen produce.
func Integer(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

// IsLocal matches if an address is one of the node's own. fib says which one.
func IsLocal(fib expr.Fib) []expr.Any {
	fib.Register, fib.ResultADDRTYPE = register(0), true
	return append([]expr.Any{&fib}, Compare(expr.CmpOpEq, Integer(unix.RTN_LOCAL))...)
}

// AndMask keeps only some bits of the integer in register n.
func AndMask(n int, mask uint32) []expr.Any { return CopyMasked(n, n, mask) }

// CopyMasked copies some bits of an integer to another register.
func CopyMasked(from, to int, mask uint32) []expr.Any {
	return bitwise(from, to, Integer(mask), Integer(0))
}

// hasAny matches if one of the bits is set in the integer in register 0.
func hasAny(some uint32) []expr.Any {
	return append(AndMask(0, some), Compare(expr.CmpOpNeq, Integer(0))...)
}

func loadMark(to int) []expr.Any { return Meta(expr.MetaKeyMARK, to) }

// MarkHas matches if one of the bits is set in the packet's mark.
func MarkHas(some uint32) []expr.Any { return append(loadMark(0), hasAny(some)...) }

// CtHas matches if one of the bits is set in the value that conntrack has for the packet.
func CtHas(key expr.CtKey, some uint32) []expr.Any {
	return append([]expr.Any{&expr.Ct{Key: key, Register: register(0)}}, hasAny(some)...)
}

// IsReply matches if the packet is a reply on its connection.
func IsReply() []expr.Any {
	return append([]expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: register(0)}}, Compare(expr.CmpOpEq, []byte{1})...)
}

// Bits of include/uapi/linux/netfilter/nf_conntrack_common.h, as nft's "ct state" and "ct status"
// use them.
const (
	CtStateInvalid = 1 << 0
	CtStateNew     = 1 << 3
	CtStatusDNAT   = 1 << 5
)

// StoreMark sets the packet's mark to the integer in register n.
func StoreMark(n int) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: register(n), SourceRegister: true}}
}

// ChangeMark sets the bits of the packet's mark that are in mask to those of value.
func ChangeMark(mask, value uint32) []expr.Any {
	return slices.Concat(loadMark(0), bitwise(0, 0, Integer(^mask), Integer(value)), StoreMark(0))
}

// ChangeCtMark is ChangeMark for the mark of the packet's connection.
func ChangeCtMark(mask, value uint32) []expr.Any {
	return slices.Concat(
		[]expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: register(0)}},
		bitwise(0, 0, Integer(^mask), Integer(value)),
		[]expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: register(0), SourceRegister: true}},
	)
}

// InterfaceIs matches if the comparison of the name of the interface, over which the packet came,
// with name is true. See InterfaceName.
func InterfaceIs(op expr.CmpOp, name []byte) []expr.Any {
	return append(Meta(expr.MetaKeyIIFNAME, 0), Compare(op, name)...)
}

// InterfaceName returns the name of an interface for a comparison. Without the zeros at its end, a
// name stands for all that begin with it.
func InterfaceName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// Masquerade makes one of the node's addresses the connection's source.
func Masquerade() []expr.Any { return []expr.Any{&expr.Masq{FullyRandom: true}} }

// DNAT translates the connection to the address and port in the registers from n on.
func (f Family) DNAT(n int) []expr.Any {
	address, port := register(n), register(n+f.Words())
	return []expr.Any{&expr.NAT{
		Type: expr.NATTypeDestNAT, Family: uint32(f.Number),
		RegAddrMin: address, RegAddrMax: address, RegProtoMin: port, RegProtoMax: port,
	}}
}

// RandomIndex loads a random number less than modulus.
func RandomIndex(modulus uint32, to int) []expr.Any {
	return []expr.Any{&expr.Numgen{Register: register(to), Modulus: modulus, Type: unix.NFT_NG_RANDOM}}
}

// UpdateSet adds the key in register key, with the integer in register data, to a set, or carries
// out another operation (NFT_DYNSET_OP_*). An added element lasts for the timeout.
func UpdateSet(set string, operation uint32, key, data int, timeout time.Duration) []expr.Any {
	return []expr.Any{&expr.Dynset{
		SrcRegKey: register(key), SrcRegData: register(data), SetName: set, Operation: operation, Timeout: timeout,
	}}
}

// Immediate loads an integer.
func Immediate(n uint32, to int) []expr.Any {
	return []expr.Any{&expr.Immediate{Register: register(to), Data: Integer(n)}}
}

// Refuse returns rules, with a comment, that refuse a connection which matches, with ICMP port
// unreachable. If client and node share a kernel, an ICMPv6 error may arrive while connect still
// holds the socket. Linux ignores it then, and the client is refused only at its next attempt, a
// second later. A TCP reset is not ignored.
func (f Family) Refuse(comment string, matches ...[]expr.Any) []Rule {
	reject := func(kind uint32, code uint8, match ...[]expr.Any) Rule {
		return Do(append(match, []expr.Any{&expr.Reject{Type: kind, Code: code}})...).Because(comment)
	}
	const portUnreachable, portUnreachable6 = 3, 4
	match := slices.Concat(matches...)
	if f.IP == model.IPv4 {
		return []Rule{reject(unix.NFT_REJECT_ICMP_UNREACH, portUnreachable, match)}
	}
	tcp := append(Protocol(0), Compare(expr.CmpOpEq, []byte{unix.IPPROTO_TCP})...)
	return []Rule{
		reject(unix.NFT_REJECT_TCP_RST, 0, match, tcp),
		reject(unix.NFT_REJECT_ICMP_UNREACH, portUnreachable6, match),
	}
}
