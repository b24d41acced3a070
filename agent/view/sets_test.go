// These tests prove that the sets of a Service with very many endpoints or slices, which the view
// updates in place of computing them anew, equal those of a new view. The histories are random and
// the oracle judges them.
package view_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
)

// TestHistoriesOfManySlices is TestHistories for one Service with many slices, which share a few
// addresses. Only a few endpoints change at a time.
func TestHistoriesOfManySlices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := rapid.SampledFrom([]view.Options{options, {}, {NodeName: here, Schedulers: []string{"lc"}}}).Draw(t, "options")
		h := &history{
			world: world{options: o, services: map[model.ServiceKey]*model.Service{}}, view: view.New(o),
			followed: map[view.ServicePortID]*view.ServicePort{}, slices: map[model.Key]*model.Slice{},
		}
		h.node = h.view.State().Node
		// The view uses hints only if all endpoints have them, so all endpoints of a run are drawn alike.
		hints := rapid.SampledFrom([]string{"none", "zones", "nodes", "any"}).Draw(t, "hints")
		anEndpoint := func(t *rapid.T, family model.Family) model.Endpoint {
			e := modeltest.Endpoint(t, family)
			switch hints {
			case "none":
				e.ZoneHints, e.NodeHints = nil, nil
			case "zones":
				e.ZoneHints = append(e.ZoneHints, "zone-a")[:1]
			case "nodes":
				e.NodeHints = append(e.NodeHints, here)[:1]
			}
			return e
		}
		drawWeb := func(t *rapid.T) {
			s := *drawService(t, web)
			s.ClusterIPs, s.Ports = addrs("10.96.0.1", "fd00:96::1"), []model.ServicePort{http, {Name: "http", Protocol: model.UDP, Port: 80}}
			h.services[web] = model.NewService(s)
			h.set(web)
		}
		// change replaces a slice by one without the endpoints that remove selects, and with those in
		// add.
		change := func(s *model.Slice, remove func(model.Endpoint) bool, add ...model.Endpoint) {
			n := *s
			n.Endpoints = append(slices.DeleteFunc(slices.Clone(s.Endpoints), func(e model.Endpoint) bool {
				return remove(e) || slices.ContainsFunc(add, func(a model.Endpoint) bool { return a.Address == e.Address })
			}), add...)
			h.slices[s.Key()] = model.NewSlice(n)
			h.set(web)
		}
		aSlice := func(t *rapid.T) *model.Slice {
			all := h.of(web)
			if len(all) == 0 {
				t.Skip("no slice")
			}
			return rapid.SampledFrom(all).Draw(t, "slice")
		}
		held := func(t *rapid.T) (*model.Slice, model.Endpoint) {
			s := aSlice(t)
			if len(s.Endpoints) == 0 {
				t.Skip("no endpoint")
			}
			return s, rapid.SampledFrom(s.Endpoints).Draw(t, "endpoint")
		}
		nothing := func(model.Endpoint) bool { return false }
		draw := func(t *rapid.T, i int) {
			s := model.Slice{Namespace: web.Namespace, Name: fmt.Sprint("s", i), Service: web.Name, Ports: []model.SlicePort{{Name: "http", Port: 8080}}}
			s.Family = rapid.SampledFrom([]model.Family{model.IPv4, model.IPv4, model.IPv6}).Draw(t, "family")
			s.Ports[0].Protocol = model.TCP
			if rapid.IntRange(0, 3).Draw(t, "udp") == 0 {
				s.Ports = append(s.Ports, model.SlicePort{Name: "http", Protocol: model.UDP, Port: 8080})
			}
			if rapid.IntRange(0, 5).Draw(t, "other") == 0 {
				s.Ports[0].Port = 8081
			}
			for range rapid.IntRange(0, 6).Draw(t, "endpoints") {
				s.Endpoints = append(s.Endpoints, anEndpoint(t, s.Family))
			}
			n := model.NewSlice(s)
			h.slices[n.Key()] = n
			h.set(web)
		}
		for i := range 6 {
			draw(t, i)
		}
		drawWeb(t)
		steps := 0
		t.Repeat(map[string]func(*rapid.T){
			"service":     drawWeb,
			"slice":       func(t *rapid.T) { draw(t, rapid.IntRange(0, 7).Draw(t, "which")) },
			"every slice": func(t *rapid.T) { draw(t, 0); draw(t, 1); draw(t, 2); draw(t, 3); draw(t, 4) },
			"no slice": func(t *rapid.T) {
				delete(h.slices, aSlice(t).Key())
				h.set(web)
			},
			"port": func(t *rapid.T) {
				s := *aSlice(t)
				s.Ports = slices.Clone(s.Ports)
				s.Ports[0].Port ^= 1
				h.slices[s.Key()] = model.NewSlice(s)
				h.set(web)
			},
			"conditions": func(t *rapid.T) {
				s, e := held(t)
				e.Conditions = anEndpoint(t, s.Family).Conditions
				change(s, nothing, e)
			},
			"becomes ready": func(t *rapid.T) {
				s, e := held(t)
				e.Conditions = model.Conditions{Ready: true, Serving: true}
				change(s, nothing, e)
			},
			"hints": func(t *rapid.T) {
				s, e := held(t)
				other := anEndpoint(t, s.Family)
				e.ZoneHints, e.NodeHints = other.ZoneHints, other.NodeHints
				change(s, nothing, e)
			},
			"endpoint": func(t *rapid.T) {
				s := aSlice(t)
				change(s, nothing, anEndpoint(t, s.Family))
			},
			"no endpoint": func(t *rapid.T) {
				s, e := held(t)
				change(s, func(o model.Endpoint) bool { return o.Address == e.Address })
			},
			"endpoint moves": func(t *rapid.T) {
				from, e := held(t)
				to := aSlice(t)
				if to == from || to.Family != from.Family {
					t.Skip("it stays")
				}
				change(from, func(o model.Endpoint) bool { return o.Address == e.Address })
				change(to, nothing, e)
			},
			"node": func(t *rapid.T) {
				n := drawNode(t)
				h.see(n)
				h.view.SetNode(n)
			},
			"change": h.change,
			"": func(t *rapid.T) {
				if steps++; steps%4 == 0 {
					h.change(t)
					h.check(t)
				}
			},
		})
		h.change(t)
		h.check(t)
	})
}

// TestFlipOfOneOfMany asserts that a large set loses an endpoint that turns unready, and gets it
// back afterwards. A change that does not affect the set causes no Change.
func TestFlipOfOneOfMany(t *testing.T) {
	v := view.New(options)
	s, of := largeService(0, 5000)
	v.Set(s.ServiceKey(), s, of)
	v.Update()
	before := v.State().Ports[view.ServicePortID{Service: s.ServiceKey(), Port: "http", Protocol: model.TCP, Family: model.IPv4}]
	require.Equal(t, 5000, before.Cluster.Len())

	edited := func(edit func(*model.Endpoint)) []*model.Slice {
		n := *of[7]
		n.Endpoints = slices.Clone(n.Endpoints)
		edit(&n.Endpoints[9])
		out := slices.Clone(of)
		out[7] = model.NewSlice(n)
		return out
	}
	v.Set(s.ServiceKey(), s, edited(func(e *model.Endpoint) { e.Zone = "another" }))
	changes, _ := v.Update()
	require.Empty(t, changes)

	gone := of[7].Endpoints[9].Address
	v.Set(s.ServiceKey(), s, edited(unready))
	changes, _ = v.Update()
	require.Len(t, changes, 1)
	require.Equal(t, slices.DeleteFunc(before.Cluster.List(), func(b view.Backend) bool { return b.Address.Addr() == gone }), changes[0].After.Cluster.List())

	v.Set(s.ServiceKey(), s, of)
	changes, _ = v.Update()
	require.Len(t, changes, 1)
	require.Equal(t, before.Cluster, changes[0].After.Cluster)

	// A change of more endpoints than are looked up one by one has the same result.
	n := *of[7]
	n.Endpoints = n.Endpoints[30:]
	fewer := slices.Clone(of)
	fewer[7] = model.NewSlice(n)
	v.Set(s.ServiceKey(), s, fewer)
	changes, _ = v.Update()
	require.Len(t, changes, 1)
	require.Equal(t, 4970, changes[0].After.Cluster.Len())
}

// TestLocalSetComesIntoUse is TestSetComesIntoUse for the set of the policy Local.
func TestLocalSetComesIntoUse(t *testing.T) {
	f := newFight(t)
	f.set(api, clusterIP("10.96.0.2"), externalIP("203.0.113.1"))
	s := service(web, externalLocal, externalIP("203.0.113.1"), created(1))
	var of []*model.Slice
	for i := range 8 {
		of = append(of, slice(fmt.Sprint("s", i), endpoint(fmt.Sprint("10.180.0.", i), local)))
	}
	f.Set(web, s, of)
	f.change()
	require.Zero(t, f.State().Ports[id(http, model.IPv4)].Local)
	f.Set(api, nil, nil)
	f.change()
	require.Equal(t, 8, f.State().Ports[id(http, model.IPv4)].Local.Len())
}

// TestCopyOfAnEndpointComesAndGoes asserts that an endpoint which one of many slices has from the
// beginning stays usable as long as any slice has it as ready.
func TestCopyOfAnEndpointComesAndGoes(t *testing.T) {
	v := view.New(options)
	s := service(web)
	var of []*model.Slice
	for i := range 8 {
		of = append(of, slice(fmt.Sprint("s", i), endpoint(fmt.Sprint("10.180.1.", i)), endpoint(fmt.Sprint("10.180.2.", i))))
	}
	has := func() bool {
		v.Set(web, s, slices.Clone(of))
		v.Update()
		cluster := v.State().Ports[id(http, model.IPv4)].Cluster
		require.GreaterOrEqual(t, cluster.Len(), 15)
		return cluster.Contains(ap("10.180.1.0:8080"))
	}
	require.True(t, has())
	others := func(name string, i int, e ...model.Endpoint) {
		of[i] = slice(name, append(e, endpoint(fmt.Sprint("10.180.2.", i)))...)
	}
	others("s1", 1, endpoint("10.180.1.1"), endpoint("10.180.1.0"))
	require.True(t, has())
	others("s0", 0, endpoint("10.180.1.0", unready))
	require.True(t, has(), "it is ready in the other slice")
	others("s1", 1, endpoint("10.180.1.1"), endpoint("10.180.1.0", unready))
	require.False(t, has())
	others("s0", 0, endpoint("10.180.1.0"))
	require.True(t, has())
	others("s1", 1, endpoint("10.180.1.1"))
	others("s0", 0)
	require.False(t, has())
}

// TestSetComesIntoUse covers a Service that gets an address from another one, and therefore needs a
// set that it did not use before. The set is computed, although the Service and its many slices are
// unchanged.
func TestSetComesIntoUse(t *testing.T) {
	f := newFight(t)
	f.set(api, clusterIP("10.96.0.2"), externalIP("203.0.113.1"))
	s := service(web, internalLocal, externalIP("203.0.113.1"), created(1))
	var of []*model.Slice
	for i := range 8 {
		of = append(of, slice(fmt.Sprint("s", i), endpoint(fmt.Sprint("10.180.1.", i))))
	}
	f.Set(web, s, of)
	f.change()
	require.Zero(t, f.State().Ports[id(http, model.IPv4)].Cluster)
	f.Set(api, nil, nil)
	f.change()
	require.Equal(t, 8, f.State().Ports[id(http, model.IPv4)].Cluster.Len())
}
