// This file proves that attempts to connect count as connections only if there is a peer.
package kubeproxy

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/testenv"
)

// TestConnect connects to a server, to a port without one, and to an address that nobody has.
func TestConnect(t *testing.T) {
	network := testenv.NewNetwork(t)
	node := network.AddNode("node")
	client, server := node.AddPod("client"), node.AddPod("server")
	listener, err := server.Listen(t.Context(), "tcp4", "0.0.0.0:80")
	require.NoError(t, err)
	go accept(listener)
	t.Cleanup(func() { _ = listener.Close() })
	nobody := netip.MustParseAddrPort("10.96.7.7:80")
	for to, want := range map[netip.AddrPort]error{
		netip.AddrPortFrom(server.IPv4, 80): nil,
		netip.AddrPortFrom(server.IPv4, 81): unix.ECONNREFUSED,
		nobody:                              unix.EHOSTUNREACH,
	} {
		err := client.Do(func() error { return connect(to, 10*time.Second) })
		require.ErrorIs(t, err, want, "%v", to)
	}

	// While nobody has answered, there is no error, and no connection either.
	_, err = node.Run(t.Context(), "nft", "table ip t { chain c { type filter hook forward priority 0; ip daddr 10.96.7.7 drop; }; }")
	require.NoError(t, err)
	require.NoError(t, client.Do(func() error {
		socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		defer func() { _ = unix.Close(socket) }()
		require.ErrorIs(t, unix.Connect(socket, &unix.SockaddrInet4{Addr: nobody.Addr().As4(), Port: 80}), unix.EINPROGRESS)
		done, err := outcome(socket)
		require.NoError(t, err)
		require.False(t, done, "connected to nobody")
		return nil
	}))
}
