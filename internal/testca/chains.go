package testca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
)

// Forged returns a certificate with a chain of length certificates that are expensive to verify:
// all but the first have the name of the CAs of New, so that each may have issued each, and that CA
// all of them. They are signed with a key of their own. If a CA is given, it has issued the first
// one, which is that of a node.
func Forged(length int, curve elliptic.Curve, node string, by *CA) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	valid := fromNow()
	out := tls.Certificate{PrivateKey: key}
	if by != nil {
		if out, err = by.Node(node); err != nil {
			return tls.Certificate{}, err
		}
	}
	for i := len(out.Certificate); i < length; i++ {
		c := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: commonName}, NotBefore: valid.NotBefore,
			NotAfter: valid.NotAfter, IsCA: true, BasicConstraintsValid: true,
		}
		own := key
		if i > 0 { // x509 passes over a key that is in the chain already
			if own, err = ecdsa.GenerateKey(curve, rand.Reader); err != nil {
				return tls.Certificate{}, err
			}
		} else {
			c.Subject.CommonName = node
		}
		issuer := &x509.Certificate{Subject: pkix.Name{CommonName: commonName}}
		der, err := x509.CreateCertificate(rand.Reader, c, issuer, &own.PublicKey, key)
		if err != nil {
			return tls.Certificate{}, fmt.Errorf("forge a certificate: %w", err)
		}
		out.Certificate = append(out.Certificate, der)
	}
	return out, nil
}
