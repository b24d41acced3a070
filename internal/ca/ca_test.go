// These tests prove that clients accept what a CA issues, also after the CA was stored as PEM, and
// that nothing else passes for a CA.
package ca

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	now   = time.Now()
	today = Validity{NotBefore: now.Add(-time.Hour), NotAfter: now.Add(23 * time.Hour)}
)

func TestIssue(t *testing.T) {
	created, err := New("test", today)
	require.NoError(t, err)
	cert, key, err := created.PEM()
	require.NoError(t, err)
	stored, err := Parse(cert, key)
	require.NoError(t, err)
	require.Equal(t, created.Certificate().Raw, stored.Certificate().Raw)
	roots := x509.NewCertPool()
	roots.AddCert(stored.Certificate())
	serials := make(map[string]bool)
	for _, c := range []*CA{created, stored} {
		issued, err := c.Issue(Serving("server.test", "192.0.2.1"), today)
		require.NoError(t, err)
		serials[issued.Leaf.SerialNumber.String()] = true
		verify := func(name string, at time.Time) error {
			_, err := issued.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: at})
			return err
		}
		require.NoError(t, verify("server.test", now))
		require.NoError(t, verify("192.0.2.1", now))
		require.ErrorContains(t, verify("other.test", now), "other.test")
		require.ErrorContains(t, verify("server.test", now.Add(24*time.Hour)), "expired")
		require.ErrorContains(t, verify("server.test", now.Add(-2*time.Hour)), "not yet valid")
	}
	require.Len(t, serials, 2)
}

func TestParse(t *testing.T) {
	one, err := New("one", today)
	require.NoError(t, err)
	cert, _, err := one.PEM()
	require.NoError(t, err)
	other, err := New("other", today)
	require.NoError(t, err)
	_, otherKey, err := other.PEM()
	require.NoError(t, err)
	_, err = Parse(cert, otherKey)
	require.ErrorContains(t, err, "private key does not match")
	_, err = Parse(cert, nil)
	require.Error(t, err)

	issued, err := one.Issue(Serving("server.test"), today)
	require.NoError(t, err)
	cert, key, err := EncodePEM(issued)
	require.NoError(t, err)
	_, err = Parse(cert, key)
	require.ErrorContains(t, err, "not that of a CA")
}
