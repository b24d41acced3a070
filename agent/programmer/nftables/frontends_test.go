// These tests prove at which addresses and from which sources a Service is reached, what happens to
// unused and invalid addresses, and how pods and SCTP are recognized, with real packets.
package nftables

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// TestSources asserts that only clients within a frontend's sources reach it, whatever its routes
// are, and that other frontends are not affected.
func TestSources(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	other := map[model.Family]netip.Addr{model.IPv4: netip.MustParseAddr("203.0.113.129"), model.IPv6: netip.MustParseAddr("2001:db8:cafe:1::1")}
	filtered := func(f view.Frontend, port uint16, sources ...string) view.Frontend {
		f.Kind, f.Port = view.LoadBalancer, port
		for _, s := range sources {
			if p := netip.MustParsePrefix(s); model.FamilyOf(p.Addr()) == model.FamilyOf(f.Address) {
				f.Sources = append(f.Sources, p)
			}
		}
		return f
	}
	service := func(family model.Family, tr transport, sources ...string) *view.ServicePort {
		return &view.ServicePort{
			ID: serviceID("web", tr.protocol, family),
			Frontends: []view.Frontend{
				clusterIP(vip(family, 1)),
				filtered(external(vip(family, 2)), 80, sources...),
				filtered(everyone(external(vip(family, 2)), toReject), 81, sources...),
				filtered(external(vip(family, 2)), 82), // has no sources
			},
			Cluster: c.backends(family, tr.port, 2),
		}
	}
	// Each step says what the client and the pod may do, and what another address of the client may
	// do.
	steps := []struct {
		name               string
		sources            []string
		client, pod, other bool
	}{
		{"network of the client", []string{"203.0.113.0/25", "2001:db8:cafe::/64", "198.51.100.0/24", "fd99::/16"}, true, false, false},
		{"pod, and both of the client by a wider one", []string{"10.180.0.1/32", "203.0.113.0/24", "fd00:10:180::1/128", "2001:db8:cafe::/47"}, true, true, true},
		{"halves", []string{"0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"}, true, true, true},
		{"nobody", []string{"255.0.0.0/32", "ff00::/128"}, false, false, false},
	}
	for _, family := range families {
		c.client.AddAddress(other[family])
	}
	c.replace(t)
	for _, step := range steps {
		for _, family := range families {
			for _, tr := range transports {
				c.apply(t, service(family, tr, step.sources...))
			}
		}
		t.Run(step.name, func(t *testing.T) {
			c.each(t, func(t *testing.T, family model.Family, tr transport, probe probe) {
				for _, from := range []struct {
					host   *testenv.Host
					source netip.Addr
					may    bool
				}{
					{c.client.Host, c.client.Addr(family == model.IPv6), step.client}, {c.pods[0].Host, netip.Addr{}, step.pod}, {c.client.Host, other[family], step.other},
				} {
					to := func(port uint16) testenv.Result {
						options := patient
						if !from.may {
							options = brief
						}
						options.Source = netip.AddrPortFrom(from.source, 0)
						return from.host.Probe(t.Context(), tr.probe, netip.AddrPortFrom(vip(family, 2), port), 1, options)
					}
					if from.may {
						require.Equal(t, []string{"pod2"}, keys(to(80).Backends()))
						requireRefused(t, to(81))
					} else {
						require.True(t, to(80).All(testenv.TimedOut))
						require.True(t, to(81).All(testenv.TimedOut))
					}
				}
				require.True(t, probe(c.pods[0].Host, vip(family, 1), servicePort, 1).All(testenv.Answered))
				require.True(t, probe(c.pods[0].Host, vip(family, 2), 82, 1).All(testenv.Answered))
			})
		})
	}
}

// TestNodePortAddresses asserts that nodePorts are on the wanted addresses of the node and on no
// others.
func TestNodePortAddresses(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	second := map[model.Family]netip.Addr{model.IPv4: netip.MustParseAddr("192.168.1.2"), model.IPv6: netip.MustParseAddr("2001:db8:1::2")}
	c.a.Serve(testenv.TCP, 30001, 30002)
	c.a.Serve(testenv.UDP, 30001, 30002)
	for _, family := range families {
		c.a.AddAddress(second[family])
		for _, tr := range transports {
			c.set(
				&view.ServicePort{ID: serviceID("web", tr.protocol, family), Frontends: []view.Frontend{nodePort(30001)}, Cluster: c.backends(family, tr.port, 2)},
				&view.ServicePort{ID: serviceID("none", tr.protocol, family), Frontends: []view.Frontend{everyone(nodePort(30002), toReject)}})
		}
	}
	for name, test := range map[string]struct {
		prefixes      string
		first, second bool
	}{
		"all":    {"0.0.0.0/0 ::/0", true, true},
		"first":  {"192.168.0.2/32 2001:db8::/64", true, false},
		"second": {"2001:db8:1::/48 192.168.1.0/24 10.0.0.0/8", false, true},
		"none":   {"", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			c.state.Node.NodePorts = nil
			for _, p := range strings.Fields(test.prefixes) {
				c.state.Node.NodePorts = append(c.state.Node.NodePorts, netip.MustParsePrefix(p))
			}
			c.replace(t)
			c.each(t, func(t *testing.T, family model.Family, _ transport, probe probe) {
				for _, from := range []*testenv.Host{c.client.Host, c.pods[0].Host, c.a.Host} {
					for to, on := range map[netip.Addr]bool{c.a.Addr(family == model.IPv6): test.first, second[family]: test.second, loopback(family): false} {
						if to.IsLoopback() && from != c.a.Host {
							continue
						}
						r := probe(from, to, 30001, 1)
						if on {
							require.Equal(t, map[string]int{"pod2": 1}, r.Backends(), "%s to %v: %v", from.Name, to, r)
							requireRefused(t, probe(from, to, 30002, 1))
						} else {
							require.Equal(t, map[string]int{"a": 1}, r.Backends(), "%s to %v: %v", from.Name, to, r)
							require.True(t, probe(from, to, 30002, 1).All(testenv.Answered))
						}
					}
				}
			})
		})
	}
}

// TestServiceCIDRs asserts that packets to addresses in the ServiceCIDRs that no Service has are
// dropped, wherever they come from. Packets for which another proxy has a Service are not dropped.
func TestServiceCIDRs(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const unused, others = 7, 8 // last bytes of addresses
	for _, family := range families {
		c.set(&view.ServicePort{
			ID: serviceID("web", model.TCP, family), Frontends: []view.Frontend{clusterIP(vip(family, 1))}, Cluster: c.backends(family, tcpPort, 2),
		})
		nft := map[model.Family]string{model.IPv4: "ip", model.IPv6: "ip6"}[family]
		for _, hook := range []string{"prerouting", "output"} {
			c.nft(t, fmt.Sprintf("add table %[1]s other; add chain %[1]s other %[2]s { type nat hook %[2]s priority -100; }; "+
				"add rule %[1]s other %[2]s %[1]s daddr %[3]v dnat to %[4]v", nft, hook, vip(family, others), c.pods[1].Addr(family == model.IPv6)))
		}
	}
	probes := func(t *testing.T, test func(t *testing.T, from *testenv.Host, to func(last byte, port uint16, o testenv.ProbeOptions) testenv.Result)) {
		eachFamily(t, func(t *testing.T, family model.Family) {
			for _, from := range []*testenv.Host{c.pods[0].Host, c.a.Host, c.client.Host} {
				t.Run(from.Name, func(t *testing.T) {
					test(t, from, func(last byte, port uint16, o testenv.ProbeOptions) testenv.Result {
						return from.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, last), port), 1, o)
					})
				})
			}
		})
	}
	c.state.Node.ServiceCIDRs = testenv.ServiceCIDRs()
	c.replace(t)
	probes(t, func(t *testing.T, from *testenv.Host, to func(byte, uint16, testenv.ProbeOptions) testenv.Result) {
		r := to(unused, servicePort, brief)
		require.True(t, r.Count(testenv.TimedOut)+r.Count(testenv.Denied) == 1, "%v", r)
		require.Equal(t, map[string]int{"pod2": 1}, to(1, servicePort, patient).Backends())
		requireRefused(t, to(1, servicePort+1, patient))
		require.Equal(t, map[string]int{"pod1": 1}, to(others, tcpPort, patient).Backends(), "another proxy's")
	})
	require.Contains(t, c.inHost.list(t, model.IPv4), outputFilter)
	c.state.Node.ServiceCIDRs = nil
	c.replace(t)
	require.NotContains(t, c.inHost.list(t, model.IPv4), outputFilter)
}

// TestInvalid asserts that packets which conntrack finds invalid are dropped if they come from a
// backend on this node, unless conntrack is liberal.
func TestInvalid(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for _, family := range families {
		c.set(&view.ServicePort{
			ID: serviceID("web", model.TCP, family), Frontends: []view.Frontend{clusterIP(vip(family, 1))}, Cluster: c.backends(family, tcpPort, 0),
		})
	}
	// The segment is an answer that nobody has asked for.
	segment := make([]byte, 20)
	binary.BigEndian.PutUint16(segment[0:], tcpPort)
	binary.BigEndian.PutUint16(segment[2:], 4321)
	segment[12], segment[13] = 5<<4, 0x12 // the header's length; SYN and ACK
	for _, liberal := range []bool{false, true} {
		_, err := c.a.Run(t.Context(), "sysctl", "-w", fmt.Sprintf("net.netfilter.nf_conntrack_tcp_be_liberal=%d", map[bool]int{true: 1}[liberal]))
		require.NoError(t, err)
		c.replace(t)
		eachFamily(t, func(t *testing.T, family model.Family) {
			network := map[model.Family]string{model.IPv4: "ip4:tcp", model.IPv6: "ip6:tcp"}[family]
			to := &net.IPAddr{IP: c.client.Addr(family == model.IPv6).AsSlice()}
			client := listenRaw(t, c.client.Host, network)
			for _, pod := range c.pods[:2] { // a backend and another pod
				_, err := listenRaw(t, pod.Host, network).WriteTo(segment, to)
				require.NoError(t, err)
			}
			_, from, err := client.ReadFrom(make([]byte, 100))
			require.NoError(t, err)
			require.Equal(t, c.pods[map[bool]int{false: 1, true: 0}[liberal]].Addr(family == model.IPv6).String(), from.String(), "the first to arrive")
		})
	}
}

// listenRaw opens a raw socket on a host until the test ends.
func listenRaw(t *testing.T, h *testenv.Host, network string) (conn net.PacketConn) {
	t.Helper()
	require.NoError(t, h.Do(func() (err error) {
		conn, err = net.ListenPacket(network, "")
		return err
	}))
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(patient.Timeout)))
	return conn
}

// TestLocalhostNodePorts asserts that nodePorts are on IPv4 loopback addresses if requested, for
// the node itself only. The node's neighbors do not reach what listens there.
func TestLocalhostNodePorts(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for _, tr := range transports {
		for _, family := range families {
			c.set(
				&view.ServicePort{ID: serviceID("web", tr.protocol, family), Frontends: []view.Frontend{nodePort(30001)}, Cluster: c.backends(family, tr.port, 0, 2)},
				&view.ServicePort{ID: serviceID("none", tr.protocol, family), Frontends: []view.Frontend{everyone(nodePort(30003), toReject)}})
		}
		c.a.Serve(tr.probe, 30001, 30004)
	}
	routeLocalnet := func() (is string) {
		require.NoError(t, c.a.Do(func() error {
			b, err := os.ReadFile("/proc/sys/" + programmer.RouteLocalnet)
			is = strings.TrimSpace(string(b))
			return err
		}))
		return is
	}
	to := func(port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 2}), port)
	}

	c.replace(t)
	require.Equal(t, "0", routeLocalnet(), "nobody asked for it")
	c.state.Node.LocalhostNodePorts = true
	c.replace(t)
	require.Equal(t, "1", routeLocalnet())
	for _, tr := range transports {
		node := func(port uint16) testenv.Result { return c.a.Probe(t.Context(), tr.probe, to(port), 30, patient) }
		require.Len(t, node(30001).Backends(), 2, "or else a chance of 2^-29")
		requireRefused(t, node(30003))
		require.Equal(t, map[string]int{"a": 30}, node(30004).Backends())
		r := c.a.Probe(t.Context(), tr.probe, netip.AddrPortFrom(netip.IPv6Loopback(), 30001), 1, patient)
		require.Equal(t, map[string]int{"a": 1}, r.Backends(), "not for IPv6: %v", r)
	}

	// Node b sends packets to a loopback address by way of node a.
	for _, command := range []string{
		"sysctl -qw net.ipv4.conf.all.route_localnet=1", "ip rule add pref 2 lookup local", "ip rule del pref 0",
		"ip rule add pref 1 to 127.0.0.2 lookup 99", "ip route add 127.0.0.2 via 192.168.0.2 table 99",
	} {
		words := strings.Fields(command)
		_, err := c.b.Run(t.Context(), words[0], words[1:]...)
		require.NoError(t, err, command)
	}
	neighbor := func(port uint16) testenv.Result { return c.b.Probe(t.Context(), testenv.UDP, to(port), 1, brief) }
	require.True(t, neighbor(30001).All(testenv.TimedOut))
	require.True(t, neighbor(30004).All(testenv.TimedOut))
	_, err := c.a.Run(t.Context(), "nft", "flush", "chain", "ip", Table, guardChain)
	require.NoError(t, err)
	require.Equal(t, map[string]int{"a": 1}, neighbor(30004).Backends(), "without the guard it would be reached")
	c.replace(t)
	require.True(t, neighbor(30004).All(testenv.TimedOut))

	// The kernel still routes packets of loopback addresses, because others may rely on it. So the
	// guard stays, whatever others do and however often the agent starts.
	c.state.Node.LocalhostNodePorts = false
	guarded := func(what string) {
		t.Helper()
		require.Equal(t, "1", routeLocalnet(), what)
		require.True(t, neighbor(30004).All(testenv.TimedOut), what)
	}
	run := func(command string) {
		t.Helper()
		words := strings.Fields(command)
		_, err := c.a.Run(t.Context(), words[0], words[1:]...)
		require.NoError(t, err, command)
	}
	c.replace(t)
	guarded("switched off")
	run("nft delete table ip " + Table)
	c.replace(t)
	guarded("removed by others")
	c.inHost = newInHost(t, c.a.Host, Options{})
	c.replace(t)
	guarded("after a restart")
	run("sysctl -qw net.ipv4.conf.all.route_localnet=0")
	c.replace(t)
	require.NotContains(t, c.inHost.list(t, model.IPv4), guardChain)

	// Whoever removes the last guard resets the sysctl, unless another one guards the addresses.
	c.state.Node.LocalhostNodePorts = true
	for _, other := range []string{"iptables-nft", "iptables-legacy", ""} {
		c.replace(t)
		if other != "" {
			run(other + " -N SLICECAST-LOCALNET")
		}
		require.NoError(t, c.a.Do(func() error { return Cleanup(t.Context()) }))
		_, err := c.a.Run(t.Context(), "nft", "list", "table", "ip", Table)
		require.Error(t, err, "it is gone")
		if other != "" {
			require.Equal(t, "1", routeLocalnet())
			run(other + " -X SLICECAST-LOCALNET")
		}
	}
	require.Equal(t, "0", routeLocalnet())
	require.True(t, neighbor(30004).All(testenv.TimedOut))

	// If that is not possible, the guard stays.
	c.replace(t)
	require.NoError(t, c.a.Do(func() error {
		sysctl := "/proc/sys/" + programmer.RouteLocalnet
		if err := unix.Mount(sysctl, sysctl, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		defer func() { require.NoError(t, unix.Unmount(sysctl, unix.MNT_DETACH)) }()
		if err := unix.Mount("", sysctl, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return err
		}
		return Cleanup(t.Context())
	}))
	guarded("without the right to set sysctls")
	require.NotContains(t, c.inHost.list(t, model.IPv4), servicesChain)
	run("sysctl -qw net.ipv4.conf.all.route_localnet=0")
	require.NoError(t, c.a.Do(func() error { return Cleanup(t.Context()) }))
}

// TestPodsByInterface asserts that pods can be recognized by the interface on which their packets
// arrive.
func TestPodsByInterface(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for _, family := range families {
		c.set(&view.ServicePort{
			ID:        serviceID("web", model.TCP, family),
			Frontends: []view.Frontend{routed(clusterIP(vip(family, 1)), toCluster, toReject, toReject)}, Cluster: c.backends(family, tcpPort, 2),
		})
	}
	for _, test := range []struct {
		detector view.PodDetector
		pods     []bool // whether each of the node's pods is recognized
	}{
		{view.PodDetector{Interface: "pod1"}, []bool{true, false}},
		{view.PodDetector{InterfacePrefix: "pod"}, []bool{true, true}},
		{view.PodDetector{InterfacePrefix: "po2"}, []bool{false, false}},
	} {
		c.state.Node.Pods = test.detector
		c.replace(t)
		eachFamily(t, func(t *testing.T, family model.Family) {
			for _, host := range []*testenv.Host{c.a.Host, c.client.Host} {
				requireRefused(t, host.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, 1), servicePort), 1, patient))
			}
			for i, is := range test.pods {
				r := c.pods[i].Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(vip(family, 1), servicePort), 1, patient)
				require.Equal(t, is, r.All(testenv.Answered), "%v: %v", test.detector, r)
			}
		})
	}
}

// sctpInit returns the packet that begins an SCTP association (RFC 9260, 3.3.2).
func sctpInit(destination uint16) []byte {
	packet := make([]byte, 12+20)
	binary.BigEndian.PutUint16(packet[0:], 4321)
	binary.BigEndian.PutUint16(packet[2:], destination)
	packet[12] = 1                                       // INIT
	binary.BigEndian.PutUint16(packet[14:], 20)          // length
	binary.BigEndian.PutUint32(packet[16:], 0xfeed)      // tag
	binary.BigEndian.PutUint32(packet[20:], 1<<16)       // window
	binary.BigEndian.PutUint32(packet[24:], 10<<16|2048) // streams
	binary.BigEndian.PutUint32(packet[28:], 1)           // sequence number
	binary.LittleEndian.PutUint32(packet[8:], crc32.Checksum(packet, crc32.MakeTable(crc32.Castagnoli)))
	return packet
}

// TestSCTP asserts that SCTP packets are led to their Service, and TCP with the same address and
// ports to another one. The kernel need not support SCTP, because the test uses raw sockets.
func TestSCTP(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	eachFamily(t, func(t *testing.T, family model.Family) {
		c.set(
			&view.ServicePort{ID: serviceID("web", model.SCTP, family), Frontends: []view.Frontend{clusterIP(vip(family, 1)), nodePort(30001)}, Cluster: c.backends(family, 7777, 2)},
			&view.ServicePort{ID: serviceID("tcp", model.TCP, family), Frontends: []view.Frontend{everyone(clusterIP(vip(family, 1)), toReject)}})
		c.replace(t)
		network := map[model.Family]string{model.IPv4: "ip4:132", model.IPv6: "ip6:132"}[family]
		server, client := listenRaw(t, c.pods[2].Host, network), listenRaw(t, c.pods[0].Host, network)
		for to, port := range map[netip.Addr]uint16{vip(family, 1): servicePort, c.a.Addr(family == model.IPv6): 30001} {
			_, err := client.WriteTo(sctpInit(port), &net.IPAddr{IP: to.AsSlice()})
			require.NoError(t, err)
			packet := make([]byte, 100)
			_, _, err = server.ReadFrom(packet)
			require.NoError(t, err)
			require.EqualValues(t, 7777, binary.BigEndian.Uint16(packet[2:]))
		}
	})
}
