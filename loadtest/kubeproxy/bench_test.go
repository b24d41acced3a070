// Package kubeproxy measures what a node pays for Services with Slicecast, and with kube-proxy in the same mode, on the same API
// server and the same kernel; and what Slicecast's agent takes by itself where kube-proxy would take too long.
package kubeproxy

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/loadtest/usage"
)

const (
	// programTimeout is for the first programming: kube-proxy takes minutes for large clusters.
	programTimeout = 30 * time.Minute
	changeTimeout  = 5 * time.Minute
	// between is the time from one change to the next: more than kube-proxy's shortest time between two of its rounds.
	between = 1500 * time.Millisecond
)

// BenchmarkNode starts an agent or a kube-proxy on a new node, once. It tells
//
//   - program-s: the time from the start of the process to the first connection by a cluster IP, and with IPVS until all backends and cluster IPs are there; program-cpu-s: CPU time meanwhile,
//     of the process and the programs that it runs;
//   - change-ms, the median, and change-max-ms: the time from an endpoint's flip in the API to the last change of the kernel's
//     rules; change-cpu-ms: CPU time for each, of a second and a half for it; large-… are the same in the large Service. With IPVS, which has
//     nothing that tells of a change, it is to the change of the endpoint's weight, seen within 20 ms, and in an ordinary Service only;
//   - rss-MiB, peak-MiB: the process's memory after that; anon-MiB: without the program's own code; rules: those of iptables' tables nat and filter;
//   - first-…, last-…: new connections from a pod by the first and the last Service in the rules (nftables has no such order: made first
//     and last), one after the other: the median rate of ten turns, and the median and the 99th percentile of the time that each took;
//   - restart-s, Slicecast's only: the time from the start of another process until it has found that nothing has changed; touched:
//     the transactions of nftables meanwhile. It is the second of two, as the first removes what no Service needs any more.
func BenchmarkNode(b *testing.B) {
	for text := range strings.SplitSeq(*sizesFlag, ",") {
		size, err := parseSize(text)
		require.NoError(b, err)
		b.Run(text, func(b *testing.B) {
			c := newCluster(b, size)
			nodes := 0
			for mode := range strings.SplitSeq(*modesFlag, ",") {
				for subject := range strings.SplitSeq(*subjectsFlag, ",") {
					b.Run(mode+"/"+subject, func(b *testing.B) {
						nodes++
						c.measure(b, subject, c.addNode(b, fmt.Sprint("node-", nodes), mode))
					})
				}
			}
		})
	}
}

func (c *cluster) measure(b *testing.B, subject string, n *node) {
	to := c.clusterIP(b, c.ordinary)
	before, err := n.stamp()
	require.NoError(b, err)

	began := time.Now()
	p := c.startSubject(b, subject, n)
	b.ResetTimer()
	ctx, cancel := context.WithTimeout(b.Context(), programTimeout)
	defer cancel()
	for {
		_, err = n.dial(to, 1, 20*time.Millisecond)
		now, stampErr := n.stamp()
		require.NoError(b, stampErr)
		if err == nil && (now != before || n.mode == "ipvs") { // whoever else may have taken the connection
			break
		}
		require.NoError(b, ctx.Err(), "%v", err)
	}
	if n.mode == "ipvs" {
		require.NoError(b, n.awaitIPVS(ctx, c.size.services*c.size.endpoints+c.size.large, c.size.services+min(c.size.large, 1)))
	}
	b.StopTimer()
	b.ReportMetric(time.Since(began).Seconds(), "program-s")
	if n.mode != "ipvs" {
		_, err = awaitChange(ctx, n.stamp, time.Millisecond, before) // the other table, too
		require.NoError(b, err)
	}
	b.ReportMetric(familyCPU(b, p).Seconds(), "program-cpu-s")

	// Attempts of before have left flows that lead nowhere, which a connection from the same port would belong to.
	require.NoError(b, n.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	c.measureChanges(b, p, n, c.ordinary, "change")
	if c.large != nil && n.mode != "ipvs" {
		c.measureChanges(b, p, n, c.large, "large")
	}
	memory, err := usage.MemoryOf(p.Pid())
	require.NoError(b, err)
	b.ReportMetric(float64(memory.Resident)/(1<<20), "rss-MiB")
	b.ReportMetric(float64(memory.Peak)/(1<<20), "peak-MiB")
	b.ReportMetric(float64(memory.Anonymous)/(1<<20), "anon-MiB")

	first, last := c.clusterIP(b, c.first), to
	if n.iptables != "" {
		rules := n.rules(b)
		b.ReportMetric(float64(len(rules)), "rules")
		first, last = ends(rules)
	}
	n.measureConnections(b, first, last)
	if subject == slicecast {
		c.measureRestart(b, p, n)
	}
}

// clusterIP gives the address and port of a slice's Service.
func (c *cluster) clusterIP(b *testing.B, s *discoveryv1.EndpointSlice) netip.AddrPort {
	b.Helper()
	service, err := c.control.Client().CoreV1().Services(namespace).Get(b.Context(), s.Labels[discoveryv1.LabelServiceName], metav1.GetOptions{})
	require.NoError(b, err)
	return netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), 80)
}

// measureRestart ends an agent and starts another.
func (c *cluster) measureRestart(b *testing.B, p *command.Command, n *node) {
	b.Helper()
	for range 2 {
		require.NoError(b, p.Stop())
		before, err := n.stamp()
		require.NoError(b, err)
		start := time.Now()
		p = c.startSubject(b, slicecast, n)
		p.AwaitOK(b, programTimeout, "http://127.0.0.1:10256/readyz")
		b.ReportMetric(time.Since(start).Seconds(), "restart-s")
		after, err := n.stamp()
		require.NoError(b, err)
		if n.iptables == "" {
			b.ReportMetric(float64(after.(uint32)-before.(uint32)), "touched")
		}
	}
}

// measureChanges has an endpoint of a slice flip, an even number of times, so that it is again as it was.
func (c *cluster) measureChanges(b *testing.B, p *command.Command, n *node, s *discoveryv1.EndpointSlice, what string) {
	b.Helper()
	if *changesFlag < 2 {
		return
	}
	look, every := n.stamp, time.Millisecond
	if n.mode == "ipvs" {
		every = 20 * time.Millisecond
		var done func()
		look, done = n.weightIn(b, netip.AddrPortFrom(netip.MustParseAddr(s.Endpoints[0].Addresses[0]), endpointPort))
		defer done()
	}
	var times []time.Duration
	before := familyCPU(b, p)
	ticker := time.NewTicker(between)
	defer ticker.Stop()
	for range *changesFlag / 2 * 2 {
		ctx, cancel := context.WithTimeout(b.Context(), changeTimeout)
		stamp, err := look()
		require.NoError(b, err)
		start := time.Now()
		c.flip(b, s)
		end, err := awaitChange(ctx, look, every, stamp)
		cancel()
		require.NoError(b, err)
		times = append(times, end.Sub(start))
		<-ticker.C
	}
	spent := familyCPU(b, p) - before
	slices.Sort(times)
	millis := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(millis(times[len(times)/2]), what+"-ms")
	b.ReportMetric(millis(times[len(times)-1]), what+"-max-ms")
	b.ReportMetric(millis(spent/time.Duration(len(times))), what+"-cpu-ms")
}

// clusterIPRule is a rule that leads to what a cluster IP stands for.
var clusterIPRule = regexp.MustCompile(`^-A (?:KUBE-SERVICES|SLICECAST-VIPS\S*) -d (10\.96\.\d+\.\d+)/32 .*--dport 80 `)

// ends gives the cluster IPs that packets find first and last.
func ends(rules []string) (first, last netip.AddrPort) {
	for _, rule := range rules {
		if m := clusterIPRule.FindStringSubmatch(rule); m != nil {
			last = netip.AddrPortFrom(netip.MustParseAddr(m[1]), 80)
			if !first.IsValid() {
				first = last
			}
		}
	}
	return first, last
}

// measureConnections makes connections to both ends in turns, so that what else the machine does meets both.
func (n *node) measureConnections(b *testing.B, first, last netip.AddrPort) {
	b.Helper()
	const turns = 10
	times, rates := map[string][]time.Duration{}, map[string][]float64{}
	for range 1 + turns { // one to warm up
		for what, to := range map[string]netip.AddrPort{"first": first, "last": last} {
			start := time.Now()
			some, err := n.dial(to, *dialsFlag/turns, 10*time.Second)
			require.NoError(b, err)
			times[what] = append(times[what], some...)
			rates[what] = append(rates[what], float64(len(some))/time.Since(start).Seconds())
		}
	}
	for what, all := range times {
		slices.Sort(all)
		slices.Sort(rates[what])
		micros := func(q float64) float64 { return float64(all[int(q*float64(len(all)-1))].Nanoseconds()) / 1000 }
		b.ReportMetric(rates[what][len(rates[what])/2], what+"-conn/s")
		b.ReportMetric(micros(0.5), what+"-p50-µs")
		b.ReportMetric(micros(0.99), what+"-p99-µs")
	}
}
