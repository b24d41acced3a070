package view_test

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

var key = model.ServiceKey{Namespace: "default", Name: "web"}

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func service(ips []string, ports ...model.ServicePort) *model.Service {
	s := model.Service{Namespace: key.Namespace, Name: key.Name, Type: model.ClusterIP, Ports: ports}
	for _, ip := range ips {
		s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr(ip))
	}
	return model.NewService(s)
}

func slice(name string, ports []model.SlicePort, endpoints ...model.Endpoint) *model.Slice {
	family := model.IPv4
	if len(endpoints) > 0 {
		family = model.FamilyOf(endpoints[0].Address)
	}
	return model.NewSlice(model.Slice{
		Namespace: key.Namespace, Name: name, Service: key.Name, Family: family, Ports: ports, Endpoints: endpoints,
	})
}

func ready(address, node string) model.Endpoint {
	return model.Endpoint{
		Address: netip.MustParseAddr(address), NodeName: node, Conditions: model.Conditions{Ready: true, Serving: true},
	}
}

func id(port string, protocol model.Protocol, family model.Family) view.ServicePortID {
	return view.ServicePortID{Service: key, Port: port, Protocol: protocol, Family: family}
}

var (
	one     = []string{"10.96.0.1"}
	both    = []string{"10.96.0.1", "fd00::1"}
	http80  = model.ServicePort{Name: "http", Protocol: model.TCP, Port: 80}
	http81  = []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 8080}}
	unnamed = model.ServicePort{Protocol: model.TCP, Port: 80}
	tcp4    = id("http", model.TCP, model.IPv4)
	tcp6    = id("http", model.TCP, model.IPv6)
)

func TestBackends(t *testing.T) {
	notReady := ready("10.0.0.9", "")
	notReady.Conditions.Ready = false
	terminating := ready("10.0.0.8", "")
	terminating.Conditions = model.Conditions{Serving: true, Terminating: true}
	published := ready("10.0.0.7", "")
	published.Conditions.Terminating = true

	type backends map[view.ServicePortID][]view.Backend
	at := func(address string) view.Backend { return view.Backend{Address: ap(address)} }
	for name, c := range map[string]struct {
		service *model.Service
		slices  []*model.Slice
		want    backends
	}{
		"no Service": {nil, []*model.Slice{slice("s", http81, ready("10.0.0.1", ""))}, backends{}},
		"no slice":   {service(one, http80), nil, backends{tcp4: nil}},
		"no cluster IP of the family": {service(one, http80), []*model.Slice{slice("s", http81, ready("fd00::9", ""))},
			backends{tcp4: nil}},
		"several slices, in the order of addresses, each once": {service(one, http80), []*model.Slice{
			slice("s1", http81, ready("10.0.0.10", ""), ready("10.0.0.9", "")),
			slice("s2", http81, ready("10.0.0.2", ""), ready("10.0.0.9", "")),
		}, backends{tcp4: {at("10.0.0.2:8080"), at("10.0.0.9:8080"), at("10.0.0.10:8080")}}},
		"both families": {service(both, http80), []*model.Slice{
			slice("s1", http81, ready("10.0.0.1", "")), slice("s2", http81, ready("fd00::9", "")),
		}, backends{tcp4: {at("10.0.0.1:8080")}, tcp6: {at("[fd00::9]:8080")}}},
		"only ready ones": {service(one, http80), []*model.Slice{
			slice("s", http81, ready("10.0.0.1", ""), notReady, terminating),
		}, backends{tcp4: {at("10.0.0.1:8080")}}},
		"ready though terminating (publishNotReadyAddresses)": {service(one, http80), []*model.Slice{slice("s", http81, published)},
			backends{tcp4: {at("10.0.0.7:8080")}}},
		"ports joined by name, never by number": {
			service(one, http80, model.ServicePort{Name: "metrics", Protocol: model.TCP, Port: 8080}),
			[]*model.Slice{
				slice("s1", http81, ready("10.0.0.1", "")),
				slice("s2", []model.SlicePort{{Name: "http", Protocol: model.TCP, Port: 9999}}, ready("10.0.0.1", "")),
				slice("s3", []model.SlicePort{{Protocol: model.TCP, Port: 80}}, ready("10.0.0.3", "")),
			},
			backends{tcp4: {at("10.0.0.1:8080"), at("10.0.0.1:9999")}, id("metrics", model.TCP, model.IPv4): nil},
		},
		"a port without a name": {service(one, unnamed), []*model.Slice{
			slice("s1", []model.SlicePort{{Protocol: model.TCP, Port: 8080}}, ready("10.0.0.1", "")),
			slice("s2", http81, ready("10.0.0.2", "")),
		}, backends{id("", model.TCP, model.IPv4): {at("10.0.0.1:8080")}}},
		"TCP and UDP on one number": {
			service(one, model.ServicePort{Name: "dns", Protocol: model.UDP, Port: 53}, model.ServicePort{Name: "dns", Protocol: model.TCP, Port: 53}),
			[]*model.Slice{
				slice("s1", []model.SlicePort{{Name: "dns", Protocol: model.UDP, Port: 5353}}, ready("10.0.0.1", "")),
				slice("s2", []model.SlicePort{{Name: "dns", Protocol: model.TCP, Port: 53}}, ready("10.0.0.2", "")),
			},
			backends{id("dns", model.UDP, model.IPv4): {at("10.0.0.1:5353")}, id("dns", model.TCP, model.IPv4): {at("10.0.0.2:53")}},
		},
		"a slice port without a number": {service(one, http80), []*model.Slice{
			slice("s", []model.SlicePort{{Name: "http", Protocol: model.TCP}}, ready("10.0.0.1", "")),
		}, backends{tcp4: nil}},
		"local ones": {service(one, http80), []*model.Slice{
			slice("s1", http81, ready("10.0.0.1", "node-1"), ready("10.0.0.2", "node-2"), ready("10.0.0.3", "")),
			slice("s2", http81, ready("10.0.0.2", "node-1")), // of two that say different things, the local one
		}, backends{tcp4: {
			{Address: ap("10.0.0.1:8080"), Local: true}, {Address: ap("10.0.0.2:8080"), Local: true}, at("10.0.0.3:8080"),
		}}},
	} {
		t.Run(name, func(t *testing.T) {
			v := view.New(view.Options{NodeName: "node-1"})
			changes := v.Update(key, c.service, c.slices)
			got := backends{}
			for _, change := range changes {
				require.Nil(t, change.Before)
				got[change.ID()] = change.After.Backends
			}
			require.Equal(t, c.want, got)
			require.Len(t, v.State().Ports, len(c.want))
		})
	}

	// A node without a name has no local endpoints, not even those without a node.
	v := view.New(view.Options{})
	changes := v.Update(key, service(one, http80), []*model.Slice{slice("s", http81, ready("10.0.0.1", ""))})
	require.False(t, changes[0].After.Backends[0].Local)
}

func TestFrontends(t *testing.T) {
	cidrs := []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16")}
	v := view.New(view.Options{ClusterCIDRs: cidrs})
	v.Update(key, service(both, model.ServicePort{Name: "http", Protocol: model.TCP, Port: 80, NodePort: 30080},
		model.ServicePort{Name: "admin", Protocol: model.TCP, Port: 81}), nil)
	state := v.State()
	require.Equal(t, cidrs, state.Node.LocalPods)
	got := map[view.ServicePortID][]view.Frontend{}
	for id, p := range state.Ports {
		require.Equal(t, id, p.ID)
		got[id] = p.Frontends
	}
	nodePort := view.Frontend{Kind: view.NodePort, Port: 30080, Masquerade: view.MasqueradeAlways}
	clusterIP := func(address string, port uint16) view.Frontend {
		return view.Frontend{Kind: view.ClusterIP, Address: netip.MustParseAddr(address), Port: port, Masquerade: view.MasqueradeNonLocal}
	}
	require.Equal(t, map[view.ServicePortID][]view.Frontend{
		tcp4:                               {clusterIP("10.96.0.1", 80), nodePort},
		tcp6:                               {clusterIP("fd00::1", 80), nodePort},
		id("admin", model.TCP, model.IPv4): {clusterIP("10.96.0.1", 81)},
		id("admin", model.TCP, model.IPv6): {clusterIP("fd00::1", 81)},
	}, got)
}

func TestOnlyWhatDiffersChanges(t *testing.T) {
	v := view.New(view.Options{NodeName: "node-1"})
	dns := model.ServicePort{Name: "dns", Protocol: model.UDP, Port: 53}
	s1 := slice("s1", http81, ready("10.0.0.1", ""))
	require.Len(t, v.Update(key, service(one, http80, dns), []*model.Slice{s1}), 2)
	first := v.State().Ports[tcp4]
	require.Empty(t, v.Update(key, service(one, http80, dns), []*model.Slice{s1}), "nothing")

	notReady := ready("10.0.0.2", "")
	notReady.Conditions.Ready = false
	require.Empty(t, v.Update(key, service(one, http80, dns), []*model.Slice{s1, slice("s2", http81, notReady)}), "nothing that counts")

	changes := v.Update(key, service(one, http80, dns), []*model.Slice{slice("s1", http81, ready("10.0.0.1", "node-1"))})
	require.Len(t, changes, 1, "the other port is as it was")
	require.Equal(t, tcp4, changes[0].ID())
	require.Same(t, first, changes[0].Before)
	require.Len(t, first.Backends, 1)
	require.False(t, first.Backends[0].Local, "what was given out stays as it was")
	require.True(t, changes[0].After.Backends[0].Local)

	changes = v.Update(key, service(one, dns), nil)
	require.Len(t, changes, 1)
	require.Nil(t, changes[0].After)
	require.Equal(t, tcp4, changes[0].ID())

	other := model.ServiceKey{Namespace: "default", Name: "other"}
	require.Empty(t, v.Update(other, nil, nil))
	changes = v.Update(key, nil, []*model.Slice{s1})
	require.Len(t, changes, 1)
	require.Nil(t, changes[0].After)
	require.Empty(t, v.State().Ports)
}

// Whatever the history: what the changes lead to is what a view would give that sees the end only.
func TestIncrementsEqualRecompute(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		options := view.Options{NodeName: "node-1"}
		v := view.New(options)
		services := map[model.ServiceKey]*model.Service{}
		held := map[model.Key]*model.Slice{}
		of := func(key model.ServiceKey) []*model.Slice {
			var out []*model.Slice
			for _, s := range held {
				if s.ServiceKey() == key {
					out = append(out, s)
				}
			}
			slices.SortFunc(out, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) })
			return out
		}
		followed := map[view.ServicePortID]*view.ServicePort{}
		touch := func(keys ...model.ServiceKey) {
			for _, key := range keys {
				seen := map[view.ServicePortID]bool{}
				for _, c := range v.Update(key, services[key], of(key)) {
					require.False(t, seen[c.ID()], "one change for each Service port")
					seen[c.ID()] = true
					require.Same(t, followed[c.ID()], c.Before)
					require.NotEqual(t, c.Before, c.After)
					if c.After == nil {
						delete(followed, c.ID())
					} else {
						followed[c.ID()] = c.After
					}
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"service": func(t *rapid.T) {
				key := modeltest.ServiceKey(t)
				services[key] = modeltest.Service(t, key)
				touch(key)
			},
			"no service": func(t *rapid.T) {
				key := modeltest.ServiceKey(t)
				delete(services, key)
				touch(key)
			},
			"slice": func(t *rapid.T) {
				key := modeltest.SliceKey(t)
				before := held[key]
				if before == nil {
					held[key] = modeltest.Slice(t, key)
					touch(held[key].ServiceKey())
				} else {
					held[key] = modeltest.Changed(t, before)
					touch(before.ServiceKey(), held[key].ServiceKey())
				}
			},
			"no slice": func(t *rapid.T) {
				if s := held[modeltest.SliceKey(t)]; s != nil {
					delete(held, s.Key())
					touch(s.ServiceKey())
				}
			},
			"": func(t *rapid.T) {
				fresh := view.New(options)
				for key, s := range services {
					fresh.Update(key, s, of(key))
				}
				require.Empty(t, modeltest.Diff(fresh.State().Ports, v.State().Ports))
				require.True(t, maps.Equal(followed, v.State().Ports))
			},
		})
	})
}

func TestNames(t *testing.T) {
	require.Equal(t, "default/web:http/TCP/IPv4", tcp4.String())
	require.Equal(t, "default/web:/UDP/IPv6", id("", model.UDP, model.IPv6).String())
	require.Equal(t, "clusterIP", view.ClusterIP.String())
	require.Equal(t, "nodePort", view.NodePort.String())
}
