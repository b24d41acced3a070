// These tests prove who may call what: by certificate, by method and by kind of client, over real
// TLS. They also prove that refusals are counted and logged, and that replaced files take effect.
package auth

import (
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
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	channelzpb "google.golang.org/grpc/channelz/grpc_channelz_v1"
	channelz "google.golang.org/grpc/channelz/service"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/auth/authtest"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// fixture is a gRPC server on loopback that an Auth guards.
type fixture struct {
	t        *testing.T
	ca       *authtest.CA
	files    tlsfiles.Files
	registry *prometheus.Registry
	logs     *logtest.Buffer
	auth     *Auth
	address  string
}

func newFixture(t *testing.T, tokens *tokenReviewer) *fixture {
	f := &fixture{t: t, ca: authtest.NewCA(t), registry: prometheus.NewRegistry(), logs: &logtest.Buffer{}}
	f.files.Certificate, f.files.PrivateKey = f.ca.Server()
	f.files.CA = f.ca.File
	logger := slog.New(slog.NewTextHandler(f.logs, nil))
	f.auth = New(Options{Program: "server", TokenFlags: "--flags-of-tokens", Logger: logger, Registerer: f.registry})
	f.auth.tokens = tokens
	certificates, err := tlsfiles.Follow(f.files, logger)
	require.NoError(t, err)

	creds := credentials.NewTLS(certificates.Server(true, "h2"))
	options := append(f.auth.ServerOptions(f.auth.Credentials), grpc.Creds(creds))
	server := grpc.NewServer(options...)
	pb.RegisterDistributionServiceServer(server, &distribution{auth: f.auth})
	healthpb.RegisterHealthServer(server, health.NewServer())
	reflection.Register(server)
	channelz.RegisterChannelzServiceToServer(server)
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

// distribution answers a Hello with a Welcome if the caller is authorized for it.
type distribution struct {
	pb.UnimplementedDistributionServiceServer
	auth *Auth
}

func (d *distribution) Stream(g pb.DistributionService_StreamServer) error {
	request, err := g.Recv()
	if err != nil {
		return err
	}
	if _, _, err := d.auth.Authorize(g.Context(), request.GetHello().GetKind(), request.GetHello().GetNodeName()); err != nil {
		return err
	}
	return g.Send(&pb.StreamResponse{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{}}})
}

func (f *fixture) dial(config *tls.Config, options ...grpc.DialOption) *grpc.ClientConn {
	f.t.Helper()
	conn, err := grpc.NewClient(f.address, append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))...)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, conn.Close()) })
	return conn
}

// hello opens a stream as a node's agent, or as an observer if node is empty. It returns the error
// that ends the stream, or nil if the answer is a Welcome.
func (f *fixture) hello(conn *grpc.ClientConn, token, node string) error {
	f.t.Helper()
	if node == "" {
		return f.helloAs(conn, token, pb.ClientKind_CLIENT_KIND_OBSERVER, "")
	}
	return f.helloAs(conn, token, pb.ClientKind_CLIENT_KIND_AGENT, node)
}

func (f *fixture) helloAs(conn *grpc.ClientConn, token string, kind pb.ClientKind, node string) error {
	f.t.Helper()
	ctx := f.t.Context()
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	stream, err := pb.NewDistributionServiceClient(conn).Stream(ctx)
	if err != nil { // the connection failed
		return err
	}
	err = stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: &pb.Hello{Kind: kind, NodeName: node}}})
	if !errors.Is(err, io.EOF) { // the server has ended the stream already; Recv returns its status
		require.NoError(f.t, err)
	}
	if _, err = stream.Recv(); err != nil {
		return err
	}
	_, err = stream.Recv()
	require.ErrorIs(f.t, err, io.EOF)
	return nil
}

func (f *fixture) refused(why string) float64 {
	return testutil.ToFloat64(f.auth.refusals.Counts.WithLabelValues(why))
}

func TestClientCertificates(t *testing.T) {
	f := newFixture(t, nil)
	for _, test := range []struct {
		name        string
		certificate []tls.Certificate
		node        string
		want        codes.Code
		reason      string
		message     string
	}{
		{"a node is itself", []tls.Certificate{f.ca.Node("a")}, "a", codes.OK, "", ""},
		{"a node is no other", []tls.Certificate{f.ca.Node("a")}, "b", codes.PermissionDenied, reasonOtherNode, `is node "a" and cannot be the agent of node "b"`},
		{"a node is no observer", []tls.Certificate{f.ca.Node("a")}, "", codes.PermissionDenied, reasonObserver, "not allowed to observe"},
		{"a relay is not a node", []tls.Certificate{f.ca.Relay("r")}, "r", codes.PermissionDenied, reasonOtherNode, "is not a node"},
		{"a relay is no observer", []tls.Certificate{f.ca.Relay("r")}, "", codes.PermissionDenied, reasonObserver, "slicecast:observers"},
		{"an observer observes", []tls.Certificate{f.ca.Observer()}, "", codes.OK, "", ""},
		{"an observer is not a node", []tls.Certificate{f.ca.Observer()}, "observer", codes.PermissionDenied, reasonOtherNode, "is not a node"},
		{"roles add up", []tls.Certificate{f.ca.Client("system:node:a", "system:nodes", "slicecast:observers")}, "", codes.OK, "", ""},
		{"a relay needs a name", []tls.Certificate{f.ca.Client("", "slicecast:relays")}, "",
			codes.PermissionDenied, reasonCertificate, "has no role"},
		{"an operator is any node", []tls.Certificate{f.ca.Operator()}, "b", codes.OK, "", ""},
		{"an operator observes", []tls.Certificate{f.ca.Operator()}, "", codes.OK, "", ""},
		{"a user is nobody", []tls.Certificate{f.ca.Client("jane", "dev")}, "", codes.PermissionDenied, reasonCertificate, "jane"},
		{"a node's name needs its group", []tls.Certificate{f.ca.Client("system:node:a", "dev")}, "a",
			codes.PermissionDenied, reasonCertificate, "system:nodes"},
		{"a node needs a name", []tls.Certificate{f.ca.Client("system:node:", "system:nodes")}, "",
			codes.PermissionDenied, reasonCertificate, "has no role"},
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

func TestMethods(t *testing.T) {
	f := newFixture(t, nil)
	calls := map[string]func(*grpc.ClientConn) error{
		"health": func(c *grpc.ClientConn) error {
			_, err := healthpb.NewHealthClient(c).Check(t.Context(), &healthpb.HealthCheckRequest{})
			return err
		},
		"health, stream": func(c *grpc.ClientConn) error {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s, err := healthpb.NewHealthClient(c).Watch(ctx, &healthpb.HealthCheckRequest{})
			require.NoError(t, err)
			_, err = s.Recv()
			return err
		},
		"channelz": func(c *grpc.ClientConn) error {
			_, err := channelzpb.NewChannelzClient(c).GetServers(t.Context(), &channelzpb.GetServersRequest{})
			return err
		},
		"reflection": func(c *grpc.ClientConn) error {
			s, err := reflectionpb.NewServerReflectionClient(c).ServerReflectionInfo(t.Context())
			require.NoError(t, err)
			require.NoError(t, s.CloseSend())
			if _, err = s.Recv(); errors.Is(err, io.EOF) {
				return nil
			}
			return err
		},
	}
	for _, test := range []struct {
		who            string
		certificate    []tls.Certificate
		health, others codes.Code
	}{
		{"nobody", nil, codes.Unauthenticated, codes.Unauthenticated},
		{"a node", []tls.Certificate{f.ca.Node("a")}, codes.OK, codes.PermissionDenied},
		{"a relay", []tls.Certificate{f.ca.Relay("r")}, codes.OK, codes.PermissionDenied},
		{"an observer", []tls.Certificate{f.ca.Observer()}, codes.OK, codes.OK},
		{"an operator", []tls.Certificate{f.ca.Operator()}, codes.OK, codes.OK},
	} {
		conn := f.dial(f.ca.ClientTLS(test.certificate...))
		for name, call := range calls {
			want := test.others
			if strings.HasPrefix(name, "health") {
				want = test.health
			}
			require.Equal(t, want, status.Code(call(conn)), "%s: %s", test.who, name)
		}
	}
}

func TestKindsOfClients(t *testing.T) {
	f := newFixture(t, nil)
	const (
		unspecified = pb.ClientKind_CLIENT_KIND_UNSPECIFIED
		observer    = pb.ClientKind_CLIENT_KIND_OBSERVER
		relay       = pb.ClientKind_CLIENT_KIND_RELAY
		unknown     = pb.ClientKind(99)
	)
	for _, test := range []struct {
		name        string
		certificate tls.Certificate
		kind        pb.ClientKind
		node        string
		reason      string // an empty reason means that the caller is welcome
	}{
		{"a relay", f.ca.Relay("r"), relay, "", ""},
		{"a node as a relay", f.ca.Node("a"), relay, "", reasonRelay},
		{"an observer as a relay", f.ca.Observer(), relay, "", reasonRelay},
		{"an operator as a relay", f.ca.Operator(), relay, "", ""},
		{"an observer of a node", f.ca.Observer(), unspecified, "a", ""},
		{"an observer of a kind that is not known yet", f.ca.Observer(), unknown, "", ""},
		{"a node as an observer of itself", f.ca.Node("a"), observer, "a", reasonObserver},
		{"a node that does not say what it is", f.ca.Node("a"), unspecified, "a", reasonObserver},
		{"a node of a kind that is not known yet", f.ca.Node("a"), unknown, "a", reasonObserver},
	} {
		err := f.helloAs(f.dial(f.ca.ClientTLS(test.certificate)), "", test.kind, test.node)
		if test.reason == "" {
			require.NoError(t, err, test.name)
			continue
		}
		require.Equal(t, codes.PermissionDenied, status.Code(err), "%s: %v", test.name, err)
		require.NotZero(t, f.refused(test.reason), test.name)
	}
}

func TestCertificateOfAnotherCAFailsTheHandshake(t *testing.T) {
	f := newFixture(t, nil)
	stranger := authtest.NewCA(t).Operator()
	config := f.ca.ClientTLS()
	// A client does not send a certificate of a CA that the server does not ask for, unless it is
	// forced to.
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &stranger, nil }
	require.Equal(t, codes.Unavailable, status.Code(f.hello(f.dial(config), "", "a")))
}

func TestRefusalsAreLoggedOncePerInterval(t *testing.T) {
	f := newFixture(t, nil)
	for range 5 {
		require.Equal(t, codes.Unauthenticated, status.Code(f.hello(f.dial(f.ca.ClientTLS()), "", "a")))
	}
	require.Equal(t, 5.0, f.refused(reasonNoCredentials))
	require.Equal(t, 1, strings.Count(f.logs.String(), "Refused a client"), f.logs)
	require.Contains(t, f.logs.String(), "client=127.0.0.1:")
}

func TestReload(t *testing.T) {
	f := newFixture(t, nil)
	old := f.ca
	require.NoError(t, f.hello(f.dial(old.ClientTLS(old.Node("a"))), "", "a"))

	// Half of a replacement: the key does not match the certificate yet, and the old pair stays in
	// use.
	next := authtest.NewCA(t)
	cert, key := next.Server()
	f.copy(cert, f.files.Certificate)
	require.NoError(t, f.hello(f.dial(old.ClientTLS(old.Node("a"))), "", "a"))
	require.Contains(t, f.logs.String(), "Cannot reload the TLS files")

	f.copy(key, f.files.PrivateKey)
	f.copy(next.File, f.files.CA)
	require.NoError(t, f.hello(f.dial(next.ClientTLS(next.Node("a"))), "", "a"))
	mixed := next.ClientTLS()
	withdrawn := old.Node("a")
	mixed.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &withdrawn, nil }
	require.Equal(t, codes.Unavailable, status.Code(f.hello(f.dial(mixed), "", "a")), "the old CA is no longer trusted")
	require.Contains(t, f.logs.String(), "Reloaded the TLS files")
}

func (f *fixture) copy(from, to string) {
	f.t.Helper()
	b, err := os.ReadFile(from)
	require.NoError(f.t, err)
	require.NoError(f.t, os.WriteFile(to, b, 0o600))
}

func TestObserversOverHTTP(t *testing.T) {
	f := newFixture(t, nil)
	certificates, err := tlsfiles.Follow(f.files, slog.Default())
	require.NoError(t, err)
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "page") })
	server := httptest.NewUnstartedServer(f.auth.Observers(page))
	server.Listener = tls.NewListener(server.Listener, certificates.Server(true, "http/1.1"))
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
	require.Equal(t, http.StatusForbidden, get(f.ca.Relay("r")))
	require.Equal(t, http.StatusOK, get(f.ca.Observer()))
	require.Equal(t, http.StatusOK, get(f.ca.Operator()))

	// A caller that is refused has to connect again.
	for _, test := range []struct {
		certificate tls.Certificate
		closed      bool
	}{{f.ca.Observer(), false}, {f.ca.Node("a"), true}} {
		transport := &http.Transport{TLSClientConfig: f.ca.ClientTLS(test.certificate)}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+server.Listener.Addr().String(), nil)
		require.NoError(t, err)
		response, err := transport.RoundTrip(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		transport.CloseIdleConnections()
		require.Equal(t, test.closed, response.Close)
	}
}

// TestANodeHasOneName checks that a node has one name, and so one share, whatever its credentials
// are.
func TestANodeHasOneName(t *testing.T) {
	a := New(Options{Program: "server", Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()})
	for _, i := range []Identity{
		{User: "system:node:a", Node: "a"},
		{User: "system:serviceaccount:slicecast:agent", Node: "a"},
		{User: "system:serviceaccount:slicecast:both", Node: "a", Relay: true},
	} {
		user, _, err := a.Authorize(withIdentity(t.Context(), i), pb.ClientKind_CLIENT_KIND_AGENT, "a")
		require.NoError(t, err)
		require.Equal(t, "system:node:a", user, i)
	}
}

func TestOperatorNeedsNoCredentials(t *testing.T) {
	i, err := Operator("debug socket")(t.Context(), stream.path)
	require.NoError(t, err)
	a := New(Options{Program: "server", Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()})
	for kind := range pb.ClientKind_name {
		user, _, err := a.Authorize(withIdentity(t.Context(), i), pb.ClientKind(kind), "a")
		require.NoError(t, err)
		require.Equal(t, "debug socket", user)
		_, _, err = a.Authorize(context.Background(), pb.ClientKind(kind), "a")
		require.Equal(t, codes.Unauthenticated, status.Code(err))
	}
}
