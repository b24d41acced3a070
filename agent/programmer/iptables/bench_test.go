// BenchmarkProgrammer measures what programming a real kernel takes, from nothing, at a restart and
// for one changed backend.
package iptables

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// benchmarkPort returns a Service port with a cluster IP. variant changes one of its backends.
func benchmarkPort(service, backends, variant int) *view.ServicePort {
	p := &view.ServicePort{ID: serviceID(fmt.Sprint("s", service), model.TCP, model.IPv4)}
	address := netip.AddrFrom4([4]byte{10, 96, byte(service >> 8), byte(service)})
	p.Frontends = []view.Frontend{clusterIP(address)}
	var list []view.Backend
	for i := range backends {
		a := netip.AddrFrom4([4]byte{10, byte(128 + i>>8), byte(service), byte(i)})
		list = append(list, view.Backend{Address: netip.AddrPortFrom(a, uint16(8080+service>>8))})
	}
	last := &list[backends-1]
	last.Address = netip.AddrPortFrom(last.Address.Addr(), uint16(9000+variant))
	p.Cluster = view.NewBackends(list...)
	return p
}

// cpu returns the CPU time that this process and the processes that it ran have used, kernel time
// included.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var sum int64
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		require.NoError(b, unix.Getrusage(who, &u))
		sum += u.Utime.Nano() + u.Stime.Nano()
	}
	return time.Duration(sum)
}

// measure runs a benchmark that also reports CPU time, which a busy machine distorts less.
func measure(b *testing.B, name string, before, operation func(b *testing.B)) {
	b.Run(name, func(b *testing.B) {
		var sum time.Duration
		for b.Loop() {
			b.StopTimer()
			before(b)
			start := cpu(b)
			b.StartTimer()
			operation(b)
			b.StopTimer()
			sum += cpu(b) - start
			b.StartTimer()
		}
		b.ReportMetric(float64(sum.Microseconds())/1000/float64(b.N), "cpu-ms/op")
	})
}

// BenchmarkProgrammer measures these operations: Load is a first Replace, and Restart is a Replace
// that finds everything in place. Apply changes one backend of a usual Service, and ApplyBig one of
// a Service with 5000 backends.
func BenchmarkProgrammer(b *testing.B) {
	for _, size := range []struct{ services, backends int }{{1000, 50}, {10000, 5}} {
		state := view.State{Ports: map[view.ServicePortID]*view.ServicePort{}}
		state.Node.Pods.Prefixes = []netip.Prefix{netip.MustParsePrefix("10.128.0.0/9")}
		for i := range size.services {
			p := benchmarkPort(i, size.backends, 0)
			state.Ports[p.ID] = p
		}
		big := benchmarkPort(size.services, 5000, 0)
		state.Ports[big.ID] = big
		for _, variant := range []Variant{NFT, Legacy} {
			b.Run(fmt.Sprintf("services=%d/backends=%d/%s", size.services, size.backends, variant), func(b *testing.B) {
				h := newInHost(b, testenv.NewNetwork(b).AddNode("a").Host, Options{Variant: variant})
				measure(b, "Load", func(b *testing.B) {
					require.NoError(b, h.Cleanup(b.Context()))
				}, func(b *testing.B) { require.NoError(b, h.Replace(b.Context(), state)) })
				nothing := func(*testing.B) {}
				measure(b, "Restart", nothing, func(b *testing.B) { require.NoError(b, h.Replace(b.Context(), state)) })
				apply := func(name string, service, backends int) {
					before, i := benchmarkPort(service, backends, 0), 0
					measure(b, name, nothing, func(b *testing.B) {
						i++
						after := benchmarkPort(service, backends, 1+i%2)
						require.NoError(b, h.Apply(b.Context(), []view.Change{{Before: before, After: after}}))
						before = after
					})
				}
				apply("Apply", 7, size.backends)
				apply("ApplyBig", size.services, 5000)
			})
		}
	}
}
