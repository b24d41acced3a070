// Package testca is a certificate authority for the demo, the load tester and tests, which need
// real TLS with real identities but no set-up. A CA of New lives as long as the process; Load and
// Parse use one that exists.
package testca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// validity exceeds the lifetime of any process that uses this package.
const validity = 7 * 24 * time.Hour

// CA issues certificates.
type CA struct {
	cert *x509.Certificate
	key  crypto.PrivateKey
}

// New returns a CA with a new key.
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

// Load reads a CA from PEM files.
func Load(certFile, keyFile string) (*CA, error) {
	ca, err := fromPair(tls.LoadX509KeyPair(certFile, keyFile))
	if err != nil {
		return nil, fmt.Errorf("CA %s with key %s: %w", certFile, keyFile, err)
	}
	return ca, nil
}

// Parse returns the CA whose certificate and key are given in PEM.
func Parse(cert, key []byte) (*CA, error) { return fromPair(tls.X509KeyPair(cert, key)) }

func fromPair(pair tls.Certificate, err error) (*CA, error) {
	if err != nil {
		return nil, err
	}
	if !pair.Leaf.IsCA {
		return nil, errors.New("the certificate is not that of a CA")
	}
	return &CA{pair.Leaf, pair.PrivateKey}, nil
}

// PEM returns the CA's own certificate.
func (c *CA) PEM() []byte { return encode("CERTIFICATE", c.cert.Raw) }

// KeyPEM returns the CA's key.
func (c *CA) KeyPEM() ([]byte, error) { return encodeKey(c.key) }

// Pool returns a pool with the CA's own certificate.
func (c *CA) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(c.cert)
	return p
}

// Server issues a server certificate for names, which may be IP addresses.
func (c *CA) Server(names ...string) (tls.Certificate, error) {
	return c.issue(serving(pkix.Name{CommonName: names[0]}, names))
}

// Relay issues a certificate for names, like Server, which a Slicecast relay also uses as client
// certificate for its servers.
func (c *CA) Relay(names ...string) (tls.Certificate, error) {
	t := serving(pkix.Name{CommonName: names[0], Organization: []string{"slicecast:relays"}}, names)
	t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	return c.issue(t)
}

func serving(subject pkix.Name, names []string) *x509.Certificate {
	t := &x509.Certificate{
		Subject: subject, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, n)
		}
	}
	return t
}

// Node issues the client certificate of a node, like that of a kubelet: user system:node:<name> in
// group system:nodes.
func (c *CA) Node(name string) (tls.Certificate, error) {
	return c.Client("system:node:"+name, "system:nodes")
}

// Client issues a client certificate for a user in groups.
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

func sign(template, parent *x509.Certificate, key *ecdsa.PrivateKey, parentKey crypto.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(validity)
	return x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
}

// WriteCA writes the CA's certificate to the PEM file ca.crt and returns its path.
func (c *CA) WriteCA(dir string) (string, error) {
	path := filepath.Join(dir, "ca.crt")
	return path, replace(path, 0o644, c.PEM())
}

// EncodePEM returns a certificate and its key in PEM.
func EncodePEM(c tls.Certificate) (cert, key []byte, err error) {
	key, err = encodeKey(c.PrivateKey)
	return encode("CERTIFICATE", c.Certificate[0]), key, err
}

// Write writes a certificate and its key to the PEM files <name>.crt and <name>.key and returns
// their paths.
func Write(dir, name string, c tls.Certificate) (cert, key string, err error) {
	certPEM, keyPEM, err := EncodePEM(c)
	if err != nil {
		return "", "", err
	}
	cert, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	return cert, key, errors.Join(replace(cert, 0o644, certPEM), replace(key, 0o600, keyPEM))
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func encodeKey(key crypto.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a private key: %w", err)
	}
	return encode("PRIVATE KEY", der), nil
}

// replace replaces the file in one step, so that a reader sees either the old or the new content.
func replace(path string, mode os.FileMode, content []byte) error {
	if err := os.WriteFile(path+".new", content, mode); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
