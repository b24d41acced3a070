// This test proves that the example in docs/nftables.md is what nft lists after the programmer has
// written it to a real kernel.
package nftables

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestDocs compares the example in docs/nftables.md with what nft lists.
func TestDocs(t *testing.T) {
	t.Parallel()
	h := newInHost(t, testenv.NewNetwork(t).AddNode("a").Host, Options{})
	id := func(name string) view.ServicePortID {
		return view.ServicePortID{Service: model.ServiceKey{Namespace: "shop", Name: name}, Port: "http", Protocol: model.TCP, Family: model.IPv4}
	}
	ip := netip.MustParseAddr
	backends := func(addresses ...string) view.Backends {
		var out []view.Backend
		for _, a := range addresses {
			out = append(out, view.Backend{Address: netip.MustParseAddrPort(a), Local: strings.HasPrefix(a, "10.180.0.")})
		}
		return view.NewBackends(out...)
	}
	balancer := localPolicy(view.Frontend{
		Kind: view.LoadBalancer, Address: ip("198.51.100.4"), Port: servicePort, Sources: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")},
	})
	state := newState()
	state.Node.NodePorts = []netip.Prefix{netip.MustParsePrefix("192.168.0.2/32")}
	state.Node.ServiceCIDRs = testenv.ServiceCIDRs()
	require.NoError(t, h.Replace(t.Context(), state))
	for _, p := range []*view.ServicePort{
		{
			ID: id("cart"), Frontends: []view.Frontend{clusterIP(ip("10.96.0.10")), balancer, localPolicy(nodePort(30080))},
			Cluster: backends("10.180.0.7:8080", "10.180.1.3:8080"), Local: backends("10.180.0.7:8080"),
		},
		{ID: id("session"), Frontends: []view.Frontend{clusterIP(ip("10.96.0.11"))}, Cluster: backends("10.180.1.4:8080", "10.180.1.5:8080"), Affinity: 3 * time.Hour},
		{ID: id("gone"), Frontends: []view.Frontend{everyone(clusterIP(ip("10.96.0.12")), toReject)}},
	} {
		require.NoError(t, h.Apply(t.Context(), []view.Change{{After: p}}))
	}
	listed := h.list(t, model.IPv4)
	page, err := os.ReadFile("../../../docs/nftables.md")
	require.NoError(t, err)
	_, example, ok := strings.Cut(string(page), "```\ntable ip slicecast {\n")
	require.True(t, ok)
	example, _, ok = strings.Cut(example, "```\n")
	require.True(t, ok)
	// The kernel decides on the order of elements.
	fold := func(line string) string {
		line = strings.TrimPrefix(strings.Join(strings.Fields(line), " "), "elements = { ")
		return strings.TrimSuffix(strings.TrimSuffix(line, ","), " }")
	}
	all := fold(listed)
	for line := range strings.Lines(example) {
		for part := range strings.SplitSeq(line, ", ") {
			require.Contains(t, all, fold(part))
		}
	}
}
