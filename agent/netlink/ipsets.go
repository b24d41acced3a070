package netlink

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// IPSets calls each with the name of each ipset and the addresses and ports of its entries, if they
// have any. For a large ipset it calls each several times. A kernel without ipsets has none. The
// library's own function would write to the log.
func IPSets(each func(name string, entries []netip.AddrPort)) error {
	socket, err := Open(unix.NETLINK_NETFILTER)
	if err == nil {
		defer socket.Close()
		w := &Writer{}
		at := w.Begin(unix.NFNL_SUBSYS_IPSET<<8|nl.IPSET_CMD_LIST, 0)
		w.Buf = append(w.Buf, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
		w.Bytes(nl.IPSET_ATTR_PROTOCOL, []byte{nl.IPSET_PROTOCOL})
		w.End(at)
		err = socket.Dump(w, func(m Message) {
			attributes := m.Attributes(nl.SizeofNfgenmsg)
			var entries []netip.AddrPort
			for _, entry := range Attributes(Attribute(attributes, nl.IPSET_ATTR_ADT)) {
				var address netip.Addr
				for _, a := range Attributes(Attribute(entry, nl.IPSET_ATTR_IP)) {
					address, _ = netip.AddrFromSlice(a)
				}
				port := BigUint16(Attribute(entry, nl.IPSET_ATTR_PORT))
				entries = append(entries, netip.AddrPortFrom(address, port))
			}
			each(Text(Attribute(attributes, nl.IPSET_ATTR_SETNAME)), entries)
		})
	}
	switch {
	case err == nil, errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return nil
	}
	return fmt.Errorf("list ipsets: %w", err)
}
