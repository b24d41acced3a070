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

// Table is the name of the table that a family has, and StandInTable that of one that is there while it is made anew.
const (
	Table        = "slicecast"
	StandInTable = "slicecast-stand-in"
)

// Chains that always exist, and two that do not: guard is there if NodePorts are on loopback addresses, and outputFilter if
// the ranges of cluster IPs are known. The others are those of policies and picks.
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
	rejectChain      = "refuse" // "reject" is a word that nft does not take for a name
)

// chainOrder is that of packets. It is for those who read the table, as nft lists chains in the order they came in.
var chainOrder = []string{
	guardChain, preroutingChain, outputChain, servicesChain, nodePortsChain, sourcesChain, rejectChain, setChains[cluster], setChains[local],
	forwardChain, outputFilter, postroutingChain,
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
	table   string
	family  model.Family
	nfproto byte
	address field
	bits    int
	// Where addresses are in a packet's header.
	saddr, daddr uint32
	loopback     netip.Prefix
	mark         uint32
	// liberal: conntrack takes TCP segments outside of the window for valid.
	liberal bool
}

func newDialect(family model.Family, mark uint32) *dialect {
	if family == model.IPv6 {
		return &dialect{Table, family, unix.NFPROTO_IPV6, ipv6Type, 128, 8, 24, netip.PrefixFrom(netip.IPv6Loopback(), 128), mark, false}
	}
	return &dialect{Table, family, unix.NFPROTO_IPV4, ipv4Type, 32, 12, 16, netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8), mark, false}
}

// of gives the same for another table.
func (d *dialect) of(table string) *dialect {
	other := *d
	other.table = table
	return &other
}

// hook is where a base chain is called, and whether it drops what no rule of it decides.
type hook struct {
	kind     string
	number   uint32
	priority int32
	drops    bool
}

// hooks are those of base chains. The nat chains are where those of iptables are: the kernel asks the nat chains of a hook one
// after the other until one has translated the connection, so that only one of two proxies does, whichever comes first. What is
// filtered is so after that (and, on the way out, after IPVS at -98), so that what another proxy serves is not taken for unused.
var hooks = map[string]hook{
	preroutingChain:  {kind: "nat", number: unix.NF_INET_PRE_ROUTING, priority: -100},
	outputChain:      {kind: "nat", number: unix.NF_INET_LOCAL_OUT, priority: -100},
	postroutingChain: {kind: "nat", number: unix.NF_INET_POST_ROUTING, priority: 100},
	forwardChain:     {kind: "filter", number: unix.NF_INET_FORWARD, priority: 0},
	outputFilter:     {kind: "filter", number: unix.NF_INET_LOCAL_OUT, priority: 0},
	guardChain:       {kind: "filter", number: unix.NF_INET_PRE_ROUTING, priority: -300},
}

// fixedChains gives the chains that do not depend on any Service. The nat chains see only the first packet of a
// connection, so that nothing here costs the others anything except forward, and guard where it is.
func (d *dialect) fixedChains(node view.Node) map[string][]rule {
	// A packet may find something gone, as a transaction came between two of its lookups. The second time all is of one.
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
		// A mark that others set counts, too, as with kube-proxy. It is cleared since the packet may come by again, e.g.
		// inside a tunnel's.
		postroutingChain: {
			do(d.marked(), d.setMark(false), masquerade()),
			do(ctHas(expr.CtKeySTATUS, ctStatusDNAT), d.source(0), d.destination(d.words()), in(hairpins), masquerade()).because("a backend that is its own client"),
		},
		forwardChain: {},
		rejectChain:  {do(d.reject())},
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
	if !d.liberal {
		// A packet that conntrack finds invalid would pass untranslated, and the client, which knows only the Service's
		// address, would reset the connection (kubernetes/kubernetes#74839). Only what comes from backends on this node is
		// dropped: of others' connections the node may rightly see one direction only.
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
	ctStateNew     = 1 << 3
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
