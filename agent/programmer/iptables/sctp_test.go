// This test proves that SCTP is led, masqueraded and rejected like TCP and UDP, with packets from
// raw sockets, which need no SCTP in the kernel.
package iptables

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
)

// sctpInit returns the packet that begins an SCTP association (RFC 9260, 3.3.2).
func sctpInit(source, destination uint16) []byte {
	packet := make([]byte, 12+20)
	binary.BigEndian.PutUint16(packet[0:], source)
	binary.BigEndian.PutUint16(packet[2:], destination)
	packet[12] = 1 // INIT
	binary.BigEndian.PutUint16(packet[14:], 20)
	binary.BigEndian.PutUint32(packet[16:], 0xfeed)      // tag
	binary.BigEndian.PutUint32(packet[20:], 1<<16)       // window
	binary.BigEndian.PutUint32(packet[24:], 10<<16|2048) // streams
	binary.BigEndian.PutUint32(packet[28:], 1)           // sequence number
	binary.LittleEndian.PutUint32(packet[8:], crc32.Checksum(packet, crc32.MakeTable(crc32.Castagnoli)))
	return packet
}

// sctpSocket opens a raw socket for SCTP packets, which also works in a kernel without SCTP. It is
// closed when the test ends.
func sctpSocket(t *testing.T, host *testenv.Host, family model.Family) int {
	t.Helper()
	domain := unix.AF_INET
	if family == model.IPv6 {
		domain = unix.AF_INET6
	}
	fd := -1
	require.NoError(t, host.Do(func() (err error) {
		fd, err = unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		return os.NewSyscallError("socket", err)
	}))
	t.Cleanup(func() { _ = unix.Close(fd) })
	timeout := unix.NsecToTimeval((10 * time.Second).Nanoseconds())
	require.NoError(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout))
	return fd
}

func rawAddress(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16()}
}

// TestSCTP asserts that SCTP is led, masqueraded and rejected like TCP and UDP.
func TestSCTP(t *testing.T) {
	eachVariant(t, func(t *testing.T, variant Variant) {
		c := newCluster(t, Options{Variant: variant})
		for _, family := range families {
			c.set(
				&view.ServicePort{
					ID:        serviceID("web", model.SCTP, family),
					Frontends: []view.Frontend{clusterIP(vip(family, 1)), external(vip(family, 2)), nodePort(30001)},
					Cluster:   c.backends(family, 7777, 2),
				},
				&view.ServicePort{
					ID:        serviceID("none", model.SCTP, family),
					Frontends: []view.Frontend{rejected(clusterIP(vip(family, 3))), rejected(nodePort(30003))},
				},
				// The same address and ports belong to another Service port for another protocol.
				&view.ServicePort{ID: serviceID("tcp", model.TCP, family), Frontends: []view.Frontend{rejected(clusterIP(vip(family, 1))), rejected(nodePort(30001))}})
		}
		require.NoError(t, c.inHost.Replace(t.Context(), c.state))
		c.requireFresh(t)
		eachFamily(t, func(t *testing.T, family model.Family) {
			server := sctpSocket(t, c.pods[2].Host, family)
			source := uint16(40000)
			for _, from := range []*testenv.Host{c.client.Host, c.pods[0].Host} {
				for _, to := range []netip.AddrPort{
					netip.AddrPortFrom(vip(family, 1), servicePort), netip.AddrPortFrom(vip(family, 2), servicePort),
					netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30001),
				} {
					client := sctpSocket(t, from, family)
					source++
					require.NoError(t, unix.Sendto(client, sctpInit(source, to.Port()), 0, rawAddress(to.Addr())))
					buffer := make([]byte, 1500)
					n, peer, err := unix.Recvfrom(server, buffer, 0)
					require.NoError(t, err, "%s to %v", from.Name, to)
					packet, saw := buffer[:n], netip.Addr{}
					switch p := peer.(type) {
					case *unix.SockaddrInet4:
						packet, saw = packet[20:], netip.AddrFrom4(p.Addr) // after the IP header
					case *unix.SockaddrInet6:
						saw = netip.AddrFrom16(p.Addr)
					}
					require.Equal(t, uint16(7777), binary.BigEndian.Uint16(packet[2:]), "%s to %v", from.Name, to)
					want := c.a.Addr(family == model.IPv6)
					if from == c.pods[0].Host && to.Addr() == vip(family, 1) {
						want = from.Addr(family == model.IPv6)
					}
					require.Equal(t, want, saw, "%s to %v", from.Name, to)
				}
				for _, to := range []netip.AddrPort{netip.AddrPortFrom(vip(family, 3), servicePort), netip.AddrPortFrom(c.a.Addr(family == model.IPv6), 30003)} {
					client := sctpSocket(t, from, family)
					// So that the socket receives errors.
					require.NoError(t, unix.Connect(client, rawAddress(to.Addr())))
					source++
					_, err := unix.Write(client, sctpInit(source, to.Port()))
					if err == nil {
						_, err = unix.Read(client, make([]byte, 1500))
					}
					require.True(t, errors.Is(err, unix.ECONNREFUSED), "%s to %v: %v", from.Name, to, err)
				}
			}
		})
	})
}
