// This test proves that a client which answers a ping at once is alive.
package h2

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestPingAnsweredAtOnce checks an answer at the very time of the ping, as clocks are coarse.
func TestPingAnsweredAtOnce(t *testing.T) {
	c := &conn{server: &Server{options: Options{PingInterval: time.Hour, MaxIdle: time.Hour}}}
	c.startPingsLocked()
	defer c.pings.timer.Stop()
	c.pings.sent = now()
	c.lastRead.Store(int64(c.pings.sent))
	c.keepAlive()
	require.NoError(t, c.closed)
	require.Zero(t, c.pings.sent)
}
