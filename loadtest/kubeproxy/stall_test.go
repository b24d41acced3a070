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
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/command"
)

const (
	// echoPort is the UDP port at which the pods answer.
	echoPort = 9000
	// warmUp is how long flows run before and after what is measured.
	warmUp = time.Second
)

// otherService is the cluster IP of a Service that another program has set up on the node.
var otherService = netip.MustParseAddr("10.97.0.1")

// echoEndpoint is the UDP address and port of the only endpoint of the Service of echoes. It is one
// of the addresses of endpoints, because the pods of endpoints have others on each node.
var echoEndpoint = netip.MustParseAddrPort("100.127.255.254:9001")

// BenchmarkStall sends a packet in each millisecond and flow while a program loads its rules: from
// nothing (program), in another process (restart), and after all its rules were removed (repair).
// Some flows pass by Services, others lead through a Service of another program, and, in the
// restart, through Services of this program. It reports for each of them, as the median of
// -kubeproxy.runs:
//
//   - …-gap-ms: the longest time for which an answer was overdue
//   - …-over-5ms: how many answers were overdue for more than 5 ms
//   - …-lost: packets and connections without an answer within a second, as the maximum of the runs
//
// The flow "floor" never leaves its pod: it shows what the machine itself does to such a
// measurement. The processes that send and answer have the highest ordinary priority, so they do
// not wait for CPU time that others use. A repair has no flows through the removed rules. Instead,
// it reports for how long new connections through them failed (repair-outage-ms).
//
// A kube-proxy does not notice the removal by itself, so an endpoint of another Service flips then.
func BenchmarkStall(b *testing.B) {
	for text := range strings.SplitSeq(*sizesFlag, ",") {
		size, err := parseSize(text)
		require.NoError(b, err)
		b.Run(text, func(b *testing.B) {
			c := newCluster(b, size)
			echo := c.createEcho(b)
			nodes := 0
			for mode := range strings.SplitSeq(*modesFlag, ",") {
				for subject := range strings.SplitSeq(*subjectsFlag, ",") {
					b.Run(mode+"/"+subject, func(b *testing.B) {
						runs := make(map[string][]float64)
						for range *runsFlag {
							nodes++
							c.measureStalls(b, subject, c.addNode(b, fmt.Sprint("node-", nodes), mode), echo, runs)
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

// createEcho creates a Service whose endpoint is echoEndpoint. It returns where it is reached.
func (c *cluster) createEcho(b *testing.B) netip.AddrPort {
	b.Helper()
	const name = "echo"
	services := []*corev1.Service{{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: name, Port: 80, Protocol: corev1.ProtocolUDP}}},
	}}
	c.create(b, services, []*discoveryv1.EndpointSlice{{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new(name), Port: new(int32(echoEndpoint.Port())), Protocol: new(corev1.ProtocolUDP)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{echoEndpoint.Addr().String()}}},
	}})
	return netip.AddrPortFrom(netip.MustParseAddr(services[0].Spec.ClusterIP), 80)
}

// measureStalls adds the figures of one run to runs.
func (c *cluster) measureStalls(b *testing.B, subject string, n *node, echo netip.AddrPort, runs map[string][]float64) {
	b.Helper()
	defer n.Delete()
	_, err := n.Run(b.Context(), "nft", fmt.Sprintf(`table ip other { chain prerouting {
		type nat hook prerouting priority -110; ip daddr %v dnat to %v; }; }`, otherService, n.sink.IPv4))
	require.NoError(b, err)
	port := netip.AddrPortFrom(netip.IPv4Unspecified(), echoPort)
	defer startProber(b, n.sink.Host, probing{Echo: []netip.AddrPort{port, echoEndpoint}})()
	defer startProber(b, n.client.Host, probing{Echo: []netip.AddrPort{port}})()
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
	n.awaitEcho(b, echo)
	through := []flow{{Name: "service", To: echo}, {Name: "service-new", To: service, Connects: true}}
	phase("restart", slices.Concat(flows, through), func() {
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
	phase("repair", flows, func() {
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

// awaitEcho waits until a new UDP flow to a Service is answered.
func (n *node) awaitEcho(b *testing.B, service netip.AddrPort) {
	b.Helper()
	testenv.Eventually(b, programTimeout, func() error {
		return n.client.Do(func() error {
			socket, err := dialUDP(service, 20*time.Millisecond)
			if err != nil {
				return err
			}
			defer func() { _ = unix.Close(socket) }()
			return ask(socket, 0)
		})
	})
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
