// Package hostile attacks a real server (server/app) over loopback TLS, in every phase of a
// connection and on both of the server's transports. It requires two things at once: an attack
// meets its bound, and honest clients (agent/client) do not suffer from it.
//
// The exact number of a bound is tested where the bound is defined; docs/security.md names these
// tests. A client that only knows the protocol reaches each bound here, while others use the
// server.
package hostile

import (
	"crypto/tls"
	"fmt"
	"os"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/tlsfiles"
)

// identities has the certificates of all tests.
var identities *pki

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "slicecast-hostile-")
	if err == nil {
		identities, err = newPKI(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "certificates for the tests:", err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir) // it is in the system's temporary directory
		os.Exit(code)
	}))
}

// pki is a CA with the certificates that servers and clients need, and another CA that the server
// does not know.
type pki struct {
	ca, foreign *testca.CA
	server      tlsfiles.Files

	mu    sync.Mutex                 // guards nodes
	nodes map[string]tls.Certificate // by node name
}

func newPKI(dir string) (_ *pki, err error) {
	p := &pki{nodes: make(map[string]tls.Certificate)}
	if p.ca, err = testca.New(); err != nil {
		return nil, err
	}
	if p.foreign, err = testca.New(); err != nil {
		return nil, err
	}
	if p.server.CA, err = p.ca.WriteCA(dir); err != nil {
		return nil, err
	}
	certificate, err := p.ca.Server("127.0.0.1")
	if err != nil {
		return nil, err
	}
	p.server.Certificate, p.server.PrivateKey, err = testca.Write(dir, "server", certificate)
	return p, err
}

// node returns the client certificate of a node.
func (p *pki) node(name string) tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, ok := p.nodes[name]
	if !ok {
		c = must(p.ca.Node(name))
		p.nodes[name] = c
	}
	return c
}

// must panics if a call fails that has worked before, such as issuing a certificate.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
