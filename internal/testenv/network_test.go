// These tests prove that the hosts of a network reach each other with their own addresses, in all
// protocols and families, and that networks neither meet nor leave anything behind.
package testenv_test

import (
	"bufio"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

// eachFamily runs a test for IPv4 and IPv6.
func eachFamily(t *testing.T, f func(t *testing.T, ipv6 bool)) {
	for _, ipv6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("ipv6=%v", ipv6), func(t *testing.T) { f(t, ipv6) })
	}
}

// eachProto runs a test for TCP and UDP over IPv4 and IPv6.
func eachProto(t *testing.T, f func(t *testing.T, proto testenv.Proto, ipv6 bool)) {
	for _, proto := range []testenv.Proto{testenv.TCP, testenv.UDP} {
		t.Run(string(proto), func(t *testing.T) {
			eachFamily(t, func(t *testing.T, ipv6 bool) { f(t, proto, ipv6) })
		})
	}
}

// TestRouteAcross requires that connections of a client to one address are spread over nodes, that
// the nodes can be replaced, and that without any the client has the network's route again.
func TestRouteAcross(t *testing.T) {
	network := testenv.NewNetwork(t)
	a, b := network.AddNode("a"), network.AddNode("b")
	client := network.AddClient("client")
	eachFamily(t, func(t *testing.T, ipv6 bool) {
		addr := netip.MustParseAddr("198.18.0.1")
		if ipv6 {
			addr = netip.MustParseAddr("2001:db8:1b::1")
		}
		a.AddAddress(addr)
		b.AddAddress(addr) // has the network's route, because it is the last one
		for _, node := range []*testenv.Node{a, b} {
			server := node.Serve(testenv.TCP, 8080)
			defer server.Close()
		}
		for _, c := range []struct {
			nodes   []*testenv.Node
			reached []string
		}{
			{[]*testenv.Node{a, b}, []string{"a", "b"}},
			{[]*testenv.Node{a}, []string{"a"}},
			{nil, []string{"b"}},
			{[]*testenv.Node{a}, []string{"a"}},
			{[]*testenv.Node{b, a}, []string{"a", "b"}},
		} {
			require.NoError(t, client.RouteAcross(c.nodes, netip.PrefixFrom(addr, addr.BitLen())))
			result := client.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(addr, 8080), 40, testenv.ProbeOptions{})
			require.Equal(t, c.reached, slices.Sorted(maps.Keys(result.Backends())), result)
		}
	})
}

func TestEveryHostReachesEveryOtherWithItsOwnAddress(t *testing.T) {
	network := testenv.NewNetwork(t)
	a, b := network.AddNode("a"), network.AddNode("b")
	a1, a2, b1 := a.AddPod("a1"), a.AddPod("a2"), b.AddPod("b1")
	client := network.AddClient("client")
	hosts := []*testenv.Host{a.Host, b.Host, a1.Host, a2.Host, b1.Host, client.Host, network.World}
	for _, to := range hosts {
		to.Serve(testenv.TCP, 8080)
		to.Serve(testenv.UDP, 8080)
	}
	eachProto(t, func(t *testing.T, proto testenv.Proto, ipv6 bool) {
		for _, from := range hosts {
			for _, to := range hosts {
				dst := netip.AddrPortFrom(to.Addr(ipv6), 8080)
				result := from.Probe(t.Context(), proto, dst, 2, testenv.ProbeOptions{})
				require.Equal(t, map[string]int{to.Name: 2}, result.Backends(), "%s to %s: %v", from.Name, to.Name, result)
				require.Equal(t, map[netip.AddrPort]int{dst: 2}, result.Servers(), "%s to %s", from.Name, to.Name)
				require.Equal(t, []netip.Addr{from.Addr(ipv6)}, result.Clients(to.Name), "%s to %s", from.Name, to.Name)
			}
		}
	})
}

// TestNodesComeAndGo adds and deletes nodes, with links of random hardware addresses, while traffic
// through the router continues.
func TestNodesComeAndGo(t *testing.T) {
	network := testenv.NewNetwork(t)
	network.World.Serve(testenv.TCP, 8080)
	for i := range 8 {
		node := network.AddNode(fmt.Sprint("node-", i))
		pod := node.AddPod(fmt.Sprint("pod-", i))
		eachFamily(t, func(t *testing.T, ipv6 bool) {
			result := pod.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(network.World.Addr(ipv6), 8080), 2, testenv.ProbeOptions{})
			require.True(t, result.All(testenv.Answered), result)
		})
		node.Delete()
	}
}

func TestParallelNetworksDoNotMeet(t *testing.T) {
	for i := range 3 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			network := testenv.NewNetwork(t)
			node := network.AddNode("node")
			name := fmt.Sprintf("pod-%d", i)
			pod := node.AddPod(name)
			pod.Serve(testenv.TCP, 8080)
			require.Equal(t, netip.MustParseAddr("10.180.0.1"), pod.IPv4)

			listener, err := net.Listen("tcp", ":0")
			require.NoError(t, err)
			defer listener.Close()
			port := listener.Addr().(*net.TCPAddr).AddrPort().Port()

			eachFamily(t, func(t *testing.T, ipv6 bool) {
				for _, from := range []*testenv.Host{node.Host, network.World} {
					result := from.Probe(t.Context(), testenv.TCP, netip.AddrPortFrom(pod.Addr(ipv6), 8080), 20, testenv.ProbeOptions{})
					require.Equal(t, map[string]int{name: 20}, result.Backends(), result)
				}
				conn, err := pod.DialContext(t.Context(), "tcp", netip.AddrPortFrom(network.World.Addr(ipv6), port).String())
				require.NoError(t, err, "a pod cannot reach a server in the process")
				require.NoError(t, conn.Close())
			})
		})
	}
}

func TestDeletedPodIsGoneAndItsAddressIsFree(t *testing.T) {
	network := testenv.NewNetwork(t)
	node := network.AddNode("node")
	client := network.AddClient("client")
	first := node.AddPod("first")
	first.Serve(testenv.TCP, 8080)
	dst := netip.AddrPortFrom(first.IPv4, 8080)
	probe := func() testenv.Result {
		return client.Probe(t.Context(), testenv.TCP, dst, 2, testenv.ProbeOptions{Timeout: 100 * time.Millisecond})
	}
	require.Equal(t, map[string]int{"first": 2}, probe().Backends())

	conn, err := client.Dial(t.Context(), testenv.TCP, dst, testenv.ProbeOptions{})
	require.NoError(t, err)
	defer conn.Close()
	first.Delete()
	first.Delete()
	require.Empty(t, probe().Backends())
	require.Error(t, first.Do(func() error { return nil }))

	second := node.AddPod("second")
	require.NotEqual(t, first.IPv4, second.IPv4, "an address is reused early")
	node.AddPod("third", first.IPv4, first.IPv6).Serve(testenv.TCP, 8080)
	require.Equal(t, map[string]int{"third": 2}, probe().Backends())

	node.Delete()
	require.Empty(t, probe().Backends())
}

func TestAddedAddressIsReached(t *testing.T) {
	network := testenv.NewNetwork(t)
	node := network.AddNode("node")
	pod, client := node.AddPod("pod"), network.AddClient("client")
	for i, host := range []*testenv.Host{node.Host, pod.Host} {
		host.Serve(testenv.UDP, 53)
		for _, addr := range []netip.Addr{
			netip.AddrFrom4([4]byte{198, 51, 100, byte(i + 1)}), netip.MustParseAddr(fmt.Sprintf("2001:db8:1::%d", i+1)),
		} {
			host.AddAddress(addr)
			dst := netip.AddrPortFrom(addr, 53)
			result := client.Probe(t.Context(), testenv.UDP, dst, 1, testenv.ProbeOptions{})
			require.Equal(t, map[netip.AddrPort]int{dst: 1}, result.Servers(), result)
			source := netip.AddrPortFrom(addr, 5353)
			client.Serve(testenv.UDP, 53).Close()
			result = host.Probe(t.Context(), testenv.UDP, netip.AddrPortFrom(client.Addr(addr.Is6()), 53), 1, testenv.ProbeOptions{Source: source})
			require.True(t, result.All(testenv.Refused), "the refusal does not come back: %v", result)
		}
	}
}

func TestCommandsRunInTheHostAndEndWithIt(t *testing.T) {
	network := testenv.NewNetwork(t)
	node := network.AddNode("node")
	output, err := node.Run(t.Context(), "ip", "-o", "-4", "address", "show", "eth0")
	require.NoError(t, err)
	require.Contains(t, output, " 192.168.0.2/24 ")
	_, err = node.Run(t.Context(), "sh", "-c", "echo reason >&2; exit 3")
	require.ErrorContains(t, err, "exit status 3")
	require.ErrorContains(t, err, "reason")

	self, err := os.Readlink("/proc/self/ns/net")
	require.NoError(t, err)
	own, err := node.Command(t.Context(), "readlink", "/proc/self/ns/net").Output()
	require.NoError(t, err)
	require.NotEqual(t, self, strings.TrimSpace(string(own)))

	// A process with a descendant outside its session.
	cmd := node.Command(t.Context(), "sh", "-c", "setsid sleep 1000 & echo $!; wait")
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.DirExists(t, "/proc/"+strings.TrimSpace(line)+"/ns")
	node.Delete()
	require.ErrorContains(t, cmd.Wait(), "killed")
	_, err = os.Readlink("/proc/" + strings.TrimSpace(line) + "/ns/net")
	require.Error(t, err, "the descendant still exists")
	_, err = node.Run(t.Context(), "true")
	require.ErrorContains(t, err, "has been deleted")
}

// TestMainThreadEntersNoHost requires that other processes never find this program in a host's
// network namespace. They look at /proc/<pid>/ns/net, which is the namespace of the main thread. A
// hundred concurrent goroutines use every thread of the program.
func TestMainThreadEntersNoHost(t *testing.T) {
	node := testenv.NewNetwork(t).AddNode("node")
	var within, entered sync.WaitGroup
	within.Add(100)
	threads := make([]int, 100)
	for i := range threads {
		entered.Go(func() {
			assert.NoError(t, node.Do(func() error {
				threads[i] = unix.Gettid()
				within.Done()
				within.Wait()
				return nil
			}))
		})
	}
	entered.Wait()
	require.NotContains(t, threads, os.Getpid())
}
