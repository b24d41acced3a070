package certificates

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
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
	// publishedKey says since when the first CA is in all ConfigMaps; see published.
	publishedKey = "ca.published"
)

const (
	day = 24 * time.Hour

	caLife = 5 * 365 * day
	// caCopies is how long a new CA is published before it issues the servers' certificate, if an
	// older CA can issue meanwhile. Clients that do not follow the ConfigMap by themselves have this
	// long to be given the new bundle.
	caCopies = 365 * day
	// caSpread is the same if no older CA can issue any more. By then, every client that follows the
	// ConfigMap trusts the new CA; kubelets take a few minutes.
	caSpread = 7 * day
	// caRenewal is how long before the end of a CA the next one is created. The last certificate that
	// the CA issues has its whole life within the CA's.
	caRenewal = caCopies + servingLife

	servingLife    = 90 * day
	servingRenewal = 30 * day

	// clockSkew is how far the clock of a client may be behind.
	clockSkew = time.Hour

	// maxCAs bounds the bundle. More than two CAs are live only after clocks were wrong or somebody
	// added some.
	maxCAs = 8
)

// next returns the content that the Secret must have at a time, given the content that it has.
// inPlace says that all ConfigMaps have the bundle now. due reports whether the two contents
// differ.
//
// Invariants, at all times:
//
//  1. caBundleKey lists the CAs that have not ended, the newest first, and at most maxCAs. Nothing
//     but its end or maxCAs removes a CA. caKeyKey has the key of the first one, and of those
//     before it until the first one issues; the keys of CAs that issue no more are gone.
//  2. While clients accept the servers' certificate, a new CA issues the next one only once it has
//     been in all ConfigMaps for caCopies, and is there now. If no other CA can issue, caSpread is
//     enough. So clients verify the certificate with any bundle that is younger.
//  3. A certificate that no client accepts is replaced at once, and a CA that cannot issue now is
//     followed by another one. So whatever a wrong clock or an edit has left is mended by the next
//     look, and clients are back as soon as they have the bundle.
//  4. A Secret that cannot be understood is an error, and stays as it is.
func next(have map[string][]byte, names []string, now time.Time, inPlace bool) (want map[string][]byte, due bool, err error) {
	if len(have[corev1.TLSCertKey]) > 0 && len(have[caKeyKey]) == 0 {
		return nil, false, fmt.Errorf("it has a certificate but no %s, so the servers did not create it", caKeyKey)
	}
	live, err := liveCAs(have[caBundleKey], now)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", caBundleKey, err)
	}
	want = map[string][]byte{}
	maps.Copy(want, have)
	keys := have[caKeyKey]
	if len(live) == 0 || now.Before(live[0].NotBefore) || !now.Before(live[0].NotAfter.Add(-caRenewal)) || issuerOf(live[0], keys) == nil {
		first, err := ca.New("slicecast", ca.Validity{NotBefore: now.Add(-clockSkew), NotAfter: now.Add(caLife)})
		if err != nil {
			return nil, false, fmt.Errorf("create a CA: %w", err)
		}
		_, key, err := first.PEM()
		if err != nil {
			return nil, false, err
		}
		live, keys = slices.Insert(live, 0, first.Certificate()), slices.Concat(key, keys)
	}
	live = live[:min(len(live), maxCAs)]
	if want[caBundleKey], err = cert.EncodeCertificates(live...); err != nil {
		return nil, false, err
	}
	state := state{live: live, keys: keys, now: now}
	if since := published(have, live[0]); inPlace && !since.IsZero() {
		state.spread = min(now.Sub(since), now.Sub(live[0].NotBefore.Add(clockSkew)))
	}
	pair, broken := tls.X509KeyPair(have[corev1.TLSCertKey], have[corev1.TLSPrivateKeyKey])
	issuer := state.issuer(pair.Leaf)
	if broken != nil || !state.accepted(pair.Leaf, names) {
		if issuer == nil {
			issuer = issuerOf(live[0], keys)
		}
	} else if issuer != nil && !state.servingDue(pair.Leaf, issuer) {
		issuer = nil
	}
	if issuer != nil {
		c, err := issuer.Issue(ca.Serving(names...), ca.Validity{NotBefore: now.Add(-clockSkew), NotAfter: state.end(issuer)})
		if err != nil {
			return nil, false, err
		}
		if want[corev1.TLSCertKey], want[corev1.TLSPrivateKeyKey], err = ca.EncodePEM(c); err != nil {
			return nil, false, err
		}
		pair.Leaf = c.Leaf
	}
	if want[caKeyKey], err = state.keysInUse(pair.Leaf); err != nil {
		return nil, false, err
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

// includes reports whether a bundle has all certificates of another one.
func includes(bundle, other []byte) bool {
	have, _ := cert.ParseCertsPEM(bundle) // none if it is unusable
	want, err := cert.ParseCertsPEM(other)
	return err == nil && !slices.ContainsFunc(want, func(c *x509.Certificate) bool { return !slices.ContainsFunc(have, c.Equal) })
}

// issuerOf returns the CA of a certificate, or nil if none of the keys is its own.
func issuerOf(c *x509.Certificate, keys []byte) *ca.CA {
	first, err := cert.EncodeCertificates(c)
	if err != nil {
		return nil
	}
	for block, rest := pem.Decode(keys); block != nil; block, rest = pem.Decode(rest) {
		if issuer, err := ca.Parse(first, pem.EncodeToMemory(block)); err == nil {
			return issuer
		}
	}
	return nil
}

// published returns since when all ConfigMaps have had a CA; zero if that is not known.
func published(data map[string][]byte, c *x509.Certificate) time.Time {
	since, ok := bytes.CutSuffix(data[publishedKey], []byte(" "+fingerprint(c)))
	if !ok {
		return time.Time{}
	}
	at, err := time.Parse(time.RFC3339, string(since))
	if err != nil {
		return time.Time{}
	}
	return at
}

// markPublished returns the content of the Secret with the time at which all ConfigMaps were first
// seen to have its first CA. due reports whether that is new.
func markPublished(have map[string][]byte, now time.Time) (want map[string][]byte, due bool) {
	live, err := liveCAs(have[caBundleKey], now)
	if err != nil || len(live) == 0 {
		return have, false
	}
	if since := published(have, live[0]); !since.IsZero() && !since.After(now.Add(clockSkew)) {
		return have, false
	}
	want = maps.Clone(have)
	want[publishedKey] = []byte(now.UTC().Format(time.RFC3339) + " " + fingerprint(live[0]))
	return want, true
}

// changeAt returns when the first CA is to issue the certificate in place of another, in seconds
// since 1970; 0 if it has issued it. A CA that is not published issues when the other one ends.
func changeAt(data map[string][]byte, now time.Time) float64 {
	live, err := liveCAs(data[caBundleKey], now)
	pair, broken := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil || broken != nil || len(live) < 2 || signed(live[0], pair.Leaf) {
		return 0
	}
	if since := published(data, live[0]); !since.IsZero() {
		return float64(since.Add(caCopies).Unix())
	}
	for _, c := range live[1:] {
		if signed(c, pair.Leaf) {
			return float64(c.NotAfter.Unix())
		}
	}
	return 0
}

// fingerprint identifies a CA.
func fingerprint(c *x509.Certificate) string { return fmt.Sprintf("%x", sha256.Sum256(c.Raw)) }

// state is what decides which CA issues.
type state struct {
	live   []*x509.Certificate // the newest first, and at least one
	keys   []byte              // in PEM
	now    time.Time
	spread time.Duration // how long the first one has been in all ConfigMaps; 0 if it is not there now
}

// issuer returns the CA that issues the certificate after leaf, which may be nil. It returns nil if
// no CA can issue one that clients accept.
func (s *state) issuer(leaf *x509.Certificate) *ca.CA {
	first := issuerOf(s.live[0], s.keys)
	if len(s.live) == 1 || s.spread >= caCopies {
		return first
	}
	// That of the present certificate is best known, and then the oldest.
	for _, c := range slices.Backward(append(slices.Clone(s.live[1:]), s.issuerOfLeaf(leaf)...)) {
		if s.now.Before(c.NotBefore) || c.NotAfter.Sub(s.now) < servingRenewal {
			continue
		}
		if issuer := issuerOf(c, s.keys); issuer != nil {
			return issuer
		}
	}
	if s.spread >= caSpread || signed(s.live[0], leaf) {
		return first
	}
	return nil
}

// issuerOfLeaf returns the CA but the first one that has issued leaf, if there is one.
func (s *state) issuerOfLeaf(leaf *x509.Certificate) []*x509.Certificate {
	i := slices.IndexFunc(s.live[1:], func(c *x509.Certificate) bool { return signed(c, leaf) })
	if i < 0 {
		return nil
	}
	return s.live[1+i : 2+i]
}

// end returns when a certificate ends that a CA issues now.
func (s *state) end(issuer *ca.CA) time.Time {
	end := s.now.Add(servingLife)
	if last := issuer.Certificate().NotAfter; last.Before(end) {
		return last
	}
	return end
}

// accepted reports whether clients with the whole bundle accept a certificate for the names.
func (s *state) accepted(leaf *x509.Certificate, names []string) bool {
	roots := x509.NewCertPool()
	for _, c := range s.live {
		roots.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: s.now})
	return err == nil && slices.Equal(leaf.DNSNames, names)
}

// servingDue reports whether an issuer must replace a certificate that clients accept: it soon
// ends, and the next one lasts longer, or the first CA issues now, and another one has issued it.
func (s *state) servingDue(leaf *x509.Certificate, issuer *ca.CA) bool {
	endsSoon := s.now.After(leaf.NotAfter.Add(-servingRenewal)) && s.end(issuer).After(leaf.NotAfter.Add(day))
	return endsSoon || issuer.Certificate().Equal(s.live[0]) && !signed(s.live[0], leaf)
}

// keysInUse returns the key of the first CA, and those of older ones unless the first one has
// issued leaf.
func (s *state) keysInUse(leaf *x509.Certificate) (out []byte, err error) {
	for i, c := range s.live {
		issuer := issuerOf(c, s.keys)
		if issuer == nil || i > 0 && signed(s.live[0], leaf) {
			continue
		}
		_, key, err := issuer.PEM()
		if err != nil {
			return nil, err
		}
		out = append(out, key...)
	}
	return out, nil
}

// signed reports whether a CA has issued a certificate, which may be nil.
func signed(by, leaf *x509.Certificate) bool {
	return leaf != nil && leaf.CheckSignatureFrom(by) == nil
}
