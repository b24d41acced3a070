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
)

// next returns the content that the Secret must have at a time, given the content that it has. due
// reports whether the two differ.
//
// Invariants, at all times:
//
//  1. caBundleKey lists all CAs that have not ended, the newest first. caKeyKey is the newest one's
//     key; the keys of older CAs are gone, so nobody can misuse them.
//  2. The servers' certificate was issued by the oldest or only CA, or by one that had been in the
//     bundle for caSpread. So clients verify it with any bundle that is younger than caSpread.
func next(have map[string][]byte, names []string, now time.Time) (want map[string][]byte, due bool, err error) {
	if len(have[corev1.TLSCertKey]) > 0 && len(have[caKeyKey]) == 0 {
		return nil, false, fmt.Errorf("it has a certificate but no %s, so the servers did not create it", caKeyKey)
	}
	var live []*x509.Certificate
	if bundle := have[caBundleKey]; len(bundle) > 0 {
		if live, err = cert.ParseCertsPEM(bundle); err != nil {
			return nil, false, fmt.Errorf("%s: %w", caBundleKey, err)
		}
	}
	live = slices.DeleteFunc(live, func(c *x509.Certificate) bool { return now.After(c.NotAfter) })
	want = map[string][]byte{}
	maps.Copy(want, have)
	var issuer *ca.CA
	if len(live) > 0 && now.Before(live[0].NotAfter.Add(-caRenewal)) {
		if issuer, err = ca.Parse(have[caBundleKey], have[caKeyKey]); err != nil {
			return nil, false, fmt.Errorf("%s and %s: %w", caBundleKey, caKeyKey, err)
		}
	} else {
		issuer, err = ca.New("slicecast", ca.Validity{NotBefore: now.Add(-clockSkew), NotAfter: now.Add(caLife)})
		if err != nil {
			return nil, false, fmt.Errorf("create a CA: %w", err)
		}
		if _, want[caKeyKey], err = issuer.PEM(); err != nil {
			return nil, false, err
		}
		live = slices.Insert(live, 0, issuer.Certificate())
	}
	if want[caBundleKey], err = cert.EncodeCertificates(live...); err != nil {
		return nil, false, err
	}
	published := issuer.Certificate().NotBefore.Add(clockSkew)
	if (len(live) == 1 || now.Sub(published) >= caSpread) && servingDue(have, issuer.Certificate(), names, now) {
		c, err := issuer.Issue(ca.Serving(names...), ca.Validity{NotBefore: now.Add(-clockSkew), NotAfter: now.Add(servingLife)})
		if err != nil {
			return nil, false, err
		}
		if want[corev1.TLSCertKey], want[corev1.TLSPrivateKeyKey], err = ca.EncodePEM(c); err != nil {
			return nil, false, err
		}
	}
	return want, !maps.EqualFunc(want, have, bytes.Equal), nil
}

// servingDue reports whether the servers need another certificate: there is none that is usable, it
// ends soon, its names are others, or an older CA has issued it. A certificate from the future was
// issued by a server with a wrong clock.
func servingDue(have map[string][]byte, issuer *x509.Certificate, names []string, now time.Time) bool {
	pair, err := tls.X509KeyPair(have[corev1.TLSCertKey], have[corev1.TLSPrivateKeyKey])
	return err != nil || now.Before(pair.Leaf.NotBefore) || now.After(pair.Leaf.NotAfter.Add(-servingRenewal)) ||
		pair.Leaf.CheckSignatureFrom(issuer) != nil || !slices.Equal(pair.Leaf.DNSNames, names)
}
