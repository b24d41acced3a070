// These tests prove that Services and slices that come, change and go leave nothing behind,
// whatever claims and problems they had, and that rivals do not make a change more expensive.
// Otherwise, names that never come back would fill a node's memory (kubernetes/kubernetes#128928),
// and one tenant could slow down every node.
package view

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
)

func TestNothingRemainsOfChurn(t *testing.T) {
	v := New(Options{NodeName: "node-1", NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
	v.SetNode(&model.Node{Name: "node-1", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}})
	v.Update()
	v.TakeHealthChecks()
	const kept = 20
	for i := range 2000 {
		key := model.ServiceKey{Namespace: "default", Name: fmt.Sprint("web-", i)}
		// Each Service asks for an external IP and a NodePort that the one before it has, too.
		object := model.NewService(model.Service{
			Namespace: key.Namespace, Name: key.Name, Type: model.LoadBalancer,
			ClusterIPs:  []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
			ExternalIPs: []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, byte(i / 2)})},
			Ports:       []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: uint16(30000 + i/2)}},

			ExternalTrafficPolicy: model.TrafficLocal, InternalTrafficPolicy: model.TrafficCluster,
			HealthCheckNodePort: uint16(32000 + i%700),
		})
		slice := model.NewSlice(model.Slice{
			Namespace: key.Namespace, Name: key.Name, Service: key.Name, Family: model.IPv4,
			Ports: []model.SlicePort{{Protocol: model.TCP, Port: 8080}},
			Endpoints: []model.Endpoint{{
				Address: netip.AddrFrom4([4]byte{10, 180, byte(i >> 8), byte(i)}), NodeName: "node-1",
				Conditions: model.Conditions{Ready: true, Serving: true},
			}},
		})
		v.Set(key, object, []*model.Slice{slice})
		if i >= kept {
			v.Set(model.ServiceKey{Namespace: "default", Name: fmt.Sprint("web-", i-kept)}, nil, nil)
		}
		v.Update()
		require.LessOrEqual(t, len(v.services), kept+1)
		require.LessOrEqual(t, len(v.claims.owners)+len(v.claims.rivals), 8*kept)
	}
	require.Len(t, v.health, kept)
	for i := range kept {
		v.Set(model.ServiceKey{Namespace: "default", Name: fmt.Sprint("web-", 2000-1-i)}, nil, nil)
	}
	v.Update()
	require.NotEmpty(t, v.TakeProblems())
	for what, n := range map[string]int{
		"services": len(v.services), "owners": len(v.claims.owners), "rivals": len(v.claims.rivals), "ports": len(v.ports),
		"health checks": len(v.health), "problems": len(v.problems), "dirty": len(v.dirty),
	} {
		require.Zero(t, n, what)
	}
}

// TestRivalsCostNothing asserts that a change of a Service costs the same however many Services
// want one of its addresses: whether it keeps the address, gives it up or takes it back.
func TestRivalsCostNothing(t *testing.T) {
	cost := func(rivals int) float64 {
		v := New(Options{NodeName: "node-1"})
		at := func(i, round int, ips ...byte) {
			key := model.ServiceKey{Namespace: "default", Name: fmt.Sprintf("web-%04d", i)}
			object := model.Service{
				Namespace: key.Namespace, Name: key.Name, Type: model.ClusterIP, CreationTimeSeconds: int64(i),
				ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
				Ports:      []model.ServicePort{{Protocol: model.TCP, Port: 80}},

				ClientIPAffinitySeconds: uint32(round),
			}
			for _, ip := range ips {
				object.ExternalIPs = append(object.ExternalIPs, netip.AddrFrom4([4]byte{203, 0, 113, ip}))
			}
			v.Set(key, model.NewService(object), nil)
		}
		for i := range rivals {
			at(i, 1, 1)
		}
		v.Update()
		require.Len(t, v.Problems(), rivals-1)
		round := 1
		return testing.AllocsPerRun(20, func() {
			for _, i := range []int{0, rivals / 2, rivals - 1} { // the owner, and two that wait
				for _, ips := range [][]byte{{1}, {2}, {1, 2}, {1}} {
					round++
					at(i, round, ips...)
					v.Update()
				}
			}
		})
	}
	few, many := cost(5), cost(2000)
	require.LessOrEqual(t, many, 1.5*few)
}
