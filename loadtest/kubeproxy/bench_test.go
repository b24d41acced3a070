// Package kubeproxy measures what a node pays for Services with Slicecast, and with kube-proxy in
// the same mode, on the same API server and the same kernel. It also measures Slicecast's agent
// alone, in clusters for which kube-proxy would take too long.
package kubeproxy

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv/command"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
	"github.com/slicecast/slicecast/loadtest/usage"
)

const (
	// programTimeout limits the initial programming. kube-proxy takes minutes for large clusters.
	programTimeout = 30 * time.Minute
	changeTimeout  = 5 * time.Minute
	// between is the time from one change to the next. It is longer than kube-proxy's minimum time
	// between two syncs.
	between = 1500 * time.Millisecond
)

// BenchmarkNode starts an agent or a kube-proxy once, on a new node. It reports:
//
//   - program-s: the time from the start of the process to the first connection to a cluster IP;
//     with IPVS, until all backends and cluster IPs exist
//   - program-cpu-s: the CPU time of the process and of the programs that it runs during that time
//   - change-ms, change-max-ms: the median and the longest time from an endpoint's flip in the API
//     to the last change of the kernel's rules
//   - change-cpu-ms: the CPU time for each of these changes, which are a second and a half apart
//   - large-…: the same figures for the large Service
//   - rss-MiB, peak-MiB: the memory of the process after the changes, and its peak
//   - anon-MiB: the memory after the changes without the program's own pages
//   - rules: the number of rules in the tables nat and filter of iptables
//   - first-…, last-…: new connections from a pod to the first and the last Service in the rules,
//     made one after the other: the median rate of ten turns, and the median and the 99th
//     percentile of their durations. nftables has no order of Services, so these are the first and
//     the last created
//   - restart-s, only for Slicecast: the time from the start of another process until it has found
//     that nothing has changed
//   - touched: the number of nftables transactions during that restart
//
// With IPVS, nothing reports changes of the kernel. The times of changes are therefore until the
// weight of the endpoint has changed, which the benchmark polls every 20 ms, and are measured only
// for an ordinary Service.
//
// The restart is the second of two, because the first one removes what no Service needs any more.
//
// Before its figures, the benchmark prints the version of kube-proxy.
func BenchmarkNode(b *testing.B) {
	binary, err := controlplane.KubernetesBinary(b.Context(), "kube-proxy")
	require.NoError(b, err)
	version, err := exec.CommandContext(b.Context(), binary, "--version").Output()
	require.NoError(b, err)
	fmt.Printf("kube-proxy: %s", version)
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
		// The tables must have changed, in case something else accepted the connection.
		if err == nil && (now != before || n.mode == "ipvs") {
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
		_, err = awaitChange(ctx, n.stamp, time.Millisecond, before) // wait for the other table, too
		require.NoError(b, err)
	}
	b.ReportMetric(familyCPU(b, p).Seconds(), "program-cpu-s")

	n.forgetFlows(b)
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

// clusterIP returns the address and port of the Service of a slice.
func (c *cluster) clusterIP(b *testing.B, s *discoveryv1.EndpointSlice) netip.AddrPort {
	b.Helper()
	service, err := c.control.Client().CoreV1().Services(namespace).Get(b.Context(), s.Labels[discoveryv1.LabelServiceName], metav1.GetOptions{})
	require.NoError(b, err)
	return netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), 80)
}

// measureRestart stops an agent and starts another one.
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

// measureChanges makes an endpoint of a slice flip an even number of times, so that it ends in its
// original state.
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

// clusterIPRule matches rules that lead from a cluster IP to its endpoints.
var clusterIPRule = regexp.MustCompile(`^-A (?:KUBE-SERVICES|SLICECAST-VIPS\S*) -d (10\.96\.\d+\.\d+)/32 .*--dport 80 `)

// ends returns the cluster IPs of the first and the last rule that packets traverse.
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

// measureConnections connects to both Services in turns, so that other load on the machine affects
// both alike.
func (n *node) measureConnections(b *testing.B, first, last netip.AddrPort) {
	b.Helper()
	const turns = 10
	times, rates := map[string][]time.Duration{}, map[string][]float64{}
	for range 1 + turns { // one more turn to warm up
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
