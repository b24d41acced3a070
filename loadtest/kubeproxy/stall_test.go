// This file measures whether packets wait or are lost while a program loads its rules.
package kubeproxy

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
)

const (
	// echoPort is the UDP port at which the pod with the endpoints answers.
	echoPort = 9000
	// warmUp is how long flows run before and after what is measured.
	warmUp = time.Second
)

// otherService is the cluster IP of a Service that another program has set up on the node.
var otherService = netip.MustParseAddr("10.97.0.1")

// BenchmarkStall sends a packet in each millisecond and flow while a program loads its rules: from
// nothing (program), in another process (restart), and after all its rules were removed (repair).
// Some flows pass by Services, others lead through a Service of another program, and, from the
// restart on, through one of this program's. It reports for each of them, as the median of
// -kubeproxy.runs:
//
//   - …-gap-ms: the longest time for which an answer was overdue
//   - …-over-5ms: how many answers were overdue for more than 5 ms
//   - …-lost: packets and connections without an answer within a second, as the maximum of the runs
//
// The flow "floor" never leaves its pod: it shows what the machine itself does to such a
// measurement. The processes that send and answer have the highest ordinary priority, so they do
// not wait for CPU time that others use. A repair has no figure for new connections through the
// removed rules, other than how long they failed (repair-outage-ms).
//
// A kube-proxy does not notice the removal by itself, so an endpoint of another Service flips then.
func BenchmarkStall(b *testing.B) {
	for text := range strings.SplitSeq(*sizesFlag, ",") {
		size, err := parseSize(text)
		require.NoError(b, err)
		b.Run(text, func(b *testing.B) {
			c := newCluster(b, size)
			nodes := 0
			for mode := range strings.SplitSeq(*modesFlag, ",") {
				for subject := range strings.SplitSeq(*subjectsFlag, ",") {
					b.Run(mode+"/"+subject, func(b *testing.B) {
						runs := make(map[string][]float64)
						for range *runsFlag {
							nodes++
							c.measureStalls(b, subject, c.addNode(b, fmt.Sprint("node-", nodes), mode), runs)
						}
						for metric, values := range runs {
							slices.Sort(values)
							value := values[len(values)/2]
							if strings.HasSuffix(metric, "lost") {
								value = values[len(values)-1]
							}
							b.ReportMetric(value, metric)
						}
					})
				}
			}
		})
	}
}

// measureStalls adds the figures of one run to runs.
func (c *cluster) measureStalls(b *testing.B, subject string, n *node, runs map[string][]float64) {
	b.Helper()
	defer n.Delete()
	_, err := n.Run(b.Context(), "nft", fmt.Sprintf(`table ip other { chain prerouting {
		type nat hook prerouting priority -110; ip daddr %v dnat to %v; }; }`, otherService, n.sink.IPv4))
	require.NoError(b, err)
	defer startProber(b, n.sink.Host, probing{Echo: echoPort})()
	defer startProber(b, n.client.Host, probing{Echo: echoPort})()
	service := c.clusterIP(b, c.ordinary)
	flows := []flow{
		{Name: "floor", To: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), echoPort)},
		{Name: "past", To: netip.AddrPortFrom(n.sink.IPv4, echoPort)},
		{Name: "past-new", To: netip.AddrPortFrom(n.sink.IPv4, endpointPort), Connects: true},
		{Name: "other", To: netip.AddrPortFrom(otherService, echoPort)},
		{Name: "other-new", To: netip.AddrPortFrom(otherService, endpointPort), Connects: true},
	}
	phase := func(name string, flows []flow, load func()) {
		b.Helper()
		n.forgetFlows(b)
		stop := startProber(b, n.client.Host, probing{Flows: flows})
		<-time.After(warmUp)
		began := time.Now()
		load()
		took := time.Since(began)
		<-time.After(warmUp)
		add := func(metric string, value float64) { runs[metric] = append(runs[metric], value) }
		add(name+"-s", took.Seconds())
		for i, r := range stop() {
			key := name + "-" + flows[i].Name
			b.Logf("%s, %v: %+v", key, took, r)
			add(key+"-gap-ms", float64(r.Longest.Microseconds())/1000)
			add(key+"-over-5ms", float64(r.Over))
			add(key+"-lost", float64(r.Lost))
		}
	}

	var p *command.Command
	phase("program", flows, func() {
		p = c.startSubject(b, subject, n)
		n.awaitService(b, service)
	})
	flows = append(flows, flow{Name: "service-new", To: service, Connects: true})
	phase("restart", flows, func() {
		require.NoError(b, p.Stop())
		p = c.startSubject(b, subject, n)
		if subject == slicecast {
			p.AwaitOK(b, programTimeout, "http://127.0.0.1:10256/readyz")
		} else { // its health says nothing about whether it has written its rules
			p.AwaitLine(b, programTimeout, `"SyncProxyRules complete" ipFamily="IPv4"`)
		}
		c.flip(b, c.first)
		c.flip(b, c.first)
	})
	phase("repair", flows[:len(flows)-1], func() {
		began := time.Now()
		n.removeRules(b, subject)
		if subject != slicecast {
			c.flip(b, c.first)
			c.flip(b, c.first)
		}
		n.awaitService(b, service)
		runs["repair-outage-ms"] = append(runs["repair-outage-ms"], float64(time.Since(began).Milliseconds()))
	})
	require.NoError(b, p.Stop())
}

// awaitService waits until a new connection to a Service succeeds.
func (n *node) awaitService(b *testing.B, service netip.AddrPort) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), programTimeout)
	defer cancel()
	require.NoError(b, testenv.WaitFor(ctx, func() error {
		_, err := n.dial(service, 1, 20*time.Millisecond)
		return err
	}))
}

// removeRules removes everything that a program has put into the kernel's tables, as a firewall's
// script may do.
func (n *node) removeRules(b *testing.B, subject string) {
	b.Helper()
	if n.iptables == "" {
		_, err := n.Run(b.Context(), "nft", "delete table ip "+subject)
		require.NoError(b, err)
		return
	}
	// Each table at once, because kube-proxy may be about to write.
	command := n.Command(b.Context(), "iptables-"+n.iptables+"-restore")
	command.Stdin = strings.NewReader("*nat\nCOMMIT\n*filter\nCOMMIT\n*mangle\nCOMMIT\n")
	out, err := command.CombinedOutput()
	require.NoError(b, err, "%s", out)
}
