// These tests prove which endpoints receive new connections: the fallback to terminating endpoints,
// duplicates across slices, the match of ports by name, and topology hints by zone and node. The
// expected sets are written out by hand, after kube-proxy.
package view_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// sets are the backends of a Service port.
type sets struct{ Cluster, Local view.Backends }

// TestSets covers which endpoints receive new connections. externalTrafficPolicy Local makes the
// Service use both sets.
func TestSets(t *testing.T) {
	published := func(e *model.Endpoint) {
		e.Conditions = model.Conditions{Ready: true, Serving: true, Terminating: true}
	}
	servingOnly := func(e *model.Endpoint) { e.Conditions = model.Conditions{Serving: true} }
	for name, c := range map[string]struct {
		slices []*model.Slice
		want   sets
	}{
		"no slice":          {nil, sets{}},
		"no endpoint":       {[]*model.Slice{slice("s")}, sets{}},
		"local and remote":  {[]*model.Slice{slice("s", endpoint("10.180.0.1", local), endpoint("10.180.1.1"))}, sets{at("10.180.0.1* 10.180.1.1"), at("10.180.0.1*")}},
		"without a node":    {[]*model.Slice{slice("s", endpoint("10.180.0.1", func(e *model.Endpoint) { e.NodeName = "" }))}, sets{at("10.180.0.1"), view.Backends{}}},
		"of another family": {[]*model.Slice{slice("s", endpoint("fd00:180::1", local))}, sets{}},

		"not ready is not usable, even if serving": {[]*model.Slice{slice("s", endpoint("10.180.0.1", local, unready), endpoint("10.180.0.2", local, servingOnly))},
			sets{}},
		"ready beats terminating (publishNotReadyAddresses)": {[]*model.Slice{
			slice("s", endpoint("10.180.0.1", local, published), endpoint("10.180.0.2", local, terminating))}, sets{at("10.180.0.1*"), at("10.180.0.1*")}},
		"terminating ones are not used while one is ready": {[]*model.Slice{
			slice("s", endpoint("10.180.0.1", local), endpoint("10.180.0.2", local, terminating), endpoint("10.180.1.1", terminating))},
			sets{at("10.180.0.1*"), at("10.180.0.1*")}},
		"terminating ones are used when none is ready, but not those that no longer serve": {[]*model.Slice{
			slice("s", endpoint("10.180.0.1", local, terminating), endpoint("10.180.0.2", local, dead), endpoint("10.180.1.1", terminating), endpoint("10.180.1.2", unready))},
			sets{at("10.180.0.1* 10.180.1.1"), at("10.180.0.1*")}},
		"the local set falls back by itself": {[]*model.Slice{
			slice("s", endpoint("10.180.0.1", local, terminating), endpoint("10.180.1.1"))}, sets{at("10.180.1.1"), at("10.180.0.1*")}},
		"the cluster set does not fall back for a local one": {[]*model.Slice{
			slice("s", endpoint("10.180.0.1", local), endpoint("10.180.1.1", terminating))}, sets{at("10.180.0.1*"), at("10.180.0.1*")}},

		"several slices, in the order of addresses": {[]*model.Slice{
			slice("a", endpoint("10.180.1.10"), endpoint("10.180.1.9")), slice("b", endpoint("10.180.1.2")),
		}, sets{at("10.180.1.2 10.180.1.9 10.180.1.10"), view.Backends{}}},
		"twice: one copy": {[]*model.Slice{slice("a", endpoint("10.180.1.1")), slice("b", endpoint("10.180.1.1"))}, sets{at("10.180.1.1"), view.Backends{}}},
		"twice: the one that does not terminate counts": {[]*model.Slice{
			slice("a", endpoint("10.180.1.1", terminating), endpoint("10.180.1.2")), slice("b", endpoint("10.180.1.1"), endpoint("10.180.1.2", terminating)),
		}, sets{at("10.180.1.1 10.180.1.2"), view.Backends{}}},
		"twice: even if it is not ready": {[]*model.Slice{
			slice("a", endpoint("10.180.1.1", terminating)), slice("b", endpoint("10.180.1.1", unready)),
		}, sets{}},
		"twice: even if the terminating one is ready (publishNotReadyAddresses)": {[]*model.Slice{
			slice("a", endpoint("10.180.1.1", published)), slice("b", endpoint("10.180.1.1", unready)),
		}, sets{}},
		"twice, not terminating: the ready one counts": {[]*model.Slice{
			slice("a", endpoint("10.180.1.1", unready)), slice("b", endpoint("10.180.1.1")), slice("c", endpoint("10.180.1.1", unready)),
		}, sets{at("10.180.1.1"), view.Backends{}}},
		"twice, on different nodes: the local one counts": {[]*model.Slice{
			slice("a", endpoint("10.180.1.1")), slice("b", endpoint("10.180.1.1", local)),
		}, sets{at("10.180.1.1*"), at("10.180.1.1*")}},
	} {
		t.Run(name, func(t *testing.T) {
			s := service(web, loadBalancer("192.0.2.1"), externalLocal)
			for range 2 { // the order of the slices does not matter
				got := see(t, options, s, c.slices...)[id(http, model.IPv4)]
				require.Equal(t, c.want, sets{got.Cluster, got.Local})
				slices.Reverse(c.slices)
			}
		})
	}

	// A node without a name has no local endpoints. Endpoints without a node name are not local
	// either.
	got := see(t, view.Options{}, service(web, internalLocal), slice("s", endpoint("10.180.1.1", func(e *model.Endpoint) { e.NodeName = "" })))
	require.Zero(t, got[id(http, model.IPv4)].Local)
}

// TestOrderOfIPv6Addresses asserts that endpoints of several slices are in the order of their whole
// addresses.
func TestOrderOfIPv6Addresses(t *testing.T) {
	got := see(t, options, service(web, dualStack), slice("a", endpoint("fd00:180:0:1::1"), endpoint("fd00:180:0:3::1")),
		slice("b", endpoint("fd00:180:0:2::1"), endpoint("fd00:180:0:1::2")), slice("c", endpoint("fd00:180::3")))[id(http, model.IPv6)]
	var list []string
	for b := range got.Cluster.All() {
		list = append(list, b.Address.Addr().String())
	}
	require.Equal(t, []string{"fd00:180::3", "fd00:180:0:1::1", "fd00:180:0:1::2", "fd00:180:0:2::1", "fd00:180:0:3::1"}, list)
}

// TestOneOfTwoCopiesIsRemoved asserts that an endpoint in two slices stays when it leaves one of
// them.
func TestOneOfTwoCopiesIsRemoved(t *testing.T) {
	v := view.New(options)
	a, b := slice("a", endpoint("10.180.1.1")), slice("b", endpoint("10.180.1.1"))
	v.Set(web, service(web), []*model.Slice{a, b})
	v.Update()
	for _, rest := range [][]*model.Slice{{b}, {a, b}, {a}} {
		v.Set(web, service(web), rest)
		changes, _ := v.Update()
		require.Empty(t, changes)
	}
}

// TestPorts covers how the ports of Services and slices are matched, which is by name and protocol.
func TestPorts(t *testing.T) {
	metrics := model.ServicePort{Name: "metrics", Protocol: model.TCP, Port: 8080}
	dnsTCP := model.ServicePort{Name: "dns", Protocol: model.TCP, Port: 53}
	sctp := model.ServicePort{Name: "dns", Protocol: model.SCTP, Port: 53}
	unnamed := model.ServicePort{Protocol: model.TCP, Port: 80}
	p := func(name string, protocol model.Protocol, port uint16) []model.SlicePort {
		return []model.SlicePort{{Name: name, Protocol: protocol, Port: port}}
	}
	got := see(t, options, service(web, ports(http, metrics, dns, dnsTCP, sctp)),
		sliceOf("a", p("http", model.TCP, 8080), endpoint("10.180.1.1")),
		// This slice has another number at the same address.
		sliceOf("b", p("http", model.TCP, 9999), endpoint("10.180.1.1")),
		// This port has the number of the Service's port, but no name.
		sliceOf("c", p("", model.TCP, 80), endpoint("10.180.1.3")),
		// This port has no number.
		sliceOf("d", p("http", model.TCP, 0), endpoint("10.180.1.4")),
		sliceOf("e", p("dns", model.UDP, 5353), endpoint("10.180.1.5")),
		sliceOf("f", append(p("dns", model.TCP, 53), p("dns", model.SCTP, 54)...), endpoint("10.180.1.6")),
	)
	backends := map[view.ServicePortID][]netip.AddrPort{}
	for id, p := range got {
		backends[id] = nil
		for b := range p.Cluster.All() {
			backends[id] = append(backends[id], b.Address)
		}
	}
	require.Equal(t, map[view.ServicePortID][]netip.AddrPort{
		id(http, model.IPv4): {ap("10.180.1.1:8080"), ap("10.180.1.1:9999")}, id(metrics, model.IPv4): nil,
		id(dns, model.IPv4): {ap("10.180.1.5:5353")}, id(dnsTCP, model.IPv4): {ap("10.180.1.6:53")}, id(sctp, model.IPv4): {ap("10.180.1.6:54")},
	}, backends)

	got = see(t, options, service(web, ports(unnamed)), sliceOf("a", p("", model.TCP, 8080), endpoint("10.180.1.1")), slice("b", endpoint("10.180.1.2")))
	require.Equal(t, at("10.180.1.1"), got[id(unnamed, model.IPv4)].Cluster)
}

// TestTopology covers hints. The node is node-1 in zone-a.
func TestTopology(t *testing.T) {
	for name, c := range map[string]struct {
		endpoints []model.Endpoint
		want      string
	}{
		"zone": {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a")), endpoint("10.180.1.2", zones("zone-b")),
			endpoint("10.180.1.3", zones("zone-b", "zone-a"))}, "10.180.1.1 10.180.1.3"},
		"nothing for the zone: all":       {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-c")), endpoint("10.180.1.2", zones("zone-b"))}, "10.180.1.1 10.180.1.2"},
		"one without a hint: all":         {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a")), endpoint("10.180.1.2")}, "10.180.1.1 10.180.1.2"},
		"the hint counts, not the zone":   {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a"), inZone("zone-b")), endpoint("10.180.1.2", zones("zone-b"), inZone("zone-a"))}, "10.180.1.1"},
		"the hint counts, not the node":   {[]model.Endpoint{endpoint("10.180.0.1", local, nodes(elsewhere)), endpoint("10.180.1.2", nodes(here))}, "10.180.1.2"},
		"node before zone":                {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a"), nodes(here)), endpoint("10.180.1.2", zones("zone-a"), nodes(elsewhere))}, "10.180.1.1"},
		"nothing for the node: zone":      {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a"), nodes(elsewhere)), endpoint("10.180.1.2", zones("zone-b"), nodes(elsewhere))}, "10.180.1.1"},
		"one without a node hint: zone":   {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-b"), nodes(here)), endpoint("10.180.1.2", zones("zone-a"))}, "10.180.1.2"},
		"nothing for node nor zone: all":  {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-b"), nodes(elsewhere)), endpoint("10.180.1.2", zones("zone-b"), nodes(elsewhere))}, "10.180.1.1 10.180.1.2"},
		"node hints only, none here: all": {[]model.Endpoint{endpoint("10.180.1.1", nodes(elsewhere)), endpoint("10.180.1.2", nodes("node-3"))}, "10.180.1.1 10.180.1.2"},

		"unready ones are no missing hints":           {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a")), endpoint("10.180.1.2", zones("zone-b")), endpoint("10.180.1.3", unready)}, "10.180.1.1"},
		"terminating ones are none either":            {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a")), endpoint("10.180.1.2", zones("zone-b")), endpoint("10.180.1.3", terminating)}, "10.180.1.1"},
		"an unready one is not there for the zone":    {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a"), unready), endpoint("10.180.1.2", zones("zone-b"))}, "10.180.1.2"},
		"nor is a terminating one":                    {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a"), terminating), endpoint("10.180.1.2", zones("zone-b"))}, "10.180.1.2"},
		"where none is ready hints do not matter":     {[]model.Endpoint{endpoint("10.180.1.1", zones("zone-a"), terminating), endpoint("10.180.1.2", zones("zone-b"), terminating)}, "10.180.1.1 10.180.1.2"},
		"where none is ready node hints don't either": {[]model.Endpoint{endpoint("10.180.1.1", nodes(here), terminating), endpoint("10.180.1.2", nodes(elsewhere), terminating)}, "10.180.1.1 10.180.1.2"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, at(c.want), see(t, options, service(web), slice("s", c.endpoints...))[id(http, model.IPv4)].Cluster)
			// The decision is made over all endpoints of a Service, however they are divided into slices.
			var each []*model.Slice
			for _, e := range c.endpoints {
				each = append(each, slice("s-"+e.Address.String(), e))
			}
			require.Equal(t, at(c.want), see(t, options, service(web), each...)[id(http, model.IPv4)].Cluster)
		})
	}

	// Hints do not apply to the local set. They do apply to connections that may go to any node, even
	// on an address with externalTrafficPolicy Local.
	got := see(t, options, service(web, loadBalancer("192.0.2.1"), externalLocal), slice("s", endpoint("10.180.0.1", local, zones("zone-a")),
		endpoint("10.180.0.2", local, zones("zone-b")), endpoint("10.180.1.1", zones("zone-a")), endpoint("10.180.1.2", zones("zone-b"))))
	require.Equal(t, at("10.180.0.1* 10.180.1.1"), got[id(http, model.IPv4)].Cluster)
	require.Equal(t, at("10.180.0.1* 10.180.0.2*"), got[id(http, model.IPv4)].Local)
	got = see(t, options, service(web, internalLocal), slice("s", endpoint("10.180.0.1", local, zones("zone-b")), endpoint("10.180.1.1", zones("zone-a"))))
	require.Equal(t, at("10.180.0.1*"), got[id(http, model.IPv4)].Local)
	require.Zero(t, got[id(http, model.IPv4)].Cluster, "nothing leads there")
}

func inZone(zone string) func(*model.Endpoint) { return func(e *model.Endpoint) { e.Zone = zone } }

// TestZoneOfTheNodeChanges covers a zone label that is added, changed, empty and removed.
func TestZoneOfTheNodeChanges(t *testing.T) {
	v := view.New(options)
	v.Set(web, service(web), []*model.Slice{slice("s", endpoint("10.180.1.1", zones("zone-a")), endpoint("10.180.1.2", zones("zone-b")))})
	v.Update()
	for _, c := range []struct{ zone, want string }{
		{"-", "10.180.1.1 10.180.1.2"}, {"zone-a", "10.180.1.1"}, {"zone-b", "10.180.1.2"}, {"", "10.180.1.1 10.180.1.2"}, {"zone-a", "10.180.1.1"},
		{"zone-c", "10.180.1.1 10.180.1.2"}, {"zone-b", "10.180.1.2"}, {"-", "10.180.1.1 10.180.1.2"},
	} {
		n := &model.Node{Name: here}
		if c.zone != "-" {
			n.Labels = map[string]string{"topology.kubernetes.io/zone": c.zone}
		}
		v.SetNode(n)
		_, node := v.Update()
		require.False(t, node, "a change of some Service ports is all there is to program")
		require.Equal(t, at(c.want), v.State().Ports[id(http, model.IPv4)].Cluster, c.zone)
	}
}

func TestServing(t *testing.T) {
	servingOnly := func(e *model.Endpoint) { e.Conditions = model.Conditions{Serving: true} }
	s := sliceOf("s", []model.SlicePort{http8080, dns5353}, endpoint("10.180.1.1"), endpoint("10.180.1.2", terminating), endpoint("10.180.1.3", dead),
		endpoint("10.180.1.4", unready), endpoint("10.180.1.5", servingOnly), endpoint("10.180.0.6", local, zones("zone-b")))
	for _, policy := range []func(*model.Service){internalLocal, externalLocal} {
		got := see(t, options, service(web, policy, ports(http, dns)), s)
		var serving []netip.AddrPort
		for b := range got[id(dns, model.IPv4)].Serving.All() {
			serving = append(serving, b.Address)
		}
		require.Equal(t, []netip.AddrPort{ap("10.180.0.6:5353"), ap("10.180.1.1:5353"), ap("10.180.1.2:5353"), ap("10.180.1.5:5353")},
			serving, "whatever policies and hints say")
		require.Zero(t, got[id(http, model.IPv4)].Serving, "only UDP has flows that must be removed")
	}
}
