// Package boundedtest helps to test bounds on the connections to ports.
package boundedtest

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience bounds waits for events that take milliseconds on an idle machine.
const patience = 30 * time.Second

// established is the state of a connection that neither side has closed, as the kernel writes it.
const established = "01"

// mapped is what is before an IPv4 address that is mapped to IPv6, as the kernel writes it.
var mapped = fmt.Sprintf("%016X%08X", 0, binary.NativeEndian.Uint32([]byte{0, 0, 0xff, 0xff}))

// Crowd has connections to an IPv4 port of this machine. They stay open until the test ends.
type Crowd struct {
	t  testing.TB
	to netip.AddrPort

	conns []net.Conn
}

// NewCrowd returns a Crowd without connections.
func NewCrowd(t testing.TB, to string) *Crowd {
	t.Helper()
	c := &Crowd{t: t, to: netip.MustParseAddrPort(to)}
	t.Cleanup(func() {
		for _, conn := range c.conns {
			_ = conn.Close() // the server may have closed it
		}
	})
	return c
}

// Join adds a connection from an address of this machine. The connection sends say, and then
// nothing more.
func (c *Crowd) Join(from netip.Addr, say string) {
	c.t.Helper()
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	conn, err := dialer.DialContext(ctx, "tcp", c.to.String())
	require.NoError(c.t, err)
	c.conns = append(c.conns, conn)
	_, _ = io.WriteString(conn, say) // the server may have closed it
}

// Held returns how many connections the server's side of the port holds, according to the kernel.
// Once the server has answered a client that connected after the crowd, none of the crowd's
// connections waits to be accepted.
func (c *Crowd) Held() int {
	c.t.Helper()
	ip := c.to.Addr().As4()
	local := fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(ip[:]), c.to.Port())
	// The files are not snapshots: while connections come and go, they may list a connection more
	// than once.
	held := make(map[string]bool)
	// A server that listens on the addresses of both families has connections of the second file,
	// whose addresses are mapped to IPv6.
	for file, prefix := range map[string]string{"tcp": "", "tcp6": mapped} {
		sockets, err := os.ReadFile("/proc/thread-self/net/" + file)
		require.NoError(c.t, err)
		for line := range strings.Lines(string(sockets)) {
			// The fields are a number, the local address, the remote address, and the state.
			fields := strings.Fields(line)
			if len(fields) > 3 && fields[1] == prefix+local && fields[3] == established {
				held[fields[2]] = true
			}
		}
	}
	return len(held)
}
