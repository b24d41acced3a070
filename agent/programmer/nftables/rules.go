package nftables

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Table is the name of each family's table. StandInTable is the name of the table that serves while
// Table is created again. checkTable is the name of one that is validated but never committed.
const (
	Table        = "slicecast"
	StandInTable = "slicecast-stand-in"
	checkTable   = "slicecast-check"
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
	guardChain, preroutingChain, outputChain, servicesChain, nodePortsChain, sourcesChain, rejectChain,
	setChains[cluster], setChains[local], forwardChain, outputFilter, postroutingChain,
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

// dialect is what differs between the rules of tables.
type dialect struct {
	nft.Table
	mark uint32
	// liberal means that conntrack accepts TCP segments outside of the window as valid.
	liberal bool
	// guarded means that the table has guardChain, and that the kernel routes packets of loopback
	// addresses, whether they have NodePorts or not.
	guarded bool
}

func newDialect(family model.Family, mark uint32) *dialect {
	return &dialect{Table: nft.Table{Family: nft.FamilyOf(family), Name: Table}, mark: mark}
}

// of returns a copy of the dialect for another table.
func (d *dialect) of(table string) *dialect {
	other := *d
	other.Name = table
	return &other
}

// hooks are the hooks of the base chains. The nat chains have the priorities of iptables. The
// kernel calls the nat chains of a hook one after the other until one has translated the
// connection, so exactly one of two proxies translates it, whichever comes first. The filter chains
// come after all translation, on the way out also after IPVS at -98, and after what other proxies
// refuse. So addresses that another proxy serves, or refuses, are not mistaken for unused ones.
var hooks = map[string]nft.Hook{
	preroutingChain:  {Kind: "nat", Number: unix.NF_INET_PRE_ROUTING, Priority: -100},
	outputChain:      {Kind: "nat", Number: unix.NF_INET_LOCAL_OUT, Priority: -100},
	postroutingChain: {Kind: "nat", Number: unix.NF_INET_POST_ROUTING, Priority: 100},
	forwardChain:     {Kind: "filter", Number: unix.NF_INET_FORWARD, Priority: nft.AfterFilter},
	outputFilter:     {Kind: "filter", Number: unix.NF_INET_LOCAL_OUT, Priority: nft.AfterFilter},
	guardChain:       {Kind: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: -300},
}

// fixedChains returns the chains that do not depend on any Service. The nat chains see only the
// first packet of a connection. Other packets pass only the forward chain, the output filter and,
// if it exists, the guard. sticky means that the table has affinity.
func (d *dialect) fixedChains(node view.Node, sticky bool) map[string][]nft.Rule {
	// If a transaction is committed between two lookups of a packet, the packet may find something
	// gone. In the second pass, all lookups see the state after the transaction.
	dispatch := []nft.Rule{
		nft.Do(nft.Jump(servicesChain)),
		nft.Do(nft.Jump(servicesChain)).Because("again: something may just have changed"),
		nft.Do(d.Destination(0), in(clusterIPs), nft.Goto(rejectChain)).Because("another port of a cluster IP"),
	}
	hairpin := slices.Concat(d.Source(0), d.Destination(d.Words()), in(hairpins))
	policy := slices.Concat(lookupInteger(frontends, 0, 0), nft.AndMask(0, policyBits), lookupChain(policies))
	nodePortPolicy := slices.Concat(lookupInteger(nodePorts, 0, 0), nft.AndMask(0, policyBits), lookupChain(policies))
	chains := map[string][]nft.Rule{
		preroutingChain: dispatch,
		outputChain:     dispatch,
		servicesChain:   append([]nft.Rule{nft.Do(d.Frontend(0), policy)}, d.nodePortRules(node)...),
		nodePortsChain:  {nft.Do(nft.IsLocal(expr.Fib{FlagDADDR: true}), nft.Port(0), nodePortPolicy)},
		// A mark that others set counts, too, as with kube-proxy. The rule clears it, because the packet
		// may come by again, for example inside a tunnel's packet.
		postroutingChain: {
			nft.Do(nft.MarkHas(d.mark), nft.ChangeMark(d.mark, 0), nft.Masquerade()),
			nft.Do(nft.CtHas(expr.CtKeySTATUS, nft.CtStatusDNAT), hairpin, nft.Masquerade()).
				Because("a backend that is its own client"),
		},
		rejectChain: d.Refuse(""),
	}
	maps.Copy(chains, d.targets(sticky))
	d.addFilters(chains, node)
	return chains
}

func (d *dialect) addFilters(chains map[string][]nft.Rule, node view.Node) {
	chains[forwardChain] = []nft.Rule{}
	if !d.liberal {
		// A packet that conntrack finds invalid would pass untranslated. The client knows only the
		// Service's address and would reset the connection (kubernetes/kubernetes#74839). The rule drops
		// only packets from backends on this node, because the node may rightly see only one direction of
		// other connections.
		invalid := nft.CtHas(expr.CtKeySTATE, nft.CtStateInvalid)
		local := slices.Concat(d.Source(0), d.Source(d.Words()), in(hairpins))
		r := nft.Do(invalid, local, nft.Drop()).Because("would reset a Service's connection")
		chains[forwardChain] = append(chains[forwardChain], r)
	}
	for _, p := range d.Own(node.ServiceCIDRs) {
		unused := d.InPrefix(d.Destination, expr.CmpOpEq, p)
		r := nft.Do(nft.CtHas(expr.CtKeySTATE, nft.CtStateNew), unused, nft.Drop()).Because("no Service has this address")
		chains[forwardChain] = append(chains[forwardChain], r)
		chains[outputFilter] = append(chains[outputFilter], r)
	}
	if d.onLoopback(node) || d.guarded {
		// With route_localnet, the kernel does not drop these packets itself.
		outside := nft.InterfaceIs(expr.CmpOpNeq, nft.InterfaceName("lo"))
		chains[guardChain] = []nft.Rule{
			nft.Do(outside, d.InPrefix(d.Source, expr.CmpOpEq, d.Loopback()), nft.Drop()),
			nft.Do(outside, d.InPrefix(d.Destination, expr.CmpOpEq, d.Loopback()), nft.Drop()),
		}
	}
}

// onLoopback reports whether loopback addresses have NodePorts.
func (d *dialect) onLoopback(node view.Node) bool {
	return d.IP == model.IPv4 && node.LocalhostNodePorts
}

func (d *dialect) nodePortRules(node view.Node) (rules []nft.Rule) {
	for _, p := range d.Own(node.NodePorts) {
		var notLoopback []expr.Any
		if !d.onLoopback(node) && p.Overlaps(d.Loopback()) {
			notLoopback = d.InPrefix(d.Destination, expr.CmpOpNeq, d.Loopback())
		}
		rules = append(rules, nft.Do(d.InPrefix(d.Destination, expr.CmpOpEq, p), notLoopback, nft.Goto(nodePortsChain)))
	}
	return rules
}

func in(s setID) []expr.Any          { return nft.In(s.String()) }
func lookupChain(s setID) []expr.Any { return nft.LookupChain(s.String()) }

func lookup(s setID, key, to int) []expr.Any        { return nft.Lookup(s.String(), key, to) }
func lookupInteger(s setID, key, to int) []expr.Any { return nft.LookupInteger(s.String(), key, to) }
