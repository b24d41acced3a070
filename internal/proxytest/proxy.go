// Package proxytest is a proxy for tests. It connects a client with a server that can be exchanged.
// It cuts connections in the middle of a message, holds back what a server sends, or silently
// swallows all data.
package proxytest

import (
	"io"
	"net"
	"sync"
	"sync/atomic"

	"github.com/stretchr/testify/require"
)

// unlimited is a number of bytes that is never reached.
const unlimited = 1 << 60

// Nowhere is an address at which nobody listens.
const Nowhere = "127.0.0.1:1"

// Proxy forwards one client's connections to a target that can be exchanged.
type Proxy struct {
	listener net.Listener
	// left is the number of bytes that may still come from the server before all connections are cut.
	left atomic.Int64
	// gate is locked while nothing may pass from the server to the client. Connections stay open.
	gate sync.RWMutex
	// dead means that all data is swallowed in both directions, while connections stay open.
	dead    atomic.Bool
	running sync.WaitGroup

	// mu guards target and conns. It is held while a connection is made, so that after a Lead, Cut
	// closes all connections to the previous target.
	mu     sync.Mutex
	target string
	conns  map[net.Conn]struct{}
}

// T is a *testing.T or *rapid.T.
type T interface {
	require.TestingT
	// Helper marks the calling function as a helper.
	Helper()
	// Cleanup registers a function to be called at the end of the test.
	Cleanup(func())
}

// New runs a proxy until the test ends.
func New(t T, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &Proxy{listener: l, target: target, conns: make(map[net.Conn]struct{})}
	p.left.Store(unlimited)
	p.running.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.Cut()
		if p.gate.TryRLock() {
			p.gate.RUnlock()
		} else { // the test has ended during a Hold
			p.gate.Unlock()
		}
		p.running.Wait()
	})
	return p
}

// Address returns the address that the client should connect to.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// Lead makes new connections go to another server.
func (p *Proxy) Lead(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := p.connect(client)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.running.Go(func() {
			p.pass(server, client, func(n int) int { return n })
			p.close(client, server)
		})
		p.running.Go(func() {
			p.pass(client, server, p.fromServer)
			p.close(client, server)
		})
	}
}

func (p *Proxy) connect(client net.Conn) (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return nil, err
	}
	p.conns[client], p.conns[server] = struct{}{}, struct{}{}
	return server, nil
}

// fromServer waits for the gate, and returns how many of n bytes may pass. The result may be
// negative.
func (p *Proxy) fromServer(n int) int {
	p.gate.RLock()
	defer p.gate.RUnlock()
	left := p.left.Add(-int64(n))
	return min(n, n+int(left))
}

// pass copies data. may returns how many of n bytes may pass; if it is not all of them, pass cuts
// all connections and returns.
func (p *Proxy) pass(to io.Writer, from io.Reader, may func(int) int) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		passes := may(n)
		if p.dead.Load() {
			continue
		}
		if _, err := to.Write(buf[:max(passes, 0)]); err != nil {
			return
		}
		if passes < n {
			p.left.Store(unlimited)
			p.Cut()
			return
		}
	}
}

func (p *Proxy) close(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.conns, c)
		_ = c.Close()
	}
}

// CutAfter closes all connections once this many more bytes have come from the server.
func (p *Proxy) CutAfter(bytes int) { p.left.Store(int64(bytes)) }

// Hold keeps back what the server sends, until Release.
func (p *Proxy) Hold() { p.gate.Lock() }

// Release ends a Hold.
func (p *Proxy) Release() { p.gate.Unlock() }

// Die swallows all data in both directions from now on, while connections stay open.
func (p *Proxy) Die() { p.dead.Store(true) }

// Cut closes all connections.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}
