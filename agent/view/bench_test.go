// These benchmarks measure what a change costs in a view of 1000 Services, and that the cost of one
// port or address does not grow with their count. TestMemory proves a bound on the memory that the
// view needs in addition to the objects.
package view_test

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// largeService returns the Service with this number and its slices of a hundred endpoints each.
func largeService(number, endpoints int) (*model.Service, []*model.Slice) {
	key := model.ServiceKey{Namespace: "default", Name: fmt.Sprintf("service-%d", number)}
	s := service(key, clusterIP(netip.AddrFrom4([4]byte{10, 96, byte(number >> 8), byte(number)}).String()))
	var out []*model.Slice
	for first := 0; first < endpoints; first += 100 {
		of := model.Slice{Namespace: key.Namespace, Name: fmt.Sprintf("%s-%d", key.Name, first), Service: key.Name, Family: model.IPv4, Ports: []model.SlicePort{http8080}}
		for i := first; i < min(first+100, endpoints); i++ {
			e := endpoint("10.0.0.0")
			// Some addresses are in several slices, as happens when pods come and go.
			e.Address = netip.AddrFrom4([4]byte{10, byte(number), byte(i % 251), byte(i % 241)})
			e.NodeName = fmt.Sprintf("node-%d", i)
			of.Endpoints = append(of.Endpoints, e)
		}
		out = append(out, model.NewSlice(of))
	}
	return s, out
}

// BenchmarkChange turns one endpoint of a Service unready and ready again, beside 1000 other
// Services of 50 endpoints.
func BenchmarkChange(b *testing.B) {
	for _, endpoints := range []int{50, 5000} {
		b.Run(fmt.Sprintf("endpoints=%d", endpoints), func(b *testing.B) {
			v := view.New(options)
			for i := range 1000 {
				s, of := largeService(i+1, 50)
				v.Set(s.ServiceKey(), s, of)
			}
			s, of := largeService(0, endpoints)
			v.Set(s.ServiceKey(), s, of)
			v.Update()
			flipped := *of[0]
			flipped.Endpoints = append([]model.Endpoint(nil), flipped.Endpoints...)
			flipped.Endpoints[0].Conditions.Ready = false
			other := append([]*model.Slice{model.NewSlice(flipped)}, of[1:]...)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				v.Set(s.ServiceKey(), s, [][]*model.Slice{other, of}[i%2])
				if changes, _ := v.Update(); len(changes) != 1 {
					b.Fatal(changes)
				}
			}
		})
	}
}

// BenchmarkLarge adds, changes and removes a Service with many ports or addresses. The µs of one
// port or address should be about the same for every count.
func BenchmarkLarge(b *testing.B) {
	for _, count := range []int{500, 1000, 2000, 4000} {
		for _, large := range []struct {
			what  string
			edits []func(*model.Service)
		}{
			{"ports", []func(*model.Service){manyPorts(count)}},
			{"externalIPs", []func(*model.Service){manyPorts(2), manyExternalIPs(count)}},
		} {
			b.Run(fmt.Sprintf("%s=%d", large.what, count), func(b *testing.B) {
				first := service(web, large.edits...)
				second := service(web, append(large.edits, created(1))...)
				for b.Loop() {
					v := view.New(options)
					for _, s := range []*model.Service{first, second, nil} {
						v.Set(web, s, nil)
						v.Update()
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1000/float64(b.N)/float64(count), "µs/each")
			})
		}
	}
}

// TestMemory bounds the memory that the view needs, in addition to the objects, for 1000 Services
// of 50 endpoints and one Service of 5000.
func TestMemory(t *testing.T) {
	var services []*model.Service
	var of [][]*model.Slice
	for i := range 1001 {
		n := 50
		if i == 0 {
			n = 5000
		}
		s, slices := largeService(i, n)
		services, of = append(services, s), append(of, slices)
	}
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // a sync.Pool frees its content only in the second collection
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	v := view.New(options)
	for i, s := range services {
		v.Set(s.ServiceKey(), s, of[i])
	}
	v.Update()
	require.Len(t, v.State().Ports, 1001)
	require.Less(t, heap()-before, int64(4<<20))
	runtime.KeepAlive(v)
	runtime.KeepAlive(of)
}
