// These tests prove that a probe sees what the kernel does to connections: translation,
// masquerading, refusal, silence, and connections that outlive their rule. The rules are written
// with both variants of iptables.
package testenv_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

// iptables runs an iptables command on a node.
type iptables func(args ...string)

// eachIptables runs a test with both variants of iptables, for each protocol and family. vip is a
// virtual IP of the family.
func eachIptables(t *testing.T, f func(t *testing.T, network *testenv.Network, node *testenv.Node, run iptables, proto testenv.Proto, vip netip.AddrPort)) {
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			eachProto(t, func(t *testing.T, proto testenv.Proto, ipv6 bool) {
				t.Parallel()
				command, vip := "iptables-"+variant, netip.MustParseAddrPort("10.96.0.10:80")
				if ipv6 {
					command, vip = "ip6tables-"+variant, netip.MustParseAddrPort("[fd00:10:96::10]:80")
				}
				network := testenv.NewNetwork(t)
				node := network.AddNode("node")
				run := func(args ...string) {
					t.Helper()
					_, err := node.Run(t.Context(), command, append([]string{"-w", "10"}, args...)...)
					require.NoError(t, err)
				}
				f(t, network, node, run, proto, vip)
			})
		})
	}
}

func TestProbeSeesTranslation(t *testing.T) {
	eachIptables(t, func(t *testing.T, network *testenv.Network, node *testenv.Node, run iptables, proto testenv.Proto, vip netip.AddrPort) {
		ipv6 := vip.Addr().Is6()
		other := network.AddNode("other")
		local, backend, client := node.AddPod("local"), other.AddPod("backend"), network.AddClient("client")
		client.RouteVia(node, testenv.ServiceCIDRs()...)
		backend.Serve(proto, 8080)
		local.Serve(proto, 8080)
		dst := netip.AddrPortFrom(backend.Addr(ipv6), 8080)
		probe := func(from *testenv.Host) testenv.Result {
			return from.Probe(t.Context(), proto, vip, 5, testenv.ProbeOptions{Timeout: 5 * time.Second})
		}
		for _, from := range []*testenv.Host{node.Host, local.Host, client.Host} {
			result := probe(from)
			require.True(t, result.All(testenv.Unreachable), "no node translates, from %s: %v", from.Name, result)
		}

		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			run("-t", "nat", "-A", chain, "-d", vip.Addr().String(), "-p", string(proto), "--dport", "80",
				"-j", "DNAT", "--to-destination", dst.String())
		}
		for _, from := range []*testenv.Host{node.Host, local.Host} {
			result := probe(from)
			require.Equal(t, map[netip.AddrPort]int{dst: 5}, result.Servers(), "%s: %v", from.Name, result)
			require.Equal(t, []netip.Addr{from.Addr(ipv6)}, result.Clients("backend"), "%s: %v", from.Name, result)
		}
		// The reply goes to the client directly, bypassing the node that would translate it back.
		result := client.Probe(t.Context(), proto, vip, 1, testenv.ProbeOptions{Timeout: 100 * time.Millisecond})
		require.True(t, result.All(testenv.TimedOut), result)

		run("-t", "nat", "-A", "POSTROUTING", "-d", dst.Addr().String(), "-j", "MASQUERADE")
		for _, from := range []*testenv.Host{local.Host, client.Host} {
			result := probe(from)
			require.Equal(t, map[string]int{"backend": 5}, result.Backends(), "%s: %v", from.Name, result)
			require.Equal(t, []netip.Addr{node.Addr(ipv6)}, result.Clients("backend"), "%s: %v", from.Name, result)
		}
	})
}

func TestHairpinNeedsMasquerade(t *testing.T) {
	eachIptables(t, func(t *testing.T, _ *testenv.Network, node *testenv.Node, run iptables, proto testenv.Proto, vip netip.AddrPort) {
		pod := node.AddPod("pod")
		pod.Serve(proto, 8080)
		addr := pod.Addr(vip.Addr().Is6())
		run("-t", "nat", "-A", "PREROUTING", "-d", vip.Addr().String(), "-p", string(proto), "--dport", "80",
			"-j", "DNAT", "--to-destination", netip.AddrPortFrom(addr, 8080).String())
		result := pod.Probe(t.Context(), proto, vip, 2, testenv.ProbeOptions{Timeout: 100 * time.Millisecond})
		require.True(t, result.All(testenv.TimedOut), result)

		run("-t", "nat", "-A", "POSTROUTING", "-s", addr.String(), "-d", addr.String(), "-j", "MASQUERADE")
		result = pod.Probe(t.Context(), proto, vip, 5, testenv.ProbeOptions{Timeout: 5 * time.Second})
		require.Equal(t, map[string]int{"pod": 5}, result.Backends(), result)
		require.Equal(t, []netip.Addr{node.Addr(vip.Addr().Is6())}, result.Clients("pod"), result)
	})
}

func TestProbeDistinguishesRefusalFromSilence(t *testing.T) {
	eachIptables(t, func(t *testing.T, network *testenv.Network, node *testenv.Node, run iptables, proto testenv.Proto, vip netip.AddrPort) {
		pod, client := node.AddPod("pod"), network.AddClient("client")
		client.RouteVia(node, testenv.ServiceCIDRs()...)
		probe := func(from *testenv.Host, port uint16, n int, timeout time.Duration) testenv.Result {
			return from.Probe(t.Context(), proto, netip.AddrPortFrom(vip.Addr(), port), n, testenv.ProbeOptions{Timeout: timeout})
		}
		for _, chain := range []string{"FORWARD", "OUTPUT"} {
			run("-A", chain, "-d", vip.Addr().String(), "-p", string(proto), "--dport", "80", "-j", "REJECT")
			run("-A", chain, "-d", vip.Addr().String(), "-p", string(proto), "--dport", "81", "-j", "DROP")
		}
		for _, from := range []*testenv.Host{pod.Host, client.Host, node.Host} {
			// More probes than the kernel answers with its default rate limit.
			result := probe(from, 80, 50, 5*time.Second)
			require.True(t, result.All(testenv.Refused), "%s: %v", from.Name, result)
		}
		for _, from := range []*testenv.Host{pod.Host, client.Host} {
			result := probe(from, 81, 2, 100*time.Millisecond)
			require.True(t, result.All(testenv.TimedOut), "%s: %v", from.Name, result)
		}
		want := testenv.TimedOut // connect does not report that its SYN was dropped
		if proto == testenv.UDP {
			want = testenv.Denied
		}
		result := probe(node.Host, 81, 2, 100*time.Millisecond)
		require.True(t, result.All(want), result)

		closed := client.Probe(t.Context(), proto, netip.AddrPortFrom(pod.Addr(vip.Addr().Is6()), 9), 3, testenv.ProbeOptions{})
		require.True(t, closed.All(testenv.Refused), closed)
	})
}

func TestOpenConnectionOutlivesItsRule(t *testing.T) {
	eachIptables(t, func(t *testing.T, network *testenv.Network, node *testenv.Node, run iptables, proto testenv.Proto, vip netip.AddrPort) {
		pod, client := node.AddPod("pod"), network.AddClient("client")
		client.RouteVia(node, testenv.ServiceCIDRs()...)
		server := pod.Serve(proto, 8080)
		// The kernel tracks connections, and keeps translating tracked ones, only while some rule
		// needs conntrack.
		run("-A", "FORWARD", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP")
		run("-t", "nat", "-A", "PREROUTING", "-d", vip.Addr().String(), "-p", string(proto), "--dport", "80",
			"-j", "DNAT", "--to-destination", netip.AddrPortFrom(pod.Addr(vip.Addr().Is6()), 8080).String())
		source := netip.AddrPortFrom(client.Addr(vip.Addr().Is6()), 33333)
		conn, err := client.Dial(t.Context(), proto, vip, testenv.ProbeOptions{Source: source})
		require.NoError(t, err)
		defer conn.Close()
		require.Equal(t, source, conn.LocalAddr())
		for _, text := range []string{"first", "second"} {
			reply, err := conn.Echo(t.Context(), text)
			require.NoError(t, err)
			require.Equal(t, text, reply.Echo)
			require.Equal(t, source, reply.Client)
			run("-t", "nat", "-F")
		}
		result := client.Probe(t.Context(), proto, vip, 1, testenv.ProbeOptions{})
		require.True(t, result.All(testenv.Unreachable), result)

		server.Close()
		server.Close()
		_, err = conn.Echo(t.Context(), "third")
		require.Error(t, err)
	})
}

func TestWaitForReportsWhatIsMissing(t *testing.T) {
	tries := 0
	testenv.Eventually(t, time.Minute, func() error {
		if tries++; tries < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	require.Equal(t, 3, tries)

	ctx, cancel := context.WithCancel(t.Context())
	missing := errors.New("a backend")
	err := testenv.WaitFor(ctx, func() error {
		cancel()
		return missing
	})
	require.ErrorIs(t, err, missing)
	require.ErrorIs(t, err, context.Canceled)
}

// TestDatagramsComeFromNewPorts requires a new source port for each socket, so that the conntrack
// entry of an earlier socket does not apply to a later one.
func TestDatagramsComeFromNewPorts(t *testing.T) {
	network := testenv.NewNetwork(t)
	client := network.AddClient("client")
	seen := make(map[netip.AddrPort]bool)
	for range 1000 {
		conn, err := client.Dial(t.Context(), testenv.UDP, netip.AddrPortFrom(client.Addr(false), 53), testenv.ProbeOptions{})
		require.NoError(t, err)
		require.False(t, seen[conn.LocalAddr()], "%v", conn.LocalAddr())
		seen[conn.LocalAddr()] = true
		conn.Close()
	}
}

// TestDialUnused requires connections from ports that conntrack does not know yet. It also requires
// that one from a port that conntrack knows fails, which is why DialUnused exists.
func TestDialUnused(t *testing.T) {
	eachIptables(t, func(t *testing.T, network *testenv.Network, node *testenv.Node, run iptables, proto testenv.Proto, vip netip.AddrPort) {
		client, backend := node.AddPod("client"), node.AddPod("backend")
		backend.Serve(proto, 8080)
		// With this rule, the node tracks connections.
		run("-A", "FORWARD", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP")
		from := netip.AddrPortFrom(client.Addr(vip.Addr().Is6()), 11999)
		answers := func() map[netip.AddrPort]int {
			return client.Probe(t.Context(), proto, vip, 1, testenv.ProbeOptions{Source: from}).Servers()
		}
		require.Empty(t, answers())

		run("-t", "nat", "-A", "PREROUTING", "-d", vip.Addr().String(), "-p", string(proto), "--dport", "80",
			"-j", "DNAT", "--to-destination", netip.AddrPortFrom(backend.Addr(vip.Addr().Is6()), 8080).String())
		require.Empty(t, answers(), "conntrack remembers that nothing translated it")
		seen := map[string]bool{from.String(): true}
		for range 10 {
			conn, err := client.DialUnused(t.Context(), string(proto), vip)
			require.NoError(t, err)
			require.False(t, seen[conn.LocalAddr().String()], conn.LocalAddr())
			seen[conn.LocalAddr().String()] = true
			require.NoError(t, conn.Close())
		}
	})
}
