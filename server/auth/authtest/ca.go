// Package authtest creates certificates for the server's tests.
package authtest

import (
	"crypto/tls"

	"github.com/slicecast/slicecast/internal/testca"
)

// ServerName is the name in server certificates.
const ServerName = "slicecast-server.test"

// TB is the part of testing.TB that the package uses.
type TB interface {
	// Helper marks the calling function as a helper.
	Helper()
	// Fatalf reports a failure and does not return.
	Fatalf(format string, args ...any)
	// TempDir returns a directory that is removed when the test ends.
	TempDir() string
}

// CA signs certificates. Its files exist until the test ends.
type CA struct {
	// File holds the CA's certificate.
	File string

	t  TB
	ca *testca.CA
}

// NewCA returns a new CA.
func NewCA(t TB) *CA {
	t.Helper()
	ca, err := testca.New()
	if err != nil {
		t.Fatalf("make a CA: %v", err)
	}
	file, err := ca.WriteCA(t.TempDir())
	if err != nil {
		t.Fatalf("write the CA's certificate: %v", err)
	}
	return &CA{File: file, t: t, ca: ca}
}

// Server creates a server certificate in new files.
func (c *CA) Server() (certFile, keyFile string) {
	c.t.Helper()
	certificate, err := c.ca.Server(ServerName)
	if err != nil {
		c.t.Fatalf("make a server certificate: %v", err)
	}
	certFile, keyFile, err = testca.Write(c.t.TempDir(), "server", certificate)
	if err != nil {
		c.t.Fatalf("write a server certificate: %v", err)
	}
	return certFile, keyFile
}

// Client returns a client certificate of a user in these groups.
func (c *CA) Client(user string, groups ...string) tls.Certificate {
	c.t.Helper()
	certificate, err := c.ca.Client(user, groups...)
	if err != nil {
		c.t.Fatalf("make a client certificate: %v", err)
	}
	return certificate
}

// Node returns the client certificate of a node's kubelet.
func (c *CA) Node(name string) tls.Certificate {
	c.t.Helper()
	return c.Client("system:node:"+name, "system:nodes")
}

// Relay returns the client certificate of a relay.
func (c *CA) Relay(name string) tls.Certificate {
	c.t.Helper()
	return c.Client(name, "slicecast:relays")
}

// Observer returns a client certificate of slicecast:observers.
func (c *CA) Observer() tls.Certificate {
	c.t.Helper()
	return c.Client("observer", "slicecast:observers")
}

// Operator returns a client certificate of system:masters.
func (c *CA) Operator() tls.Certificate {
	c.t.Helper()
	return c.Client("admin", "system:masters")
}

// ClientTLS returns a configuration for clients of servers with this CA's certificates. The client
// may have certificates of its own.
func (c *CA) ClientTLS(certificates ...tls.Certificate) *tls.Config {
	return &tls.Config{RootCAs: c.ca.Pool(), ServerName: ServerName, Certificates: certificates, MinVersion: tls.VersionTLS13}
}
