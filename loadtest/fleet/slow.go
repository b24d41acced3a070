package fleet

import (
	"context"
	"net"
	"sync"
	"time"
)

// Dial connects to an address (host:port). The connection counts its traffic, and reads slowly if
// the node is slow.
func (m *Member) Dial(ctx context.Context, address string) (net.Conn, error) {
	c, err := m.Traffic.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	if m.Delay > 0 {
		c = &slowConn{Conn: c, pause: m.Delay, until: time.Now().Add(burst), closed: make(chan struct{})}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conn = c
	return c, nil
}

// burst is how long a slow node reads before it pauses again.
const burst = 10 * time.Millisecond

// slowConn is the connection of a slow node. It alternates between a pause and reading what has
// arrived. Data that it does not read waits in the buffers of the kernels and the server.
type slowConn struct {
	net.Conn
	pause time.Duration

	until  time.Time // end of the burst; used only by Read
	closed chan struct{}
	once   sync.Once
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
