// Package kubeproxy measures what a node pays for Services with Slicecast, and with kube-proxy in iptables mode, on the same API
// server and the same kernel.
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
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
//   - program-s: the time from the start of the process to the first connection by a cluster IP; program-cpu-s: CPU time meanwhile,
//     of the process and the programs that it runs;
//   - change-ms, the median, and change-max-ms: the time from an endpoint's flip in the API to the last change of the kernel's
//     rules; change-cpu-ms: CPU time for each, of a second and a half for it; large-… are the same in the large Service;
//   - rss-MiB, peak-MiB: the process's memory after that; rules: those of nat and filter;
//   - first-…, last-…: new connections from a pod by the first and the last Service in the rules, one after the other.
func BenchmarkNode(b *testing.B) {
	for text := range strings.SplitSeq(*sizesFlag, ",") {
		size, err := parseSize(text)
		require.NoError(b, err)
		b.Run(text, func(b *testing.B) {
			c := newCluster(b, size)
			nodes := 0
			for variant := range strings.SplitSeq(*variantsFlag, ",") {
				for subject := range strings.SplitSeq(*subjectsFlag, ",") {
					b.Run(variant+"/"+subject, func(b *testing.B) {
						nodes++
						c.measure(b, subject, c.addNode(b, fmt.Sprint("node-", nodes), variant))
					})
				}
			}
		})
	}
}

func (c *cluster) measure(b *testing.B, subject string, n *node) {
	service, err := c.control.Client().CoreV1().Services(namespace).Get(b.Context(), c.ordinary.Labels[discoveryv1.LabelServiceName], metav1.GetOptions{})
	require.NoError(b, err)
	to := netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), 80)
	before, err := n.stamp()
	require.NoError(b, err)

	began := time.Now()
	p := c.startSubject(b, subject, n)
	b.ResetTimer()
	ctx, cancel := context.WithTimeout(b.Context(), programTimeout)
	defer cancel()
	for {
		if _, err = n.dial(to, 1, 20*time.Millisecond); err == nil {
			break
		}
		require.NoError(b, ctx.Err(), "%v", err)
	}
	b.StopTimer()
	b.ReportMetric(time.Since(began).Seconds(), "program-s")
	_, err = n.awaitChange(ctx, before) // the other table, too
	require.NoError(b, err)
	spent, err := usage.FamilyCPUOf(p.Process.Pid)
	require.NoError(b, err)
	b.ReportMetric(spent.Total().Seconds(), "program-cpu-s")

	c.measureChanges(b, p, n, c.ordinary, "change")
	if c.large != nil {
		c.measureChanges(b, p, n, c.large, "large")
	}
	memory, err := usage.MemoryOf(p.Process.Pid)
	require.NoError(b, err)
	b.ReportMetric(float64(memory.Resident)/(1<<20), "rss-MiB")
	b.ReportMetric(float64(memory.Peak)/(1<<20), "peak-MiB")

	rules := n.rules(b)
	b.ReportMetric(float64(len(rules)), "rules")
	first, last := ends(rules)
	n.measureConnections(b, first, "first")
	n.measureConnections(b, last, "last")
}

// measureChanges has an endpoint of a slice flip, an even number of times, so that it is again as it was.
func (c *cluster) measureChanges(b *testing.B, p *process, n *node, s *discoveryv1.EndpointSlice, what string) {
	b.Helper()
	var times []time.Duration
	before, err := usage.FamilyCPUOf(p.Process.Pid)
	require.NoError(b, err)
	ticker := time.NewTicker(between)
	defer ticker.Stop()
	for range *changesFlag / 2 * 2 {
		ctx, cancel := context.WithTimeout(b.Context(), changeTimeout)
		stamp, err := n.stamp()
		require.NoError(b, err)
		start := time.Now()
		c.flip(b, s)
		end, err := n.awaitChange(ctx, stamp)
		cancel()
		require.NoError(b, err)
		times = append(times, end.Sub(start))
		<-ticker.C
	}
	after, err := usage.FamilyCPUOf(p.Process.Pid)
	require.NoError(b, err)
	slices.Sort(times)
	millis := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(millis(times[len(times)/2]), what+"-ms")
	b.ReportMetric(millis(times[len(times)-1]), what+"-max-ms")
	b.ReportMetric(millis(after.Sub(before).Total()/time.Duration(len(times))), what+"-cpu-ms")
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

func (n *node) measureConnections(b *testing.B, to netip.AddrPort, what string) {
	b.Helper()
	_, err := n.dial(to, *dialsFlag/10, time.Second) // to warm up
	require.NoError(b, err)
	start := time.Now()
	times, err := n.dial(to, *dialsFlag, time.Second)
	require.NoError(b, err)
	b.ReportMetric(float64(len(times))/time.Since(start).Seconds(), what+"-conn/s")
	micros := func(q float64) float64 {
		return float64(times[int(q*float64(len(times)-1))].Nanoseconds()) / 1000
	}
	b.ReportMetric(micros(0.5), what+"-p50-µs")
	b.ReportMetric(micros(0.99), what+"-p99-µs")
}
