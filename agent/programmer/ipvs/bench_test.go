package ipvs

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// many gives Services with a cluster IP and a nodePort each.
func many(services, endpoints int) view.State {
	state := view.State{
		Node: view.Node{
			Pods:      view.PodDetector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16")}},
			NodePorts: []netip.Prefix{netip.MustParsePrefix("192.168.0.2/32")},
		},
		Ports: map[view.ServicePortID]*view.ServicePort{},
	}
	for s := range services {
		p := &view.ServicePort{
			ID:        serviceID(fmt.Sprint("service", s), model.TCP, model.IPv4),
			Frontends: []view.Frontend{clusterIP(netip.AddrFrom4([4]byte{10, 96, byte(s >> 8), byte(s)})), nodePort(uint16(20000 + s))},
		}
		for e := range endpoints {
			n := s*endpoints + e
			p.Cluster = append(p.Cluster, view.Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 180 + byte(n>>16), byte(n >> 8), byte(n)}), 8080)})
		}
		state.Ports[p.ID] = p
	}
	return state
}

// BenchmarkProgrammer measures what it takes to program Services from nothing, to find nothing changed after a restart, and
// to follow one endpoint. In the virtual machine figures are ten and more times those of a machine.
func BenchmarkProgrammer(b *testing.B) {
	for _, size := range []struct{ services, endpoints int }{{1000, 50}, {10000, 5}} {
		b.Run(fmt.Sprintf("%dx%d", size.services, size.endpoints), func(b *testing.B) {
			state := many(size.services, size.endpoints)
			host := testenv.NewNetwork(b).AddNode("a")
			h := newInHost(b, host.Host, Options{})
			b.Run("nothing", func(b *testing.B) {
				for b.Loop() {
					b.StopTimer()
					require.NoError(b, h.Cleanup(b.Context()))
					b.StartTimer()
					require.NoError(b, h.Replace(b.Context(), state))
				}
			})
			b.Run("restart", func(b *testing.B) {
				var again *inHost
				for b.Loop() {
					again = newInHost(b, host.Host, Options{})
					require.NoError(b, again.Replace(b.Context(), state))
				}
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				b.ReportMetric(float64(m.HeapAlloc)/(1<<20), "MB-heap")
				runtime.KeepAlive(again)
			})
			b.Run("flip", func(b *testing.B) {
				require.NoError(b, h.Replace(b.Context(), state))
				full := state.Ports[serviceID("service7", model.TCP, model.IPv4)]
				less := *full
				less.Cluster = full.Cluster[1:]
				var took []time.Duration
				for i := 0; b.Loop(); i++ {
					c := view.Change{Before: full, After: &less}
					if i%2 == 1 {
						c = view.Change{Before: &less, After: full}
					}
					start := time.Now()
					if err := h.Apply(b.Context(), []view.Change{c}); err != nil {
						b.Fatal(err)
					}
					took = append(took, time.Since(start))
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs-p50")
				b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "µs-p99")
			})
		})
	}
}
