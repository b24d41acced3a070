// This file builds the stage on which cases are played: a real API server, and a node with the
// subject, in network namespaces in which every address of a case is answered.
package conformance

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

// stage is an API server, and a node with a subject and two other hosts: one for the node's pods
// and one for everything outside the node. Together these receive packets for all addresses that
// cases use; see Wire.
type stage struct {
	control *controlplane.ControlPlane
	cluster *cluster
	network *testenv.Network
	node    *testenv.Node
	pods    *testenv.Pod
	outside *testenv.Client
	wire    *Wire
	subject subject
	// canary is the number of changes of the canary so far.
	canary int
	// recorder records outcomes instead of failing the test; nil means that nothing is recorded.
	recorder *recorder
	// running is the settings with which the subject was started last; nil before the first start.
	running *settings
}

// settings are the settings with which a subject is started.
type settings struct {
	Config
	Node string
}

// key returns a string that is equal for equal settings.
func (s *settings) key() string { return s.Node + s.Config.key() }

// The addresses of a stage's hosts, which no case uses.
var (
	podsAddresses    = []netip.Addr{netip.MustParseAddr("10.180.0.254"), netip.MustParseAddr("fd00:10:180::fe")}
	outsideAddresses = []netip.Addr{netip.MustParseAddr("203.0.113.254"), netip.MustParseAddr("2001:db8:cafe::fe")}
	everything       = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
)

func newStage(t *testing.T) *stage {
	t.Helper()
	network := testenv.NewNetwork(t)
	s := &stage{
		control: controlplane.Start(t, controlplane.Options{Address: network.World.IPv4, OldAddresses: true}),
		network: network,
		// The first node of a network has the addresses of the cases' node.
		node:    network.AddNode("node1"),
		outside: network.AddClient("outside", outsideAddresses...),
	}
	s.cluster = newCluster(s.control.Client())
	s.pods = s.node.AddPod("pods", podsAddresses...)
	s.pods.Attract(s.node.PodCIDR4, s.node.PodCIDR6)
	s.outside.Attract(everything...)
	s.outside.RouteVia(s.node, everything...)
	s.wire = NewWire(t, s.node, s.pods.Host, s.outside.Host)
	return s
}

// flush removes all rules of a variant of iptables.
func (s *stage) flush(ctx context.Context, variant string) error {
	for _, command := range []string{"iptables-" + variant, "ip6tables-" + variant} {
		for _, table := range []string{"raw", "mangle", "nat", "filter"} {
			for _, what := range []string{"-F", "-X"} {
				if _, err := s.node.Run(ctx, command, "-w", "10", "-t", table, what); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// setUp prepares the stage for a case, and cleans up at the end of t.
func (s *stage) setUp(t *testing.T, c *Case) {
	t.Helper()
	require.NoError(t, s.possible(c))
	t.Cleanup(func() { require.NoError(t, s.cluster.Clear(context.Background())) })
	if s.subject.Reference() && !s.cluster.NodeHas(t, c.Node) {
		// before kube-proxy exits with an error, because its Node's addresses change
		require.NoError(t, s.subject.Stop())
	}
	s.cluster.SetNode(t, c.Node)
	for _, addr := range c.Node.ExtraIPs {
		s.addAddress(t, "eth0", netip.PrefixFrom(addr.Addr, addr.BitLen()))
	}
	for _, addr := range s.neighbors(c) {
		s.outside.Attract(netip.PrefixFrom(addr, addr.BitLen()))
	}
	require.NoError(t, s.node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	want := &settings{c.Config, c.Node.Name}
	if s.running != nil && s.running.key() == want.key() && s.subject.Check() == nil {
		return
	}
	s.running = nil
	require.NoError(t, s.subject.Stop())
	s.running = want
	require.NoError(t, s.start(t))
}

// start starts the subject. It is an error if a kube-proxy does not program what exists.
func (s *stage) start(t *testing.T) error {
	t.Helper()
	require.NoError(t, s.subject.Start(*s.running))
	if s.subject.Reference() {
		// A kube-proxy may miss its Node's zone when it starts: config.NodeTopologyConfig may
		// receive the Node before its handlers are registered.
		if err := s.awaitSync(t); err != nil {
			return err
		}
		s.cluster.RepeatZone(t, s.running.Node)
	}
	return nil
}

// possible returns an error if this stage cannot play a case.
func (s *stage) possible(c *Case) error {
	for _, ip := range c.Node.IPs {
		if ip.Addr != s.node.Addr(ip.Is6()) {
			return fmt.Errorf("node.ips has %s: the node of this test has %s and %s", ip, s.node.IPv4, s.node.IPv6)
		}
	}
	for _, cidr := range append(slices.Clone(c.Node.PodCIDRs), c.Node.PodCIDR) {
		if cidr.Prefix != s.node.PodCIDR4 && cidr.Prefix != s.node.PodCIDR6 {
			return fmt.Errorf("node.podCIDRs has %s: the pods of this test have %s and %s", cidr, s.node.PodCIDR4, s.node.PodCIDR6)
		}
	}
	return nil
}

// neighbors returns the addresses in the node's own network to which a case sends packets and that
// do not belong to the node.
func (s *stage) neighbors(c *Case) []netip.Addr {
	network := netip.PrefixFrom(s.node.IPv4, 24).Masked()
	var neighbors []netip.Addr
	for _, step := range c.All("") {
		for i := range step.Flows {
			dst := step.Flows[i].Dst.Addr
			if network.Contains(dst) && dst != s.node.IPv4 && !slices.Contains(c.Node.ExtraIPs, step.Flows[i].Dst) {
				neighbors = append(neighbors, dst)
			}
		}
	}
	return neighbors
}

// addAddress adds an address to the node until the end of t.
func (s *stage) addAddress(t *testing.T, device string, prefix netip.Prefix) {
	t.Helper()
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())}}
	if prefix.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	change := func(f func(netlink.Link, *netlink.Addr) error) error {
		return s.node.Do(func() error {
			link, err := netlink.LinkByName(device)
			if err != nil {
				return err
			}
			return f(link, addr)
		})
	}
	require.NoError(t, change(netlink.AddrAdd), "add %s to %s", prefix, device)
	t.Cleanup(func() { require.NoError(t, change(netlink.AddrDel), "remove %s from %s", prefix, device) })
}
