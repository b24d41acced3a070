// These tests prove which pods of a Node count as unrecognized: in both IP families, for Nodes with
// and without podCIDRs, and whether or not the network uses them.
package view

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

func TestUnrecognizedPods(t *testing.T) {
	prefixes := func(list ...string) (out []netip.Prefix) {
		for _, s := range list {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	addrs := func(list ...string) (out []netip.Addr) {
		for _, s := range list {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	both := prefixes("10.0.0.0/16", "fd00::/48")
	for name, c := range map[string]struct {
		mode       DetectLocalMode
		ranges     []netip.Prefix
		podCIDRs   []netip.Prefix
		ips        []netip.Addr // nil means 192.0.2.1 and 2001:db8::1
		local      []netip.Addr
		ipv4, ipv6 string // what is not recognized
	}{
		"right":                               {ranges: both, podCIDRs: prefixes("10.0.3.0/24", "fd00:0:0:3::/64")},
		"one of a family":                     {ranges: prefixes("10.0.0.0/16", "10.7.0.0/16"), podCIDRs: prefixes("10.7.3.0/24")},
		"exactly":                             {ranges: prefixes("10.0.3.0/24"), podCIDRs: prefixes("10.0.3.0/24")},
		"by halves":                           {ranges: prefixes("10.0.3.0/25", "10.0.3.128/26", "10.0.3.192/26"), podCIDRs: prefixes("10.0.3.0/24")},
		"a part is missing":                   {ranges: prefixes("10.0.3.0/25", "10.0.3.128/26"), podCIDRs: prefixes("10.0.3.0/24"), ipv4: "10.0.3.0/24"},
		"partly inside":                       {ranges: prefixes("10.0.3.0/24"), podCIDRs: prefixes("10.0.0.0/16"), ipv4: "10.0.0.0/16"},
		"partly inside, as a pod is":          {ranges: prefixes("10.0.3.0/24"), podCIDRs: prefixes("10.0.0.0/16"), local: addrs("10.0.3.1"), ipv4: "10.0.0.0/16"},
		"outside":                             {ranges: both, podCIDRs: prefixes("10.1.3.0/24", "fd00:0:0:3::/64"), ipv4: "10.1.3.0/24"},
		"outside in IPv6":                     {ranges: both, podCIDRs: prefixes("10.0.3.0/24", "fd00:1::/64"), ipv6: "fd00:1::/64"},
		"outside in both":                     {ranges: both, podCIDRs: prefixes("10.1.3.0/24", "fd00:1::/64"), ipv4: "10.1.3.0/24", ipv6: "fd00:1::/64"},
		"some of several":                     {ranges: both, podCIDRs: prefixes("10.0.3.0/24", "10.1.3.0/24"), ipv4: "10.1.3.0/24"},
		"a range of one family only":          {ranges: prefixes("10.0.0.0/16"), podCIDRs: prefixes("10.0.3.0/24", "fd00::/64"), ipv6: "fd00::/64"},
		"a range of the wrong family":         {ranges: prefixes("fd00::/48"), podCIDRs: prefixes("10.0.3.0/24"), ipv4: "10.0.3.0/24"},
		"a range for a family without pods":   {ranges: both, podCIDRs: prefixes("10.0.3.0/24")},
		"no range on purpose":                 {podCIDRs: prefixes("10.0.3.0/24"), local: addrs("10.0.3.1")},
		"no podCIDRs, nothing known":          {ranges: both},
		"no podCIDRs, right":                  {ranges: both, local: addrs("10.0.3.1", "fd00::1")},
		"no podCIDRs, outside":                {ranges: both, local: addrs("10.0.3.1", "10.9.0.7", "fd00::1"), ipv4: "10.9.0.7"},
		"no podCIDRs, in the node's network":  {ranges: both, local: addrs("192.0.2.1", "2001:db8::1")},
		"no podCIDRs, no addresses":           {ranges: both, ips: []netip.Addr{}, local: addrs("192.0.2.1")},
		"no podCIDRs, no address of IPv4":     {ranges: both, ips: addrs("2001:db8::1"), local: addrs("10.9.0.7")},
		"a single address":                    {ranges: prefixes("10.0.3.1/32"), podCIDRs: prefixes("10.0.3.1/32")},
		"podCIDRs outside that are not used":  {ranges: both, podCIDRs: prefixes("172.16.3.0/24"), local: addrs("192.0.2.1", "10.0.3.1")},
		"podCIDRs outside, pods elsewhere":    {ranges: both, podCIDRs: prefixes("172.16.3.0/24"), local: addrs("10.0.3.1", "10.9.0.7"), ipv4: "10.9.0.7"},
		"podCIDRs outside that are used":      {ranges: both, podCIDRs: prefixes("172.16.3.0/24"), local: addrs("172.16.3.9"), ipv4: "172.16.3.9"},
		"podCIDRs inside, an endpoint is not": {ranges: both, podCIDRs: prefixes("10.0.3.0/24"), local: addrs("10.9.0.7")},
		"all addresses":                       {ranges: prefixes("0.0.0.0/0"), podCIDRs: prefixes("10.0.3.0/24")},
		"by podCIDRs":                         {mode: ByNodeCIDR, podCIDRs: prefixes("10.0.3.0/24")},
		"by podCIDRs, without any":            {mode: ByNodeCIDR, local: addrs("10.0.3.1"), ipv4: "10.0.3.1"},
		"by bridge":                           {mode: ByBridgeInterface, podCIDRs: prefixes("10.0.3.0/24"), local: addrs("10.9.0.7")},
		"by interfaces":                       {mode: ByInterfaceNamePrefix, podCIDRs: prefixes("10.0.3.0/24"), local: addrs("10.9.0.7")},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{DetectLocal: c.mode, ClusterCIDRs: c.ranges}
			n := &model.Node{Name: "node-1", Addresses: c.ips, PodCIDRs: c.podCIDRs}
			if c.ips == nil {
				n.Addresses = addrs("192.0.2.1", "2001:db8::1")
			}
			got := o.UnrecognizedPods(n, slices.Values(c.local))
			for family, want := range map[model.Family]string{model.IPv4: c.ipv4, model.IPv6: c.ipv6} {
				if want == "" {
					require.NotContains(t, got, family)
				} else {
					require.Contains(t, got[family], family.String()+" pods at "+want+" are not in ")
				}
			}
		})
	}
	o := Options{ClusterCIDRs: both}
	require.Empty(t, o.UnrecognizedPods(nil, slices.Values(addrs("10.9.0.7"))))
}
