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

// readSize is small because there are thousands, most messages are short, and TLS has a buffer of its own.
const readSize = 4 << 10

// Clients are connections to a Server, which read what comes.
type Clients struct {
	conns    []net.Conn
	traffic  usage.Traffic
	wait     sync.WaitGroup
	received atomic.Int64
	// awaited is how many bytes are waited for, and arrived is told when they are there.
	awaited atomic.Int64
	arrived chan struct{}
}

// Dial opens connections, atATime of them at the same time, each with its own configuration, and returns when all are greeted.
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

// read counts what comes, until Close or an error of the server, which tells of it.
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

// Received is how many bytes have come over all connections, below TLS.
func (c *Clients) Received() int64 { return c.traffic.Received.Load() }

// Await waits until each connection has got so many bytes, all in all.
func (c *Clients) Await(ctx context.Context, bytes int64) error {
	all := bytes * int64(len(c.conns))
	c.awaited.Store(all)
	for c.received.Load() < all {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d bytes have come over raw TLS: %w", c.received.Load(), all, ctx.Err())
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
