package nftables

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Table is the name of each family's table. StandInTable is the name of the table that serves while
// Table is created again.
const (
	Table        = "slicecast"
	StandInTable = "slicecast-stand-in"
)

// Chains that do not belong to a policy or a pick. guardChain exists only if NodePorts are on
// loopback addresses, and outputFilter only if the ranges of cluster IPs are known. The others
// always exist.
const (
	preroutingChain  = "prerouting"
	outputChain      = "output"
	postroutingChain = "postrouting"
	forwardChain     = "forward"
	outputFilter     = "output-filter"
	guardChain       = "guard-loopback"
	servicesChain    = "services"
	nodePortsChain   = "nodeports"
	sourcesChain     = "sources"
	rejectChain      = "refuse" // nft does not accept the keyword "reject" as a name
)

// chainOrder is the order in which packets pass the chains. nft lists chains in the order of their
// creation, so a reader sees them in this order.
var chainOrder = []string{
	guardChain, preroutingChain, outputChain, servicesChain, nodePortsChain, sourcesChain, rejectChain, setChains[cluster], setChains[local],
	forwardChain, outputFilter, postroutingChain,
}

// compareChains sorts the chains in chainOrder before all others, and the others by name.
func compareChains(a, b string) int {
	place := func(name string) int {
		if i := slices.Index(chainOrder, name); i >= 0 {
			return i
		}
		return len(chainOrder)
	}
	return cmp.Or(cmp.Compare(place(a), place(b)), strings.Compare(a, b))
}

// setChains are the chains that lead to a backend of a set. They and the chains behind them are
// named as the Target.
var setChains = [backendSets]string{cluster: view.Cluster.String(), local: view.Local.String()}

// dialect is what differs between the two families' rules.
type dialect struct {
	table   string
	family  model.Family
	nfproto byte
	address field
	bits    int
	// saddr and daddr are the offsets of the addresses in a packet's network header, in bytes.
	saddr, daddr uint32
	loopback     netip.Prefix
	mark         uint32
	// liberal means that conntrack accepts TCP segments outside of the window as valid.
	liberal bool
}

func newDialect(family model.Family, mark uint32) *dialect {
	if family == model.IPv6 {
		return &dialect{Table, family, unix.NFPROTO_IPV6, ipv6Type, 128, 8, 24, netip.PrefixFrom(netip.IPv6Loopback(), 128), mark, false}
	}
	return &dialect{Table, family, unix.NFPROTO_IPV4, ipv4Type, 32, 12, 16, netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8), mark, false}
}

// of returns a copy of the dialect for another table.
func (d *dialect) of(table string) *dialect {
	other := *d
	other.table = table
	return &other
}

// hook is where a base chain is called, and whether its policy is to drop.
type hook struct {
	kind     string
	number   uint32
	priority int32
	drops    bool
}

// hooks are the hooks of the base chains. The nat chains have the priorities of iptables. The
// kernel calls the nat chains of a hook one after the other until one has translated the
// connection, so exactly one of two proxies translates it, whichever comes first. The filter chains
// come after all translation, on the way out also after IPVS at -98. So addresses that another
// proxy serves are not mistaken for unused ones.
var hooks = map[string]hook{
	preroutingChain:  {kind: "nat", number: unix.NF_INET_PRE_ROUTING, priority: -100},
	outputChain:      {kind: "nat", number: unix.NF_INET_LOCAL_OUT, priority: -100},
	postroutingChain: {kind: "nat", number: unix.NF_INET_POST_ROUTING, priority: 100},
	forwardChain:     {kind: "filter", number: unix.NF_INET_FORWARD, priority: 0},
	outputFilter:     {kind: "filter", number: unix.NF_INET_LOCAL_OUT, priority: 0},
	guardChain:       {kind: "filter", number: unix.NF_INET_PRE_ROUTING, priority: -300},
}

// fixedChains returns the chains that do not depend on any Service. The nat chains see only the
// first packet of a connection. Other packets pass only the forward chain, the output filter and,
// if it exists, the guard.
func (d *dialect) fixedChains(node view.Node) map[string][]rule {
	// If a transaction is committed between two lookups of a packet, the packet may find something
	// gone. In the second pass, all lookups see the state after the transaction.
	dispatch := []rule{
		do(jump(servicesChain)),
		do(jump(servicesChain)).because("again: something may just have changed"),
		do(d.destination(0), in(clusterIPs), gotoTo(rejectChain)).because("another port of a cluster IP"),
	}
	chains := map[string][]rule{
		preroutingChain: dispatch,
		outputChain:     dispatch,
		servicesChain:   {do(d.key(0), lookupInteger(frontends, 0, 0), andMask(0, policyBits), lookupChain(policies))},
		nodePortsChain:  {do(isLocal(expr.Fib{FlagDADDR: true}), nodePortKey(0), lookupInteger(nodePorts, 0, 0), andMask(0, policyBits), lookupChain(policies))},
		// A mark that others set counts, too, as with kube-proxy. The rule clears it, because the packet
		// may come by again, for example inside a tunnel's packet.
		postroutingChain: {
			do(d.marked(), d.setMark(false), masquerade()),
			do(ctHas(expr.CtKeySTATUS, ctStatusDNAT), d.source(0), d.destination(d.words()), in(hairpins), masquerade()).because("a backend that is its own client"),
		},
		forwardChain: {},
		rejectChain:  {do(d.reject())},
	}
	if d.family == model.IPv6 {
		// If client and node share a kernel, an ICMPv6 error may arrive while connect still holds the
		// socket. Linux ignores it then, and the client is refused only at its next attempt, a second
		// later. A TCP reset is not ignored.
		chains[rejectChain] = []rule{
			do(protocol(0), compare(expr.CmpOpEq, []byte{unix.IPPROTO_TCP}), []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}),
			do(d.reject()),
		}
	}
	for i := range setChains {
		chains[setChains[i]] = d.setChain(backendSet(i))
	}
	if !d.liberal {
		// A packet that conntrack finds invalid would pass untranslated. The client knows only the
		// Service's address and would reset the connection (kubernetes/kubernetes#74839). The rule drops
		// only packets from backends on this node, because the node may rightly see only one direction of
		// other connections.
		chains[forwardChain] = []rule{
			do(ctHas(expr.CtKeySTATE, ctStateInvalid), d.source(0), d.source(d.words()), in(hairpins), drop()).because("would reset a Service's connection"),
		}
	}
	for _, p := range node.ServiceCIDRs {
		if model.FamilyOf(p.Addr()) != d.family {
			continue
		}
		r := do(ctHas(expr.CtKeySTATE, ctStateNew), d.inPrefix(d.destination, expr.CmpOpEq, p), drop()).because("no Service has this address")
		chains[forwardChain] = append(chains[forwardChain], r)
		chains[outputFilter] = append(chains[outputFilter], r)
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
		// With route_localnet, the kernel does not drop these packets itself.
		outside := append([]expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register(0)}}, compare(expr.CmpOpNeq, interfaceName("lo"))...)
		chains[guardChain] = []rule{
			do(outside, d.inPrefix(d.source, expr.CmpOpEq, d.loopback), drop()),
			do(outside, d.inPrefix(d.destination, expr.CmpOpEq, d.loopback), drop()),
		}
	}
	return chains
}

// Bits from include/uapi/linux/netfilter/nf_conntrack_common.h, as nft's "ct state" and "ct status"
// use them.
const (
	ctStateInvalid = 1 << 0
	ctStateNew     = 1 << 3
	ctStatusDNAT   = 1 << 5
)

func interfaceName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// reject refuses a connection with ICMP port unreachable.
func (d *dialect) reject() []expr.Any {
	code := uint8(3)
	if d.family == model.IPv6 {
		code = 4
	}
	return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code}}
}
