// This test proves that a view that has seen random changes, in any batches, has the state of a new
// view that sees only the last objects. The Changes alone lead to the same state, and the oracle
// agrees with it for every connection.
package view_test

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// Services of histories draw addresses and ports from pools so small that they conflict over nearly
// everything.
var (
	poolAddresses = addrs("10.96.0.1", "10.96.0.2", "10.96.0.3", "fd00:96::1", "fd00:96::2")
	poolPorts     = []uint16{80, 30080}
	poolNodePorts = []uint16{0, 30080, 30081}
	poolRanges    = prefixes("0.0.0.0/0", "192.168.0.0/24", "198.51.100.0/24", "10.96.0.1/32", "2001:db8::/32", "::/1")
	poolSources   = addrs("198.51.100.1", "203.0.113.1", "10.96.0.1", "10.96.0.2", "192.168.0.2", "2001:db8::2", "fd00:96::1")
	protocols     = []model.Protocol{model.TCP, model.UDP}
)

func drawService(t *rapid.T, key model.ServiceKey) *model.Service {
	address := rapid.SampledFrom(poolAddresses)
	s := model.Service{
		Namespace: key.Namespace, Name: key.Name,
		Type:                    rapid.SampledFrom([]model.ServiceType{model.ClusterIP, model.NodePort, model.LoadBalancer}).Draw(t, "type"),
		InternalTrafficPolicy:   rapid.SampledFrom([]model.TrafficPolicy{0, model.TrafficLocal}).Draw(t, "internal"),
		ExternalTrafficPolicy:   rapid.SampledFrom([]model.TrafficPolicy{0, model.TrafficLocal}).Draw(t, "external"),
		ClientIPAffinitySeconds: rapid.SampledFrom([]uint32{0, 60}).Draw(t, "affinity"),
		HealthCheckNodePort:     rapid.SampledFrom([]uint16{0, 31000}).Draw(t, "health check"),
		CreationTimeSeconds:     rapid.Int64Range(0, 2).Draw(t, "created"),
		IPVSScheduler:           rapid.SampledFrom([]string{"", "", "lc", "best"}).Draw(t, "scheduler"),
		ClusterIPs:              rapid.SliceOfNDistinct(address, 0, 2, model.FamilyOf).Draw(t, "cluster IPs"),
		ExternalIPs:             rapid.SliceOfN(address, 0, 2).Draw(t, "external IPs"),

		LoadBalancerSourceRanges: rapid.SliceOfN(rapid.SampledFrom(poolRanges), 0, 2).Draw(t, "ranges"),
	}
	for _, ip := range rapid.SliceOfNDistinct(address, 0, 2, rapid.ID).Draw(t, "ingress") {
		s.LoadBalancerIngress = append(s.LoadBalancerIngress, model.LoadBalancerIngress{IP: ip, ProxyMode: rapid.IntRange(0, 4).Draw(t, "mode") == 0})
	}
	for range rapid.IntRange(0, 3).Draw(t, "ports") {
		s.Ports = append(s.Ports, model.ServicePort{
			Name: rapid.SampledFrom([]string{"", "http"}).Draw(t, "name"), Protocol: rapid.SampledFrom(protocols).Draw(t, "protocol"),
			Port: rapid.SampledFrom(poolPorts).Draw(t, "port"), NodePort: rapid.SampledFrom(poolNodePorts).Draw(t, "node port"),
		})
	}
	return model.NewService(s)
}

func drawNode(t *rapid.T) *model.Node {
	return rapid.SampledFrom([]*model.Node{
		nil, thisNode, {Name: here}, {Name: here, Labels: map[string]string{"topology.kubernetes.io/zone": "zone-b"}, Addresses: addrs("198.51.100.1")},
		{Name: here, Labels: map[string]string{"topology.kubernetes.io/zone": ""}, PodCIDRs: prefixes("10.180.0.0/24")},
		{Name: here, ServiceCIDRs: prefixes("10.96.0.0/16")},
		{Name: here, Addresses: addrs("10.96.0.3", "10.96.0.2", "fd00:96::2")},
	}).Draw(t, "node")
}

// history is a view under random changes, with the objects that exist (world) and the state that
// follows from the Changes that Update returns (followed).
type history struct {
	world

	view     *view.View
	followed map[view.ServicePortID]*view.ServicePort
	checks   map[view.HealthCheckID]view.HealthCheck
	node     view.Node
	slices   map[model.Key]*model.Slice
}

func (h *history) of(key model.ServiceKey) []*model.Slice {
	var out []*model.Slice
	for _, s := range h.slices {
		if s.ServiceKey() == key {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) })
	return out
}

func (h *history) set(keys ...model.ServiceKey) {
	for _, key := range keys {
		h.view.Set(key, h.services[key], h.of(key))
	}
}

// change applies the Changes to followed, and asserts what Update promises about them.
func (h *history) change(t *rapid.T) {
	changes, node := h.view.Update()
	seen := map[view.ServicePortID]bool{}
	for _, c := range changes {
		require.False(t, seen[c.ID()], "one change for each Service port")
		seen[c.ID()] = true
		require.Same(t, h.followed[c.ID()], c.Before)
		require.NotEmpty(t, modeltest.Diff(c.Before, c.After))
		if c.After == nil {
			delete(h.followed, c.ID())
			continue
		}
		require.Equal(t, c.ID(), c.After.ID)
		h.followed[c.ID()] = c.After
	}
	require.True(t, maps.Equal(h.followed, h.view.State().Ports))
	now := h.view.State().Node
	now.PodCIDRs = h.node.PodCIDRs // nothing is programmed for them
	require.Equal(t, node, modeltest.Diff(h.node, now) != "")
	h.node = now
	if checks, changed := h.view.TakeHealthChecks(); changed {
		h.checks = checks
	}
}

// check compares the state with that of a new view that sees only the present objects, with the
// promises of the types, and with the oracle.
func (h *history) check(t *rapid.T) {
	fresh := view.New(h.options)
	fresh.SetNode(h.world.node)
	for key, s := range h.services {
		fresh.Set(key, s, h.of(key))
	}
	fresh.Update()
	require.Empty(t, modeltest.Diff(fresh.State(), h.view.State()))
	checks, _ := fresh.TakeHealthChecks()
	require.Empty(t, modeltest.Diff(checks, h.checks))
	byName := func(a, b view.Problem) int { return strings.Compare(a.Service.String(), b.Service.String()) }
	require.Equal(t, slices.SortedFunc(slices.Values(fresh.Problems()), byName), slices.SortedFunc(slices.Values(h.view.Problems()), byName))

	requirePromises(t, h.view.State())

	h.world.slices = slices.Collect(maps.Values(h.slices))
	var asked []connection
	for _, protocol := range protocols {
		for _, to := range poolAddresses {
			for _, port := range poolPorts {
				asked = append(asked, connection{to: to, port: port, protocol: protocol, family: model.FamilyOf(to)})
			}
		}
		for _, port := range poolNodePorts[1:] {
			asked = append(asked, connection{port: port, protocol: protocol, family: model.IPv4}, connection{port: port, protocol: protocol, family: model.IPv6})
		}
	}
	for _, c := range asked {
		for _, c.from = range origins {
			for _, c.source = range poolSources {
				if model.FamilyOf(c.source) != c.family {
					continue
				}
				if want, got := h.fate(c), observed(h.view.State(), c); !want.equal(got) {
					require.Equal(t, want, got, "%+v", c)
				}
			}
		}
	}
	checkPorts := map[view.HealthCheckID][]uint16{}
	for id, p := range h.view.State().Ports {
		of := view.HealthCheckID{Service: id.Service, Family: id.Family}
		numbers := checkPorts[of]
		if p.HealthCheckPort != 0 {
			numbers = append(numbers, p.HealthCheckPort)
		}
		checkPorts[of] = numbers
	}
	for of, numbers := range checkPorts {
		if check, ok := h.checks[of]; ok {
			require.Equal(t, []uint16{check.Port}, numbers)
		} else {
			require.Empty(t, numbers)
		}
	}
	for key, s := range h.services {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			got, ok := h.checks[view.HealthCheckID{Service: key, Family: family}]
			require.Equal(t, ok, s.Type == model.LoadBalancer && s.ExternalTrafficPolicy == model.TrafficLocal && s.HealthCheckNodePort != 0 &&
				slices.ContainsFunc(s.ClusterIPs, func(a netip.Addr) bool { return model.FamilyOf(a) == family }))
			if ok {
				want := view.HealthCheck{Port: s.HealthCheckNodePort, LocalEndpoints: h.localEndpoints(s, family), Addresses: got.Addresses}
				if got.LocalEndpoints == 0 && h.displaced(s, family) {
					want.LocalEndpoints = 0
				}
				require.Equal(t, want, got)
			}
		}
	}
}

// displaced reports whether other Services have all of a Service's NodePorts and load balancer's
// addresses.
func (h *history) displaced(s *model.Service, family model.Family) bool {
	for id, p := range h.view.State().Ports {
		if id.Service == s.ServiceKey() && id.Family == family &&
			slices.ContainsFunc(p.Frontends, func(f view.Frontend) bool { return f.Kind == view.LoadBalancer || f.Kind == view.NodePort }) {
			return false
		}
	}
	return true
}

// requirePromises asserts what the doc comments of State's types promise.
func requirePromises(t *rapid.T, state view.State) {
	type listener struct {
		address  netip.AddrPort
		protocol model.Protocol
		family   model.Family
	}
	taken := map[listener]bool{}
	for id, p := range state.Ports {
		require.Equal(t, id, p.ID)
		require.NotEmpty(t, p.Frontends)
		to := map[view.Target]bool{}
		for i, f := range p.Frontends {
			l := listener{netip.AddrPortFrom(f.Address, f.Port), id.Protocol, id.Family}
			require.False(t, taken[l], "two have %v", l)
			taken[l] = true
			require.Equal(t, f.Kind == view.NodePort, !f.Address.IsValid())
			require.True(t, i == 0 || p.Frontends[i-1].Kind < f.Kind || p.Frontends[i-1].Kind == f.Kind && p.Frontends[i-1].Address.Less(f.Address))
			for _, r := range []view.Route{f.Pods, f.Node, f.Others} {
				to[r.To] = true
				require.False(t, r.Masquerade && r.To != view.Cluster && r.To != view.Local)
			}
			if !state.Node.Pods.Of(id.Family) {
				require.Equal(t, f.Others, f.Pods)
			}
		}
		require.Equal(t, to[view.Cluster], p.Cluster.Len() > 0)
		require.Equal(t, to[view.Local], p.Local.Len() > 0)
		for _, set := range []view.Backends{p.Cluster, p.Local, p.Serving} {
			list := set.List()
			require.Len(t, list, set.Len())
			for i, b := range list {
				require.Equal(t, id.Family, model.FamilyOf(b.Address.Addr()))
				require.True(t, i == 0 || list[i-1].Address.Compare(b.Address) < 0)
			}
		}
		require.True(t, id.Protocol == model.UDP || p.Serving.Len() == 0)
	}
}

// TestHistories asserts that a sequence of changes, in any batches, leads to the state that a new
// view computes from the last objects, and that the oracle agrees with this state.
func TestHistories(t *testing.T) {
	yes := true
	rapid.Check(t, func(t *rapid.T) {
		o := rapid.SampledFrom([]view.Options{
			options, {NodeName: here}, {NodeName: here, DetectLocal: view.ByNodeCIDR, MasqueradeAll: true, LocalhostNodePorts: &yes},
			{NodeName: here, DetectLocal: view.ByBridgeInterface, BridgeInterface: "cni0"}, {ClusterCIDRs: prefixes("fd00:180::/48")},
			{NodeName: here, Schedulers: []string{"rr", "lc"}}, {NodeName: here, RefuseExternalIPs: true},
		}).Draw(t, "options")
		h := &history{
			world: world{options: o, services: map[model.ServiceKey]*model.Service{}}, view: view.New(o),
			followed: map[view.ServicePortID]*view.ServicePort{}, slices: map[model.Key]*model.Slice{},
		}
		h.node = h.view.State().Node
		steps := 0
		t.Repeat(map[string]func(*rapid.T){
			"service": func(t *rapid.T) {
				key := modeltest.ServiceKey(t)
				h.services[key] = drawService(t, key)
				h.set(key)
			},
			"no service": func(t *rapid.T) {
				key := modeltest.ServiceKey(t)
				delete(h.services, key)
				h.set(key)
			},
			"slice": func(t *rapid.T) {
				key := modeltest.SliceKey(t)
				if before := h.slices[key]; before != nil {
					h.slices[key] = modeltest.Changed(t, before)
					h.set(before.ServiceKey(), h.slices[key].ServiceKey())
				} else {
					h.slices[key] = modeltest.Slice(t, key)
					h.set(h.slices[key].ServiceKey())
				}
			},
			"no slice": func(t *rapid.T) {
				if s := h.slices[modeltest.SliceKey(t)]; s != nil {
					delete(h.slices, s.Key())
					h.set(s.ServiceKey())
				}
			},
			"node": func(t *rapid.T) {
				n := drawNode(t)
				h.see(n)
				h.view.SetNode(n)
			},
			"change": h.change,
			"": func(t *rapid.T) {
				if steps++; steps%8 == 0 {
					h.change(t)
					h.check(t)
				}
			},
		})
		h.change(t)
		h.check(t)
	})
}
