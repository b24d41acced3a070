// BenchmarkClean measures a pass over a large connection tracking table of a real kernel, and
// proves that it takes little memory however large the table is (kubernetes/kubernetes#129982).
package conntrack

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// manyFlows is how many flows the table gets, if net.netfilter.nf_conntrack_max admits so many.
const manyFlows = 1_000_000

// maxGrowth bounds, in bytes, by how much the heap may grow during a pass.
const maxGrowth = 8 << 20

// BenchmarkClean has two cases: no flow is stale, or all flows are. Removing a flow costs more than
// looking at it, so the numbers of removed flows are bounded.
func BenchmarkClean(b *testing.B) {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_max")
	if err != nil {
		b.Fatal(err)
	}
	limit, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		b.Fatal(err)
	}
	n := min(manyFlows, limit*9/10)
	if n < manyFlows {
		b.Logf("nf_conntrack_max is %d: set it to more than %d for a table with %d flows", limit, manyFlows*10/9, manyFlows)
	}
	for name, serving := range map[string]string{"none is stale": "10.180.0.4:53", "all are stale": "10.180.0.5:53"} {
		b.Run(fmt.Sprintf("%d flows, %s", n, name), func(b *testing.B) {
			var grown uint64
			for b.Loop() {
				b.StopTimer()
				fill(b, n)
				c := New(Options{})
				c.Replaced(state(port(dns4, []view.Frontend{at(view.ClusterIP, "10.96.16.1:53")}, serving)))
				peak := watchHeap()
				b.StartTimer()
				if err := c.pass(model.IPv4); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				grown = max(grown, peak())
				if err := vnetlink.ConntrackTableFlush(vnetlink.ConntrackTable); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(grown), "heap-growth-bytes")
			if grown > maxGrowth {
				b.Errorf("the heap grew by %d bytes during a pass over %d flows", grown, n)
			}
		})
	}
}

// fill creates UDP flows from n clients to one frontend, all of which lead to the same endpoint.
func fill(b *testing.B, n int) {
	b.Helper()
	handle, err := vnetlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		b.Fatal(err)
	}
	defer handle.Close()
	for i := range n {
		var client [4]byte
		binary.BigEndian.PutUint32(client[:], 0x0ab60000+uint32(i/50000)) // from 10.182.0.0 on
		source := netip.AddrPortFrom(netip.AddrFrom4(client), uint16(1024+i%50000))
		f := udp(source.String(), "10.96.16.1:53", "10.180.0.4:53")
		if err := handle.ConntrackCreate(vnetlink.ConntrackTable, unix.AF_INET, f.entry()); err != nil {
			b.Fatalf("create flow %d: %v", i, err)
		}
	}
}

// watchHeap begins to watch the heap. The function that it returns ends that, and returns by how
// many bytes the heap was larger at most.
func watchHeap() (growth func() uint64) {
	read := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	runtime.GC()
	before := read()
	var most uint64
	done := make(chan struct{})
	var wait sync.WaitGroup
	wait.Go(func() {
		for {
			if now := read(); now > before {
				most = max(most, now-before)
			}
			select {
			case <-done:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	return func() uint64 {
		close(done)
		wait.Wait()
		return most
	}
}
