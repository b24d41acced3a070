// These tests prove on which addresses of a node nodePorts and health checks are reached, loopback
// included, with real packets through both variants of iptables.
package iptables

import (
	"bytes"
	"fmt"
	"log/slog"
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

// TestNodePortAddresses asserts that nodePorts, including rejected ones, are on the wanted
// addresses of the node and on no others.
func TestNodePortAddresses(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		second := map[model.Family]netip.Addr{
			model.IPv4: netip.MustParseAddr("192.168.1.2"), model.IPv6: netip.MustParseAddr("2001:db8:1::2"),
		}
		c.a.Serve(testenv.TCP, 30001, 30002)
		c.a.Serve(testenv.UDP, 30001, 30002)
		for _, family := range families {
			c.a.AddAddress(second[family])
			for _, tr := range transports {
				web := &view.ServicePort{
					ID: serviceID("web", tr.protocol, family), Frontends: []view.Frontend{nodePort(30001)}, Cluster: c.backends(family, tr.port, 2),
				}
				c.set(web, &view.ServicePort{ID: serviceID("none", tr.protocol, family), Frontends: []view.Frontend{rejected(nodePort(30002))}})
			}
		}
		for name, test := range map[string]struct {
			prefixes      []netip.Prefix
			first, second bool
		}{
			"all":    {everywhere, true, true},
			"first":  {[]netip.Prefix{netip.MustParsePrefix("192.168.0.2/32"), netip.MustParsePrefix("2001:db8::/64")}, true, false},
			"second": {[]netip.Prefix{netip.MustParsePrefix("2001:db8:1::/48"), netip.MustParsePrefix("192.168.1.0/24"), netip.MustParsePrefix("10.0.0.0/8")}, false, true},
			"none":   {nil, false, false},
		} {
			t.Run(name, func(t *testing.T) {
				c.state.Node.NodePorts = test.prefixes
				require.NoError(t, c.inHost.Replace(t.Context(), c.state))
				c.requireFresh(t)
				c.each(t, func(t *testing.T, family model.Family, _ transport, probe func(*testenv.Host, netip.Addr, uint16, int) testenv.Result) {
					for _, from := range []*testenv.Host{c.client.Host, c.pods[0].Host, c.a.Host} {
						for to, on := range map[netip.Addr]bool{
							c.a.Addr(family == model.IPv6): test.first, second[family]: test.second, loopback(family): false,
						} {
							if to.IsLoopback() && from != c.a.Host {
								continue
							}
							r := probe(from, to, 30001, 1)
							if on {
								require.Equal(t, map[string]int{"pod2": 1}, r.Backends(), "%s to %v: %v", from.Name, to, r)
							} else {
								require.Equal(t, map[string]int{"a": 1}, r.Backends(), "%s to %v: %v", from.Name, to, r)
							}
							r = probe(from, to, 30002, 1)
							require.Equal(t, on, r.All(testenv.Refused), "%s to %v: %v", from.Name, to, r)
						}
					}
				})
			})
		}
	})
}

// TestHealthCheckPort asserts that healthCheckNodePorts are accepted on the addresses that have
// nodePorts, whatever the policy.
func TestHealthCheckPort(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.state.Node.NodePorts = []netip.Prefix{netip.MustParsePrefix("192.168.0.2/32")}
		second := netip.MustParseAddr("192.168.1.2")
		c.a.AddAddress(second)
		c.a.Serve(testenv.TCP, 32000, 32001)
		for _, rule := range []string{"-P INPUT DROP", "-A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT"} {
			_, err := c.a.Run(t.Context(), programName(model.IPv4, variant), strings.Fields(rule)...)
			require.NoError(t, err)
		}
		probe := func(to netip.Addr, port uint16) testenv.Result {
			return c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(to, port), 1, testenv.ProbeOptions{Timeout: time.Second})
		}
		node := c.a.Addr(false)
		before := c.web("web", model.IPv4, 1, 0)
		after := *before
		after.HealthCheckPort = 32000
		c.set(before)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		require.True(t, probe(node, 32000).All(testenv.TimedOut))
		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: before, After: &after}}))
		r := c.client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(node, 32000), 1, patient)
		require.True(t, r.All(testenv.Answered), "%v", r)
		require.True(t, probe(node, 32001).All(testenv.TimedOut))
		require.True(t, probe(second, 32000).All(testenv.TimedOut))
		c.set(&after)
		c.requireFresh(t)
		require.NoError(t, c.inHost.Apply(t.Context(), []view.Change{{Before: &after, After: before}}))
		require.True(t, probe(node, 32000).All(testenv.TimedOut))
	})
}

// readOnlySysctl calls f while nobody in the calling thread's network namespace can set the sysctl.
func readOnlySysctl(t *testing.T, f func() error) error {
	t.Helper()
	sysctl := "/proc/sys/" + programmer.RouteLocalnet
	if err := unix.Mount(sysctl, sysctl, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	// A process that another test forks at the same time may have the file open until it executes its
	// program.
	defer func() { require.NoError(t, unix.Unmount(sysctl, unix.MNT_DETACH)) }()
	if err := unix.Mount("", sysctl, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("read only: %w", err)
	}
	require.Error(t, os.WriteFile(sysctl, []byte("1"), 0o644))
	return f()
}

// setRouteLocalnet sets the sysctl on a node, as others do.
func setRouteLocalnet(t *testing.T, node *testenv.Node, value string) {
	t.Helper()
	_, err := node.Run(t.Context(), "sysctl", "-qw", "net.ipv4.conf.all.route_localnet="+value)
	require.NoError(t, err)
}

// TestRouteLocalnet asserts that RouteLocalnet enables routing of loopback addresses with the guard
// in place, and that a later Replace has nothing left to do for it that needs more than reading.
func TestRouteLocalnet(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		c.set(c.web("web", model.IPv4, 1, 0))
		guard := func() string {
			var lines []string
			for line := range strings.Lines(c.inHost.rules(t, model.IPv4, variant)) {
				if strings.Contains(line, ChainPrefix) && strings.Contains(line, localnetChain) {
					lines = append(lines, line)
				}
			}
			return strings.Join(lines, "")
		}
		const want = "filter -A INPUT -d 127.0.0.0/8 ! -i lo -j SLICECAST-LOCALNET\nfilter :SLICECAST-LOCALNET -\n" +
			"filter -A SLICECAST-LOCALNET -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP\n"
		for range 2 {
			require.NoError(t, c.a.Do(func() error { return RouteLocalnet(t.Context(), Options{Variant: variant}) }))
			require.Equal(t, want, guard())
			require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), ServicesChain)
		}
		var log bytes.Buffer
		p := newInHost(t, c.a.Host, Options{Variant: variant, Log: slog.New(slog.NewTextHandler(&log, nil))})
		c.state.Node.LocalhostNodePorts = true
		require.NoError(t, c.a.Do(func() error {
			return readOnlySysctl(t, func() error { return p.Programmer.Replace(t.Context(), c.state) })
		}))
		require.Empty(t, log.String())
		require.Equal(t, want, guard())
		c.requireFresh(t)
	})
}

// TestLocalhostNodePorts asserts that nodePorts are on IPv4 loopback addresses if requested, for
// the node itself only. The node's neighbors do not reach what listens there.
func TestLocalhostNodePorts(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for _, tr := range transports {
			for _, family := range families {
				c.set(
					&view.ServicePort{ID: serviceID("web", tr.protocol, family), Frontends: []view.Frontend{nodePort(30001)}, Cluster: c.backends(family, tr.port, 0, 2)},
					&view.ServicePort{
						ID: serviceID("local", tr.protocol, family), Frontends: []view.Frontend{localPolicy(nodePort(30002))},
						Cluster: c.backends(family, tr.port, 2), Local: c.backends(family, tr.port, 0),
					},
					&view.ServicePort{ID: serviceID("none", tr.protocol, family), Frontends: []view.Frontend{rejected(nodePort(30003))}})
			}
			c.a.Serve(tr.probe, 30001, 30004)
		}
		routeLocalnet := func() string {
			t.Helper()
			var is []byte
			require.NoError(t, c.a.Do(func() (err error) {
				is, err = os.ReadFile("/proc/sys/" + programmer.RouteLocalnet)
				return err
			}))
			return strings.TrimSpace(string(is))
		}
		to := func(port uint16) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 2}), port)
		}
		node := func(tr transport, port uint16) testenv.Result {
			return c.a.Probe(t.Context(), tr.probe, to(port), 30, patient)
		}

		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		require.Equal(t, "0", routeLocalnet(), "nobody asked for it")
		c.state.Node.LocalhostNodePorts = true
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		require.Equal(t, "1", routeLocalnet())
		c.requireFresh(t)
		for _, tr := range transports {
			require.Len(t, node(tr, 30001).Backends(), 2, "or else a chance of 2^-29")
			require.Equal(t, map[string]int{"pod2": 30}, node(tr, 30002).Backends())
			require.True(t, node(tr, 30003).All(testenv.Refused))
			require.Equal(t, map[string]int{"a": 30}, node(tr, 30004).Backends())
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
		neighbor := func(port uint16) testenv.Result {
			return c.b.Probe(t.Context(), testenv.UDP, to(port), 1, testenv.ProbeOptions{Timeout: 300 * time.Millisecond})
		}
		require.True(t, neighbor(30001).All(testenv.TimedOut))
		require.True(t, neighbor(30004).All(testenv.TimedOut))
		_, err := c.a.Run(t.Context(), programName(model.IPv4, variant), "-F", localnetChain)
		require.NoError(t, err)
		require.Equal(t, map[string]int{"a": 1}, neighbor(30004).Backends(), "without the guard it would be reached")
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		require.True(t, neighbor(30004).All(testenv.TimedOut))

		// The kernel still routes packets of loopback addresses, because others may rely on it. So the
		// guard stays, whatever others do and however often the agent starts.
		c.state.Node.LocalhostNodePorts = false
		guarded := func(what string) {
			t.Helper()
			require.Equal(t, "1", routeLocalnet(), what)
			require.True(t, neighbor(30004).All(testenv.TimedOut), what)
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		guarded("switched off")
		require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), "-o lo")
		_, err = c.a.Run(t.Context(), programName(model.IPv4, variant), "-D", "INPUT", "-d", "127.0.0.0/8", "!", "-i", "lo", "-j", localnetChain)
		require.NoError(t, err)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		guarded("removed by others")
		c.requireFresh(t)
		guarded("after a restart")
		setRouteLocalnet(t, c.a, "0")
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), localnetChain)
		c.requireFresh(t)

		// Whoever removes the last guard resets the sysctl, and keeps the guard if that is not possible.
		c.state.Node.LocalhostNodePorts = true
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		require.NoError(t, c.a.Do(func() error { return readOnlySysctl(t, func() error { return Cleanup(t.Context()) }) }))
		guarded("without the right to set sysctls")
		require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), ServicesChain)
		require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), inputChain)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		_, err = c.a.Run(t.Context(), "iptables-nft", "-N", "KUBE-FIREWALL")
		require.NoError(t, err)
		require.NoError(t, c.inHost.Cleanup(t.Context()))
		require.Equal(t, "1", routeLocalnet(), "kube-proxy needs it, and guards by itself")
		require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), localnetChain)
		_, err = c.a.Run(t.Context(), "iptables-nft", "-X", "KUBE-FIREWALL")
		require.NoError(t, err)
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		require.NoError(t, c.inHost.Cleanup(t.Context()))
		require.Equal(t, "0", routeLocalnet())
		require.NotContains(t, c.inHost.rules(t, model.IPv4, variant), localnetChain)
		require.True(t, neighbor(30004).All(testenv.TimedOut))
	})
}
