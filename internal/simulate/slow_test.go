// This test proves that a slow way is slow however many writes and connections share it, and that
// on a way without a rate no write waits for another.
package simulate

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSlowWay(t *testing.T) {
	const delay, writes, size = 50 * time.Millisecond, 80, 1 << 10
	for _, c := range []struct {
		rate int // bytes per second
		took time.Duration
	}{
		{20_000, delay + 2*writes*size*time.Second/20_000},
		{0, delay},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNetwork()
			l := n.process("10.0.0.1").listen(netip.MustParseAddrPort("10.0.0.1:1"))
			n.set(way{"10.0.0.2", "10.0.0.1"}, func(x *weather) { x.rate, x.delay = c.rate, delay })
			var conns []net.Conn
			for range 2 {
				conn, err := n.process("10.0.0.2").dial(t.Context(), "tcp", "10.0.0.1:1")
				require.NoError(t, err)
				conns = append(conns, conn)
			}
			begin := time.Now()
			for _, conn := range conns {
				for range writes {
					_, err := conn.Write(make([]byte, size))
					require.NoError(t, err)
				}
				require.NoError(t, conn.(interface{ CloseWrite() error }).CloseWrite())
			}
			for range conns {
				conn, err := l.Accept()
				require.NoError(t, err)
				b, err := io.ReadAll(conn)
				require.NoError(t, err)
				require.Len(t, b, writes*size)
			}
			require.Equal(t, c.took, time.Since(begin))
		})
	}
}
