// These tests prove that a run can observe a real server that it did not start, and that a server
// that does not start is an error.
package app

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/ca"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/target"
)

// TestRunningServer observes a server whose state changes all the time, even while nodes are
// compared with it.
func TestRunningServer(t *testing.T) {
	files := writeAuthority(t)
	authority, err := testca.Load(files.certificate, files.key)
	require.NoError(t, err)
	address, err := target.Addresses(1)
	require.NoError(t, err)
	setup := target.Setup{
		Cluster:  &generate.Config{Nodes: 4, Services: []generate.Group{{Count: 10, Least: 10, Most: 10}}, Change: generate.Flip},
		ClientCA: authority.PEM(), Address: address[0],
	}
	serving, err := authority.Server("127.0.0.1")
	require.NoError(t, err)
	setup.Certificate, setup.PrivateKey, err = ca.EncodePEM(serving)
	require.NoError(t, err)
	server, err := child.Start(t.Context(), "server", os.Stderr, []string{engine.ServeCommand}, (*target.Servant).Setup, setup)
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	_, err = child.Call(t.Context(), server, (*target.Servant).Play, generate.Plan{
		Kind: generate.Flip, Schedule: generate.Schedule{Start: time.Now(), Count: 100_000, Rate: 50},
	})
	require.NoError(t, err)

	r := run(t, report.Slicecast, "--nodes=4", "--duration=1s", "--server="+setup.Address, "--server-pid="+strconv.Itoa(server.PID()),
		"--ca-file="+files.certificate, "--node-ca-cert-file="+files.certificate, "--node-ca-key-file="+files.key)
	first := r.Repeats[0]
	require.Equal(t, report.Check{Nodes: 4, Shards: 64, OK: true}, first.Check)
	require.Equal(t, 10, first.State.Services)
	changes := first.Phases[1]
	require.Greater(t, changes.Updates, int64(4))
	require.Greater(t, changes.Latency.Count, int64(4))
	require.Positive(t, first.ServerPeakBytes)
	require.Zero(t, changes.Changes, "the number of changes is unknown")
	require.Contains(t, r.Notes[0], "last-change-trigger-time")
	require.Equal(t, daemon.Version(), r.Versions.Server, "the version that the server reports")
	require.Contains(t, r.PeerText(), daemon.Version()+" at ")

	// A client that may act as any node needs only one certificate.
	operator, err := authority.Client("operator", "system:masters")
	require.NoError(t, err)
	certificate, key, err := testca.Write(t.TempDir(), "operator", operator)
	require.NoError(t, err)
	r = run(t, report.Slicecast, "--nodes=4", "--duration=100ms", "--server="+setup.Address,
		"--ca-file="+files.certificate, "--client-cert-file="+certificate, "--client-key-file="+key)
	require.Equal(t, 4, r.Repeats[0].Check.Nodes)
}

type authorityFiles struct{ certificate, key string }

// writeAuthority creates a CA and writes its certificate and key to files.
func writeAuthority(t *testing.T) authorityFiles {
	authority, err := testca.New()
	require.NoError(t, err)
	key, err := authority.KeyPEM()
	require.NoError(t, err)
	dir := t.TempDir()
	f := authorityFiles{filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")}
	require.NoError(t, os.WriteFile(f.certificate, authority.PEM(), 0o600))
	require.NoError(t, os.WriteFile(f.key, key, 0o600))
	return f
}

func TestServerThatDoesNotStart(t *testing.T) {
	_, err := child.Start(t.Context(), "server", os.Stderr, []string{engine.ServeCommand}, (*target.Servant).Setup,
		target.Setup{Cluster: &generate.Config{}})
	require.ErrorContains(t, err, "server: ")
}
