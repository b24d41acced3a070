package source

import (
	"net/netip"
	"strings"

	netutils "k8s.io/utils/net"
)

// Every address and range that a person writes, in a manifest, a flag or a file, is parsed here.
// ParseAddr and ParsePrefix accept what kube-proxy accepts, so that objects that an older API
// server has admitted keep their meaning. They only return values whose family model.FamilyOf
// reports correctly.

// nobody has, for each IP family, a range that contains no packet's source: the unspecified
// address. The kernel neither accepts nor forwards packets from it.
var nobody = []netip.Prefix{
	netip.PrefixFrom(netip.IPv4Unspecified(), netip.IPv4Unspecified().BitLen()),
	netip.PrefixFrom(netip.IPv6Unspecified(), netip.IPv6Unspecified().BitLen()),
}

// ParseAddr parses an IP address as kube-proxy does. Numbers may have leading zeros, and an
// IPv4-mapped IPv6 address is the IPv4 address. ParseAddr refuses zones.
func ParseAddr(s string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return a.Unmap(), a.Zone() == ""
	}
	a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(s))
	return a.Unmap(), ok
}

// ParsePrefix parses a CIDR as kube-proxy does. It trims spaces, accepts leading zeros in numbers,
// clears the host's bits, and converts a range of IPv4-mapped IPv6 addresses to the IPv4 range.
//
// ParsePrefix refuses an IPv4-mapped address with a prefix of less than 96 bits, such as
// ::ffff:10.0.0.0/8. Taken literally, it is an IPv6 range far larger than its address suggests.
// Most likely, the length is meant for IPv4.
func ParsePrefix(s string) (netip.Prefix, bool) {
	written, n, err := netutils.ParseCIDRSloppy(strings.TrimSpace(s))
	if err != nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	// The mask leaves such an address only if it has at least 96 bits.
	if a.Is4In6() {
		a, bits = a.Unmap(), bits-(netip.IPv6Unspecified().BitLen()-netip.IPv4Unspecified().BitLen())
	}
	if a.Is6() && written.To4() != nil {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, bits), ok
}
