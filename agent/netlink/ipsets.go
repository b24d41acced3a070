package netlink

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// IPSetEntry is an entry of an ipset. What the kind of the ipset does not have is zero.
type IPSetEntry struct {
	First, Second netip.Prefix
	Protocol      byte
	Port          uint16
}

// IPSets calls each with the name of each ipset and the addresses and ports of its entries, if they
// have any. For a large ipset it calls each several times. A kernel without ipsets has none. The
// library's own function would write to the log.
func IPSets(each func(name string, entries []netip.AddrPort)) error {
	return IPSetEntries(func(name, _ string, entries []IPSetEntry) {
		var all []netip.AddrPort
		for _, e := range entries {
			all = append(all, netip.AddrPortFrom(e.First.Addr(), e.Port))
		}
		each(name, all)
	})
}

// IPSetEntries calls each as IPSets does, with the kind of each ipset, such as hash:ip,port, and
// its entries.
func IPSetEntries(each func(name, kind string, entries []IPSetEntry)) error {
	type part struct {
		name, kind string
		entries    []IPSetEntry
	}
	var parts []part
	socket, err := Open(unix.NETLINK_NETFILTER)
	if err == nil {
		defer socket.Close()
		w := &Writer{}
		at := w.Begin(unix.NFNL_SUBSYS_IPSET<<8|nl.IPSET_CMD_LIST, 0)
		w.Buf = append(w.Buf, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
		w.Bytes(nl.IPSET_ATTR_PROTOCOL, []byte{nl.IPSET_PROTOCOL})
		w.End(at)
		err = socket.Read(w, func() { parts = nil }, func(m Message) {
			attributes := m.Attributes(nl.SizeofNfgenmsg)
			var entries []IPSetEntry
			for _, entry := range Attributes(Attribute(attributes, nl.IPSET_ATTR_ADT)) {
				one := IPSetEntry{
					First: ipsetAddress(entry, nl.IPSET_ATTR_IP, nl.IPSET_ATTR_CIDR), Second: ipsetAddress(entry, nl.IPSET_ATTR_IP2, nl.IPSET_ATTR_CIDR2),
					Port: BigUint16(Attribute(entry, nl.IPSET_ATTR_PORT)),
				}
				if protocol := Attribute(entry, nl.IPSET_ATTR_PROTO); len(protocol) == 1 {
					one.Protocol = protocol[0]
				}
				entries = append(entries, one)
			}
			name, kind := Attribute(attributes, nl.IPSET_ATTR_SETNAME), Attribute(attributes, nl.IPSET_ATTR_TYPENAME)
			parts = append(parts, part{Text(name), Text(kind), entries})
		})
	}
	switch {
	case err == nil:
		for _, p := range parts {
			each(p.name, p.kind, p.entries)
		}
		return nil
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return nil
	}
	return fmt.Errorf("list ipsets: %w", err)
}

// ipsetAddress returns an address of an entry, with the length of its prefix if it has one.
func ipsetAddress(entry []byte, address, length uint16) netip.Prefix {
	for _, b := range Attributes(Attribute(entry, address)) {
		a, ok := netip.AddrFromSlice(b)
		if !ok {
			continue
		}
		bits := a.BitLen()
		if cidr := Attribute(entry, length); len(cidr) == 1 {
			bits = int(cidr[0])
		}
		return netip.PrefixFrom(a, bits)
	}
	return netip.Prefix{}
}
