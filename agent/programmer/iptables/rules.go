package iptables

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// All chains of ours have this prefix, and nothing else has.
const prefix = "SLICECAST-"

// Chains that always exist.
const (
	// In nat, for the first packet of a connection.
	servicesChain    = prefix + "SERVICES"
	dispatchChain    = prefix + "DISPATCH"
	nonLocalChain    = prefix + "NONLOCAL"
	vipsChain        = prefix + "VIPS"      // a tree
	nodePortsChain   = prefix + "NODEPORTS" // with a protocol appended, trees
	postroutingChain = prefix + "POSTROUTING"
	hairpinChain     = prefix + "HAIRPIN" // a tree

	// In filter.
	forwardChain = prefix + "FORWARD"
	inputChain   = prefix + "INPUT"
	rejectChain  = prefix + "REJECT" // a tree

	rejectNodePortsChain = prefix + "REJECT-NODEPORTS"

	// In both, while a rejected Service port is looked for.
	checkChain = prefix + "CHECK"
)

// Chains of one Service port.
const (
	portChainPrefix  = prefix + "P-"
	groupChainPrefix = prefix + "G-"
)

// hooks are the rules in the kernel's base chains, each put at the head.
var hooks = []hook{
	{nat, "-A PREROUTING -j " + servicesChain},
	{nat, "-A OUTPUT -j " + servicesChain},
	{nat, "-A POSTROUTING -j " + postroutingChain},
	{filter, "-A INPUT -m conntrack --ctstate NEW -j " + inputChain},
	{filter, "-A FORWARD -j " + forwardChain},
	{filter, "-A OUTPUT -m conntrack --ctstate NEW -j " + rejectChain},
}

// protocols in the order of rules.
var protocols = []model.Protocol{model.TCP, model.UDP, model.SCTP}

// dialect is what differs between the families' rules.
type dialect struct {
	family      model.Family
	loopback    string
	bits        int
	markBit     uint32
	randomFully bool
}

func newDialect(family model.Family, markBit uint32, randomFully bool) *dialect {
	d := &dialect{family: family, loopback: "127.0.0.0/8", bits: 32, markBit: markBit, randomFully: randomFully}
	if family == model.IPv6 {
		d.loopback, d.bits = "::1/128", 128
	}
	return d
}

// addressDigit gives the digits of an address from its lowest bits, which differ most among Services and among pods.
func addressDigit(a netip.Addr, level int) int {
	b := a.As16()
	return int(b[15-level/2]>>(level%2*4)) & (fanout - 1)
}

// matchAddress matches destinations that have the last digit of a path where it stands in an address: the mask leaves
// all other bits out.
func (d *dialect) matchAddress(path string) string {
	level := len(path) - 1
	bits := func(digit int) netip.Addr {
		var b [16]byte
		b[15-level/2] = byte(digit << (level % 2 * 4))
		if d.family == model.IPv4 {
			return netip.AddrFrom4([4]byte(b[12:]))
		}
		return netip.AddrFrom16(b)
	}
	return fmt.Sprintf("-d %v/%v", bits(strings.IndexByte(digits, path[level])), bits(fanout-1))
}

// portDigit gives the digits of a port from its highest bits, since rules match ranges of ports.
func portDigit(port uint16, level int) int { return int(port>>(12-4*level)) & (fanout - 1) }

// matchPorts matches the destination ports that begin with the digits of a path.
func matchPorts(p model.Protocol) func(path string) string {
	return func(path string) string {
		first, size := 0, 1<<16
		for _, digit := range []byte(path) {
			size /= fanout
			first += size * strings.IndexByte(digits, digit)
		}
		return fmt.Sprintf("-p %s -m %s --dport %d:%d", lower(p), lower(p), first, first+size-1)
	}
}

func lower(p model.Protocol) string { return strings.ToLower(p.String()) }

// mark gives the target that sets the masquerade mark, or clears it.
func (d *dialect) mark(set bool) string {
	value := d.markBit
	if !set {
		value = 0
	}
	return fmt.Sprintf("-j MARK --set-xmark 0x%x/0x%x", value, d.markBit)
}

// marked gives the match of the masquerade mark.
func (d *dialect) marked() string { return fmt.Sprintf("--mark 0x%x/0x%x", d.markBit, d.markBit) }

func (d *dialect) masquerade() string {
	if d.randomFully {
		return "-j MASQUERADE --random-fully"
	}
	return "-j MASQUERADE"
}

// toNode matches what goes to an address of the node, except a loopback one, which cannot lead out of the node.
func (d *dialect) toNode() string { return "! -d " + d.loopback + " -m addrtype --dst-type LOCAL" }

// fixedChains puts the chains that do not depend on any Service.
func (d *dialect) fixedChains(x *transaction, localPods []netip.Prefix) {
	chain := func(t table, name string, rules ...string) {
		x.put(t, name, func(w *bytes.Buffer) {
			for _, rule := range rules {
				fmt.Fprintf(w, "-A %s %s\n", name, rule)
			}
		})
	}
	// The mark is set before it is known whether a Service is meant, as most traffic to them wants it, and cleared again
	// if none was: so a Service port needs no rule for it. A mark that was there before is left alone.
	chain(nat, servicesChain,
		"-m mark "+d.marked()+" -g "+dispatchChain,
		"-j "+nonLocalChain,
		"-j "+dispatchChain,
		d.mark(false))
	chain(nat, dispatchChain,
		"-j "+vipsChain,
		d.toNode()+" -j "+nodePortsChain)
	nodePorts, rejects := []string{d.mark(true)}, []string{}
	for _, p := range protocols {
		nodePorts = append(nodePorts, "-p "+lower(p)+" -j "+nodePortsChain+"-"+p.String())
		rejects = append(rejects, "-p "+lower(p)+" -j "+rejectChain+"-"+p.String())
	}
	chain(nat, nodePortsChain, nodePorts...)
	chain(filter, inputChain, d.toNode()+" -j "+rejectNodePortsChain)
	chain(filter, rejectNodePortsChain, rejects...)

	// NonLocal: what comes from pods is not marked.
	nonLocal := []string{d.mark(false)}
	for _, p := range localPods {
		nonLocal = append(nonLocal, "-s "+p.String()+" -j RETURN")
	}
	if len(localPods) > 0 {
		nonLocal = append(nonLocal, d.mark(true))
	}
	chain(nat, nonLocalChain, nonLocal...)

	// What is not marked may still be a hairpin, and that only if it was translated. The mark is cleared as the packet
	// may come by again, e.g. inside a tunnel's.
	chain(nat, postroutingChain,
		"-m mark ! "+d.marked()+" -m conntrack --ctstate DNAT -j "+hairpinChain,
		"-m mark ! "+d.marked()+" -j RETURN",
		d.mark(false),
		d.masquerade())

	// A packet that conntrack finds invalid would pass untranslated, e.g. a pod's reply to a client that knows only the
	// Service's address, and the client would reset the connection.
	chain(filter, forwardChain,
		"-m conntrack --ctstate INVALID -j DROP",
		"-m mark "+d.marked()+" -j ACCEPT",
		"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-m conntrack --ctstate NEW -j "+rejectChain)
}

// entry is what a tree holds under a key: a frontend of a Service port.
type entry struct {
	port     *view.ServicePort
	frontend view.Frontend
}

// hairpinEntry is the entry for a local backend: as a frontend, only its address is set.
func hairpinEntry(port *view.ServicePort, b view.Backend) entry {
	return entry{port, view.Frontend{Address: b.Address.Addr()}}
}

func compareEntries(a, b entry) int {
	return cmp.Or(
		cmp.Compare(a.port.ID.Protocol, b.port.ID.Protocol),
		cmp.Compare(a.frontend.Port, b.frontend.Port),
		cmp.Compare(a.port.ID.String(), b.port.ID.String()))
}

// matchFrontend matches what comes to the frontend, given (for a NodePort) that it comes to the node.
func (d *dialect) matchFrontend(e entry) string {
	p := lower(e.port.ID.Protocol)
	match := fmt.Sprintf("-p %s -m %s --dport %d", p, p, e.frontend.Port)
	if e.frontend.Kind != view.NodePort {
		match = fmt.Sprintf("-d %v/%d %s", e.frontend.Address, d.bits, match)
	}
	return match
}

// comment names the frontend for those who read the rules. Names from a cluster are harmless as they are.
func comment(e entry) string {
	text := strings.Map(func(r rune) rune {
		if r > ' ' && r < 0x7f && r != '"' && r != '\\' && r != '\'' {
			return r
		}
		return '_'
	}, e.port.ID.String())
	return fmt.Sprintf("-m comment --comment \"%.230s %v\"", text, e.frontend.Kind)
}

// frontendRules writes the rules under a key of a tree of frontends with backends. usual is the masquerading for which
// the packet is marked already.
func (d *dialect) frontendRules(usual view.Masquerade) func(w *bytes.Buffer, chain string, entries []entry) {
	return func(w *bytes.Buffer, chain string, entries []entry) {
		for _, e := range slices.SortedFunc(slices.Values(entries), compareEntries) {
			match := d.matchFrontend(e)
			if e.frontend.Masquerade != usual {
				fmt.Fprintf(w, "-A %s %s %s\n", chain, match, d.markAs(e.frontend.Masquerade))
			}
			fmt.Fprintf(w, "-A %s %s %s -j %s\n", chain, match, comment(e), portChain(e.port.ID))
		}
	}
}

// markAs gives the target that sets the mark as a masquerading wants it.
func (d *dialect) markAs(m view.Masquerade) string {
	if m == view.MasqueradeNonLocal {
		return "-j " + nonLocalChain
	}
	return d.mark(m == view.MasqueradeAlways)
}

// rejectRules writes the rules under a key of a tree of frontends without backends.
func (d *dialect) rejectRules(w *bytes.Buffer, chain string, entries []entry) {
	for _, e := range slices.SortedFunc(slices.Values(entries), compareEntries) {
		fmt.Fprintf(w, "-A %s %s %s -j REJECT --reject-with %s\n", chain, d.matchFrontend(e), comment(e), d.rejectWith(e.port.ID.Protocol))
	}
}

// rejectWith gives the way in which new connections are refused: ICMP port unreachable. Over IPv6 Linux does not heed it
// if it comes while connect still holds the socket, as it does when client and node share a kernel: the client would
// only be refused at its next try, a second later. A TCP reset waits for the socket.
func (d *dialect) rejectWith(p model.Protocol) string {
	switch {
	case d.family == model.IPv4:
		return "icmp-port-unreachable"
	case p == model.TCP:
		return "tcp-reset"
	}
	return "icmp6-port-unreachable"
}

// hairpinRule writes the rule for connections that a backend makes to itself.
func (d *dialect) hairpinRule(w *bytes.Buffer, chain string, entries []entry) {
	a := entries[0].frontend.Address
	fmt.Fprintf(w, "-A %s -s %v/%d -d %v/%d %s\n", chain, a, d.bits, a, d.bits, d.masquerade())
}

// A Service port with more backends than maxPlain has them in groups, a chain each: a packet passes a few dozen rules
// instead of half as many as there are backends, and when a backend comes or goes its group is written anew, not all.
const maxPlain = 64

// groupCount gives the number of groups for a number of backends, a power of two near its square root; 0: no groups.
func groupCount(backends int) int {
	if backends <= maxPlain {
		return 0
	}
	count := 1
	for count*count < backends {
		count *= 2
	}
	return count
}

// chance gives the match that holds with probability part/whole (above 0, below 1), as iptables-save prints it: the
// kernel counts in 2^-31.
func chance(part, whole int) string {
	const unit = 1 << 31
	p := math.Round(float64(part) / float64(whole) * unit)
	return fmt.Sprintf("-m statistic --mode random --probability %.11f", p/unit)
}

// destinations writes rules that lead to each backend with the same probability. The protocol is matched as the target
// asks for it.
func destinations(w *bytes.Buffer, chain string, p model.Protocol, backends []view.Backend) {
	for i, b := range backends {
		fmt.Fprintf(w, "-A %s -p %s", chain, lower(p))
		if left := len(backends) - i; left > 1 {
			fmt.Fprintf(w, " %s", chance(1, left))
		}
		fmt.Fprintf(w, " -j DNAT --to-destination %v\n", b.Address)
	}
}

// portChains puts the chains of a Service port, given what it was and is; nil: it was not, is not.
func portChains(x *transaction, before, after *view.ServicePort) {
	was, is := 0, 0
	id := view.ServicePortID{}
	if before != nil {
		id, was = before.ID, groupCount(len(before.Backends))
	}
	if after != nil {
		id, is = after.ID, groupCount(len(after.Backends))
	}
	name := portChain(id)
	switch {
	case after == nil || len(after.Backends) == 0:
		x.remove(nat, name)
	case is == 0:
		x.put(nat, name, func(w *bytes.Buffer) { destinations(w, name, id.Protocol, after.Backends) })
	default:
		groups := make([][]view.Backend, is)
		for _, b := range after.Backends {
			g := groupOf(b, is)
			groups[g] = append(groups[g], b)
		}
		x.put(nat, name, func(w *bytes.Buffer) {
			left := len(after.Backends)
			for g, members := range groups {
				switch {
				case len(members) == 0:
				case len(members) == left:
					fmt.Fprintf(w, "-A %s -g %s\n", name, groupChain(id, g))
				default:
					fmt.Fprintf(w, "-A %s %s -g %s\n", name, chance(len(members), left), groupChain(id, g))
				}
				left -= len(members)
			}
		})
		for g, members := range groups {
			chain := groupChain(id, g)
			if len(members) == 0 {
				x.remove(nat, chain)
				continue
			}
			x.put(nat, chain, func(w *bytes.Buffer) { destinations(w, chain, id.Protocol, members) })
		}
	}
	for g := is; g < was; g++ {
		x.remove(nat, groupChain(id, g))
	}
}

// groupOf gives a backend's group: by a hash, so that it does not depend on the others.
func groupOf(b view.Backend, groups int) int {
	text, _ := b.Address.MarshalBinary() // never fails
	return int(xxhash.Sum64(text) & uint64(groups-1))
}

// portChain names a Service port's chain; 28 characters is the most that iptables takes.
func portChain(id view.ServicePortID) string { return portChainPrefix + digest(id.String()) }

// groupChain names the chain of a group of a Service port's backends.
func groupChain(id view.ServicePortID, group int) string {
	return groupChainPrefix + digest(fmt.Sprintf("%v/%d", id, group))
}

// digest gives 16 characters (80 bits, so that no two names that somebody made up meet).
func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

// checkRules writes all that is particular to a Service port as rules of checkChain that refer to no other chain.
func (d *dialect) checkRules(w *[tables]bytes.Buffer, port *view.ServicePort) {
	var entries []entry
	for _, f := range port.Frontends {
		entries = append(entries, entry{port, f})
	}
	if len(port.Backends) == 0 {
		d.rejectRules(&w[filter], checkChain, entries)
		return
	}
	for _, e := range entries {
		fmt.Fprintf(&w[nat], "-A %s %s %s -j RETURN\n", checkChain, d.matchFrontend(e), comment(e))
	}
	destinations(&w[nat], checkChain, port.ID.Protocol, port.Backends)
	for _, b := range port.Backends {
		if b.Local {
			d.hairpinRule(&w[nat], checkChain, []entry{hairpinEntry(port, b)})
		}
	}
}
