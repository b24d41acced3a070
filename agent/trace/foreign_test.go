// This test proves which rules count as written by kube-proxy, by the texts of real rules and of
// others that resemble them.
package trace

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestForms(t *testing.T) {
	t.Parallel()
	pods := []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00:10:180::/48")}
	ofPods := func(s Source) bool {
		return slices.Contains(pods, s.Network) || s == Source{Interface: "veth", IsPrefix: true}
	}
	for _, c := range []struct {
		chain, rule string
		written     bool
	}{
		{"KUBE-EXT-X", "-s 10.180.0.0/16 -m comment --comment pod traffic for shop/edge:http external destinations -j KUBE-SVC-X", true},
		{"KUBE-EXT-X", "-m comment --comment masquerade LOCAL traffic for shop/edge:http external destinations -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ", true},
		{"KUBE-EXT-X", "-m comment --comment route LOCAL traffic for shop/edge:http external destinations -m addrtype --src-type LOCAL -j KUBE-SVC-X", true},
		{"KUBE-EXT-X", "-s 10.180.0.0/16 -j DNAT --to-destination 10.9.9.9:80", false},
		{"KUBE-FW-X", "-s 10.97.0.4/32 -m comment --comment shop/edge:http loadbalancer IP -j KUBE-EXT-X", true},
		{"KUBE-FORWARD", "-m comment --comment kubernetes forwarding conntrack rule -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", true},
		{"KUBE-FORWARD", "-m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP", true},
		{"KUBE-FORWARD", "-m comment --comment x -s 10.9.9.9/32 -m conntrack --ctstate INVALID -j DROP", false},
		{"KUBE-FORWARD", "-m comment --comment x -i eth0 -m mark --mark 0x1/0x1 -j ACCEPT", false},
		{"external-X-shop/edge/tcp/http", `source address == 10.180.0.0/16 goto service-X-shop/edge/tcp/http "short-circuit pod traffic"`, true},
		{"external-X-shop/edge/tcp/http", "type of the source == local mark & 0xffffbfff ^ 0x4000 set mark", true},
		{"external-X-shop/edge/tcp/http", "source address == 10.9.9.9 drop", false},
		{"external-X-shop/edge/tcp/http", "source address & 255.255.0.0 == 10.180.0.0 goto service-X-shop/edge/tcp/http", true},
		{"external-X-shop/edge/tcp/http", "source address & 255.0.0.0 == 10.0.0.0 goto service-X-shop/edge/tcp/http", false},
		{"external-X-shop/edge/tcp/http", "source address & ffff:ffff:ffff:: == fd00:10:180:: goto service-X-shop/edge/tcp/http", true},
		{"external-X-shop/edge/tcp/http", "source address & fd00:: == fd00:10:180:: goto service-X-shop/edge/tcp/http", false},
		{"external-X-shop/edge/tcp/http", `input interface == "veth*" goto service-X-shop/edge/tcp/http`, true},
		{"external-X-shop/edge/tcp/http", `input interface == "eth0" goto service-X-shop/edge/tcp/http`, false},
		{"KUBE-EXT-X", "-s 10.180.0.0/16 -m comment --comment pod traffic for shop/edge:http external destinations -j KUBE-SVC-Y", false},
		{"KUBE-EXT-X", "-s 10.9.0.0/16 -m comment --comment pod traffic for shop/edge:http external destinations -j KUBE-SVC-X", false},
		{"KUBE-FW-X", "-s 10.97.0.4/32 -m comment --comment shop/edge:http loadbalancer IP -j KUBE-EXT-Y", false},
		{"external-X-shop/edge/tcp/http", "source address == 10.9.9.9 goto service-X-shop/edge/tcp/http", false},
		{"external-X-shop/edge/tcp/http", "type of the source == local goto service-Y-shop/other/tcp/http", false},
		{"external-X-shop/edge/tcp/http", "type of the source == local goto service-X-shop/edge/tcp/http", true},
	} {
		require.Equal(t, c.written, (&chain{name: c.chain}).writes(&Rule{Text: c.rule}, ofPods), "%s: %s", c.chain, c.rule)
	}
}
