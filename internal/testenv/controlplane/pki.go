package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// pki is the certificate authority of one control plane, with the files its components read.
type pki struct {
	dir   string
	caKey *ecdsa.PrivateKey
	ca    *x509.Certificate
	caPEM []byte
}

// newPKI makes an authority, a serving certificate for loopback and address, and the key that
// signs ServiceAccount tokens.
func newPKI(dir string, address netip.Addr) (*pki, error) {
	p := &pki{dir: dir, caKey: newKey()}
	p.ca = p.sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: "slicecast test authority"},
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}, p.caKey)
	p.caPEM = certPEM(p.ca)

	servingKey, tokenKey := newKey(), newKey()
	serving := p.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: "kube-apiserver"},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost", "kubernetes.default.svc"},
		IPAddresses: []net.IP{loopback.AsSlice(), net.IPv6loopback, address.AsSlice()},
	}, servingKey)
	tokenPublic, err := x509.MarshalPKIXPublicKey(&tokenKey.PublicKey)
	if err != nil {
		return nil, err
	}
	for name, content := range map[string][]byte{
		"ca.crt":               p.caPEM,
		"serving.crt":          certPEM(serving),
		"serving.key":          keyPEM(servingKey),
		"service-accounts.key": keyPEM(tokenKey),
		"service-accounts.pub": pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: tokenPublic}),
	} {
		if err := os.WriteFile(p.file(name), content, 0o600); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *pki) file(name string) string { return filepath.Join(p.dir, name) }

// client returns a certificate and key, in PEM, for a user in groups.
func (p *pki) client(user string, groups []string) (cert, key []byte) {
	private := newKey()
	return certPEM(p.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, private)), keyPEM(private)
}

// sign completes template and has it signed by the authority, or by itself if there is none yet.
// Only a broken template or random source can make it fail, which is a bug: it panics.
func (p *pki) sign(template *x509.Certificate, key *ecdsa.PrivateKey) *x509.Certificate {
	template.SerialNumber = must(rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 64)))
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(24 * time.Hour)
	parent := p.ca
	if parent == nil {
		parent = template
	}
	der := must(x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, p.caKey))
	return must(x509.ParseCertificate(der))
}

func newKey() *ecdsa.PrivateKey { return must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)) }

func certPEM(cert *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
}

func keyPEM(key *ecdsa.PrivateKey) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: must(x509.MarshalECPrivateKey(key))})
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func writeKubeconfig(path string, config *rest.Config) error {
	const name = "slicecast-test"
	kubeconfig := clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{name: {
			Server:                   config.Host,
			CertificateAuthorityData: config.CAData,
		}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{name: {
			ClientCertificateData: config.CertData,
			ClientKeyData:         config.KeyData,
			Token:                 config.BearerToken,
		}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}
	if err := clientcmd.WriteToFile(kubeconfig, path); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}
