// These tests prove that a view keeps its promises about cost: a change of a few of many endpoints
// shares memory with what was before, buffers are reused, and nothing remains of what is gone.
package view

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

var manyKey = model.ServiceKey{Namespace: "default", Name: "many"}

// manySliced returns a Service with manySlices slices of a hundred endpoints each.
func manySliced() (*model.Service, []*model.Slice) {
	s := model.NewService(model.Service{
		Namespace: manyKey.Namespace, Name: manyKey.Name, Type: model.ClusterIP, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
	})
	var of []*model.Slice
	for i := range byte(manySlices) {
		slice := model.Slice{
			Namespace: manyKey.Namespace, Name: fmt.Sprint("s-", i), Service: manyKey.Name, Family: model.IPv4,
			Ports: []model.SlicePort{{Protocol: model.TCP, Port: 8080}},
		}
		for j := range byte(100) {
			slice.Endpoints = append(slice.Endpoints, model.Endpoint{
				Address: netip.AddrFrom4([4]byte{10, 180, i, j}), Conditions: model.Conditions{Ready: true, Serving: true},
			})
		}
		of = append(of, model.NewSlice(slice))
	}
	return s, of
}

// changed returns the slices with another version of one of them.
func changed(of []*model.Slice, i int, edit func([]model.Endpoint) []model.Endpoint) []*model.Slice {
	n := *of[i]
	n.Endpoints = edit(append([]model.Endpoint(nil), n.Endpoints...))
	out := append([]*model.Slice(nil), of...)
	out[i] = model.NewSlice(n)
	return out
}

// TestFewChangesShareMemory asserts that a change of one of many endpoints leaves nearly all parts
// of the set as they were, change after change.
func TestFewChangesShareMemory(t *testing.T) {
	v := New(Options{})
	s, of := manySliced()
	v.Set(manyKey, s, of)
	v.Update()
	for i := range 3 {
		of = changed(of, 1, func(e []model.Endpoint) []model.Endpoint {
			e[40+i].Conditions.Ready = false
			return e
		})
		v.Set(manyKey, s, of)
		changes, _ := v.Update()
		require.Len(t, changes, 1)
		before, after := changes[0].Before.Cluster, changes[0].After.Cluster
		require.Equal(t, before.Len()-1, after.Len())
		had := make(map[*Backend]bool)
		for _, part := range before.parts {
			had[&part[0]] = true
		}
		fresh := 0
		for _, part := range after.parts {
			if !had[&part[0]] {
				fresh++
			}
		}
		require.Greater(t, len(after.parts), 3)
		require.LessOrEqual(t, fresh, 1)
	}
}

// TestSharedAddressesAreForgotten asserts that the view remembers which addresses several slices
// have, and no longer than they do. Pods that move would otherwise fill a node's memory.
func TestSharedAddressesAreForgotten(t *testing.T) {
	v := New(Options{})
	s, of := manySliced()
	shared := func(of []*model.Slice) (out []netip.Addr) {
		v.Set(manyKey, s, of)
		v.Update()
		for _, p := range v.services[manyKey].seen.ports {
			for a := range p.shared {
				out = append(out, a)
			}
		}
		return out
	}
	require.Empty(t, shared(of))
	both := changed(of, 1, func(e []model.Endpoint) []model.Endpoint { return append(e, of[0].Endpoints[7]) })
	require.Equal(t, []netip.Addr{of[0].Endpoints[7].Address}, shared(both))
	require.Empty(t, shared(of))
}

// TestBuffersAreReused asserts that reading endpoints allocates nothing once the buffers are large
// enough, and that a reader holds no slices between two updates.
func TestBuffersAreReused(t *testing.T) {
	_, of := manySliced()
	both := changed(of, 1, func(e []model.Endpoint) []model.Endpoint { return append(e, of[0].Endpoints[7]) })
	id := ServicePortID{Service: manyKey, Protocol: model.TCP, Family: model.IPv4}
	var r endpointReader
	require.Zero(t, testing.AllocsPerRun(10, func() { r.read(both, id, netip.Addr{}) }))
	require.Equal(t, []netip.Addr{of[0].Endpoints[7].Address}, r.several, "it is that of the last read")

	v := New(Options{})
	s, _ := manySliced()
	holdsNothing := func() {
		t.Helper()
		require.Positive(t, cap(v.reader.all))
		require.Positive(t, cap(v.reader.sorted))
		for _, list := range [][]endpoint{v.reader.all[:cap(v.reader.all)], v.reader.sorted[:cap(v.reader.sorted)]} {
			for _, e := range list {
				require.Nil(t, e.Endpoint)
			}
		}
		require.Positive(t, cap(v.dirty))
		for _, s := range v.dirty[:cap(v.dirty)] {
			require.Nil(t, s)
		}
	}
	v.Set(manyKey, s, of)
	v.Set(manyKey, s, of)
	require.Len(t, v.dirty, 1, "it is computed once")
	v.Update()
	holdsNothing()
	v.Explain(manyKey)
	holdsNothing()
}
