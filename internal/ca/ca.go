// Package ca creates certificate authorities and issues certificates. Its keys are ECDSA keys on
// the curve P-256.
package ca

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
	"net"
	"time"
)

// Validity is the period in which a certificate is valid.
type Validity struct {
	NotBefore, NotAfter time.Time
}

// CA issues certificates. It never changes.
type CA struct {
	cert *x509.Certificate
	key  crypto.PrivateKey
}

// New returns a CA with a new key and a self-signed certificate.
func New(name string, validity Validity) (*CA, error) {
	self := CA{cert: &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}}
	c, err := self.Issue(self.cert, validity)
	if err != nil {
		return nil, err
	}
	return &CA{c.Leaf, c.PrivateKey}, nil
}

// Parse returns the CA of a certificate and its key in PEM.
func Parse(cert, key []byte) (*CA, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	if !pair.Leaf.IsCA {
		return nil, errors.New("the certificate is not that of a CA")
	}
	return &CA{pair.Leaf, pair.PrivateKey}, nil
}

// Certificate returns the CA's own certificate. The caller must not change it.
func (c *CA) Certificate() *x509.Certificate { return c.cert }

// PEM returns the CA's own certificate and its key in PEM.
func (c *CA) PEM() (cert, key []byte, err error) {
	return EncodePEM(tls.Certificate{Certificate: [][]byte{c.cert.Raw}, PrivateKey: c.key})
}

// Issue returns a certificate with a new key. The template provides everything but the serial
// number and the validity. A CA without a key yet signs with the new key.
func (c *CA) Issue(template *x509.Certificate, validity Validity) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	signer := c.key
	if signer == nil {
		signer = key
	}
	template.NotBefore, template.NotAfter = validity.NotBefore, validity.NotAfter
	// Without a serial number in the template, CreateCertificate generates one.
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, &key.PublicKey, signer)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("create a certificate for %q: %w", template.Subject, err)
	}
	leaf, err := x509.ParseCertificate(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, err
}

// Serving returns the template of a server's certificate for names, which may be IP addresses. The
// first one is the common name.
func Serving(names ...string) *x509.Certificate {
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
	return t
}

// EncodePEM returns a certificate and its key in PEM.
func EncodePEM(c tls.Certificate) (cert, key []byte, err error) {
	der, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	if err != nil {
		return nil, nil, fmt.Errorf("encode a private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate[0]}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}
