// Package fabric tests distribution as a whole: real servers (server/app) and real clients
// (agent/client) over loopback TLS. The tests make up the cluster, and cause every disturbance that
// can happen between the parts. Each part's own package tests the part's guarantees. Here the parts
// are held to what they guarantee together.
package fabric

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
	if os.Getenv(serveVariable) != "" {
		if err := serveProcess(); err != nil {
			fmt.Fprintln(os.Stderr, "the server of a test:", err)
			os.Exit(1)
		}
		return
	}
	dir, err := os.MkdirTemp("", "slicecast-fabric-")
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

// pki is a CA with the certificates that servers and clients need.
type pki struct {
	dir    string
	ca     *testca.CA
	server tlsfiles.Files

	mu sync.Mutex
	// clients has the certificates of nodes, by name, and those of relays and observers.
	clients map[string]tls.Certificate
}

// client returns the certificate of relays or observers if name is theirs, and that of the node of
// that name otherwise.
func (p *pki) client(name string) tls.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, ok := p.clients[name]
	if !ok {
		var err error
		if c, err = p.ca.Node(name); err != nil {
			panic(err) // it worked for the others
		}
		p.clients[name] = c
	}
	return c
}

// relay and observer name the certificates of all relays and observers.
const relay, observer = "relay", "observer"

// nodes are the names of the cluster's Nodes.
var nodes = []string{"node-1", "node-2", "node-3", "node-4"}

func newPKI(dir string) (*pki, error) {
	ca, err := testca.New()
	if err != nil {
		return nil, err
	}
	p := &pki{dir: dir, ca: ca, clients: make(map[string]tls.Certificate)}
	if p.server.CA, err = ca.WriteCA(dir); err != nil {
		return nil, err
	}
	server, err := ca.Server("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", serversName)
	if err != nil {
		return nil, err
	}
	if p.server.Certificate, p.server.PrivateKey, err = testca.Write(dir, "server", server); err != nil {
		return nil, err
	}
	for name, group := range map[string]string{relay: "slicecast:relays", observer: "slicecast:observers"} {
		if p.clients[name], err = ca.Client(name, group); err != nil {
			return nil, err
		}
	}
	// Servers in processes of their own read these files.
	if _, _, err = testca.Write(dir, relay, p.clients[relay]); err != nil {
		return nil, err
	}
	return p, nil
}
