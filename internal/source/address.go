package source

import (
	"net/netip"
	"strings"

	netutils "k8s.io/utils/net"
)

// Every address and range that a person writes, in a manifest, a flag or a file, is parsed here. ParseAddr and ParsePrefix read
// what kube-proxy reads, so that an object that an older API server has admitted keeps its meaning, and return only what
// model.FamilyOf tells the right family of.

// nobody holds, for each IP family, a range that no packet's source is in: the unspecified address, from which the kernel
// neither accepts nor forwards anything.
var nobody = []netip.Prefix{
	netip.PrefixFrom(netip.IPv4Unspecified(), netip.IPv4Unspecified().BitLen()),
	netip.PrefixFrom(netip.IPv6Unspecified(), netip.IPv6Unspecified().BitLen()),
}

// ParseAddr parses an IP address as kube-proxy does: numbers may have leading zeros, and an IPv4-mapped IPv6 address is the IPv4
// address. It refuses zones.
func ParseAddr(s string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return a.Unmap(), a.Zone() == ""
	}
	a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(s))
	return a.Unmap(), ok
}

// ParsePrefix parses a CIDR as kube-proxy does: spaces around it are trimmed, numbers may have leading zeros, the host's bits are
// cleared, and a range of IPv4-mapped IPv6 addresses is the IPv4 range.
//
// It refuses an IPv4-mapped address with a prefix of less than 96 bits, such as ::ffff:10.0.0.0/8. Taken literally that is an
// IPv6 range far larger than its address suggests, and the length is most likely meant for IPv4.
func ParsePrefix(s string) (netip.Prefix, bool) {
	written, n, err := netutils.ParseCIDRSloppy(strings.TrimSpace(s))
	if err != nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if a.Is4In6() { // then bits are 96 or more, else the mask had cleared some of the 96
		a, bits = a.Unmap(), bits-(netip.IPv6Unspecified().BitLen()-netip.IPv4Unspecified().BitLen())
	}
	if a.Is6() && written.To4() != nil {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, bits), ok
}
