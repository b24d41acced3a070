package ipvs

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/cespare/xxhash/v2"
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Table is the name of each family's nftables table.
const Table = "slicecast-ipvs"

// The packet mark selects the set of backends. IPVS has a virtual service for each mark, called a
// firewall mark service. The marks of this package have markTag in their highest byte. The maps
// hold marks with flags, which the rules clear before IPVS sees the mark.
const (
	markTag     uint32 = 0x5c << 24
	markTagMask uint32 = 0xff << 24

	flagMasquerade uint32 = 1 << 23
	flagReject     uint32 = 1 << 22
	flagDrop       uint32 = 1 << 21

	maxID uint32 = flagDrop - 1
)

// Chains of the table. The first six have hooks.
const (
	reenterChain     = "reenter"
	inputChain       = "input"
	outputChain      = "output"
	postroutingChain = "postrouting"
	forwardChain     = "forward"
	leaveChain       = "leave"
	sourcesChain     = "sources"
	unknownChain     = "unknown-port"
	routeChain       = "route"
)

// class is where a new connection comes from, as the Routes of a Frontend distinguish it.
type class int

const (
	pods class = iota
	node
	others
	classes // number of classes
)

func (c class) String() string { return [...]string{"pods", "node", "others"}[c] }

// route returns a frontend's route for the class.
func (c class) route(f view.Frontend) view.Route {
	return [...]view.Route{f.Pods, f.Node, f.Others}[c]
}

// layout describes a family's table: its sets, and its rules as long as the node does not change.
type layout struct {
	family    model.Family
	table     *nftables.Table
	sets      [setCount]*nftables.Set
	node      view.Node
	masqBit   uint32
	addrLen   uint32
	srcOffset uint32
	dstOffset uint32
}

// setID identifies one of the table's sets and maps.
type setID int

// The maps by class come first. Those for addresses have the keys address, protocol and port. Those
// for NodePorts have the keys protocol and port.
const (
	setNodePorts setID = setID(classes) + iota*setID(classes)
	setAddresses
)

const (
	setFiltered setID = setAddresses + 1 + iota
	setSources
	setHairpins
	setServices
	setCount
)

func (c class) frontends() setID { return setID(c) }
func (c class) nodePorts() setID { return setNodePorts + setID(c) }

func newLayout(family model.Family, node view.Node, masqBit uint32) *layout {
	l := &layout{family: family, node: node, masqBit: masqBit, addrLen: 4, srcOffset: 12, dstOffset: 16}
	addr := nftables.TypeIPAddr
	l.table = &nftables.Table{Family: nftables.TableFamilyIPv4, Name: Table}
	if family == model.IPv6 {
		l.addrLen, l.srcOffset, l.dstOffset = 16, 8, 24
		addr = nftables.TypeIP6Addr
		l.table.Family = nftables.TableFamilyIPv6
	}
	proto, port := nftables.TypeInetProto, nftables.TypeInetService
	set := func(id setID, name string, keys ...nftables.SetDatatype) *nftables.Set {
		l.sets[id] = &nftables.Set{Table: l.table, Name: name, KeyType: nftables.MustConcatSetType(keys...)}
		return l.sets[id]
	}
	for c := range classes {
		for _, s := range []*nftables.Set{
			set(c.frontends(), "from-"+c.String(), addr, proto, port),
			set(c.nodePorts(), "from-"+c.String()+"-nodeports", proto, port),
		} {
			s.IsMap, s.DataType = true, nftables.TypeMark
		}
	}
	set(setAddresses, "addresses", addr)
	set(setFiltered, "filtered", addr, proto, port)
	sources := set(setSources, "sources", addr, proto, port, addr)
	sources.Interval, sources.Concatenation = true, true
	set(setHairpins, "hairpins", addr, addr)
	set(setServices, "services", nftables.TypeMark).KeyByteOrder = binaryutil.NativeEndian
	return l
}

// rule is a rule of a chain. Operators see its comment.
type rule struct {
	comment string
	exprs   []expr.Any
}

// chain is a chain of the table. hook is nil if other chains lead to it.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority nftables.ChainPriority
	rules    []rule
}

// Priorities of the chains that mark packets. The hooks of IPVS have the priorities 98 and 99 in
// input, and -99 and -98 in output (net/netfilter/ipvs/ip_vs_core.c). The mark is set as late as
// possible, so that rules of others do not see it. It is cleared as soon as IPVS has sent the
// packet on, because the packet then passes all of output.
const (
	beforeIPVSInput  = 97
	beforeIPVSOutput = -99
)

func (l *layout) chains() []chain {
	chains := []chain{
		{reenterChain, nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityRaw, []rule{{
			"IPVS has seen its mark",
			join(l.loadMark(), masked(markTagMask, markTag), setMark(0)),
		}}},
		{inputChain, nftables.ChainTypeFilter, nftables.ChainHookInput, beforeIPVSInput, l.inputRules()},
		{outputChain, nftables.ChainTypeFilter, nftables.ChainHookOutput, beforeIPVSOutput, []rule{
			l.checkSources(),
			{"", verdict(expr.VerdictGoto, node.String())},
		}},
		{postroutingChain, nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource, l.postroutingRules()},
		{forwardChain, nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter, l.unusedRules()},
		{leaveChain, nftables.ChainTypeFilter, nftables.ChainHookOutput, *nftables.ChainPriorityFilter, l.unusedRules()},
		{name: sourcesChain, rules: []rule{
			{"loadBalancerSourceRanges", join(l.loadFrontend(), []expr.Any{l.loadAddress(l.srcOffset, l.sourceRegister())}, l.in(setSources), verdict(expr.VerdictReturn, ""))},
			{"", verdict(expr.VerdictDrop, "")},
		}},
		{name: unknownChain, rules: l.unknownRules()},
		{name: routeChain, rules: l.routeRules()},
	}
	for c := range classes {
		chains = append(chains, chain{name: c.String(), rules: l.classRules(c)})
	}
	return chains
}

// inputRules distinguish pods from others.
func (l *layout) inputRules() []rule {
	rules := []rule{l.checkSources()}
	toPods := func(match []expr.Any) {
		rules = append(rules, rule{"from pods", join(match, verdict(expr.VerdictGoto, pods.String()))})
	}
	detector := l.node.Pods
	for _, p := range detector.Prefixes {
		if model.FamilyOf(p.Addr()) == l.family {
			toPods(l.inPrefix(l.srcOffset, p))
		}
	}
	if detector.Interface != "" {
		toPods(inputInterface([]byte(detector.Interface + "\x00")))
	}
	if detector.InterfacePrefix != "" {
		toPods(inputInterface([]byte(detector.InterfacePrefix)))
	}
	return append(rules, rule{"", verdict(expr.VerdictGoto, others.String())})
}

// checkSources returns the rule that sends new connections to frontends with sources to the chain
// which drops those from other sources.
func (l *layout) checkSources() rule {
	return rule{"", join(isNew(), l.loadFrontend(), l.in(setFiltered), verdict(expr.VerdictJump, sourcesChain))}
}

// classRules look the frontend up by address, or as a NodePort.
func (l *layout) classRules(c class) []rule {
	rules := []rule{
		{"", join(l.loadFrontend(), l.lookup(c.frontends()), verdict(expr.VerdictGoto, routeChain))},
		{"", join(l.load(l.dstOffset), l.in(setAddresses), verdict(expr.VerdictGoto, unknownChain))},
		{"no NodePorts there", join(l.inPrefix(l.dstOffset, loopback(l.family)), verdict(expr.VerdictReturn, ""))},
	}
	for _, p := range l.node.NodePorts {
		if model.FamilyOf(p.Addr()) != l.family {
			continue
		}
		match := []expr.Any{}
		if p.Bits() > 0 {
			match = l.inPrefix(l.dstOffset, p)
		}
		rules = append(rules, rule{"NodePorts", join(match, isLocal(), loadPort(1), l.lookup(c.nodePorts()), verdict(expr.VerdictGoto, routeChain))})
	}
	return rules
}

func loopback(family model.Family) netip.Prefix {
	if family == model.IPv6 {
		return netip.MustParsePrefix("::1/128")
	}
	return netip.MustParsePrefix("127.0.0.0/8")
}

// unusedRules drop new connections to addresses within the ranges of cluster IPs that no Service
// has. Such packets would be routed anywhere. The rules come after IPVS, so packets that others
// have led elsewhere by then are left alone.
func (l *layout) unusedRules() (rules []rule) {
	for _, p := range l.node.ServiceCIDRs {
		if model.FamilyOf(p.Addr()) == l.family {
			rules = append(rules, rule{"no Service", join(l.inPrefix(l.dstOffset, p), l.load(l.dstOffset),
				[]expr.Any{&expr.Lookup{SourceRegister: 1, SetName: l.sets[setAddresses].Name, Invert: true}}, isNew(), verdict(expr.VerdictDrop, ""))})
		}
	}
	return rules
}

// unknownRules refuse new connections to unknown ports of addresses that only Services have.
// Otherwise they would reach whatever listens on all of the node's addresses.
func (l *layout) unknownRules() []rule {
	return append([]rule{
		{"no ports", join(loadProtocol(1), compare(expr.CmpOpNeq, unix.IPPROTO_TCP), compare(expr.CmpOpNeq, unix.IPPROTO_UDP),
			compare(expr.CmpOpNeq, unix.IPPROTO_SCTP), verdict(expr.VerdictReturn, ""))},
	}, l.refuse("no Service", isNew())...)
}

// routeRules do what the flags of the mark say, and leave the rest to IPVS. They reject and drop
// only new connections. IPVS knows the others.
func (l *layout) routeRules() []rule {
	flagged := func(flags uint32) []expr.Any { return join(l.loadMark(), anyBit(flags)) }
	rules := []rule{{"no local endpoint", join(isNew(), flagged(flagDrop), verdict(expr.VerdictDrop, ""))}}
	rules = append(rules, l.refuse("no endpoint", join(isNew(), flagged(flagReject)))...)
	return append(rules, []rule{
		{"open connections go on", join(flagged(flagDrop|flagReject), setMark(0), verdict(expr.VerdictReturn, ""))},
		{"to be masqueraded", join(isNew(), flagged(flagMasquerade), setConnectionBit(l.masqBit))},
		{"the mark of the virtual service", join(l.loadMark(), clearBits(flagMasquerade), storeMark())},
	}...)
}

func (l *layout) postroutingRules() []rule {
	masquerade := []expr.Any{&expr.Masq{FullyRandom: true}}
	notOurs := join(l.loadMark(), []expr.Any{
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: host32(markTagMask), Xor: host32(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: host32(markTag)},
	})
	return []rule{
		{"a backend to itself", join([]expr.Any{l.loadAddress(l.srcOffset, 1), l.loadAddress(l.dstOffset, l.secondAddress())}, l.in(setHairpins), masquerade)},
		{"", join([]expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: 1}}, anyBit(l.masqBit), masquerade)},
		// These are connections that others translate and have marked for masquerading. When this
		// programmer takes over, a packet may have passed the first of the others' rules just before all
		// of them are removed. Without masquerading, its connection would get no reply, even if the
		// client sends the packet again, because conntrack keeps the translation. The rule clears the
		// mark, because the packet may come by again, for example inside a tunnel's packet.
		{"asked for by others", join(notOurs, l.loadMark(), anyBit(l.masqBit), l.loadMark(), clearBits(l.masqBit), storeMark(), masquerade)},
		// If the node connects to one of its own addresses, the kernel uses that address as the
		// connection's source.
		{"no reply would come", join([]expr.Any{
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte("lo\x00")},
		}, l.load(l.srcOffset), l.in(setAddresses), masquerade)},
	}
}

// Expressions. Register 1 has 16 bytes, as do 2 to 4. Registers 8 to 23 are the same bytes in
// groups of four.

func join(parts ...[]expr.Any) (all []expr.Any) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func verdict(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: kind, Chain: chain}}
}

func hostNumber(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

func host32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// masked matches if the bits of mask in register 1 equal value.
func masked(mask, value uint32) []expr.Any {
	return []expr.Any{
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: host32(mask), Xor: host32(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: host32(value)},
	}
}

// anyBit matches if register 1 has any of the bits.
func anyBit(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: host32(bits), Xor: host32(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: host32(0)},
	}
}

// clearBits clears bits of register 1.
func clearBits(bits uint32) []expr.Any {
	return []expr.Any{&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: host32(^bits), Xor: host32(0)}}
}

func (l *layout) loadMark() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}}
}

func storeMark() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true}}
}

func setMark(mark uint32) []expr.Any {
	return join([]expr.Any{&expr.Immediate{Register: 1, Data: host32(mark)}}, storeMark())
}

// setConnectionBit sets a bit of conntrack's mark.
func setConnectionBit(bit uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: host32(^bit), Xor: host32(bit)},
		&expr.Ct{Key: expr.CtKeyMARK, Register: 1, SourceRegister: true},
	}
}

func isNew() []expr.Any {
	return join([]expr.Any{&expr.Ct{Key: expr.CtKeySTATE, Register: 1}}, anyBit(expr.CtStateBitNEW))
}

// isLocal matches destinations that are the node's own addresses.
func isLocal() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, ResultADDRTYPE: true, FlagDADDR: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: host32(unix.RTN_LOCAL)},
	}
}

func inputInterface(name []byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
	}
}

func (l *layout) loadAddress(offset, register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: l.addrLen}
}

func (l *layout) load(offset uint32) []expr.Any { return []expr.Any{l.loadAddress(offset, 1)} }

// inPrefix matches addresses in a prefix.
func (l *layout) inPrefix(offset uint32, p netip.Prefix) []expr.Any {
	return []expr.Any{
		l.loadAddress(offset, 1),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: l.addrLen, Mask: net.CIDRMask(p.Bits(), int(l.addrLen)*8), Xor: make([]byte, l.addrLen)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Masked().Addr().AsSlice()},
	}
}

func loadProtocol(register uint32) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register}}
}

func compare(op expr.CmpOp, data byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: op, Register: 1, Data: []byte{data}}}
}

// fourBytes returns the number of the nth register of four bytes. The first one is register 1.
func fourBytes(n uint32) uint32 {
	if n == 0 {
		return 1
	}
	return unix.NFT_REG32_00 + n
}

// loadPort loads the protocol and the destination port into the registers from register on.
func loadPort(register uint32) []expr.Any {
	next := uint32(unix.NFT_REG32_01)
	if register != 1 {
		next = register + 1
	}
	return join(loadProtocol(register), []expr.Any{
		&expr.Payload{DestRegister: next, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	})
}

// secondAddress returns the register after an address in register 1. sourceRegister returns the
// register after a frontend in register 1.
func (l *layout) secondAddress() uint32  { return fourBytes(l.addrLen / 4) }
func (l *layout) sourceRegister() uint32 { return fourBytes(l.addrLen/4 + 2) }

// loadFrontend loads the destination address, the protocol and the port.
func (l *layout) loadFrontend() []expr.Any {
	return join(l.load(l.dstOffset), loadPort(l.secondAddress()))
}

// in matches if a set holds what was loaded.
func (l *layout) in(id setID) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: 1, SetName: l.sets[id].Name}}
}

// lookup sets the mark to the value that a map holds for what was loaded. If there is none, the
// rule ends. nft expects values of a map in big-endian order.
func (l *layout) lookup(id setID) []expr.Any {
	return join([]expr.Any{
		&expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: l.sets[id].Name},
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderNtoh, Len: 4, Size: 4},
	}, storeMark())
}

// refuse returns rules that refuse what matches by ICMP port unreachable. TCP over IPv6 is refused
// by a reset. If client and node share a kernel, an ICMPv6 error may arrive while connect still
// holds the socket, and Linux ignores it then.
func (l *layout) refuse(comment string, match []expr.Any) []rule {
	const portUnreachable4, portUnreachable6 = 3, 4
	if l.family == model.IPv4 {
		return []rule{{comment, join(match, []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: portUnreachable4}})}}
	}
	return []rule{
		{comment, join(match, loadProtocol(1), compare(expr.CmpOpEq, unix.IPPROTO_TCP), []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}})},
		{comment, join(match, []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: portUnreachable6}})},
	}
}

// userdataHash is the type of the hash in a rule's user data. nft ignores types that it does not
// know.
const userdataHash userdata.Type = 0xf0

// userData returns the user data of a rule: its comment in nft's format, and a hash of its
// expressions. The kernel returns rules in a form of its own but keeps user data.
func (r rule) userData(family nftables.TableFamily) (data []byte) {
	if r.comment != "" {
		data = userdata.AppendString(data, userdata.TypeComment, r.comment)
	}
	h := xxhash.New()
	for _, e := range r.exprs {
		b, err := expr.Marshal(byte(family), e)
		fmt.Fprintf(h, "%x %v\n", b, err) //nolint:errcheck // never fails
	}
	return userdata.Append(data, userdataHash, h.Sum(nil))
}
