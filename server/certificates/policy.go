package certificates

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/cert"

	"github.com/slicecast/slicecast/internal/ca"
)

// Keys of the Secret, beside tls.crt and tls.key, which every Secret of type kubernetes.io/tls has.
const (
	// caBundleKey is also the key of the ConfigMaps.
	caBundleKey = "ca.crt"
	caKeyKey    = "ca.key"
)

const (
	day = 24 * time.Hour

	caLife = 5 * 365 * day
	// caRenewal is how long before the end of a CA the next one is created. Clients that do not
	// follow the ConfigMap by themselves have this long to be given the new bundle.
	caRenewal = 365 * day
	// caSpread is how long a new CA is published before it issues the servers' certificate. By
	// then, every client that follows the ConfigMap trusts it; kubelets take a few minutes.
	caSpread = 7 * day

	servingLife    = 90 * day
	servingRenewal = 30 * day

	// clockSkew is how far the clock of a client may be behind.
	clockSkew = time.Hour

	// maxCAs bounds the bundle. More than two CAs are live only after clocks were wrong or somebody
	// added some.
	maxCAs = 8
)

// next returns the content that the Secret must have at a time, given the content that it has. due
// reports whether the two differ.
//
// Invariants, at all times:
//
//  1. caBundleKey lists the CAs that have not ended, the newest first, and at most maxCAs. Nothing
//     but its end or maxCAs removes a CA. caKeyKey is the first one's key; the keys of older CAs
//     are gone, so nobody can misuse them.
//  2. While clients accept the servers' certificate, only a CA that has been in the bundle for
//     caSpread, or the only one, issues the next certificate. So clients verify it with any bundle
//     that is younger than caSpread.
//  3. A certificate that no client accepts is replaced at once, and a CA that cannot issue now is
//     followed by another one. So whatever a wrong clock or an edit has left is mended by the next
//     look, and clients are back as soon as they have the bundle.
//  4. A Secret that cannot be understood is an error, and stays as it is.
func next(have map[string][]byte, names []string, now time.Time) (want map[string][]byte, due bool, err error) {
	if len(have[corev1.TLSCertKey]) > 0 && len(have[caKeyKey]) == 0 {
		return nil, false, fmt.Errorf("it has a certificate but no %s, so the servers did not create it", caKeyKey)
	}
	live, err := liveCAs(have[caBundleKey], now)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", caBundleKey, err)
	}
	want = map[string][]byte{}
	maps.Copy(want, have)
	issuer := issuerOf(live, have[caKeyKey], now)
	if issuer == nil {
		issuer, err = ca.New("slicecast", ca.Validity{NotBefore: now.Add(-clockSkew), NotAfter: now.Add(caLife)})
		if err != nil {
			return nil, false, fmt.Errorf("create a CA: %w", err)
		}
		if _, want[caKeyKey], err = issuer.PEM(); err != nil {
			return nil, false, err
		}
		live = slices.Insert(live, 0, issuer.Certificate())
	}
	live = live[:min(len(live), maxCAs)]
	if want[caBundleKey], err = cert.EncodeCertificates(live...); err != nil {
		return nil, false, err
	}
	if servingDue(have, live, names, now) {
		validity := ca.Validity{NotBefore: now.Add(-clockSkew), NotAfter: now.Add(servingLife)}
		c, err := issuer.Issue(ca.Serving(names...), validity)
		if err != nil {
			return nil, false, err
		}
		if want[corev1.TLSCertKey], want[corev1.TLSPrivateKeyKey], err = ca.EncodePEM(c); err != nil {
			return nil, false, err
		}
	}
	return want, !maps.EqualFunc(want, have, bytes.Equal), nil
}

// liveCAs returns the CAs of a bundle that have not ended.
func liveCAs(bundle []byte, now time.Time) ([]*x509.Certificate, error) {
	if len(bundle) == 0 {
		return nil, nil
	}
	live, err := cert.ParseCertsPEM(bundle)
	return slices.DeleteFunc(live, func(c *x509.Certificate) bool { return !c.IsCA || now.After(c.NotAfter) }), err
}

// issuerOf returns the CA that issues certificates now, which is the first live one. It returns nil
// if there is none, if it soon ends, if a server with a fast clock has created it, or if the key is
// not its own.
func issuerOf(live []*x509.Certificate, key []byte, now time.Time) *ca.CA {
	if len(live) == 0 || now.Before(live[0].NotBefore) || !now.Before(live[0].NotAfter.Add(-caRenewal)) {
		return nil
	}
	first, err := cert.EncodeCertificates(live[0])
	if err != nil {
		return nil
	}
	issuer, err := ca.Parse(first, key)
	if err != nil {
		return nil
	}
	return issuer
}

// servingDue reports whether the servers need another certificate from the first live CA. They need
// it at once if no client accepts the certificate that they have. If it only ends soon or is from
// an older CA, they need another one once clients trust the first CA.
func servingDue(have map[string][]byte, live []*x509.Certificate, names []string, now time.Time) bool {
	pair, err := tls.X509KeyPair(have[corev1.TLSCertKey], have[corev1.TLSPrivateKeyKey])
	if err != nil || !slices.Equal(pair.Leaf.DNSNames, names) {
		return true
	}
	roots := x509.NewCertPool()
	for _, c := range live {
		roots.AddCert(c)
	}
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now}); err != nil {
		return true
	}
	published := live[0].NotBefore.Add(clockSkew)
	spread := len(live) == 1 || now.Sub(published) >= caSpread
	endsSoon := now.After(pair.Leaf.NotAfter.Add(-servingRenewal))
	return spread && (endsSoon || pair.Leaf.CheckSignatureFrom(live[0]) != nil)
}
