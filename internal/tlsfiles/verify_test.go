// These tests prove that a chain of certificates is bounded before its signatures are checked, at
// both ends, and that what is not bounded is verified as crypto/x509 does it.
package tlsfiles

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/testca"
)

// link issues a certificate of a key, with the name, by a CA.
func link(t *testing.T, name string, public crypto.PublicKey, isCA bool, by *x509.Certificate, with crypto.Signer) *x509.Certificate {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, IsCA: isCA, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	if !isCA {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		template.DNSNames = []string{name}
	}
	if by == nil {
		by = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by, public, with)
	require.NoError(t, err)
	c, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return c
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return key
}

// TestChains checks which chains are verified, and that no key is used for a check of a signature
// before the roots have certified it.
func TestChains(t *testing.T) {
	keys := make([]*ecdsa.PrivateKey, 7)
	cas := make([]*x509.Certificate, len(keys)) // each has issued the next one
	for i := range keys {
		keys[i] = newKey(t)
		var by *x509.Certificate
		with := keys[0]
		if i > 0 {
			by, with = cas[i-1], keys[i-1]
		}
		cas[i] = link(t, string(rune('a'+i)), &keys[i].PublicKey, true, by, with)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cas[0])
	leaf := func(depth int) *x509.Certificate {
		return link(t, "node", &newKey(t).PublicKey, false, cas[depth], keys[depth])
	}
	stranger := newKey(t)
	// It has the name of the root, and is not issued by it.
	forged := link(t, "a", &stranger.PublicKey, true, nil, stranger)
	ofForged := link(t, "node", &newKey(t).PublicKey, false, forged, stranger)
	client := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	for _, test := range []struct {
		name string
		sent []*x509.Certificate
		dns  string
		want string
	}{
		{name: "of the root", sent: []*x509.Certificate{leaf(0)}},
		{name: "with the root", sent: []*x509.Certificate{leaf(0), cas[0]}},
		{name: "of an intermediate CA", sent: []*x509.Certificate{leaf(1), cas[1]}},
		{name: "the longest", sent: []*x509.Certificate{leaf(4), cas[4], cas[3], cas[2], cas[1]}},
		{name: "in any order", sent: []*x509.Certificate{leaf(4), cas[1], cas[3], cas[2], cas[4]}},
		{name: "with another's certificate", sent: []*x509.Certificate{leaf(1), forged, cas[1], forged}},
		{name: "its name", sent: []*x509.Certificate{leaf(0)}, dns: "node"},
		{name: "another name", sent: []*x509.Certificate{leaf(0)}, dns: "other", want: "not other"},
		{name: "none", want: "there is no certificate"},
		{name: "too long", sent: []*x509.Certificate{leaf(5), cas[5], cas[4], cas[3], cas[2], cas[1]}, want: "a chain of 6 certificates"},
		{name: "a link is missing", sent: []*x509.Certificate{leaf(3), cas[3], cas[1]}, want: "unknown authority"},
		{name: "of a forged CA", sent: []*x509.Certificate{ofForged, forged}, want: "unknown authority"},
		{name: "a leaf as CA", sent: []*x509.Certificate{ofForged, leaf(0)}, want: "unknown authority"},
		{name: "for servers", sent: []*x509.Certificate{cas[1]}, want: ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			chain, err := verify(test.sent, x509.VerifyOptions{Roots: roots, DNSName: test.dns, KeyUsages: client}, nil)
			if test.want == "" {
				require.NoError(t, err)
				require.Equal(t, test.sent[0], chain[0])
				require.Equal(t, cas[0], chain[len(chain)-1])
				return
			}
			require.ErrorContains(t, err, test.want)
			var verification *tls.CertificateVerificationError
			require.ErrorAs(t, err, &verification)
		})
	}
	_, err := verify([]*x509.Certificate{leaf(0)}, x509.VerifyOptions{Roots: roots, KeyUsages: client},
		func() time.Time { return time.Now().Add(2 * time.Hour) })
	require.ErrorContains(t, err, "expired")
}

// TestKeysAreBounded checks the types and sizes of keys in a chain, of the peer and of CAs.
func TestKeysAreBounded(t *testing.T) {
	root := newKey(t)
	ca := link(t, "root", &root.PublicKey, true, nil, root)
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	ec := func(curve elliptic.Curve) crypto.PublicKey {
		key, err := ecdsa.GenerateKey(curve, rand.Reader)
		require.NoError(t, err)
		return &key.PublicKey
	}
	ed, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	ofBits := func(bits uint) crypto.PublicKey { // a key is not generated: nothing is signed with it
		n := new(big.Int).Lsh(big.NewInt(1), bits-1)
		return &rsa.PublicKey{N: n.SetBit(n, 0, 1), E: 65537}
	}
	for _, test := range []struct {
		public crypto.PublicKey
		want   string
	}{
		{ec(elliptic.P256()), ""}, {ec(elliptic.P384()), ""}, {ed, ""}, {ofBits(maxRSABits), ""},
		{ec(elliptic.P521()), "521 bits"}, {ofBits(maxRSABits + 8), "4104 bits"},
	} {
		leaf, other := link(t, "node", test.public, false, ca, root), link(t, "node", ec(elliptic.P256()), false, ca, root)
		for _, sent := range [][]*x509.Certificate{{leaf}, {other, leaf}} {
			_, err := verify(sent, x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}, nil)
			if test.want == "" {
				require.NoError(t, err)
				continue
			}
			require.ErrorContains(t, err, test.want)
		}
	}
	require.ErrorContains(t, checkKey(&x509.Certificate{}), "unsupported type")
}

// TestRogueServersAreBounded checks that a client gives up a server with a long chain, also if its
// own certificate is good. The same holds for one whose part of the handshake does not end, and for
// one that asks for an expensive agreement on a key.
func TestRogueServersAreBounded(t *testing.T) {
	own := newCA(t)
	client := newSide(t, clientOf(own, "a"), own)
	good, err := own.Server(name)
	require.NoError(t, err)
	forged, err := testca.Forged(50, elliptic.P521(), name, nil)
	require.NoError(t, err)
	long := good
	long.Certificate = append(long.Certificate[:1:1], forged.Certificate...)
	endless := good
	for range 40 {
		endless.Certificate = append(endless.Certificate[:len(endless.Certificate):len(endless.Certificate)], make([]byte, 1000))
	}
	for _, test := range []struct {
		name   string
		config *tls.Config
		want   string
	}{
		{"expensive", &tls.Config{Certificates: []tls.Certificate{forged}}, "a chain of 50 certificates"},
		{"good, and then expensive", &tls.Config{Certificates: []tls.Certificate{long}}, "a chain of 51 certificates"},
		{"without end", &tls.Config{Certificates: []tls.Certificate{endless}}, "too long"},
		{"P-521", &tls.Config{Certificates: []tls.Certificate{good}, CurvePreferences: []tls.CurveID{tls.CurveP521}}, "no key exchanges supported"},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.config.MinVersion, test.config.NextProtos = tls.VersionTLS13, []string{"h2"}
			_, err := handshake(t, test.config, client, name+":1")
			require.ErrorContains(t, err, test.want)
		})
	}
}

// TestAServerHasToHaveAName checks that a client without a name for its server accepts none.
func TestAServerHasToHaveAName(t *testing.T) {
	own := newCA(t)
	good, err := own.Server(name)
	require.NoError(t, err)
	for server, want := range map[string]string{name: "", "": "its name is not known", "other": "not other"} {
		var chain []*x509.Certificate
		config := ClientConfig(own.Pool(), server, nil, func(c []*x509.Certificate) { chain = c })
		err := config.VerifyConnection(tls.ConnectionState{PeerCertificates: []*x509.Certificate{good.Leaf}})
		if want == "" {
			require.NoError(t, err)
			require.Len(t, chain, 2)
			continue
		}
		require.ErrorContains(t, err, want)
		require.Nil(t, chain)
	}
}
