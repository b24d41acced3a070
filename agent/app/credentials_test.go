// This test proves that an agent accepts exactly the servers whose certificate has the right name
// and CA, and that it reads the CA file again for each connection. Real TLS servers on loopback
// present good and bad certificates.
package app

import (
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/testca"
)

// serveHealth serves gRPC health checks on loopback, with a certificate for this name, and returns
// its address.
func serveHealth(t *testing.T, ca *testca.CA, name string) string {
	t.Helper()
	certificate, err := ca.Server(name)
	require.NoError(t, err)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{certificate}, ClientCAs: ca.Pool(), ClientAuth: tls.RequireAndVerifyClientCert,
		MinVersion: tls.VersionTLS13,
	})))
	healthpb.RegisterHealthServer(server, health.NewServer())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-served)
	})
	return listener.Addr().String()
}

// TestServersAreVerifiedByNameAndCA asserts that --server-name and --ca-file decide which servers
// are accepted, and that the CA file is read again for each connection.
func TestServersAreVerifiedByNameAndCA(t *testing.T) {
	const name = "slicecast-server.test"
	dir := t.TempDir()
	ours, err := testca.New()
	require.NoError(t, err)
	others, err := testca.New()
	require.NoError(t, err)
	caFile, err := ours.WriteCA(dir)
	require.NoError(t, err)
	client, err := ours.Node("node-1")
	require.NoError(t, err)
	cert, key, err := testca.Write(dir, "client", client)
	require.NoError(t, err)
	address := serveHealth(t, ours, name)
	options := func(serverName string) []grpc.DialOption {
		o := parse(t, "--servers="+address, "--ca-file="+caFile, "--server-name="+serverName,
			"--client-cert-file="+cert, "--client-key-file="+key)
		dial := o.Credentials.DialOptions(nil, slog.New(slog.DiscardHandler))
		if serverName != "" { // the client does the same
			dial = append(dial, grpc.WithAuthority(serverName))
		}
		return dial
	}
	check := func(dial []grpc.DialOption) error {
		conn, err := grpc.NewClient(address, dial...)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
		return err
	}
	good := options(name)
	require.NoError(t, check(good))
	require.ErrorContains(t, check(options("")), "127.0.0.1", "the certificate has no address in it")
	require.ErrorContains(t, check(options("other.test")), "not other.test")

	require.NoError(t, os.WriteFile(caFile, others.PEM(), 0o600))
	err = check(good)
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.ErrorContains(t, err, "unknown authority")
	require.NoError(t, os.WriteFile(caFile, ours.PEM(), 0o600))
	require.NoError(t, check(good))
}
