// These tests prove that the certificates are always usable: whenever the servers look, over
// decades, with clients whose bundle is old, after clocks were wrong, and after people edited the
// Secret. They use no API server; manager_test.go does.
package certificates

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/cert"

	"github.com/slicecast/slicecast/internal/ca"
)

const serverName = "slicecast-server.slicecast-system.svc"

// look returns the content that the Secret has after a look at a time, if all ConfigMaps can be
// written.
func look(data map[string][]byte, names []string, now time.Time) (want map[string][]byte, due bool, err error) {
	if want, due, err = next(data, names, now, true); err != nil {
		return nil, false, err
	}
	want, marked := markPublished(want, now)
	return want, due || marked, nil
}

// verify requires that clients accept the certificate if they trust a bundle, at a time.
func verify(t *testing.T, data map[string][]byte, bundle []byte, now time.Time) {
	t.Helper()
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(bundle))
	_, err = pair.Leaf.Verify(x509.VerifyOptions{DNSName: serverName, Roots: roots, CurrentTime: now})
	require.NoError(t, err, now)
}

// TestDecades lets servers look at random times for decades. Clients with a copy of the bundle that
// is up to 360 days old, and with a clock that is up to an hour behind, accept each certificate.
func TestDecades(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	names := []string{serverName}
	begin := time.Date(2026, 11, 25, 0, 0, 0, 0, time.UTC)
	var data map[string][]byte
	type published struct {
		at     time.Time
		bundle []byte
	}
	var history []published
	cas, certificates := map[string]bool{}, map[string]bool{}
	for now := begin; now.Before(begin.AddDate(16, 0, 0)); now = now.Add(time.Duration(1 + random.Int64N(int64(4*day)))) {
		before := maps.Clone(data)
		want, due, err := look(data, names, now)
		require.NoError(t, err)
		require.Equal(t, before, data, "look changed what it was given")
		require.Equal(t, due, !maps.EqualFunc(want, before, bytes.Equal))
		data = want
		_, due, err = look(data, names, now)
		require.NoError(t, err)
		require.False(t, due, "a second look at once finds something due")
		history = append(history, published{now, data[caBundleKey]})
		for now.Sub(history[0].at) > 360*day {
			history = history[1:]
		}
		verify(t, data, history[0].bundle, now)
		verify(t, data, data[caBundleKey], now.Add(-clockSkew+time.Second))
		cas[string(data[caKeyKey])], certificates[string(data[corev1.TLSCertKey])] = true, true
	}
	// A CA lasts for almost four years before the next one is created, and issues for a year more. A
	// certificate lasts for two months.
	require.InDelta(t, 2*16/4, len(cas), 2)
	require.InDelta(t, 16*365/60, len(certificates), 10)
}

// TestClocksThatJump lets servers look with clocks that are wrong by up to ten years, both ways.
// The first look with the right clock mends everything: clients that have its bundle accept the
// certificate, and from then on all is as if no clock had ever been wrong.
func TestClocksThatJump(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	names := []string{serverName}
	seen := func(data map[string][]byte, now time.Time) map[string][]byte {
		want, _, err := look(data, names, now)
		require.NoError(t, err)
		bundle, err := cert.ParseCertsPEM(want[caBundleKey])
		require.NoError(t, err)
		require.LessOrEqual(t, len(bundle), maxCAs)
		return want
	}
	for range 30 {
		now := time.Date(2026, 11, 25, 0, 0, 0, 0, time.UTC)
		data := seen(nil, now)
		for range random.IntN(2 * maxCAs) {
			now = now.Add(time.Duration(random.Int64N(int64(day))))
			wrong := time.Duration((random.Float64() - 0.5) * float64(20*365*day))
			data = seen(data, now.Add(wrong))
		}
		data = seen(data, now)
		verify(t, data, data[caBundleKey], now)
		_, due, err := look(data, names, now)
		require.NoError(t, err)
		require.False(t, due, "a second look at once finds something due")
		for range 30 {
			before := data[caBundleKey]
			now = now.Add(6 * day)
			data = seen(data, now)
			verify(t, data, before, now)
		}
	}
}

// TestACertificateFromTheFuture covers a certificate that a server with a fast clock has issued.
func TestACertificateFromTheFuture(t *testing.T) {
	now := time.Now()
	names := []string{serverName}
	data, _, err := look(nil, names, now)
	require.NoError(t, err)
	fast, due, err := look(data, names, now.Add(80*day))
	require.NoError(t, err)
	require.True(t, due)
	right, due, err := look(fast, names, now)
	require.NoError(t, err)
	require.True(t, due)
	verify(t, right, data[caBundleKey], now)
}

// TestServersThatWereAway covers servers, or an API server, that are away while a CA or a
// certificate becomes due or ends. Clients have the bundle of before if the CA has not ended.
func TestServersThatWereAway(t *testing.T) {
	names := []string{serverName}
	begin := time.Now()
	data, _, err := look(nil, names, begin)
	require.NoError(t, err)
	for _, away := range []time.Duration{
		servingLife - servingRenewal + day, servingLife + day, caLife - caRenewal + day, caLife + day, 2 * caLife,
	} {
		now := begin.Add(away)
		want, due, err := look(data, names, now)
		require.NoError(t, err)
		require.True(t, due)
		verify(t, want, want[caBundleKey], now)
		if away < caLife-caRenewal {
			verify(t, want, data[caBundleKey], now)
		}
	}

	// A certificate of the old CA is due when the new CA is a day old, and is of the old CA again.
	now := begin.Add(caLife - caRenewal - servingLife + day)
	before, _, err := look(data, names, now)
	require.NoError(t, err)
	for _, after := range []time.Duration{servingLife - day, 2 * day} {
		now = now.Add(after)
		data, _, err = look(before, names, now)
		require.NoError(t, err)
		verify(t, data, before[caBundleKey], now)
	}
}

// TestUnpublishedCAs lets servers look for years at ConfigMaps that cannot be written at times.
// A CA that is not published issues nothing while the other one can, and one that was published
// waits for its year.
func TestUnpublishedCAs(t *testing.T) {
	names := []string{serverName}
	for name, c := range map[string]struct {
		writable func(age time.Duration) bool // by the age of the new CA
		changes  time.Duration                // the age at which the new CA issues
	}{
		"always":               {func(time.Duration) bool { return true }, caCopies},
		"never":                {func(time.Duration) bool { return false }, caRenewal},
		"after 50 days":        {func(age time.Duration) bool { return age >= 50*day }, 50*day + caCopies},
		"late":                 {func(age time.Duration) bool { return age >= 350*day }, caRenewal - servingRenewal},
		"not when it is time":  {func(age time.Duration) bool { return age < 300*day || age > 380*day }, 381 * day},
		"while it is new":      {func(age time.Duration) bool { return age < 10*day }, caRenewal},
		"too late for copies":  {func(age time.Duration) bool { return age >= caRenewal-10*day }, caRenewal - 3*day},
		"never while it could": {func(age time.Duration) bool { return age >= caRenewal+day }, caRenewal},
	} {
		begin := time.Date(2026, 11, 25, 0, 0, 0, 0, time.UTC)
		data, _, err := look(nil, names, begin)
		require.NoError(t, err)
		first := data[caBundleKey]
		born := begin.Add(caLife - caRenewal)
		for now := begin; now.Before(begin.Add(caLife + 30*day)); now = now.Add(day) {
			writable := now.Before(born) || c.writable(now.Sub(born))
			data, _, err = next(data, names, now, writable)
			require.NoError(t, err)
			if writable {
				data, _ = markPublished(data, now)
			}
			pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
			require.NoError(t, err)
			bundle, err := cert.ParseCertsPEM(data[caBundleKey])
			require.NoError(t, err)
			changed := now.After(born) && signed(bundle[0], pair.Leaf)
			keys := bytes.Count(data[caKeyKey], []byte("BEGIN"))
			switch {
			case now.Before(born.Add(c.changes - day)):
				require.False(t, changed, "%s: the new CA issues after %v", name, now.Sub(born))
				verify(t, data, first, now)
				require.Equal(t, !now.Before(born), changeAt(data, now) > 0, name)
				require.Equal(t, !now.Before(born), keys == 2, name)
			case now.After(born.Add(c.changes + day)):
				require.True(t, changed, "%s: the new CA does not issue after %v", name, now.Sub(born))
				require.Zero(t, changeAt(data, now))
				require.Equal(t, 1, keys, "the old key can be misused")
			}
		}
	}
}

func TestNamesThatChange(t *testing.T) {
	now := time.Now()
	data, _, err := look(nil, []string{"old.example"}, now)
	require.NoError(t, err)
	data, due, err := look(data, []string{serverName, "other.example"}, now)
	require.NoError(t, err)
	require.True(t, due)
	verify(t, data, data[caBundleKey], now)
}

// edited returns the content of a Secret with another value for a key.
func edited(own map[string][]byte, key string, value []byte) map[string][]byte {
	data := maps.Clone(own)
	data[key] = value
	return data
}

// newPEM returns the certificate and the key of a CA in PEM.
func newPEM(t *testing.T, validity ca.Validity) (certificate, key []byte) {
	t.Helper()
	c, err := ca.New("other", validity)
	require.NoError(t, err)
	certificate, key, err = c.PEM()
	require.NoError(t, err)
	return certificate, key
}

// TestForeignSecrets requires that the servers change no Secret that they did not create, and none
// whose CAs they cannot read.
func TestForeignSecrets(t *testing.T) {
	now := time.Now()
	names := []string{serverName}
	own, _, err := look(nil, names, now)
	require.NoError(t, err)
	for name, test := range map[string]struct {
		data map[string][]byte
		want string
	}{
		"brought along": {edited(own, caKeyKey, nil), "it has a certificate but no ca.key"},
		"torn bundle":   {edited(own, caBundleKey, own[caBundleKey][:50]), "ca.crt: "},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := look(test.data, names, now)
			require.ErrorContains(t, err, test.want)
		})
	}
}

// TestEdits requires that whatever somebody does to the Secret is mended at once. No CA that is
// still listed is lost, and a certificate that clients still accept stays.
func TestEdits(t *testing.T) {
	now := time.Now()
	names := []string{serverName}
	own, _, err := look(nil, names, now)
	require.NoError(t, err)
	otherCA, otherKey := newPEM(t, ca.Validity{NotBefore: now, NotAfter: now.Add(10 * caLife)})
	endedCA, endedKey := newPEM(t, ca.Validity{NotBefore: now.Add(-caLife), NotAfter: now.Add(-day)})
	ended := edited(edited(own, caBundleKey, endedCA), caKeyKey, endedKey)
	for name, test := range map[string]struct {
		data  map[string][]byte
		stays bool // the certificate
	}{
		"other key":              {edited(own, caKeyKey, otherKey), true},
		"torn key":               {edited(own, caKeyKey, otherKey[:20]), true},
		"another CA behind":      {edited(own, caBundleKey, slices.Concat(own[caBundleKey], otherCA)), true},
		"another CA before":      {edited(own, caBundleKey, slices.Concat(otherCA, own[caBundleKey])), true},
		"an ended CA before":     {edited(own, caBundleKey, slices.Concat(endedCA, own[caBundleKey])), true},
		"an ended CA's key":      {edited(edited(own, caBundleKey, slices.Concat(endedCA, own[caBundleKey])), caKeyKey, endedKey), true},
		"a certificate of no CA": {edited(own, caBundleKey, slices.Concat(own[corev1.TLSCertKey], own[caBundleKey])), true},
		"something else":         {edited(own, "note", []byte("x")), true},
		"other CA":               {edited(own, caBundleKey, otherCA), false},
		"no CA":                  {edited(own, caBundleKey, nil), false},
		"an ended CA":            {ended, false},
		"torn certificate":       {edited(own, corev1.TLSCertKey, own[corev1.TLSCertKey][:50]), false},
		"another private key":    {edited(own, corev1.TLSPrivateKeyKey, otherKey), false},
		"nothing but keys":       {map[string][]byte{corev1.TLSCertKey: {}, corev1.TLSPrivateKeyKey: {}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			data, _, err := look(test.data, names, now)
			require.NoError(t, err)
			verify(t, data, data[caBundleKey], now)
			require.Equal(t, test.stays, bytes.Equal(own[corev1.TLSCertKey], data[corev1.TLSCertKey]))
			require.NotContains(t, string(data[caBundleKey]), string(endedCA))
			require.Equal(t, test.data["note"], data["note"])
			if bytes.Contains(test.data[caBundleKey], otherCA) {
				require.Contains(t, string(data[caBundleKey]), string(otherCA))
			}
			_, due, err := look(data, names, now)
			require.NoError(t, err)
			require.False(t, due)
			// The next certificate is accepted by clients with the bundle of today.
			later, _, err := look(data, names, now.Add(servingLife-servingRenewal+day))
			require.NoError(t, err)
			verify(t, later, data[caBundleKey], now.Add(servingLife-servingRenewal+day))
		})
	}
}
