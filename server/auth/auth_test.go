package auth

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/auth/authtest"
)

// fixture is a gRPC server on loopback that lets in whom an Auth knows.
type fixture struct {
	t        *testing.T
	ca       *authtest.CA
	files    TLSFiles
	registry *prometheus.Registry
	logs     *syncBuffer
	auth     *Auth
	address  string
}

// syncBuffer is a log that can be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func newFixture(t *testing.T, tokens *TokenReviewer) *fixture {
	f := &fixture{t: t, ca: authtest.NewCA(t), registry: prometheus.NewRegistry(), logs: &syncBuffer{}}
	f.files.Certificate, f.files.PrivateKey = f.ca.Server()
	f.files.ClientCA = f.ca.File
	logger := slog.New(slog.NewTextHandler(f.logs, nil))
	f.auth = New(Options{Tokens: tokens, Logger: logger, Registerer: f.registry})
	certificates, err := LoadCertificates(f.files, logger)
	require.NoError(t, err)

	options := append(ServerOptions(f.auth.Credentials), grpc.Creds(credentials.NewTLS(certificates.Config("h2"))))
	server := grpc.NewServer(options...)
	pb.RegisterDistributionServiceServer(server, &distribution{auth: f.auth})
	healthpb.RegisterHealthServer(server, health.NewServer())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	f.address = listener.Addr().String()
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-served)
	})
	return f
}

// distribution answers a hello of a caller that may be that node with a welcome.
type distribution struct {
	pb.UnimplementedDistributionServiceServer
	auth *Auth
}

func (d *distribution) Stream(g pb.DistributionService_StreamServer) error {
	request, err := g.Recv()
	if err != nil {
		return err
	}
	if err := d.auth.Authorize(g.Context(), request.GetHello().GetNodeName()); err != nil {
		return err
	}
	return g.Send(&pb.StreamResponse{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{}}})
}

func (f *fixture) dial(config *tls.Config) *grpc.ClientConn {
	f.t.Helper()
	conn, err := grpc.NewClient(f.address, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, conn.Close()) })
	return conn
}

// hello opens a stream as a node and returns the error it ends with; nil if the node is welcome.
func (f *fixture) hello(conn *grpc.ClientConn, token, node string) error {
	f.t.Helper()
	ctx := f.t.Context()
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	stream, err := pb.NewDistributionServiceClient(conn).Stream(ctx)
	if err != nil { // the connection failed
		return err
	}
	err = stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{NodeName: node}}})
	if !errors.Is(err, io.EOF) { // the server was faster; Recv tells what it said
		require.NoError(f.t, err)
	}
	if _, err = stream.Recv(); err != nil {
		return err
	}
	_, err = stream.Recv()
	require.ErrorIs(f.t, err, io.EOF)
	return nil
}

func (f *fixture) refused(why reason) float64 {
	return testutil.ToFloat64(f.auth.refusals.count.WithLabelValues(string(why)))
}

func TestClientCertificates(t *testing.T) {
	f := newFixture(t, nil)
	for _, test := range []struct {
		name        string
		certificate []tls.Certificate
		node        string
		want        codes.Code
		reason      reason
		message     string
	}{
		{"a node is itself", []tls.Certificate{f.ca.Node("a")}, "a", codes.OK, "", ""},
		{"a node is no other", []tls.Certificate{f.ca.Node("a")}, "b", codes.PermissionDenied, reasonOtherNode, `is node "a", not "b"`},
		{"a node is no observer", []tls.Certificate{f.ca.Node("a")}, "", codes.PermissionDenied, reasonObserver, "may not observe"},
		{"an operator is any node", []tls.Certificate{f.ca.Operator()}, "b", codes.OK, "", ""},
		{"an operator observes", []tls.Certificate{f.ca.Operator()}, "", codes.OK, "", ""},
		{"a user is nobody", []tls.Certificate{f.ca.Client("jane", "dev")}, "", codes.PermissionDenied, reasonCertificate, "jane"},
		{"a node's name needs its group", []tls.Certificate{f.ca.Client("system:node:a", "dev")}, "a",
			codes.PermissionDenied, reasonCertificate, "system:nodes"},
		{"a node needs a name", []tls.Certificate{f.ca.Client("system:node:", "system:nodes")}, "",
			codes.PermissionDenied, reasonCertificate, "neither"},
		{"without one", nil, "a", codes.Unauthenticated, reasonNoCredentials, "client certificate"},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := 0.0
			if test.reason != "" {
				before = f.refused(test.reason)
			}
			err := f.hello(f.dial(f.ca.ClientTLS(test.certificate...)), "", test.node)
			require.Equal(t, test.want, status.Code(err), "%v", err)
			require.Contains(t, status.Convert(err).Message(), test.message)
			if test.reason != "" {
				require.Equal(t, before+1, f.refused(test.reason))
			}
		})
	}
}

func TestOtherServicesNeedCredentialsToo(t *testing.T) {
	f := newFixture(t, nil)
	check := func(conn *grpc.ClientConn) codes.Code {
		_, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
		return status.Code(err)
	}
	require.Equal(t, codes.Unauthenticated, check(f.dial(f.ca.ClientTLS())))
	require.Equal(t, codes.OK, check(f.dial(f.ca.ClientTLS(f.ca.Node("a")))))
}

func TestCertificateOfAnotherCAFailsTheHandshake(t *testing.T) {
	f := newFixture(t, nil)
	stranger := authtest.NewCA(t).Operator()
	config := f.ca.ClientTLS()
	// A client sends no certificate that the server's list of CAs does not ask for, unless it is made to.
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &stranger, nil }
	require.Equal(t, codes.Unavailable, status.Code(f.hello(f.dial(config), "", "a")))
}

func TestRefusalsAreLoggedOnceForAWhile(t *testing.T) {
	f := newFixture(t, nil)
	for range 5 {
		require.Equal(t, codes.Unauthenticated, status.Code(f.hello(f.dial(f.ca.ClientTLS()), "", "a")))
	}
	require.Equal(t, 5.0, f.refused(reasonNoCredentials))
	require.Equal(t, 1, strings.Count(f.logs.String(), "Request refused"), f.logs)
	require.Contains(t, f.logs.String(), "peer=127.0.0.1:")
}

func TestReload(t *testing.T) {
	f := newFixture(t, nil)
	old := f.ca
	require.NoError(t, f.hello(f.dial(old.ClientTLS(old.Node("a"))), "", "a"))

	// Half of a replacement: the key does not match yet, and the old pair stays in use.
	next := authtest.NewCA(t)
	cert, key := next.Server()
	f.copy(cert, f.files.Certificate)
	require.NoError(t, f.hello(f.dial(old.ClientTLS(old.Node("a"))), "", "a"))
	require.Contains(t, f.logs.String(), "TLS files can't be used")

	f.copy(key, f.files.PrivateKey)
	f.copy(next.File, f.files.ClientCA)
	require.NoError(t, f.hello(f.dial(next.ClientTLS(next.Node("a"))), "", "a"))
	mixed := next.ClientTLS()
	withdrawn := old.Node("a")
	mixed.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &withdrawn, nil }
	require.Equal(t, codes.Unavailable, status.Code(f.hello(f.dial(mixed), "", "a")), "the old CA is no longer trusted")
	require.Contains(t, f.logs.String(), "TLS files have changed")
}

func (f *fixture) copy(from, to string) {
	f.t.Helper()
	b, err := os.ReadFile(from)
	require.NoError(f.t, err)
	require.NoError(f.t, os.WriteFile(to, b, 0o600))
}

func TestLoadCertificatesSaysWhichFileIsBad(t *testing.T) {
	ca := authtest.NewCA(t)
	cert, key := ca.Server()
	_, otherKey := ca.Server()
	for _, test := range []struct {
		files TLSFiles
		want  string
	}{
		{TLSFiles{Certificate: "/nowhere", PrivateKey: key}, "/nowhere"},
		{TLSFiles{Certificate: cert, PrivateKey: otherKey}, "does not match"},
		{TLSFiles{Certificate: cert, PrivateKey: key, ClientCA: key}, "holds no PEM certificate"},
	} {
		_, err := LoadCertificates(test.files, slog.Default())
		require.ErrorContains(t, err, test.want)
	}
}

func TestObserversOverHTTP(t *testing.T) {
	f := newFixture(t, nil)
	certificates, err := LoadCertificates(f.files, slog.Default())
	require.NoError(t, err)
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "page") })
	server := httptest.NewUnstartedServer(f.auth.Observers(page))
	server.Listener = tls.NewListener(server.Listener, certificates.Config("http/1.1"))
	server.Start()
	defer server.Close()
	get := func(certificates ...tls.Certificate) int {
		transport := &http.Transport{TLSClientConfig: f.ca.ClientTLS(certificates...), DisableKeepAlives: true}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+server.Listener.Addr().String(), nil)
		require.NoError(t, err)
		response, err := transport.RoundTrip(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	require.Equal(t, http.StatusUnauthorized, get())
	require.Equal(t, http.StatusForbidden, get(f.ca.Node("a")))
	require.Equal(t, http.StatusOK, get(f.ca.Operator()))
}

func TestOperatorNeedsNoCredentials(t *testing.T) {
	i, err := Operator("debug socket")(t.Context())
	require.NoError(t, err)
	a := New(Options{Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()})
	for _, node := range []string{"", "a"} {
		require.NoError(t, a.Authorize(withIdentity(t.Context(), i), node))
	}
	require.Equal(t, codes.Unauthenticated, status.Code(a.Authorize(context.Background(), "a")))
}
