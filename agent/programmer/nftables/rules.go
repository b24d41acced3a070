package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Table is the name of the table that a family has.
const Table = "slicecast"

// Chains that always exist, and guard, which does if NodePorts are on loopback addresses. The others are those of
// policies and picks.
const (
	preroutingChain  = "prerouting"
	outputChain      = "output"
	postroutingChain = "postrouting"
	forwardChain     = "forward"
	guardChain       = "guard-loopback"
	servicesChain    = "services"
	nodePortsChain   = "nodeports"
	sourcesChain     = "sources"
	rejectChain      = "refuse" // "reject" is a word that nft does not take for a name
)

// chainOrder is that of packets. It is for those who read the table, as nft lists chains in the order they came in.
var chainOrder = []string{
	guardChain, preroutingChain, outputChain, servicesChain, nodePortsChain, sourcesChain, rejectChain, setChains[cluster], setChains[local],
	forwardChain, postroutingChain,
}

// compareChains puts the chains that always exist in their order, and the others behind them by their names.
func compareChains(a, b string) int {
	place := func(name string) int {
		if i := slices.Index(chainOrder, name); i >= 0 {
			return i
		}
		return len(chainOrder)
	}
	return cmp.Or(cmp.Compare(place(a), place(b)), strings.Compare(a, b))
}

// setChains lead to a backend of a set. They are named as Target is, and so are the chains behind them.
var setChains = [backendSets]string{cluster: view.Cluster.String(), local: view.Local.String()}

// dialect is what differs between the families' rules.
type dialect struct {
	family  model.Family
	nfproto byte
	address field
	bits    int
	// Where addresses are in a packet's header.
	saddr, daddr uint32
	loopback     netip.Prefix
	mark         uint32
}

func newDialect(family model.Family, mark uint32) *dialect {
	if family == model.IPv6 {
		return &dialect{family, unix.NFPROTO_IPV6, ipv6Type, 128, 8, 24, netip.PrefixFrom(netip.IPv6Loopback(), 128), mark}
	}
	return &dialect{family, unix.NFPROTO_IPV4, ipv4Type, 32, 12, 16, netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8), mark}
}

// rule is what a rule does, one expression after the other.
type rule struct {
	exprs   []expr.Any
	comment string
}

// encode gives the attributes of a rule as the kernel takes them, and a hash of what it does. The kernel gives rules back
// in words of its own, but keeps user data: the hash there tells that a rule is still the same.
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

// Types in the user data of rules and of elements: nft shows comments, and leaves out what it does not know.
const (
	userdataComment = 0
	userdataHash    = 0xf0
)

// maxComment is as long as a comment can be.
const maxComment = 250

func appendComment(b []byte, comment string) []byte {
	b = append(b, userdataComment, byte(len(comment)+1))
	return append(append(b, comment...), 0)
}

// userdataOf gives what user data hold of a type.
func userdataOf(userdata []byte, kind byte) []byte {
	for len(userdata) >= 2 && len(userdata) >= 2+int(userdata[1]) {
		value := userdata[2 : 2+int(userdata[1])]
		if userdata[0] == kind {
			return value
		}
		userdata = userdata[2+len(value):]
	}
	return nil
}

func commentOf(userdata []byte) string { return textOf(userdataOf(userdata, userdataComment)) }

// label gives a Service port's name for comments, as it is found again by it. What is too long for that ends in a hash.
func label(id view.ServicePortID) string {
	name := id.String()
	if len(name) > maxLabel {
		name = fmt.Sprintf("%s~%016x", name[:maxLabel-17], xxhash.Sum64String(name))
	}
	return name
}

// maxLabel leaves room for the kind of a frontend.
const maxLabel = maxComment - 20

// frontendComment tells whose a frontend is; nameOf gives the label in it.
func frontendComment(label string, kind view.FrontendKind) string { return label + " " + kind.String() }

func nameOf(comment string) string {
	name, _, _ := strings.Cut(comment, " ")
	return name
}

// do joins what a rule does.
func do(parts ...[]expr.Any) rule { return rule{exprs: slices.Concat(parts...)} }

func (r rule) because(comment string) rule {
	r.comment = comment
	return r
}

// registers is how many registers of 4 bytes a rule has. What is longer takes several, from the one given. From 6.4 on the
// kernel refuses rules that read a register which they have not written, so nothing is passed from rule to rule.
const registers = 16

// register gives the kernel's number for one of them, from 0.
func register(n int) uint32 { return unix.NFT_REG32_00 + uint32(n) }

// words is the number of registers that an address takes.
func (d *dialect) words() int { return d.address.length / 4 }

// keyWords is that of a frontend's key.
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

// nodePortKey loads protocol and destination port, key the destination address before them.
func nodePortKey(to int) []expr.Any {
	return append(protocol(to), &expr.Payload{DestRegister: register(to + 1), Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
}

func (d *dialect) key(to int) []expr.Any {
	return append(d.destination(to), nodePortKey(to+d.words())...)
}

// lookup replaces a key by what a map holds; if it holds nothing, the rule ends.
func lookup(s setID, key, to int) []expr.Any {
	return []expr.Any{&expr.Lookup{SetName: s.String(), SourceRegister: register(key), DestRegister: register(to), IsDestRegSet: true}}
}

// lookupInteger is for integers that are part of another lookup's key. No version of nft so far (1.1.6) can list that: it
// does not know how long the first lookup's result is, and aborts. So the integer goes through the packet's mark, whose
// length nft knows, and the mark is put back before anything can see it.
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

// compare ends the rule if register 0 does not compare to data.
func compare(op expr.CmpOp, data []byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: op, Register: register(0), Data: data}}
}

func verdict(kind expr.VerdictKind, chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: kind, Chain: chain}}
}

func jump(chain string) []expr.Any   { return verdict(expr.VerdictJump, chain) }
func gotoTo(chain string) []expr.Any { return verdict(expr.VerdictGoto, chain) }
func drop() []expr.Any               { return verdict(expr.VerdictDrop, "") }

// mask gives n bytes with so many bits set.
func mask(bits, n int) []byte {
	b := make([]byte, n)
	for i := range bits {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return b
}

// masked leaves so many bits of an address.
func (d *dialect) masked(n, bits int) []expr.Any {
	return []expr.Any{&expr.Bitwise{
		SourceRegister: register(n), DestRegister: register(n), Len: uint32(d.address.length),
		Mask: mask(bits, d.address.length), Xor: make([]byte, d.address.length),
	}}
}

// inPrefix ends the rule if an address (loaded by load) is not in a prefix; op may turn that round.
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

// local ends the rule if an address is not one of the node.
func isLocal(fib expr.Fib) []expr.Any {
	fib.Register, fib.ResultADDRTYPE = register(0), true
	return append([]expr.Any{&fib}, compare(expr.CmpOpEq, integer(unix.RTN_LOCAL))...)
}

// andMask leaves only some bits of an integer.
func andMask(n int, mask uint32) []expr.Any {
	return []expr.Any{&expr.Bitwise{SourceRegister: register(n), DestRegister: register(n), Len: 4, Mask: integer(mask), Xor: integer(0)}}
}

// setMark sets or clears the masquerade mark.
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

// ctHas ends the rule if none of the bits is set in something that conntrack knows of the packet.
func ctHas(key expr.CtKey, some uint32) []expr.Any {
	return slices.Concat([]expr.Any{&expr.Ct{Key: key, Register: register(0)}}, andMask(0, some), compare(expr.CmpOpNeq, integer(0)))
}

// dnat sends the connection to the backend in registers.
func (d *dialect) dnat(n int) []expr.Any {
	address, port := register(n), register(n+d.words())
	return []expr.Any{&expr.NAT{
		Type: expr.NATTypeDestNAT, Family: uint32(d.nfproto),
		RegAddrMin: address, RegAddrMax: address, RegProtoMin: port, RegProtoMax: port,
	}}
}

// hook is where a base chain is called.
type hook struct {
	kind     string
	number   uint32
	priority int32
}

var hooks = map[string]hook{
	preroutingChain:  {"nat", unix.NF_INET_PRE_ROUTING, -100},
	outputChain:      {"nat", unix.NF_INET_LOCAL_OUT, -100},
	postroutingChain: {"nat", unix.NF_INET_POST_ROUTING, 100},
	forwardChain:     {"filter", unix.NF_INET_FORWARD, 0},
	guardChain:       {"filter", unix.NF_INET_PRE_ROUTING, -300},
}

// fixedChains gives the chains that do not depend on any Service. The nat chains see only the first packet of a
// connection, so that nothing here costs the others anything except forward, and guard where it is.
func (d *dialect) fixedChains(node view.Node) map[string][]rule {
	chains := map[string][]rule{
		preroutingChain: {do(jump(servicesChain))},
		outputChain:     {do(jump(servicesChain))},
		servicesChain: {
			do(d.key(0), lookupInteger(frontends, 0, 0), andMask(0, policyBits), lookupChain(policies)),
			do(d.destination(0), in(clusterIPs), gotoTo(rejectChain)).because("another port of a cluster IP"),
		},
		nodePortsChain: {do(isLocal(expr.Fib{FlagDADDR: true}), nodePortKey(0), lookupInteger(nodePorts, 0, 0), andMask(0, policyBits), lookupChain(policies))},
		// A mark that others set counts, too, as with kube-proxy. It is cleared since the packet may come by again, e.g.
		// inside a tunnel's.
		postroutingChain: {
			do(d.marked(), d.setMark(false), masquerade()),
			do(ctHas(expr.CtKeySTATUS, ctStatusDNAT), d.source(0), d.destination(d.words()), in(hairpins), masquerade()).because("a backend that is its own client"),
		},
		// A packet that conntrack finds invalid would pass untranslated, and the client, which knows only the Service's
		// address, would reset the connection (kubernetes/kubernetes#74839). Only what comes from backends on this node is
		// dropped: of others' connections the node may rightly see one direction only.
		forwardChain: {
			do(ctHas(expr.CtKeySTATE, ctStateInvalid), d.source(0), d.source(d.words()), in(hairpins), drop()).because("would reset a Service's connection"),
		},
		rejectChain: {do(d.reject())},
	}
	if d.family == model.IPv6 {
		// Linux does not heed an ICMPv6 error that comes while connect still holds the socket, as it does when client and
		// node share a kernel: the client would only be refused at its next try, a second later. A TCP reset waits.
		chains[rejectChain] = []rule{
			do(protocol(0), compare(expr.CmpOpEq, []byte{unix.IPPROTO_TCP}), []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}),
			do(d.reject()),
		}
	}
	for i := range setChains {
		chains[setChains[i]] = d.setChain(backendSet(i))
	}

	loopback := d.family == model.IPv4 && node.LocalhostNodePorts
	for _, p := range node.NodePorts {
		if model.FamilyOf(p.Addr()) != d.family {
			continue
		}
		var notLoopback []expr.Any
		if !loopback && p.Overlaps(d.loopback) {
			notLoopback = d.inPrefix(d.destination, expr.CmpOpNeq, d.loopback)
		}
		chains[servicesChain] = append(chains[servicesChain], do(d.inPrefix(d.destination, expr.CmpOpEq, p), notLoopback, gotoTo(nodePortsChain)))
	}
	if loopback {
		// With route_localnet the kernel does not do this itself.
		outside := append([]expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register(0)}}, compare(expr.CmpOpNeq, interfaceName("lo"))...)
		chains[guardChain] = []rule{
			do(outside, d.inPrefix(d.source, expr.CmpOpEq, d.loopback), drop()),
			do(outside, d.inPrefix(d.destination, expr.CmpOpEq, d.loopback), drop()),
		}
	}
	return chains
}

// Of include/uapi/linux/netfilter/nf_conntrack_common.h, as nft's "ct state" and "ct status" have them.
const (
	ctStateInvalid = 1 << 0
	ctStatusDNAT   = 1 << 5
)

func interfaceName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// reject refuses by ICMP port unreachable.
func (d *dialect) reject() []expr.Any {
	code := uint8(3)
	if d.family == model.IPv6 {
		code = 4
	}
	return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code}}
}

// A policy is what becomes of connections to a frontend, as one number: three bits each for the routes of pods, the
// node and others, and one if sources are filtered. What is held of a frontend is an integer with the policy in its
// lowest three hexadecimal digits and the Service port's id in the others.
type policy uint32

const (
	policyMasquerade = 1 << 2
	policySources    = 1 << 9

	policyBits = 1<<12 - 1
	idBits     = 1<<32 - 1 - policyBits
)

func policyOf(f view.Frontend) policy {
	code := func(r view.Route) policy {
		c := policy(r.To - view.Reject)
		if r.Masquerade && (r.To == view.Cluster || r.To == view.Local) {
			c |= policyMasquerade
		}
		return c
	}
	p := code(f.Pods)<<6 | code(f.Node)<<3 | code(f.Others)
	if len(f.Sources) > 0 {
		p |= policySources
	}
	return p
}

// valid tells whether policyOf could have given it.
func (p policy) valid() bool { return p < policySources<<1 }

// routes gives the routes of pods, the node and others.
func (p policy) routes() (pods, node, others view.Route) {
	route := func(p policy) view.Route {
		return view.Route{To: view.Reject + view.Target(p&3), Masquerade: p&policyMasquerade != 0}
	}
	return route(p >> 6), route(p >> 3), route(p)
}

// chain names the policy's chain: "to-cluster", or "pods-cluster.node-cluster-masquerade.others-local", each with
// ".sources" if those are filtered.
func (p policy) chain() string {
	name := func(r view.Route) string {
		if r.Masquerade {
			return r.To.String() + "-masquerade"
		}
		return r.To.String()
	}
	pods, node, others := p.routes()
	text := "to-" + name(others)
	if pods != others || node != others {
		text = "pods-" + name(pods) + ".node-" + name(node) + ".others-" + name(others)
	}
	if p&policySources != 0 {
		text += ".sources"
	}
	return text
}

// policyChain gives the rules of a policy's chain.
func (d *dialect) policyChain(p policy, detector view.PodDetector) []rule {
	var rules []rule
	if p&policySources != 0 {
		rules = append(rules, do(jump(sourcesChain)))
	}
	to := func(r view.Route) []expr.Any {
		var mark []expr.Any
		if r.Masquerade {
			mark = d.setMark(true)
		}
		switch r.To {
		case view.Cluster, view.Local:
			return append(mark, gotoTo(r.To.String())...)
		case view.Drop:
			return drop()
		}
		return gotoTo(rejectChain)
	}
	pods, node, others := p.routes()
	if pods != others || node != others {
		for _, match := range d.fromPods(detector) {
			rules = append(rules, do(match, to(pods)))
		}
	}
	if node != others {
		rules = append(rules, do(isLocal(expr.Fib{FlagSADDR: true}), to(node)))
	}
	return append(rules, do(to(others)))
}

// fromPods gives matches of what comes from pods, any of which is enough.
func (d *dialect) fromPods(detector view.PodDetector) [][]expr.Any {
	var matches [][]expr.Any
	for _, p := range detector.Prefixes {
		if model.FamilyOf(p.Addr()) == d.family {
			matches = append(matches, d.inPrefix(d.source, expr.CmpOpEq, p))
		}
	}
	comesIn := func(name []byte) {
		in := []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register(0)}}
		matches = append(matches, append(in, compare(expr.CmpOpEq, name)...))
	}
	if detector.Interface != "" {
		comesIn(interfaceName(detector.Interface))
	}
	if detector.InterfacePrefix != "" {
		comesIn([]byte(detector.InterfacePrefix))
	}
	return matches
}

// sourcesRules gives the rules of the chain that drops what may not use a frontend with sources, given the lengths of
// all prefixes there are. A set for each length keeps a packet's way and a change independent of how many prefixes
// there are, which a set of intervals does not.
func (d *dialect) sourcesRules(lengths []int) []rule {
	var rules []rule
	for _, bits := range lengths {
		masked := d.masked(d.keyWords(), bits)
		if bits == d.bits {
			masked = nil
		}
		rules = append(rules, do(d.key(0), d.source(d.keyWords()), masked, in(sources+setID(bits)), verdict(expr.VerdictReturn, "")))
	}
	return append(rules, do(drop()))
}

// via is how a connection came to a Service port: it tells how to find that again.
type via uint8

const (
	viaAddress via = iota
	viaNodePort
	vias
)

// id loads a Service port's id.
func (d *dialect) id(v via, to int) []expr.Any {
	if v == viaNodePort {
		return slices.Concat(nodePortKey(to), lookupInteger(nodePorts, to, to), andMask(to, idBits))
	}
	return slices.Concat(d.key(to), lookupInteger(frontends, to, to), andMask(to, idBits))
}

// setChain gives the rules of the chain that leads to a backend of a set. What came to a nodePort is known by no address:
// else it would have been treated as such.
func (d *dialect) setChain(set backendSet) []rule {
	var rules []rule
	for v := range vias {
		rules = append(rules, do(d.id(v, 0), lookupInteger(sizes+set, 0, 0), lookupChain(picks(set, v))))
	}
	return rules
}

// pick names one of the chains that choose a backend of a set.
type pick struct {
	set backendSet
	via via
	class
}

// class is what a chain to choose a backend is made for: the size in its lowest three hexadecimal digits, as sizeOf has
// it, and the timeout of affinity in seconds in the others, 0 without. The class 0 is that of a set without backends.
type class uint32

// maxTimeout is as long as a class can tell, twelve days; Kubernetes allows one.
const maxTimeout = 1<<20 - 1

func classOf(backends int, timeout uint32) class {
	if backends == 0 {
		return 0
	}
	return class(timeout<<12 | sizeOf(backends))
}

func (c class) timeout() uint32 { return uint32(c >> 12) }

// valid tells whether classOf could have given it.
func (c class) valid() bool {
	e, m := c>>8&0xf, c&0xff
	return m > 0 && m <= exactSize && (e == 0 || m > exactSize/2)
}

// chain gives a name such as cluster-50, or local-3-affinity-10800-nodeport.
func (p pick) chain() string {
	name := fmt.Sprintf("%s-%d", setChains[p.set], p.draws()[0])
	if t := p.timeout(); t > 0 {
		name += fmt.Sprintf("-affinity-%d", t)
	}
	if p.via == viaNodePort {
		name += "-nodeport"
	}
	return name
}

// exactSize is the largest number of backends for which there is a size of its own, and tries is how often an index is
// drawn for larger ones before the last rule.
const (
	exactSize = 8
	tries     = 14
)

// sizeOf rounds a number of backends up by at most a quarter, to m × 2^e with m up to exactSize; it gives e in the third
// hexadecimal digit and m in the two below. Chains are needed only for such sizes, so that a backend that comes or goes
// hardly ever asks for another one: the kernel looks at all elements of the maps that a new chain's rules refer to. When
// the index that was drawn has no backend another is drawn, so that each backend is as likely as any other.
func sizeOf(backends int) uint32 {
	e := 0
	for backends > exactSize<<e {
		e++
	}
	return uint32(e<<8 | (backends+1<<e-1)>>e)
}

// draws gives the moduli of the indices to draw one after the other, until one has a backend. The last is drawn with a
// chance of at most 5^-14, about 2^-32, which is how exact random numbers are for the kernel; it always has one, yet the
// last backends are never drawn then.
func (c class) draws() []uint32 {
	e, m := uint32(c>>8)&0xf, uint32(c)&0xff
	if e == 0 {
		return []uint32{m}
	}
	return append(slices.Repeat([]uint32{m << e}, tries), (m-1)<<e)
}

// pickChain gives the rules of a chain that chooses a backend.
func (d *dialect) pickChain(p pick) []rule {
	// id . index is at 0, and so is id . client. A backend's number is behind what it takes to load an id.
	client, number := 1, d.keyWords()
	key := slices.Concat(d.id(p.via, 0), d.source(client))
	draw := func(modulus uint32) []expr.Any {
		return append(d.id(p.via, 0), &expr.Numgen{Register: register(1), Modulus: modulus, Type: unix.NFT_NG_RANDOM})
	}
	var rules []rule
	if p.timeout() == 0 {
		for _, modulus := range p.draws() {
			rules = append(rules, do(draw(modulus), lookup(endpoints+p.set, 0, 0), d.dnat(0)))
		}
		return rules
	}
	dynset := func(operation uint32, timeout time.Duration) []expr.Any {
		return []expr.Any{&expr.Dynset{
			SrcRegKey: register(0), SrcRegData: register(number), SetName: affinity.String(), Operation: operation, Timeout: timeout,
		}}
	}
	renew := dynset(unix.NFT_DYNSET_OP_UPDATE, time.Duration(p.timeout())*time.Second)
	forget := append([]expr.Any{&expr.Immediate{Register: register(number), Data: integer(0)}}, dynset(dynsetDelete, 0)...) // the kernel wants a number
	send := slices.Concat(lookup(backends+p.set, number, 0), d.dnat(0))
	last := slices.Concat(key, lookupInteger(affinity, 0, number))
	rules = append(rules,
		do(last, lookup(backends+p.set, number, number+1), renew, d.dnat(number+1)).because("the backend of last time"),
		do(key, forget).because("that backend is gone"))
	// If two connections of a client come at once, both go to the backend that is held in the end.
	for _, modulus := range p.draws() {
		rules = append(rules, do(draw(modulus), lookupInteger(numbers+p.set, 0, number), key, renew, lookupInteger(affinity, 0, number), send))
	}
	for i, modulus := range p.draws() {
		r := do(draw(modulus), lookupInteger(numbers+p.set, 0, number), send)
		if i == 0 {
			r = r.because("there are too many clients to remember this one")
		}
		rules = append(rules, r)
	}
	return rules
}

// dynsetDelete is NFT_DYNSET_OP_DELETE of include/uapi/linux/netfilter/nf_tables.h.
const dynsetDelete = 2
