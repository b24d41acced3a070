// Package testca is a certificate authority for the demo, the load tester and tests, which need
// real TLS with real identities but no set-up. A CA of New lives as long as the process; Load and
// Parse use one that exists.
package testca

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/slicecast/slicecast/internal/ca"
)

// validity exceeds the lifetime of any process that uses this package.
const validity = 7 * 24 * time.Hour

// fromNow is the period of validity of a certificate that is issued now.
func fromNow() ca.Validity {
	now := time.Now()
	return ca.Validity{NotBefore: now.Add(-time.Hour), NotAfter: now.Add(validity)}
}

// commonName is the name of each CA of New.
const commonName = "slicecast test CA"

// CA issues certificates.
type CA struct{ ca *ca.CA }

// New returns a CA with a new key.
func New() (*CA, error) {
	c, err := ca.New(commonName, fromNow())
	if err != nil {
		return nil, err
	}
	return &CA{c}, nil
}

// Load reads a CA from PEM files.
func Load(certFile, keyFile string) (*CA, error) {
	cert, certErr := os.ReadFile(certFile)
	key, keyErr := os.ReadFile(keyFile)
	if err := errors.Join(certErr, keyErr); err != nil {
		return nil, err
	}
	c, err := Parse(cert, key)
	if err != nil {
		return nil, fmt.Errorf("CA %s with key %s: %w", certFile, keyFile, err)
	}
	return c, nil
}

// Parse returns the CA whose certificate and key are given in PEM.
func Parse(cert, key []byte) (*CA, error) {
	c, err := ca.Parse(cert, key)
	if err != nil {
		return nil, err
	}
	return &CA{c}, nil
}

// PEM returns the CA's own certificate.
func (c *CA) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.ca.Certificate().Raw})
}

// KeyPEM returns the CA's key.
func (c *CA) KeyPEM() ([]byte, error) {
	_, key, err := c.ca.PEM()
	return key, err
}

// Pool returns a pool with the CA's own certificate.
func (c *CA) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(c.ca.Certificate())
	return p
}

// Server issues a server certificate for names, which may be IP addresses.
func (c *CA) Server(names ...string) (tls.Certificate, error) {
	return c.ca.Issue(ca.Serving(names...), fromNow())
}

// Relay issues a certificate for names, like Server, which a Slicecast relay also uses as client
// certificate for its servers.
func (c *CA) Relay(names ...string) (tls.Certificate, error) {
	t := ca.Serving(names...)
	t.Subject.Organization = []string{"slicecast:relays"}
	t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	return c.ca.Issue(t, fromNow())
}

// Node issues the client certificate of a node, like that of a kubelet: user system:node:<name> in
// group system:nodes.
func (c *CA) Node(name string) (tls.Certificate, error) {
	return c.Client("system:node:"+name, "system:nodes")
}

// Client issues a client certificate for a user in groups.
func (c *CA) Client(user string, groups ...string) (tls.Certificate, error) {
	return c.ca.Issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: user, Organization: groups}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, fromNow())
}

// WriteCA writes the CA's certificate to the PEM file ca.crt and returns its path.
func (c *CA) WriteCA(dir string) (string, error) {
	path := filepath.Join(dir, "ca.crt")
	return path, replace(path, 0o644, c.PEM())
}

// Write writes a certificate and its key to the PEM files <name>.crt and <name>.key and returns
// their paths.
func Write(dir, name string, c tls.Certificate) (cert, key string, err error) {
	certPEM, keyPEM, err := ca.EncodePEM(c)
	if err != nil {
		return "", "", err
	}
	cert, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	return cert, key, errors.Join(replace(cert, 0o644, certPEM), replace(key, 0o600, keyPEM))
}

// replace replaces the file in one step, so that a reader sees either the old or the new content.
func replace(path string, mode os.FileMode, content []byte) error {
	if err := os.WriteFile(path+".new", content, mode); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
