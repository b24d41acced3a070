package iptables

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// dialect is what differs between the two families' rules, and what depends on the node.
type dialect struct {
	family      model.Family
	loopback    string
	bits        int
	markBit     uint32
	randomFully bool

	// pods are matches of connections from pods, any of which is enough. If it is empty, pods cannot
	// be recognized in this family.
	pods []match
	// nodePorts are the prefixes of the node's addresses that have nodePorts.
	nodePorts []netip.Prefix
	// localnet means that loopback addresses have nodePorts, too.
	localnet bool
	// guarded means that the guard exists and packets of loopback addresses are routed, whether they
	// have nodePorts or not.
	guarded bool
	// liberal means that conntrack accepts TCP segments outside of the window as valid.
	liberal bool
	// counters means that rules can count packets with the counters of counters.go.
	counters bool
}

func newDialect(family model.Family, markBit uint32, randomFully bool) *dialect {
	f := nft.FamilyOf(family)
	return &dialect{
		family: family, loopback: f.Loopback().String(), bits: f.Bits(), markBit: markBit, randomFully: randomFully,
	}
}

func (d *dialect) setNode(node view.Node) {
	d.pods, d.nodePorts, d.localnet = nil, nil, false
	d.liberal = programmer.TCPIsLiberal()
	switch {
	case node.Pods.Interface != "":
		d.pods = []match{{in: "-i " + node.Pods.Interface}}
	case node.Pods.InterfacePrefix != "":
		d.pods = []match{{in: "-i " + node.Pods.InterfacePrefix + "+"}}
	}
	f := nft.FamilyOf(d.family)
	for _, p := range f.Own(node.Pods.Prefixes) {
		d.pods = append(d.pods, from(p))
	}
	for _, p := range f.Own(node.NodePorts) {
		d.nodePorts = append(d.nodePorts, p.Masked())
		d.localnet = d.localnet || d.family == model.IPv4 && node.LocalhostNodePorts && p.Overlaps(f.Loopback())
	}
}

// match is what a rule matches, in the order in which iptables-save prints it. Empty fields match
// everything.
type match struct {
	source      string // "-s ..."
	destination string // "-d ..."
	in          string // "-i ..." or "-o ..."
	protocol    string // "-p ..." and its ports
	more        string
}

func (m match) rule(chain string, rest ...string) string {
	var b strings.Builder
	b.WriteString("-A " + chain)
	for _, part := range append([]string{m.source, m.destination, m.in, m.protocol, m.more}, rest...) {
		if part != "" {
			b.WriteByte(' ')
			b.WriteString(part)
		}
	}
	b.WriteByte('\n')
	return b.String()
}

// and returns the conjunction of two matches, which must not have a field in common.
func (m match) and(o match) match {
	return match{
		m.source + o.source, m.destination + o.destination, m.in + o.in, m.protocol + o.protocol, m.more + o.more,
	}
}

func from(p netip.Prefix) match {
	if p.Bits() == 0 {
		return match{}
	}
	return match{source: "-s " + p.Masked().String()}
}

func to(p netip.Prefix) match {
	return match{destination: strings.Replace(from(p).source, "-s", "-d", 1)}
}

// countsLocalhost reports whether a frontend has a rule that counts connections to loopback
// addresses.
func (d *dialect) countsLocalhost(f view.Frontend) bool {
	return d.localnet && d.counters && f.Kind == view.NodePort
}

// fromNode matches packets from an address of the node.
var fromNode = match{more: "-m addrtype --src-type LOCAL"}

// toNode returns matches of packets to an address of the node that may have nodePorts, any of which
// is enough. Loopback addresses have nodePorts only for packets from the node itself. Those are
// recognized by the interface lo: outbound in nat's OUTPUT, inbound in filter's INPUT.
func (d *dialect) toNode(t table) []match {
	matches := []match{{destination: "! -d " + d.loopback, more: "-m addrtype --dst-type LOCAL"}}
	if d.localnet {
		in := "-o lo"
		if t == filter {
			in = "-i lo"
		}
		matches = append(matches, match{destination: "-d " + d.loopback, in: in})
	}
	return matches
}

// frontend matches packets to a frontend. For a nodePort, the caller has made sure that they are
// for the node.
func (d *dialect) frontend(p model.Protocol, f view.Frontend) match {
	m := match{protocol: fmt.Sprintf("-p %s -m %s --dport %d", lower(p), lower(p), f.Port)}
	if f.Kind != view.NodePort {
		m.destination = fmt.Sprintf("-d %v/%d", f.Address, d.bits)
	}
	return m
}

func lower(p model.Protocol) string { return strings.ToLower(p.String()) }

func (d *dialect) mark(set bool) string {
	value := d.markBit
	if !set {
		value = 0
	}
	return fmt.Sprintf("-j MARK --set-xmark 0x%x/0x%x", value, d.markBit)
}

func (d *dialect) marked() string { return fmt.Sprintf("--mark 0x%x/0x%x", d.markBit, d.markBit) }

func (d *dialect) masquerade() string {
	if d.randomFully {
		return "-j MASQUERADE --random-fully"
	}
	return "-j MASQUERADE"
}

// rejectWith returns the target that refuses new connections: by ICMP port unreachable, or by a TCP
// reset over IPv6. If client and node share a kernel, an ICMPv6 error may arrive while connect
// still holds the socket. Linux ignores it then, and the client is refused only at its next
// attempt, a second later. A TCP reset is not ignored.
func (d *dialect) rejectWith(p model.Protocol) string {
	switch {
	case d.family == model.IPv4:
		return "-j REJECT --reject-with icmp-port-unreachable"
	case p == model.TCP:
		return "-j REJECT --reject-with tcp-reset"
	}
	return "-j REJECT --reject-with icmp6-port-unreachable"
}

// addressBit returns the ith bit of an address, counted from the lowest, because the lowest bits
// differ most among Services and among pods.
func addressBit(a netip.Addr, i int) int {
	b := a.As16()
	return int(b[15-i/8]>>(i%8)) & 1
}

// matchAddress matches destinations that have the bits of a path's last digit at that digit's place
// in the address. The mask excludes all other bits.
func (d *dialect) matchAddress(path string) match {
	first := (len(path) - 1) / digitBits * digitBits
	var value, mask [16]byte
	for i := first; i < len(path); i++ {
		mask[15-i/8] |= 1 << (i % 8)
		if path[i] == '1' {
			value[15-i/8] |= 1 << (i % 8)
		}
	}
	address := func(b [16]byte) netip.Addr {
		if d.family == model.IPv4 {
			return netip.AddrFrom4([4]byte(b[12:]))
		}
		return netip.AddrFrom16(b)
	}
	return match{destination: fmt.Sprintf("-d %v/%v", address(value), address(mask))}
}

// portBit returns the ith bit of a port number, counted from the highest, because rules match
// ranges of ports.
func portBit(port uint16, i int) int { return int(port>>(15-i)) & 1 }

// matchPorts returns a function that matches the destination ports which begin with the bits of a
// path.
func matchPorts(p model.Protocol) func(path string) match {
	return func(path string) match {
		first, size := 0, 1<<16
		for _, bit := range []byte(path) {
			size /= 2
			if bit == '1' {
				first += size
			}
		}
		return match{protocol: fmt.Sprintf("-p %s -m %s --dport %d:%d", lower(p), lower(p), first, first+size-1)}
	}
}
