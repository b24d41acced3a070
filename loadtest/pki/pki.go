// Package pki makes the certificates of a load test: one authority, a server and many nodes, as a cluster has them.
package pki

import (
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
	"time"
)

// lifetime of the certificates: longer than a load test, too short to be of use elsewhere.
const lifetime = 48 * time.Hour

// Authority signs certificates.
type Authority struct {
	certificate *x509.Certificate
	key         any
}

// NewAuthority makes an authority with a key of its own.
func NewAuthority() (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:  pkix.Name{CommonName: "slicecast-loadtest"},
		KeyUsage: x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := sign(template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Authority{certificate: certificate, key: key}, nil
}

// LoadAuthority reads the certificate and key of an authority, in PEM.
func LoadAuthority(certFile, keyFile string) (*Authority, error) {
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("authority %s with key %s: %w", certFile, keyFile, err)
	}
	if !pair.Leaf.IsCA {
		return nil, fmt.Errorf("authority %s: the certificate is no CA's", certFile)
	}
	return &Authority{certificate: pair.Leaf, key: pair.PrivateKey}, nil
}

// PEM gives the authority's certificate.
func (a *Authority) PEM() []byte { return certificatePEM(a.certificate.Raw) }

// KeyPEM gives the authority's key.
func (a *Authority) KeyPEM() ([]byte, error) { return keyPEM(a.key) }

// Node makes the client certificate that a kubelet of that node would have.
func (a *Authority) Node(name string) (tls.Certificate, error) {
	key, der, err := a.issue(&x509.Certificate{
		Subject:     pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// Server makes a server's certificate for an IP address, and its key, in PEM.
func (a *Authority) Server(address net.IP) (certificate, key []byte, err error) {
	private, der, err := a.issue(&x509.Certificate{
		Subject:     pkix.Name{CommonName: "slicecast-server"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{address},
	})
	if err != nil {
		return nil, nil, err
	}
	key, err = keyPEM(private)
	return certificatePEM(der), key, err
}

// Pool reads certificates to trust, in PEM.
func Pool(certificates []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(certificates) {
		return nil, errors.New("there is no PEM certificate")
	}
	return pool, nil
}

func (a *Authority) issue(template *x509.Certificate) (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := sign(template, a.certificate, key.Public(), a.key)
	return key, der, err
}

func sign(template, parent *x509.Certificate, public, private any) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template.SerialNumber = serial
	template.NotBefore, template.NotAfter = now.Add(-time.Hour), now.Add(lifetime)
	return x509.CreateCertificate(rand.Reader, template, parent, public, private)
}

func certificatePEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func keyPEM(private any) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}
