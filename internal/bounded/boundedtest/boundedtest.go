// Package boundedtest helps to test that ports are bounded.
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

// patience is for what takes milliseconds on a machine that has time.
const patience = 30 * time.Second

// established is the state of a connection that neither side has closed, as the kernel writes it.
const established = "01"

// Crowd are connections to an IPv4 port of this machine that stay open until the test ends.
type Crowd struct {
	t  testing.TB
	to netip.AddrPort

	conns []net.Conn
}

// NewCrowd returns a crowd without connections.
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

// Join adds a connection from an address of this machine. It says something, if that is not empty,
// and then nothing more.
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

// Held returns how many connections the server's side of the port holds, by the kernel. Once the
// server has answered somebody who came after the crowd, none of them waits to be accepted.
func (c *Crowd) Held() int {
	c.t.Helper()
	sockets, err := os.ReadFile("/proc/thread-self/net/tcp")
	require.NoError(c.t, err)
	ip := c.to.Addr().As4()
	local := fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(ip[:]), c.to.Port())
	// The file is no snapshot: while connections come and go, it may list one more than once.
	held := make(map[string]bool)
	for line := range strings.Lines(string(sockets)) {
		// A number, the local and the remote address, and the state.
		fields := strings.Fields(line)
		if len(fields) > 3 && fields[1] == local && fields[3] == established {
			held[fields[2]] = true
		}
	}
	return len(held)
}
