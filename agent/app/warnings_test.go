// These tests prove that a warning about the range of pods needs pods that the kernel's routes lead
// to: what tenants write into EndpointSlices makes none, and hides none.
package app

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	uplink = iota + 1 // the interface with the Node's address
	bridge            // of pods
	second            // another network of the machine
)

func route(to string, over int, gateway string) netlink.Route {
	r := netlink.Route{Link: over, Type: unix.RTN_UNICAST, Table: unix.RT_TABLE_MAIN}
	r.Destination, _ = netip.ParsePrefix(to) // not valid for a default route
	r.Gateway, _ = netip.ParseAddr(gateway)
	return r
}

// TestRoutesToPods checks which addresses are those of pods, in the routes that networks make.
func TestRoutesToPods(t *testing.T) {
	addr := func(s string, on int) netlink.Address {
		return netlink.Address{Prefix: netip.MustParsePrefix(s), Link: on}
	}
	held := []netlink.Address{addr("192.168.0.2/24", uplink), addr("2001:db8::2/64", uplink), addr("10.1.1.1/24", bridge), addr("10.0.0.2/24", second)}
	blackhole := route("10.2.0.0/26", 0, "")
	blackhole.Type = unix.RTN_BLACKHOLE
	several := route("10.8.0.0/16", 0, "")
	several.Hops = []int{bridge, second}
	elsewhere := route("10.9.0.0/16", bridge, "") // in another table
	elsewhere.Table = 100
	table := newRoutes([]netlink.Route{
		route("", uplink, "192.168.0.1"), route("192.168.0.0/24", uplink, ""), route("10.0.0.0/24", second, ""),
		route("10.1.1.0/24", bridge, ""), route("10.1.2.0/24", uplink, "192.168.0.3"),
		blackhole, route("10.2.0.7/32", bridge, ""), // addresses one by one
		route("10.3.1.0/24", bridge, "10.1.1.1"), route("10.3.2.0/24", second, "10.0.0.3"), // by gateways
		route("10.4.0.0/16", bridge, ""), route("10.4.0.0/16", uplink, ""), // in two ways
		several, elsewhere, route("fd00:1::/64", bridge, ""), route("2001:db8::/64", uplink, ""), route("", uplink, "fe80::1"),
	}, held, &model.Node{Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2"), netip.MustParseAddr("2001:db8::2")}})
	for a, want := range map[string]bool{
		"10.1.1.9": true, "10.2.0.7": true, "10.3.1.9": true, "fd00:1::9": true,
		"203.0.113.9": false, "192.168.0.9": false, "10.1.2.9": false, "10.2.0.8": false, "10.3.2.9": false, "10.4.0.9": false,
		"10.8.0.9": false, "10.9.0.9": false, "2001:db8::9": false, "fd00:2::9": false,
	} {
		require.Equal(t, want, table.isPod(netip.MustParseAddr(a)), a)
	}
	require.False(t, routes{}.isPod(netip.MustParseAddr("10.1.1.9")))
	own, err := readRoutes(nil)
	require.NoError(t, err)
	require.False(t, own.isPod(netip.MustParseAddr("203.0.113.9")))
	// A network of the machine itself, without pods, cannot be told from one with pods.
	require.True(t, table.isPod(netip.MustParseAddr("10.0.0.9")))
}

// TestEndpointsOfTenants checks that endpoints which only an EndpointSlice says to be on the node
// make no warning.
func TestEndpointsOfTenants(t *testing.T) {
	w := &cache.Writer{Cache: cache.New()}
	require.NoError(t, w.Welcome(1, 1))
	_, err := w.Apply(&model.Update{To: 1, Full: true, Services: []*model.Service{modeltest.Web()}, Slices: []*model.Slice{
		model.NewSlice(model.Slice{Namespace: "default", Name: "mine", Service: "web", Family: model.IPv4, Endpoints: []model.Endpoint{
			{Address: netip.MustParseAddr("203.0.113.9"), NodeName: "node-1"},
		}}),
	}})
	require.NoError(t, err)
	w.SetNode(&model.Node{Name: "node-1", Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.2")}})
	require.NoError(t, w.InSync([]uint64{1}, model.ResourceVersions{}))
	a := &agent{options: &Options{NodeName: "node-1", BesideKubeProxy: true}, cache: w.Cache, logger: slog.New(slog.DiscardHandler), services: newServices(slog.New(slog.DiscardHandler), nil)}
	a.programmer = &chosen{name: programmerPrinter}
	o := view.Options{DetectLocal: view.ByClusterCIDR, ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
	require.NotContains(t, a.check(o)(t.Context()), pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV4)
}
