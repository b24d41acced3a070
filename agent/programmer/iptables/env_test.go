// This file runs the programmer in the network namespace of a node with real pods and a client, for
// both variants of iptables.
package iptables

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

var families = []model.Family{model.IPv4, model.IPv6}

// inHost is a programmer that works in the network namespace of a host.
type inHost struct {
	host *testenv.Host
	*Programmer
	// restored holds the input of each iptables-restore so far that was to take effect. refuse, if
	// set, returns what iptables-restore says about an input that it refuses, or "". accepted, if
	// set, is called after each input that took effect. between, if set, is called after each table
	// of an input, whose tables then take effect one by one.
	restored [][]byte
	refuse   func(input []byte) string
	accepted func()
	between  func()
}

var _ programmer.Programmer = (*inHost)(nil)

func newInHost(t testing.TB, host *testenv.Host, options Options) *inHost {
	t.Helper()
	h := &inHost{host: host}
	run := func(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
		if strings.HasSuffix(name, "-restore") && !slices.Contains(args, "--test") && !bytes.Contains(stdin, []byte("\n-S ")) {
			h.restored = append(h.restored, bytes.Clone(stdin))
			if h.refuse != nil {
				if said := h.refuse(stdin); said != "" {
					return nil, &commandError{name: name, exit: fmt.Errorf("exit status 1"), said: said}
				}
			}
		}
		if h.between != nil && strings.HasSuffix(name, "-restore") {
			for part := range bytes.SplitAfterSeq(stdin, []byte("COMMIT\n")) {
				if len(part) == 0 {
					continue
				}
				if out, err := runCommand(ctx, part, name, args...); err != nil {
					return out, err
				}
				h.between()
			}
			return nil, nil
		}
		out, err := runCommand(ctx, stdin, name, args...)
		if h.accepted != nil && err == nil && strings.HasSuffix(name, "-restore") {
			h.accepted()
		}
		return out, err
	}
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	require.NoError(t, host.Do(func() (err error) {
		h.Programmer, err = newProgrammer(options, run)
		return err
	}))
	return h
}

func (h *inHost) Replace(ctx context.Context, state view.State) error {
	return h.host.Do(func() error { return h.Programmer.Replace(ctx, state) })
}

func (h *inHost) Apply(ctx context.Context, changes []view.Change) error {
	return h.host.Do(func() error { return h.Programmer.Apply(ctx, changes) })
}

func (h *inHost) Cleanup(ctx context.Context) error {
	return h.host.Do(func() error { return h.Programmer.Cleanup(ctx) })
}

func (h *inHost) RetireOtherVariant(ctx context.Context) error {
	return h.host.Do(func() error { return h.Programmer.RetireOtherVariant(ctx) })
}

// restoredBytes returns how many bytes went to iptables-restore since the last call.
func (h *inHost) restoredBytes() int {
	n := 0
	for _, r := range h.restored {
		n += len(r)
	}
	h.restored = nil
	return n
}

var chainCounters = regexp.MustCompile(`(?m)^(:\S+ \S+) \[.*$`)

// rules returns all rules and chains of a family's nat and filter tables. Chains are sorted and
// without counters. Rules are in their order within a chain.
func (h *inHost) rules(t testing.TB, family model.Family, variant Variant, args ...string) string {
	t.Helper()
	var lines []string
	for table := range tables {
		out, err := h.host.Run(t.Context(), programName(family, variant)+"-save", append([]string{"-t", table.String()}, args...)...)
		require.NoError(t, err)
		for line := range strings.Lines(chainCounters.ReplaceAllString(out, "$1")) {
			if !strings.HasPrefix(line, "#") && line != "COMMIT\n" {
				lines = append(lines, table.String()+" "+line)
			}
		}
	}
	chain := regexp.MustCompile(`^\w+ (\[\S+ )?(:|-A )(\S+)`)
	slices.SortStableFunc(lines, func(a, b string) int {
		chainOf := func(line string) string {
			if m := chain.FindStringSubmatch(line); m != nil {
				return m[3]
			}
			return ""
		}
		return strings.Compare(chainOf(a), chainOf(b))
	})
	return strings.Join(lines, "")
}

// eachVariant runs a test for both variants, in parallel.
func eachVariant(t *testing.T, test func(t *testing.T, variant Variant)) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			test(t, v)
		})
	}
}

// eachFamily runs a test for both families, one after the other.
func eachFamily(t *testing.T, test func(t *testing.T, family model.Family)) {
	for _, f := range families {
		t.Run(f.String(), func(t *testing.T) { test(t, f) })
	}
}

// cluster is two nodes with two pods each and a client outside. There are no rules yet. The
// programmer works on node a.
type cluster struct {
	*testenv.Network
	a, b   *testenv.Node
	pods   []*testenv.Pod // 0 and 1 are on node a, 2 and 3 on node b
	client *testenv.Client
	state  view.State

	options Options
	inHost  *inHost
}

const (
	tcpPort, udpPort = 8080, 8053 // served by the pods
	servicePort      = 80
)

func newCluster(t *testing.T, options Options) *cluster {
	t.Helper()
	n := testenv.NewNetwork(t)
	c := &cluster{Network: n, a: n.AddNode("a"), b: n.AddNode("b"), options: options}
	for i, node := range []*testenv.Node{c.a, c.a, c.b, c.b} {
		pod := node.AddPod(fmt.Sprint("pod", i))
		pod.Serve(testenv.TCP, tcpPort)
		pod.Serve(testenv.UDP, udpPort)
		c.pods = append(c.pods, pod)
	}
	c.client = n.AddClient("client")
	c.client.RouteVia(c.a, testenv.ServiceCIDRs()...)
	c.state = view.State{
		Node:  view.Node{Pods: view.PodDetector{Prefixes: podCIDRs}, NodePorts: everywhere},
		Ports: map[view.ServicePortID]*view.ServicePort{},
	}
	c.inHost = newInHost(t, c.a.Host, options)
	return c
}

// backends returns the pods as backends of a port, as node a sees them.
func (c *cluster) backends(family model.Family, port uint16, pods ...int) view.Backends {
	var backends []view.Backend
	for _, i := range pods {
		p := c.pods[i]
		backends = append(backends, view.Backend{
			Address: netip.AddrPortFrom(p.Addr(family == model.IPv6), port), Local: p.Node == c.a,
		})
	}
	return view.NewBackends(backends...)
}

// vip returns a cluster IP.
func vip(family model.Family, last byte) netip.Addr {
	if family == model.IPv6 {
		a := netip.MustParseAddr("fd00:10:96::").As16()
		a[15] = last
		return netip.AddrFrom16(a)
	}
	return netip.AddrFrom4([4]byte{10, 96, 0, last})
}

func serviceID(name string, protocol model.Protocol, family model.Family) view.ServicePortID {
	return view.ServicePortID{Service: model.ServiceKey{Namespace: "default", Name: name}, Port: "p", Protocol: protocol, Family: family}
}

// podCIDRs are the addresses of all pods of a cluster. everywhere puts nodePorts on all addresses
// of a node.
var (
	podCIDRs   = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00:10:180::/48")}
	everywhere = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
)

// clusterIP returns a frontend that leads to the cluster set and is masqueraded for everybody
// except pods.
func clusterIP(addr netip.Addr) view.Frontend {
	return view.Frontend{
		Kind: view.ClusterIP, Address: addr, Port: servicePort,
		Pods: view.Route{To: view.Cluster}, Node: view.Route{To: view.Cluster, Masquerade: true}, Others: view.Route{To: view.Cluster, Masquerade: true},
	}
}

// everyone sets one route for all of a frontend's connections.
func everyone(f view.Frontend, r view.Route) view.Frontend {
	f.Pods, f.Node, f.Others = r, r, r
	return f
}

// external returns a frontend that leads to the cluster set and is masqueraded.
func external(addr netip.Addr) view.Frontend {
	return everyone(view.Frontend{Kind: view.ExternalIP, Address: addr, Port: servicePort}, view.Route{To: view.Cluster, Masquerade: true})
}

// nodePort returns such a frontend on the node's addresses.
func nodePort(port uint16) view.Frontend {
	return everyone(view.Frontend{Kind: view.NodePort, Port: port}, view.Route{To: view.Cluster, Masquerade: true})
}

// localPolicy sets the routes of externalTrafficPolicy Local.
func localPolicy(f view.Frontend) view.Frontend {
	f.Pods, f.Node, f.Others = view.Route{To: view.Cluster}, view.Route{To: view.Cluster, Masquerade: true}, view.Route{To: view.Local}
	return f
}

// rejected makes a frontend reject all of its connections.
func rejected(f view.Frontend) view.Frontend { return everyone(f, view.Route{To: view.Reject}) }

// patient waits for answers even on a busy machine.
var patient = testenv.ProbeOptions{Timeout: 20 * time.Second}

// transport is what a test needs for TCP or UDP.
type transport struct {
	probe    testenv.Proto
	protocol model.Protocol
	port     uint16 // of the pods
}

var transports = []transport{{testenv.TCP, model.TCP, tcpPort}, {testenv.UDP, model.UDP, udpPort}}

// requireFresh asserts that a new process finds nothing to write, because the kernel prints each
// rule as it was written.
func (c *cluster) requireFresh(t *testing.T) {
	t.Helper()
	again := newInHost(t, c.a.Host, c.options)
	require.NoError(t, again.Replace(t.Context(), c.state))
	require.Empty(t, string(slices.Concat(again.restored...)))
}
