// These tests prove which addresses and prefixes are accepted, including spellings of old releases.
// The fuzz target compares the results with kube-proxy's own parsers.
package source

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	netutils "k8s.io/utils/net"
)

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestParseAddr(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "010.000.0.01": "10.0.0.1", "::ffff:10.0.0.1": "10.0.0.1", "::ffff:0a00:1": "10.0.0.1",
		"::ffff:010.0.0.1": "10.0.0.1", "fd00:0:0::01": "fd00::1", "::10.0.0.1": "::a00:1",
		"": "", "10.0.0": "", "10.0.0.256": "", "10.0.0.1/32": "", "fe80::1%eth0": "", "web": "",
	} {
		a, ok := ParseAddr(in)
		require.Equal(t, want != "", ok, in)
		if ok {
			require.Equal(t, netip.MustParseAddr(want), a, in)
		}
		_, ok = ParseAddr(" " + in)
		require.False(t, ok, "kube-proxy trims ranges, and no addresses")
	}
}

func TestParsePrefix(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.0/8": "10.0.0.0/8", " 10.0.0.0/8\n": "10.0.0.0/8", "010.0.0.0/8": "10.0.0.0/8", "10.1.2.3/8": "10.0.0.0/8", "10.0.0.0/08": "10.0.0.0/8",
		"::ffff:10.0.0.0/104": "10.0.0.0/8", "::ffff:a01:203/104": "10.0.0.0/8", "::ffff:10.0.0.1/128": "10.0.0.1/32", "::ffff:1.2.3.4/96": "0.0.0.0/0",
		"fd00::1/64": "fd00::/64", "::/0": "::/0", "::ffff:0:0:0/90": "::ffff:0:0:0/90", "::fffe:10.0.0.0/104": "::fffe:a00:0/104",
		// These are IPv4-mapped addresses whose prefix is shorter than the 96 bits of the mapping.
		"::ffff:10.0.0.0/8": "", "::ffff:10.0.0.0/95": "", "::ffff:0:0/0": "",
		"": "", " ": "", "10.0.0.0": "", "10.0.0.0/33": "", "10.0.0.0/-1": "", "10.0.0.0/8/8": "", "fe80::%eth0/64": "", "fd00::/129": "", "10.0.0.0 /8": "", "x/8": "",
	} {
		p, ok := ParsePrefix(in)
		require.Equal(t, want != "", ok, in)
		if ok {
			require.Equal(t, netip.MustParsePrefix(want).Masked(), p, in)
		}
	}
}

// FuzzParse compares the result with what kube-proxy makes of the same text. kube-proxy treats the
// members of a mapped range as IPv4 addresses.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"10.0.0.1", "010.0.0.0/8", "::ffff:10.0.0.0/104", "::ffff:10.0.0.0/8", "fd00::/64", "::ffff:1.2.3.4", "fe80::1%eth0", "::/0"} {
		f.Add(s, []byte{10, 0, 0, 1})
		f.Add(s, []byte("0123456789abcdef"))
	}
	f.Fuzz(func(t *testing.T, s string, member []byte) {
		a, ok := ParseAddr(s)
		ip := netutils.ParseIPSloppy(s)
		require.Equal(t, ip != nil, ok)
		if ok {
			require.Equal(t, ip.String(), a.String())
			require.False(t, a.Is4In6())
		}
		p, ok := ParsePrefix(s)
		_, n, err := netutils.ParseCIDRSloppy(s)
		if !ok || err != nil { // spaces are trimmed, and mapped ranges larger than IPv4 are refused
			return
		}
		require.Equal(t, n.String(), p.String())
		require.Equal(t, p.Masked(), p)
		require.Equal(t, netutils.IsIPv4CIDR(n), p.Addr().Is4())
		if m, ok := netip.AddrFromSlice(member); ok {
			require.Equal(t, n.Contains(member), p.Contains(m.Unmap()), "%s in %s", m, p)
		}
	})
}
