// These tests prove that the certificates are always usable: whenever the servers look, over
// decades, and with clients whose bundle is old. They use no API server; manager_test.go does.
package certificates

import (
	"crypto/tls"
	"crypto/x509"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/slicecast/slicecast/internal/ca"
)

const serverName = "slicecast-server.slicecast-system.svc"

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

// TestDecades lets servers look at random times for decades. Clients with a bundle that is up to
// six days old, and with a clock that is up to an hour behind, accept each certificate.
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
	for now := begin; now.Before(begin.AddDate(30, 0, 0)); now = now.Add(time.Duration(1 + random.Int64N(int64(4*day)))) {
		before := maps.Clone(data)
		want, due, err := next(data, names, now)
		require.NoError(t, err)
		require.Equal(t, before, data, "next changed what it was given")
		require.Equal(t, due, string(want[caBundleKey])+string(want[corev1.TLSCertKey]) !=
			string(before[caBundleKey])+string(before[corev1.TLSCertKey]))
		data = want
		_, due, err = next(data, names, now)
		require.NoError(t, err)
		require.False(t, due, "a second look at once finds something due")
		history = append(history, published{now, data[caBundleKey]})
		for now.Sub(history[0].at) > 6*day {
			history = history[1:]
		}
		verify(t, data, history[0].bundle, now)
		verify(t, data, data[caBundleKey], now.Add(-clockSkew+time.Second))
		cas[string(data[caKeyKey])], certificates[string(data[corev1.TLSCertKey])] = true, true
	}
	// A CA lasts for four years before the next one is created; a certificate for two months.
	require.InDelta(t, 30/4, len(cas), 1)
	require.InDelta(t, 30*365/60, len(certificates), 10)
}

// TestAClockThatWasWrong covers a certificate that a server with a fast clock has issued.
func TestAClockThatWasWrong(t *testing.T) {
	now := time.Now()
	names := []string{serverName}
	data, _, err := next(nil, names, now)
	require.NoError(t, err)
	fast, due, err := next(data, names, now.Add(80*day))
	require.NoError(t, err)
	require.True(t, due)
	right, due, err := next(fast, names, now)
	require.NoError(t, err)
	require.True(t, due)
	verify(t, right, data[caBundleKey], now)
}

func TestNamesThatChange(t *testing.T) {
	now := time.Now()
	data, _, err := next(nil, []string{"old.example"}, now)
	require.NoError(t, err)
	data, due, err := next(data, []string{serverName, "other.example"}, now)
	require.NoError(t, err)
	require.True(t, due)
	verify(t, data, data[caBundleKey], now)
}

// TestForeignSecrets requires that the servers change no Secret that they did not create, and none
// that is damaged.
func TestForeignSecrets(t *testing.T) {
	now := time.Now()
	names := []string{serverName}
	own, _, err := next(nil, names, now)
	require.NoError(t, err)
	other, err := ca.New("other", ca.Validity{NotBefore: now, NotAfter: now.Add(10 * caLife)})
	require.NoError(t, err)
	otherCA, otherKey, err := other.PEM()
	require.NoError(t, err)
	with := func(key string, value []byte) map[string][]byte {
		data := maps.Clone(own)
		data[key] = value
		return data
	}
	for name, test := range map[string]struct {
		data map[string][]byte
		want string
	}{
		"brought along": {with(caKeyKey, nil), "it has a certificate but no ca.key"},
		"other key":     {with(caKeyKey, otherKey), "private key does not match"},
		"other CA":      {with(caBundleKey, otherCA), "private key does not match"},
		"torn key":      {with(caKeyKey, otherKey[:20]), "ca.crt and ca.key"},
		"torn bundle":   {with(caBundleKey, otherCA[:50]), "ca.crt: "},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := next(test.data, names, now)
			require.ErrorContains(t, err, test.want)
		})
	}
}
