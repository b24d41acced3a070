// Package testca is a certificate authority that lives as long as the process: for the demo, the load tester and tests,
// which talk real TLS with real identities and want no set-up for it.
package testca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// validity is longer than any process lives that uses this package.
const validity = 7 * 24 * time.Hour

// CA issues certificates.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New makes a CA with a new key.
func New() (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "slicecast test CA"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := sign(template, template, key, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &CA{cert, key}, nil
}

// Pool holds the CA's own certificate.
func (c *CA) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(c.cert)
	return p
}

// Server issues a server certificate for names, which may be IP addresses.
func (c *CA) Server(names ...string) (tls.Certificate, error) {
	t := &x509.Certificate{
		Subject: pkix.Name{CommonName: names[0]}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, n)
		}
	}
	return c.issue(t)
}

// Node issues the client certificate of a node, as the kubelet has one: system:node:<name> of group system:nodes.
func (c *CA) Node(name string) (tls.Certificate, error) {
	return c.Client("system:node:"+name, "system:nodes")
}

// Client issues a client certificate for a user with groups.
func (c *CA) Client(user string, groups ...string) (tls.Certificate, error) {
	return c.issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: user, Organization: groups}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

func (c *CA) issue(template *x509.Certificate) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	der, err := sign(template, c.cert, key, c.key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

func sign(template, parent *x509.Certificate, key, parentKey *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(validity)
	return x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
}

// WriteCA writes the CA's certificate as a PEM file and gives its path.
func (c *CA) WriteCA(dir string) (string, error) {
	path := filepath.Join(dir, "ca.crt")
	return path, writePEM(path, 0o644, "CERTIFICATE", c.cert.Raw)
}

// Write writes a certificate and its key as PEM files <name>.crt and <name>.key and gives their paths.
func Write(dir, name string, c tls.Certificate) (cert, key string, err error) {
	cert, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	if err := writePEM(cert, 0o644, "CERTIFICATE", c.Certificate...); err != nil {
		return "", "", err
	}
	der, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", key, err)
	}
	return cert, key, writePEM(key, 0o600, "PRIVATE KEY", der)
}

// writePEM replaces the file in one step, so that a reader sees the old one or the new one.
func writePEM(path string, mode os.FileMode, kind string, blocks ...[]byte) error {
	var out []byte
	for _, b := range blocks {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b})...)
	}
	if err := os.WriteFile(path+".new", out, mode); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
