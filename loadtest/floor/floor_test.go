// These tests prove that the plain TLS server, which is the floor of the figures, delivers every
// message to every connection, and that its errors are reported.
package floor

import (
	"context"
	"crypto/tls"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/loadtest/generate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t *testing.T) (*Server, *testca.CA) {
	ca, err := testca.New()
	require.NoError(t, err)
	certificate, err := ca.Server("127.0.0.1")
	require.NoError(t, err)
	s, err := Listen(&tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{certificate}})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s, ca
}

func configs(ca *testca.CA, n int) []*tls.Config {
	out := make([]*tls.Config, n)
	for i := range out {
		out[i] = &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: ca.Pool(), ServerName: "127.0.0.1"}
	}
	return out
}

func TestEveryConnectionGetsEveryMessage(t *testing.T) {
	s, ca := listen(t)
	clients, err := Dial(t.Context(), s.Address(), configs(ca, 20), 4)
	require.NoError(t, err)
	defer clients.Close()
	handshakes := clients.Received()

	lag, err := s.Write(t.Context(), Writes{Size: 100, Schedule: generate.Schedule{Start: time.Now(), Count: 5, Rate: 1000}})
	require.NoError(t, err)
	require.GreaterOrEqual(t, lag.Max, lag.P99)
	require.NoError(t, clients.Await(t.Context(), 500))
	require.EqualValues(t, 20*5*(100+22), clients.Received()-handshakes, "the header, type and tag of a record are 22 bytes")

	_, err = s.Write(t.Context(), Writes{Size: 300_000, AtATime: 20, Schedule: generate.Schedule{Start: time.Now(), Count: 1, Rate: 1}})
	require.NoError(t, err)
	require.NoError(t, clients.Await(t.Context(), 300_500))
}

func TestErrors(t *testing.T) {
	s, ca := listen(t)
	other, err := testca.New()
	require.NoError(t, err)
	_, err = Dial(t.Context(), s.Address(), configs(other, 2), 2)
	require.ErrorContains(t, err, "raw connection ")

	clients, err := Dial(t.Context(), s.Address(), configs(ca, 2), 2)
	require.NoError(t, err)
	defer clients.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, clients.Await(ctx, 1), "0 of 2 bytes")
	_, err = s.Write(ctx, Writes{Size: 1, Schedule: generate.Schedule{Start: time.Now(), Count: 1, Rate: 1}})
	require.ErrorIs(t, err, context.Canceled)
}
