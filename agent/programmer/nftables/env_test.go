// This file runs the programmer in the network namespace of a node with real pods and a client.
package nftables

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
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
}

var _ programmer.Monitor = (*inHost)(nil)

func newInHost(t testing.TB, host *testenv.Host, options Options) *inHost {
	t.Helper()
	h := &inHost{host: host}
	if options.Log == nil {
		options.Log = slog.New(slog.DiscardHandler)
	}
	require.NoError(t, host.Do(func() (err error) {
		h.Programmer, err = New(options)
		return err
	}))
	t.Cleanup(h.Close)
	return h
}

// Replace runs in the host's namespace, because it reads and writes sysctls.
func (h *inHost) Replace(ctx context.Context, state view.State) error {
	return h.host.Do(func() error { return h.Programmer.Replace(ctx, state) })
}

// Watch runs in the host's namespace, because it opens a socket.
func (h *inHost) Watch(ctx context.Context, lost func(reason string)) {
	_ = h.host.Do(func() error {
		h.Programmer.Watch(ctx, lost)
		return nil
	})
}

// list returns a family's table as nft lists it.
func (h *inHost) list(t testing.TB, family model.Family, args ...string) string {
	t.Helper()
	name := "ip"
	if family == model.IPv6 {
		name = "ip6"
	}
	out, err := h.host.Run(t.Context(), "nft", append(args, "list", "table", name, Table)...)
	require.NoError(t, err)
	return out
}

// eachFamily runs a test for both families, one after the other.
func eachFamily(t *testing.T, test func(t *testing.T, family model.Family)) {
	for _, f := range families {
		t.Run(f.String(), func(t *testing.T) { test(t, f) })
	}
}

// testCluster is two nodes with two pods each and a client outside. There are no rules yet. The
// programmer works on node a.
type testCluster struct {
	*testenv.Network
	a, b   *testenv.Node
	pods   []*testenv.Pod // 0 and 1 are on node a, 2 and 3 on node b
	client *testenv.Client
	state  view.State
	inHost *inHost
	t      testing.TB // the programmers live as long as t
}

const (
	tcpPort, udpPort = 8080, 8053 // served by the pods
	servicePort      = 80
)

func newCluster(t *testing.T) *testCluster {
	t.Helper()
	n := testenv.NewNetwork(t)
	c := &testCluster{Network: n, a: n.AddNode("a"), b: n.AddNode("b"), state: newState(), t: t}
	for i, node := range []*testenv.Node{c.a, c.a, c.b, c.b} {
		pod := node.AddPod(fmt.Sprint("pod", i))
		pod.Serve(testenv.TCP, tcpPort)
		pod.Serve(testenv.UDP, udpPort)
		c.pods = append(c.pods, pod)
	}
	c.client = n.AddClient("client")
	c.client.RouteVia(c.a, testenv.ServiceCIDRs()...)
	c.restart()
	return c
}

// restart lets another process take over.
func (c *testCluster) restart() { c.inHost = newInHost(c.t, c.a.Host, Options{}) }

func newState() view.State {
	return view.State{
		Node:  view.Node{Pods: view.PodDetector{Prefixes: podCIDRs}, NodePorts: everywhere},
		Ports: map[view.ServicePortID]*view.ServicePort{},
	}
}

// podCIDRs are the addresses of all pods of a cluster. everywhere puts nodePorts on all addresses
// of a node.
var (
	podCIDRs   = []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00:10:180::/48")}
	everywhere = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
)

// set makes these Service ports the cluster's state.
func (c *testCluster) set(ports ...*view.ServicePort) {
	for _, p := range ports {
		c.state.Ports[p.ID] = p
	}
}

func (c *testCluster) replace(t *testing.T) {
	t.Helper()
	require.NoError(t, c.inHost.Replace(t.Context(), c.state))
}

// apply changes one Service port to what it is in after.
func (c *testCluster) apply(t *testing.T, after *view.ServicePort) {
	t.Helper()
	require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: c.state.Ports[after.ID], After: after}}))
	c.set(after)
}

// backends returns the pods as backends of a port, as node a sees them.
func (c *testCluster) backends(family model.Family, port uint16, pods ...int) view.Backends {
	var backends []view.Backend
	for _, i := range pods {
		p := c.pods[i]
		backends = append(backends, view.Backend{
			Address: netip.AddrPortFrom(p.Addr(family == model.IPv6), port), Local: p.Node == c.a,
		})
	}
	return view.NewBackends(backends...)
}

// nobodys returns count backends that do not answer.
func nobodys(count int) view.Backends {
	var backends []view.Backend
	for i := range count {
		backends = append(backends, view.Backend{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 181, byte(i >> 8), byte(i)}), 80)})
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

// The routes that tests use.
var (
	toCluster           = view.Route{To: view.Cluster}
	toClusterMasquerade = view.Route{To: view.Cluster, Masquerade: true}
	toLocal             = view.Route{To: view.Local}
	toReject            = view.Route{To: view.Reject}
	toDrop              = view.Route{To: view.Drop}
)

// routed sets a frontend's routes for pods, the node and others.
func routed(f view.Frontend, pods, node, others view.Route) view.Frontend {
	f.Pods, f.Node, f.Others = pods, node, others
	return f
}

func everyone(f view.Frontend, r view.Route) view.Frontend { return routed(f, r, r, r) }

// clusterIP returns a frontend that is masqueraded for everybody except pods.
func clusterIP(address netip.Addr) view.Frontend {
	return routed(view.Frontend{Kind: view.ClusterIP, Address: address, Port: servicePort}, toCluster, toClusterMasquerade, toClusterMasquerade)
}

// external returns a frontend that is masqueraded for everybody.
func external(address netip.Addr) view.Frontend {
	return everyone(view.Frontend{Kind: view.ExternalIP, Address: address, Port: servicePort}, toClusterMasquerade)
}

// nodePort returns such a frontend on the node's addresses.
func nodePort(port uint16) view.Frontend {
	return everyone(view.Frontend{Kind: view.NodePort, Port: port}, toClusterMasquerade)
}

// localPolicy sets the routes of externalTrafficPolicy Local.
func localPolicy(f view.Frontend) view.Frontend {
	return routed(f, toCluster, toClusterMasquerade, toLocal)
}

// patient waits for answers even on a busy machine. brief and silence are for connections without
// an answer.
var (
	patient = testenv.ProbeOptions{Timeout: 10 * time.Second}
	brief   = testenv.ProbeOptions{Timeout: 300 * time.Millisecond}
	silence = testenv.ProbeOptions{Timeout: 50 * time.Millisecond}
)

// transport is what a test needs for TCP or UDP.
type transport struct {
	probe    testenv.Proto
	protocol model.Protocol
	port     uint16 // of the pods
}

var transports = []transport{{testenv.TCP, model.TCP, tcpPort}, {testenv.UDP, model.UDP, udpPort}}
