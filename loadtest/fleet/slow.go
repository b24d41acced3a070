package fleet

import (
	"context"
	"net"
	"sync"
	"time"
)

// Dial connects to an address (host:port), as the node reads: counted, and slowly if it is a slow one.
func (m *Member) Dial(ctx context.Context, address string) (net.Conn, error) {
	c, err := m.Traffic.Dial(ctx, address)
	if err == nil && m.Delay > 0 {
		c = newSlowConn(c, m.Delay)
	}
	return c, err
}

// burst is how long a slow node reads what has come before it pauses again.
const burst = 10 * time.Millisecond

// slowConn is the connection of a node that has other things to do: it pauses, reads what has come meanwhile, and so on. What
// it does not read waits in the buffers of kernels and server.
type slowConn struct {
	net.Conn
	pause time.Duration

	until  time.Time // of the burst; Read's
	closed chan struct{}
	once   sync.Once
}

func newSlowConn(c net.Conn, pause time.Duration) *slowConn {
	return &slowConn{Conn: c, pause: pause, until: time.Now().Add(burst), closed: make(chan struct{})}
}

// Read implements net.Conn.
func (c *slowConn) Read(b []byte) (int, error) {
	if time.Now().After(c.until) {
		wait := time.NewTimer(c.pause)
		select {
		case <-wait.C:
		case <-c.closed:
			wait.Stop()
		}
		c.until = time.Now().Add(burst)
	}
	return c.Conn.Read(b)
}

// Close implements net.Conn.
func (c *slowConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}
