// Package proxytest is a proxy for tests, between a client and whatever server they choose: it cuts connections in the middle of a
// message, stops what they carry, or lets them go silent.
package proxytest

import (
	"io"
	"net"
	"sync"
	"sync/atomic"

	"github.com/stretchr/testify/require"
)

// unlimited is more than ever passes.
const unlimited = 1 << 60

// Nowhere is an address at which nobody listens.
const Nowhere = "127.0.0.1:1"

// Proxy stands between one client and whatever server is its target.
type Proxy struct {
	listener net.Listener
	// left is how many more bytes may come from the server before all connections are cut.
	left atomic.Int64
	// gate is locked while nothing passes from the server to the client; the connections stay.
	gate sync.RWMutex
	// dead: what comes from either side is swallowed, and nobody hears of anything.
	dead    atomic.Bool
	running sync.WaitGroup

	// mu is held for as long as a connection is made: Cut closes all that lead to what was the target before a Lead.
	mu     sync.Mutex
	target string
	conns  map[net.Conn]struct{}
}

// T is a *testing.T or *rapid.T.
type T interface {
	require.TestingT
	Helper()
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
		} else { // the test has ended meanwhile
			p.gate.Unlock()
		}
		p.running.Wait()
	})
	return p
}

// Address that the client connects to.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// Lead makes connections go to another server from now on.
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

// connect makes the connection to the target that belongs to a client's.
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

// fromServer waits for the gate, and gives how many of n bytes may pass.
func (p *Proxy) fromServer(n int) int {
	p.gate.RLock()
	defer p.gate.RUnlock()
	left := p.left.Add(-int64(n))
	return min(n, n+int(left))
}

// pass copies as much as may gives, which ends it where that is not all.
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

// CutAfter closes all connections when so many bytes more have come from the server.
func (p *Proxy) CutAfter(bytes int) { p.left.Store(int64(bytes)) }

// Hold keeps what the server sends from the client, until Release.
func (p *Proxy) Hold() { p.gate.Lock() }

// Release ends a Hold.
func (p *Proxy) Release() { p.gate.Unlock() }

// Die swallows what comes from either side from now on; nobody hears of anything.
func (p *Proxy) Die() { p.dead.Store(true) }

// Cut closes all connections.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}
