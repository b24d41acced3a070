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
	sockets, err := os.ReadFile("/proc/thread-self/net/tcp")
	require.NoError(c.t, err)
	ip := c.to.Addr().As4()
	local := fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(ip[:]), c.to.Port())
	// The file is not a snapshot: while connections come and go, it may list a connection more than
	// once.
	held := make(map[string]bool)
	for line := range strings.Lines(string(sockets)) {
		// The fields are a number, the local address, the remote address, and the state.
		fields := strings.Fields(line)
		if len(fields) > 3 && fields[1] == local && fields[3] == established {
			held[fields[2]] = true
		}
	}
	return len(held)
}
