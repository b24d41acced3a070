// This test proves that an agent that reaches no server programs its checkpoint and reports that it
// is old. The checkpoint is written by an earlier agent that followed a real server.
package app

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/source/file"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	serverapp "github.com/slicecast/slicecast/server/app"
)

// serveManifests runs a server for a directory of manifests, without TLS if files is nil. It
// returns the server's address, and a function that stops the server.
func serveManifests(t *testing.T, dir string, files *tlsfiles.Files) (address string, stop func()) {
	t.Helper()
	registry, logger := daemon.NewRegistry(), slog.New(slog.DiscardHandler)
	source, err := file.New(file.Options{Directory: dir, Log: logger, Metrics: registry})
	require.NoError(t, err)
	server, err := serverapp.New(serverapp.Config{
		Source: source, BindAddress: "127.0.0.1:0", TLS: files, DrainWindow: time.Millisecond, GracePeriod: time.Minute, Logger: logger, Registry: registry,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	return server.Addresses().GRPC.String(), func() {
		cancel()
		require.NoError(t, <-ended)
	}
}

// keptByAnAgent writes a manifest to dir and returns the path of the checkpoint of an agent that
// has programmed it. Its server has stopped, and had the address that is returned.
func keptByAnAgent(t *testing.T, dir string) (checkpoint, address string) {
	t.Helper()
	checkpoint = filepath.Join(t.TempDir(), "checkpoint")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "web.yaml"), fmt.Appendf(nil, manifest, 8080), 0o600))
	address, stopServer := serveManifests(t, dir, nil)
	t.Run("first", func(t *testing.T) { // the end of the subtest ends the agent
		out := start(t, "--servers="+address, "--insecure-plaintext", "--programmer=printer", "--checkpoint="+checkpoint)
		require.Eventually(t, func() bool { return strings.Contains(out.String(), "10.180.0.1:8080") }, 10*time.Second, 10*time.Millisecond)
	})
	stopServer()
	require.FileExists(t, checkpoint)
	return checkpoint, address
}

// TestCheckpointIsProgrammedWithoutServers asserts that an agent that reaches no server programs
// what the previous agent knew, and reports that this is old.
func TestCheckpointIsProgrammedWithoutServers(t *testing.T) {
	checkpoint, address := keptByAnAgent(t, t.TempDir())
	args := []string{"--servers=" + address, "--insecure-plaintext", "--programmer=printer", "--checkpoint=" + checkpoint}
	ca, err := testca.New()
	require.NoError(t, err)
	serving, err := ca.Server("127.0.0.1")
	require.NoError(t, err)
	files := t.TempDir()
	caFile, err := ca.WriteCA(files)
	require.NoError(t, err)
	cert, key, err := testca.Write(files, "metrics", serving)
	require.NoError(t, err)
	scraper, err := ca.Client("prometheus", "slicecast:observers")
	require.NoError(t, err)
	health, metrics := freeAddress(t), freeAddress(t)
	out := start(t, append(args, "--healthz-bind-address="+health, "--secure-metrics-bind-address="+metrics,
		"--metrics-cert-file="+cert, "--metrics-key-file="+key, "--metrics-client-ca-file="+caFile)...)
	require.Eventually(t, func() bool { return readyz(t, health) == http.StatusOK }, 30*time.Second, 10*time.Millisecond)
	require.Contains(t, out.String(), "10.180.0.1:8080")
	page, err := scrape(t, metrics, "", &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{scraper}})
	require.NoError(t, err)
	require.Contains(t, page, "slicecast_agent_stale 1")
	require.Contains(t, page, "slicecast_agent_connected 0")
}
