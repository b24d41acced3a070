// These tests prove that a wire sees where a connection arrives, with which addresses, and how it
// is refused, for every source, protocol and family.
package conformance

import (
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testenv"
)

var (
	anywhere4 = netip.MustParsePrefix("0.0.0.0/0")
	anywhere6 = netip.MustParsePrefix("::/0")
)

// scene is a node between its pods and the rest of the world, in one IP family.
type scene struct {
	t       *testing.T
	proto   Proto
	command string
	node    *testenv.Node
	pods    *testenv.Pod
	outside *testenv.Client
	wire    *Wire
	// vip belongs to no host, backend to the pods. sources has a source address for connections
	// from each host.
	vip, backend netip.AddrPort
	sources      map[*testenv.Host]netip.Addr
}

// eachScene runs a test for each protocol and family.
func eachScene(t *testing.T, f func(s *scene)) {
	for _, proto := range []Proto{TCP, UDP, SCTP} {
		for name, ipv6 := range map[string]bool{"IPv4": false, "IPv6": true} {
			t.Run(string(proto)+" "+name, func(t *testing.T) {
				t.Parallel()
				f(newScene(t, proto, ipv6))
			})
		}
	}
}

func newScene(t *testing.T, proto Proto, ipv6 bool) *scene {
	t.Helper()
	network := testenv.NewNetwork(t)
	s := &scene{t: t, proto: proto, node: network.AddNode("node"), outside: network.AddClient("outside")}
	s.pods = s.node.AddPod("pods")
	s.pods.Attract(s.node.PodCIDR4, s.node.PodCIDR6)
	s.outside.Attract(anywhere4, anywhere6)
	s.outside.RouteVia(s.node, anywhere4, anywhere6)
	s.wire = NewWire(t, s.node, s.pods.Host, s.outside.Host)
	pod, client := "10.180.0.200", "198.51.100.77"
	s.command, s.vip = "iptables", netip.MustParseAddrPort("10.96.0.10:80")
	s.backend = netip.MustParseAddrPort("10.180.0.77:8080")
	if ipv6 {
		pod, client = "fd00:10:180::200", "2001:db8:77::1"
		s.command, s.vip = "ip6tables", netip.MustParseAddrPort("[fd00:10:96::10]:80")
		s.backend = netip.MustParseAddrPort("[fd00:10:180::77]:8080")
	}
	s.sources = map[*testenv.Host]netip.Addr{
		s.pods.Host: netip.MustParseAddr(pod), s.outside.Host: netip.MustParseAddr(client), s.node.Host: s.node.Addr(ipv6),
	}
	return s
}

func (s *scene) rule(args ...string) {
	s.t.Helper()
	_, err := s.node.Run(s.t.Context(), s.command, args...)
	require.NoError(s.t, err)
}

// each opens connections from every host to an address and calls check with each fate. For the
// node, its own kernel chooses the source.
func (s *scene) each(dst netip.AddrPort, check func(fate Fate)) {
	s.t.Helper()
	var openings []Opening
	for host, source := range s.sources {
		if host == s.node.Host {
			source = netip.Addr{}
		}
		for range 50 {
			openings = append(openings, Opening{From: host, Proto: s.proto, Src: netip.AddrPortFrom(source, 0), Dst: dst})
		}
	}
	fates, err := s.wire.Open(s.t.Context(), openings, 300*time.Millisecond)
	require.NoError(s.t, err)
	require.Len(s.t, fates, len(openings))
	for _, fate := range fates {
		require.Equal(s.t, s.sources[fate.From], fate.Src.Addr())
		require.Equal(s.t, dst, fate.Dst)
		check(fate)
	}
}

func TestWireSeesWhereConnectionsArrive(t *testing.T) {
	eachScene(t, func(s *scene) {
		s.each(s.vip, func(f Fate) {
			require.Equal(t, s.outside.Host, f.At)
			require.Equal(t, []netip.AddrPort{f.Src, s.vip}, []netip.AddrPort{f.SeenSrc, f.SeenDst}, "the packet is translated")
			require.True(t, f.Answered)
		})
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			s.rule("-t", "nat", "-A", chain, "-d", s.vip.Addr().String(), "-p", strings.ToLower(string(s.proto)), "--dport", "80",
				"-j", "DNAT", "--to-destination", s.backend.String())
		}
		s.each(s.vip, func(f Fate) {
			require.Equal(t, s.pods.Host, f.At)
			require.Equal(t, s.backend, f.SeenDst)
			require.Equal(t, f.Src.Addr(), f.SeenSrc.Addr())
			require.True(t, f.Answered)
		})
		s.rule("-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE")
		s.each(s.vip, func(f Fate) {
			require.Equal(t, s.backend, f.SeenDst)
			require.Equal(t, s.sources[s.node.Host], f.SeenSrc.Addr())
			require.True(t, f.Answered)
		})
	})
}

func TestWireSeesWhatTheNodeDelivers(t *testing.T) {
	eachScene(t, func(s *scene) {
		own := netip.AddrPortFrom(s.sources[s.node.Host], 30000)
		s.each(own, func(f Fate) {
			require.Equal(t, s.node.Host, f.At, f)
			require.Equal(t, []netip.AddrPort{f.Src, own}, []netip.AddrPort{f.SeenSrc, f.SeenDst})
		})
		s.rule("-A", "INPUT", "-p", strings.ToLower(string(s.proto)), "--dport", "30000", "-j", "DROP")
		s.each(own, func(f Fate) { require.Nil(t, f.At) })
	})
}

func TestWireDistinguishesRefusalFromSilence(t *testing.T) {
	eachScene(t, func(s *scene) {
		for _, chain := range []string{"FORWARD", "OUTPUT"} {
			s.rule("-A", chain, "-d", s.vip.Addr().String(), "-p", strings.ToLower(string(s.proto)), "--dport", "80", "-j", "REJECT")
			s.rule("-A", chain, "-d", s.vip.Addr().String(), "-p", strings.ToLower(string(s.proto)), "--dport", "81", "-j", "DROP")
		}
		s.each(s.vip, func(f Fate) {
			require.True(t, f.PortUnreachable(), f)
			require.Nil(t, f.At)
			require.False(t, f.Answered)
		})
		s.each(netip.AddrPortFrom(s.vip.Addr(), 81), func(f Fate) {
			require.Nil(t, f.At)
			require.Empty(t, f.Refused)
			require.False(t, f.Answered)
			require.Equal(t, f.From == s.node.Host, f.Denied != nil, "only the node's own rules report the drop")
		})
	})
}

func TestWireSeesResets(t *testing.T) {
	s := newScene(t, TCP, false)
	s.rule("-A", "FORWARD", "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
	fates, err := s.wire.Open(t.Context(), []Opening{{
		From: s.pods.Host, Proto: s.proto, Src: netip.AddrPortFrom(s.sources[s.pods.Host], 4444), Dst: s.vip,
	}}, 300*time.Millisecond)
	require.NoError(t, err)
	require.Equal(t, uint16(4444), fates[0].Src.Port())
	require.True(t, fates[0].Answered)
	require.Nil(t, fates[0].At)
	require.Empty(t, fates[0].Refused)
}

// TestWireFollowsProxiesInUserSpace proves that a wire sees where a proxy in user space leads a
// connection, that a server need not be a proxy, and that nothing listens.
func TestWireFollowsProxiesInUserSpace(t *testing.T) {
	s := newScene(t, TCP, false)
	loopback := netip.MustParseAddr("127.0.0.1")
	listen := func(serve func(client net.Conn)) netip.AddrPort {
		var listener net.Listener
		require.NoError(t, s.node.Do(func() (err error) {
			listener, err = new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
			return err
		}))
		var done sync.WaitGroup
		t.Cleanup(done.Wait)
		t.Cleanup(func() { _ = listener.Close() })
		done.Go(func() {
			for {
				client, err := listener.Accept()
				if err != nil {
					return // closed
				}
				serve(client)
				_ = client.Close()
			}
		})
		return listener.Addr().(*net.TCPAddr).AddrPort()
	}
	proxy := listen(func(client net.Conn) {
		_ = s.node.Do(func() error {
			backend, err := net.Dial("tcp", s.backend.String())
			if err != nil {
				return err
			}
			return backend.Close()
		})
	})
	fate, err := s.wire.Relayed(t.Context(), loopback, proxy)
	require.NoError(t, err)
	require.Equal(t, s.pods.Host, fate.At)
	require.Equal(t, s.backend, fate.SeenDst)
	require.NotEqual(t, loopback, fate.SeenSrc.Addr())
	require.True(t, fate.Answered)

	fate, err = s.wire.Relayed(t.Context(), loopback, listen(func(net.Conn) {}))
	require.NoError(t, err)
	require.Equal(t, s.node.Host, fate.At, "a server that is no proxy")
	require.True(t, fate.Answered)

	fate, err = s.wire.Relayed(t.Context(), loopback, netip.AddrPortFrom(loopback, 1))
	require.NoError(t, err)
	require.Nil(t, fate.At)
	require.True(t, fate.PortUnreachable())
}
