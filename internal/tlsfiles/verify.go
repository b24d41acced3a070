package tlsfiles

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"
)

// What a peer can make its other end compute before it is known is bounded. crypto/tls and
// crypto/x509 alone would check up to 100 signatures with keys that the peer chooses.
const (
	// maxChain bounds the certificates that a peer sends: its own, and four of intermediate CAs.
	maxChain = 5
	// maxRSABits and maxCurveBits bound the keys in these certificates. A signature by a key of the
	// curve P-521 takes ten times as long to check as one of P-256.
	maxRSABits, maxCurveBits = 4096, 384
)

// maxHandshake bounds the bytes that a client reads in a TLS handshake. It has room for a chain of
// maxChain large certificates, and for the largest record that may be read with them.
const maxHandshake = 32 << 10

// curves are those on which keys are agreed. A key exchange on P-521, which the peer could ask for,
// takes ten times as long as on X25519.
var curves = []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256}

// Config returns the configuration that all ends of TLS begin with: TLS 1.3 and curves on which a
// handshake is cheap.
func Config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, CurvePreferences: curves}
}

// ClientConfig returns the configuration of a client for servers whose certificates have the name
// and descend from roots. nil roots are the system's. If verified is not nil, it is called with the
// chain of each server that was accepted. If now is nil, it is time.Now.
func ClientConfig(
	roots *x509.CertPool, name string, now func() time.Time, verified func(chain []*x509.Certificate),
) *tls.Config {
	config := Config()
	config.ServerName, config.Time = name, now
	// crypto/tls would verify before anything can be bounded. VerifyConnection runs in every
	// handshake.
	config.InsecureSkipVerify = true
	config.VerifyConnection = func(state tls.ConnectionState) error {
		if name == "" { // x509 would accept any name
			return errors.New("verify the server's certificate: its name is not known")
		}
		chain, err := verify(state.PeerCertificates, x509.VerifyOptions{Roots: roots, DNSName: name}, now)
		if err == nil && verified != nil {
			verified(chain)
		}
		return err
	}
	return config
}

// verify verifies the chain that a peer has sent, its own certificate first. It checks signatures
// only with keys that descend from the roots. A peer without a certificate of a root causes one
// such check for each certificate that it sends and each root of the issuer's name.
func verify(sent []*x509.Certificate, o x509.VerifyOptions, now func() time.Time) (_ []*x509.Certificate, err error) {
	defer func() {
		if err != nil {
			err = &tls.CertificateVerificationError{UnverifiedCertificates: sent, Err: err}
		}
	}()
	switch {
	case len(sent) == 0:
		return nil, errors.New("there is no certificate")
	case len(sent) > maxChain:
		return nil, fmt.Errorf("a chain of %d certificates, and the most is %d", len(sent), maxChain)
	}
	for _, c := range sent {
		if err := checkKey(c); err != nil {
			return nil, err
		}
	}
	if now != nil {
		o.CurrentTime = now()
	}
	o.Intermediates = x509.NewCertPool()
	unknown := slices.Clone(sent[1:])
	for progress := true; progress; { // a chain need not be in order
		progress = false
		for i := len(unknown) - 1; i >= 0; i-- { // the one next to the root is the last
			ca := o
			ca.DNSName, ca.KeyUsages = "", []x509.ExtKeyUsage{x509.ExtKeyUsageAny}
			if _, err := unknown[i].Verify(ca); err == nil {
				o.Intermediates.AddCert(unknown[i])
				unknown, progress = slices.Delete(unknown, i, i+1), true
			}
		}
	}
	chains, err := sent[0].Verify(o)
	if err != nil {
		return nil, err
	}
	return chains[0], nil
}

// checkKey returns an error if the key of a certificate is of an unusual type or size.
func checkKey(c *x509.Certificate) error {
	switch key := c.PublicKey.(type) {
	case *ecdsa.PublicKey:
		if bits := key.Curve.Params().BitSize; bits > maxCurveBits {
			return fmt.Errorf("the certificate of %q has a key on a curve of %d bits, and the most is %d", c.Subject, bits,
				maxCurveBits)
		}
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits > maxRSABits {
			return fmt.Errorf("the certificate of %q has an RSA key of %d bits, and the most is %d", c.Subject, bits, maxRSABits)
		}
	case ed25519.PublicKey:
	default:
		return fmt.Errorf("the certificate of %q has a key of an unsupported type, %v", c.Subject, c.PublicKeyAlgorithm)
	}
	return nil
}
