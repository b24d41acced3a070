// This file runs the programmer in the network namespace of a node with real pods and a client, in
// the virtual machine whose kernel has IPVS.
package ipvs

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	mobyipvs "github.com/moby/ipvs"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
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
	t.Cleanup(h.close)
	return h
}

func (h *inHost) Replace(ctx context.Context, state view.State) error {
	return h.host.Do(func() error { return h.Programmer.Replace(ctx, state) })
}

// programmed returns the programmer's state of a Service port.
func (h *inHost) programmed(id view.ServicePortID) *programmed { return h.family(id.Family).ports[id] }

// virtuals returns the virtual services of a Service port.
func (h *inHost) virtuals(id view.ServicePortID) []*virtual {
	return h.family(id.Family).services(h.programmed(id))
}

// moby returns the library's form of the key, for asking the kernel by another way.
func (k serviceKey) moby() *mobyipvs.Service {
	s := &mobyipvs.Service{AddressFamily: uint16(netlink.Domain(k.family)), Netmask: 1<<32 - 1}
	if k.family == model.IPv6 {
		s.Netmask = 128
	}
	if k.number != 0 {
		s.FWMark = markTag | k.number
	} else {
		s.Address, s.Protocol, s.Port = k.address.AsSlice(), uint16(nft.ProtocolNumber(k.protocol)), k.port
	}
	return s
}

// moby returns the library's form of the virtual service.
func (v *virtual) moby() *mobyipvs.Service {
	s, own := v.serviceKey.moby(), v.settings()
	s.SchedName, s.Flags, s.Timeout = own.scheduler, own.flags, own.timeout
	return s
}

// cluster is two nodes with two pods each and a client outside. The programmer works on node a.
type cluster struct {
	*testenv.Network
	a, b   *testenv.Node
	pods   []*testenv.Pod // 0 and 1 are on node a, 2 and 3 on node b
	client *testenv.Client
	state  view.State
	*inHost
}

const (
	tcpPort, udpPort = 8080, 8053 // served by the pods
	servicePort      = 80
)

func newCluster(t *testing.T, options Options) *cluster {
	t.Helper()
	n := testenv.NewNetwork(t)
	c := &cluster{Network: n, a: n.AddNode("a"), b: n.AddNode("b")}
	for i, node := range []*testenv.Node{c.a, c.a, c.b, c.b} {
		pod := node.AddPod(fmt.Sprint("pod", i))
		pod.Serve(testenv.TCP, tcpPort)
		pod.Serve(testenv.UDP, udpPort)
		c.pods = append(c.pods, pod)
	}
	c.client = n.AddClient("client")
	c.client.RouteVia(c.a, testenv.ServiceCIDRs()...)
	c.client.RouteVia(c.a, netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:5::/64"))
	c.state = view.State{
		Node: view.Node{
			Pods:      view.PodDetector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.180.0.0/16"), netip.MustParsePrefix("fd00:10:180::/48")}},
			NodePorts: []netip.Prefix{netip.PrefixFrom(c.a.IPv4, 32), netip.PrefixFrom(c.a.IPv6, 128)},
		},
		Ports: map[view.ServicePortID]*view.ServicePort{},
	}
	c.inHost = newInHost(t, c.a.Host, options)
	return c
}

// set makes these Service ports the cluster's state.
func (c *cluster) set(ports ...*view.ServicePort) {
	for _, p := range ports {
		c.state.Ports[p.ID] = p
	}
}

// apply changes a Service port. nil removes it.
func (c *cluster) apply(t *testing.T, id view.ServicePortID, after *view.ServicePort) {
	t.Helper()
	require.NoError(t, c.Apply(t.Context(), []view.Change{{Before: c.state.Ports[id], After: after}}))
	if after == nil {
		delete(c.state.Ports, id)
	} else {
		c.set(after)
	}
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

// ingress returns an address of a load balancer.
func ingress(family model.Family, last byte) netip.Addr {
	if family == model.IPv6 {
		a := netip.MustParseAddr("2001:db8:5::").As16()
		a[15] = last
		return netip.AddrFrom16(a)
	}
	return netip.AddrFrom4([4]byte{198, 51, 100, last})
}

func serviceID(name string, protocol model.Protocol, family model.Family) view.ServicePortID {
	return view.ServicePortID{Service: model.ServiceKey{Namespace: "default", Name: name}, Port: "p", Protocol: protocol, Family: family}
}

// everywhere sets one target for all of a frontend's connections. Those of pods are masqueraded
// only if all is set.
func everywhere(f view.Frontend, to view.Target, all bool) view.Frontend {
	f.Pods, f.Node, f.Others = view.Route{To: to, Masquerade: all}, view.Route{To: to, Masquerade: true}, view.Route{To: to, Masquerade: true}
	return f
}

func clusterIP(a netip.Addr) view.Frontend {
	return everywhere(view.Frontend{Kind: view.ClusterIP, Address: a, Port: servicePort}, view.Cluster, false)
}

func nodePort(port uint16) view.Frontend {
	return everywhere(view.Frontend{Kind: view.NodePort, Port: port}, view.Cluster, true)
}

// localPolicy sets the routes of externalTrafficPolicy Local.
func localPolicy(f view.Frontend, others view.Target) view.Frontend {
	f.Pods, f.Node, f.Others = view.Route{To: view.Cluster}, view.Route{To: view.Cluster, Masquerade: true}, view.Route{To: others}
	return f
}

// patient waits for answers even on a busy machine.
var patient = testenv.ProbeOptions{Timeout: 20 * time.Second}

// hasty is for connections that are dropped.
var hasty = testenv.ProbeOptions{Timeout: 500 * time.Millisecond}

// transport is what a test needs for TCP or UDP.
type transport struct {
	probe    testenv.Proto
	protocol model.Protocol
	port     uint16 // of the pods
}

var (
	tcp        = transport{testenv.TCP, model.TCP, tcpPort}
	transports = []transport{tcp, {testenv.UDP, model.UDP, udpPort}}
)

// each runs a test for each family and transport. probe makes connections.
func each(t *testing.T, test func(t *testing.T, family model.Family, tr transport, probe func(from *testenv.Host, to netip.Addr, port uint16, n int) testenv.Result)) {
	for _, family := range families {
		for _, tr := range transports {
			t.Run(family.String()+"/"+string(tr.probe), func(t *testing.T) {
				test(t, family, tr, func(from *testenv.Host, to netip.Addr, port uint16, n int) testenv.Result {
					return from.Probe(t.Context(), tr.probe, netip.AddrPortFrom(to, port), n, patient)
				})
			})
		}
	}
}
