// Package authtest makes certificates for the server's tests.
package authtest

import (
	"crypto/tls"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testca"
)

// ServerName is the name in server certificates.
const ServerName = "slicecast-server.test"

// CA signs certificates. Its files last as long as the test.
type CA struct {
	// File holds the CA's certificate.
	File string

	t  testing.TB
	ca *testca.CA
}

// NewCA makes a CA.
func NewCA(t testing.TB) *CA {
	t.Helper()
	ca, err := testca.New()
	require.NoError(t, err)
	file, err := ca.WriteCA(t.TempDir())
	require.NoError(t, err)
	return &CA{File: file, t: t, ca: ca}
}

// Server makes a server certificate in new files.
func (c *CA) Server() (certFile, keyFile string) {
	c.t.Helper()
	certificate, err := c.ca.Server(ServerName)
	require.NoError(c.t, err)
	certFile, keyFile, err = testca.Write(c.t.TempDir(), "server", certificate)
	require.NoError(c.t, err)
	return certFile, keyFile
}

// Client makes the client certificate of a user in these groups.
func (c *CA) Client(user string, groups ...string) tls.Certificate {
	c.t.Helper()
	certificate, err := c.ca.Client(user, groups...)
	require.NoError(c.t, err)
	return certificate
}

// Node makes the client certificate of a node's kubelet.
func (c *CA) Node(name string) tls.Certificate {
	c.t.Helper()
	return c.Client("system:node:"+name, "system:nodes")
}

// Operator makes a client certificate of system:masters.
func (c *CA) Operator() tls.Certificate {
	c.t.Helper()
	return c.Client("admin", "system:masters")
}

// ClientTLS is for clients of servers whose certificate this CA made, with or without a certificate of their own.
func (c *CA) ClientTLS(certificates ...tls.Certificate) *tls.Config {
	return &tls.Config{RootCAs: c.ca.Pool(), ServerName: ServerName, Certificates: certificates, MinVersion: tls.VersionTLS13}
}
