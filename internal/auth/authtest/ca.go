// Package authtest creates certificates for the server's tests.
package authtest

import (
	"crypto/tls"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testca"
)

// ServerName is the name in server certificates.
const ServerName = "slicecast-server.test"

// CA signs certificates. Its files exist until the test ends.
type CA struct {
	// File holds the CA's certificate.
	File string

	t  testing.TB
	ca *testca.CA
}

// NewCA returns a new CA.
func NewCA(t testing.TB) *CA {
	t.Helper()
	ca, err := testca.New()
	require.NoError(t, err)
	file, err := ca.WriteCA(t.TempDir())
	require.NoError(t, err)
	return &CA{File: file, t: t, ca: ca}
}

// Server creates a server certificate in new files.
func (c *CA) Server() (certFile, keyFile string) {
	c.t.Helper()
	certificate, err := c.ca.Server(ServerName)
	require.NoError(c.t, err)
	certFile, keyFile, err = testca.Write(c.t.TempDir(), "server", certificate)
	require.NoError(c.t, err)
	return certFile, keyFile
}

// Client returns a client certificate of a user in these groups.
func (c *CA) Client(user string, groups ...string) tls.Certificate {
	c.t.Helper()
	certificate, err := c.ca.Client(user, groups...)
	require.NoError(c.t, err)
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
