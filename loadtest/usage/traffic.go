package usage

import (
	"context"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync/atomic"
)

// Traffic counts the bytes of connections as TCP carries them, below TLS.
type Traffic struct{ Received, Sent atomic.Int64 }

// Dial connects to an address (host:port) and counts the connection's traffic. If the address is an
// IPv4 loopback address, the local address is a random one of that network. Real nodes have
// different addresses, and servers limit the connections from one address.
func (t *Traffic) Dial(ctx context.Context, address string) (net.Conn, error) {
	var dialer net.Dialer
	if to, err := netip.ParseAddrPort(address); err == nil && to.Addr().Is4() && to.Addr().IsLoopback() {
		dialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, byte(rand.N(255)), byte(rand.N(255)), byte(1+rand.N(254)))}
	}
	c, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return &countedConn{c, t}, nil
}

type countedConn struct {
	net.Conn
	traffic *Traffic
}

// Read implements net.Conn.
func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.traffic.Received.Add(int64(n))
	return n, err
}

// Write implements net.Conn.
func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.traffic.Sent.Add(int64(n))
	return n, err
}
