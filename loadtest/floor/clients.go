package floor

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/slicecast/slicecast/loadtest/usage"
)

// readSize is the size of read buffers, in bytes. It is small because there are thousands of
// connections. Most messages are short, and TLS has a buffer of its own.
const readSize = 4 << 10

// Clients are connections to a Server. They read and count what arrives.
type Clients struct {
	conns    []net.Conn
	traffic  usage.Traffic
	wait     sync.WaitGroup
	received atomic.Int64
	// awaited is the number of bytes that Await waits for. arrived has a value once they have been
	// received.
	awaited atomic.Int64
	arrived chan struct{}
}

// Dial opens one connection for each configuration, atATime of them concurrently. It returns once
// all have been greeted.
func Dial(ctx context.Context, address string, configs []*tls.Config, atATime int) (*Clients, error) {
	c := &Clients{conns: make([]net.Conn, len(configs)), arrived: make(chan struct{}, 1)}
	dialing, ctx := errgroup.WithContext(ctx)
	dialing.SetLimit(atATime)
	for i, config := range configs {
		dialing.Go(func() error {
			raw, err := c.traffic.Dial(ctx, address)
			if err != nil {
				return fmt.Errorf("raw connection %d of %d: %w", i+1, len(configs), err)
			}
			conn := tls.Client(raw, config)
			c.conns[i] = conn
			stop := context.AfterFunc(ctx, func() { raw.Close() })
			defer stop()
			if _, err := io.ReadFull(conn, make([]byte, greeting)); err != nil {
				return fmt.Errorf("raw connection %d of %d: no greeting: %w", i+1, len(configs), err)
			}
			return nil
		})
	}
	if err := dialing.Wait(); err != nil {
		c.Close()
		return nil, err
	}
	for _, conn := range c.conns {
		c.wait.Go(func() { c.read(conn) })
	}
	return c, nil
}

// read counts the bytes of a connection until Close, or until an error, which the server reports.
func (c *Clients) read(conn net.Conn) {
	b := make([]byte, readSize)
	for {
		n, err := conn.Read(b)
		if c.received.Add(int64(n)) >= c.awaited.Load() {
			select {
			case c.arrived <- struct{}{}:
			default:
			}
		}
		if err != nil {
			return
		}
	}
}

// Received returns the number of bytes received on all connections, below TLS.
func (c *Clients) Received() int64 { return c.traffic.Received.Load() }

// Await waits until each connection has received a number of bytes since it was greeted.
func (c *Clients) Await(ctx context.Context, bytes int64) error {
	all := bytes * int64(len(c.conns))
	c.awaited.Store(all)
	for c.received.Load() < all {
		select {
		case <-ctx.Done():
			return fmt.Errorf("received %d of %d bytes over raw TLS: %w", c.received.Load(), all, ctx.Err())
		case <-c.arrived:
		}
	}
	return nil
}

// Close closes the connections.
func (c *Clients) Close() {
	for _, conn := range c.conns {
		if conn != nil {
			conn.(*tls.Conn).NetConn().Close()
		}
	}
	c.wait.Wait()
}
