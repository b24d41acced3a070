// BenchmarkProgrammer measures what programming a real kernel takes, from nothing, at a restart and
// for one changed backend.
package nftables

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

var large = flag.Bool("large", false, "run benchmarks of large tables, too")

// benchPort returns a Service port with a cluster IP and count backends. Without backends, it is
// rejected.
func benchPort(service, count int) *view.ServicePort {
	p := &view.ServicePort{ID: serviceID(fmt.Sprint("s", service), model.TCP, model.IPv4)}
	f := clusterIP(netip.AddrFrom4([4]byte{10, byte(96 + service>>16), byte(service >> 8), byte(service)}))
	if count == 0 {
		f = everyone(f, toReject)
	}
	p.Frontends = []view.Frontend{f}
	var backends []view.Backend
	for i := range count {
		a := netip.AddrFrom4([4]byte{byte(11 + service>>16), byte(service >> 8), byte(service), byte(i)})
		backends = append(backends, view.Backend{Address: netip.AddrPortFrom(a, uint16(1000+i>>8))})
	}
	p.Cluster = view.NewBackends(backends...)
	return p
}

// cpu returns the CPU time that this process has used, kernel time included.
func cpu(b testing.TB) time.Duration {
	b.Helper()
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// measure runs a benchmark that reports medians and other quantiles. It also reports CPU time,
// which a busy machine distorts less.
func measure(b *testing.B, name string, before, operation func(b *testing.B)) {
	b.Run(name, func(b *testing.B) {
		var times []time.Duration
		var sum time.Duration
		for b.Loop() {
			b.StopTimer()
			before(b)
			start, startCPU := time.Now(), cpu(b)
			b.StartTimer()
			operation(b)
			b.StopTimer()
			times, sum = append(times, time.Since(start)), sum+cpu(b)-startCPU
			b.StartTimer()
		}
		slices.Sort(times)
		b.ReportMetric(float64(sum.Nanoseconds())/1000/float64(b.N), "cpu-µs/op")
		for _, p := range []int{50, 99} {
			b.ReportMetric(float64(times[len(times)*p/100].Nanoseconds())/1000, fmt.Sprintf("p%d-µs", p))
		}
	})
}

// BenchmarkProgrammer measures these operations: Load is a first Replace, and Restart is a Replace
// by a new process that finds everything in place. In Flip, an Apply removes or adds a backend of a
// usual Service, and in FlipBig one of a Service with 5000 backends.
func BenchmarkProgrammer(b *testing.B) {
	sizes := []struct{ services, backends, big int }{{1000, 5, 0}}
	if *large {
		sizes = append(sizes, []struct{ services, backends, big int }{
			{1000, 50, 5000}, {10000, 50, 0}, {44125, 1, 0}, {5001, 49, 5000},
		}...)
	}
	for _, size := range sizes {
		state := newState()
		for i := range size.services {
			p := benchPort(i, size.backends)
			state.Ports[p.ID] = p
		}
		if size.big > 0 {
			big := benchPort(size.services, size.big)
			state.Ports[big.ID] = big
		}
		b.Run(fmt.Sprintf("services=%d/backends=%d/big=%d", size.services, size.backends, size.big), func(b *testing.B) {
			host := testenv.NewNetwork(b).AddNode("a").Host
			h := newInHost(b, host, Options{})
			ctx, cancel := context.WithCancel(b.Context())
			var wait sync.WaitGroup
			wait.Go(func() { h.Watch(ctx, func(reason string) { b.Error(reason) }) })
			defer wait.Wait()
			defer cancel()
			measure(b, "Load", func(b *testing.B) {
				require.NoError(b, h.Cleanup(b.Context()))
			}, func(b *testing.B) { require.NoError(b, h.Replace(b.Context(), state)) })
			var again *inHost
			measure(b, "Restart", func(b *testing.B) {
				again = newInHost(b, host, Options{})
			}, func(b *testing.B) { require.NoError(b, again.Replace(b.Context(), state)) })
			apply := func(name string, service, count int) {
				with := benchPort(service, count)
				without := benchPort(service, count-1)
				measure(b, name, func(*testing.B) {}, func(b *testing.B) {
					require.NoError(b, h.Apply(b.Context(), []view.Change{{Before: with, After: without}}))
					with, without = without, with
				})
				if with.Cluster.Len() < count { // restores the state for the next benchmark
					require.NoError(b, h.Apply(b.Context(), []view.Change{{Before: with, After: without}}))
				}
			}
			require.NoError(b, h.Replace(b.Context(), state))
			apply("Flip", 7, size.backends)
			if size.big > 0 {
				apply("FlipBig", size.services, size.big)
			}
		})
	}
}
