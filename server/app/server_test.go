// These tests prove how a whole server starts, serves its ports and drains, over real connections.
// Only the source is a fake, which syncs and fails on request.
package app

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/auth/authtest"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/bounded/boundedtest"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/h2"
	"github.com/slicecast/slicecast/server/page"
)

// deadline bounds waits. It is far more than anything takes.
const deadline = 30 * time.Second

// testSource has no objects. It is synced, or fails, when a test says so.
type testSource struct {
	synced chan struct{}
	fail   chan error
}

func newTestSource() *testSource {
	return &testSource{synced: make(chan struct{}), fail: make(chan error, 1)}
}

// Run implements source.Source.
func (s *testSource) Run(ctx context.Context, sink source.Sink) error {
	synced := s.synced
	for {
		select {
		case <-synced:
			sink.Synced()
			synced = nil
		case err := <-s.fail:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

// running is a server under test.
type running struct {
	*Server
	t      *testing.T
	source *testSource
	cancel context.CancelFunc
	ended  chan error
}

// testConfig returns the configuration of a plaintext server on free loopback ports, with all
// listeners.
func testConfig(t *testing.T) Config {
	return Config{
		BindAddress: "127.0.0.1:0", HealthzBindAddress: "127.0.0.1:0", MetricsBindAddress: "127.0.0.1:0",
		DebugSocket: filepath.Join(t.TempDir(), "debug.sock"),
		DrainWindow: 100 * time.Millisecond, GracePeriod: deadline,
		Logger: slog.New(slog.DiscardHandler), Registry: daemon.NewRegistry(),
	}
}

func start(t *testing.T, c Config) *running {
	t.Helper()
	source := newTestSource()
	c.Source = source
	r := startConfig(t, c)
	r.source = source
	return r
}

// startConfig runs a server with the configuration's own source.
func startConfig(t *testing.T, c Config) *running {
	t.Helper()
	r := &running{t: t, ended: make(chan error, 1)}
	var err error
	r.Server, err = New(c)
	require.NoError(t, err)
	var ctx context.Context
	ctx, r.cancel = context.WithCancel(context.Background())
	go func() {
		r.ended <- r.Run(ctx)
		close(r.ended)
	}()
	t.Cleanup(func() {
		r.cancel()
		for range r.ended { // the test has read it, or has failed
		}
	})
	return r
}

func (r *running) sync() {
	r.t.Helper()
	close(r.source.synced)
	require.Eventually(r.t, func() bool { return r.readyz() == "200 ok" }, deadline, time.Millisecond)
}

// readyz returns the status and the body.
func (r *running) readyz() string {
	return get(r.t, nil, "http://"+r.Addresses().Healthz.String()+"/readyz")
}

func get(t *testing.T, config *tls.Config, url string) string {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err.Error()
	}
	defer func() { require.NoError(t, response.Body.Close()) }()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return fmt.Sprintf("%d %s", response.StatusCode, string(body[:max(len(body)-1, 0)]))
}

// dial connects over TLS, or in plaintext if config is nil.
func dial(t *testing.T, target string, config *tls.Config) *grpc.ClientConn {
	t.Helper()
	creds := insecure.NewCredentials()
	if config != nil {
		creds = credentials.NewTLS(config)
	}
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(creds))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn
}

// hello opens a stream as a node's agent, or as an observer if node is empty, and waits for the
// first answer.
func hello(t *testing.T, conn *grpc.ClientConn, node string) (pb.DistributionService_StreamClient, error) {
	t.Helper()
	return helloIn(t.Context(), t, conn, node)
}

func helloIn(ctx context.Context, t *testing.T, conn *grpc.ClientConn, node string) (pb.DistributionService_StreamClient, error) {
	t.Helper()
	stream, err := pb.NewDistributionServiceClient(conn).Stream(ctx)
	if err != nil { // the connection failed
		return nil, err
	}
	message := &pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_AGENT, NodeName: node}
	if node == "" {
		message.Kind = pb.ClientKind_CLIENT_KIND_OBSERVER
	}
	err = stream.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: message}})
	if !errors.Is(err, io.EOF) { // the server has ended the stream already; Recv returns its status
		require.NoError(t, err)
	}
	welcome, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	require.NotNil(t, welcome.GetWelcome())
	return stream, nil
}

// toEnd reads a stream to its end. It reports whether a Drain came, and returns the status code.
func toEnd(stream pb.DistributionService_StreamClient) (drained bool, code codes.Code) {
	for {
		m, err := stream.Recv()
		if err != nil {
			return drained, status.Code(err)
		}
		drained = drained || m.GetDrain() != nil
	}
}

func serving(t *testing.T, conn *grpc.ClientConn) healthpb.HealthCheckResponse_ServingStatus {
	t.Helper()
	answer, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "slicecast.v1.DistributionService"})
	require.NoError(t, err)
	return answer.GetStatus()
}

func TestNoClientIsServedBeforeSync(t *testing.T) {
	r := start(t, testConfig(t))
	conn := dial(t, r.Addresses().GRPC.String(), nil)
	_, err := hello(t, conn, "a")
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
	require.Equal(t, "503 not synced with the source yet", r.readyz())
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, serving(t, conn))
	require.Equal(t, "200 ok", get(t, nil, "http://"+r.Addresses().Healthz.String()+"/livez"))
	require.Equal(t, "200 ok", get(t, nil, "http://"+r.Addresses().Healthz.String()+"/healthz"))

	r.sync()
	_, err = hello(t, conn, "a")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return serving(t, conn) == healthpb.HealthCheckResponse_SERVING }, deadline, time.Millisecond)
}

func TestDrain(t *testing.T) {
	c := testConfig(t)
	c.DrainWindow = time.Second
	r := start(t, c)
	r.sync()
	conn := dial(t, r.Addresses().GRPC.String(), nil)
	byName, err := hello(t, conn, "a")
	require.NoError(t, err)
	observer, err := hello(t, dial(t, "unix:"+c.DebugSocket, nil), "")
	require.NoError(t, err)

	r.cancel()
	require.Eventually(t, func() bool { return r.ready() != nil }, deadline, time.Millisecond)
	require.EqualError(t, r.ready(), "draining")
	for _, stream := range []pb.DistributionService_StreamClient{byName, observer} {
		drained, code := toEnd(stream)
		require.True(t, drained)
		require.Equal(t, codes.Unavailable, code)
	}
	require.NoError(t, <-r.ended)
	require.NoFileExists(t, c.DebugSocket)
}

func TestDrainBeforeSync(t *testing.T) {
	r := start(t, testConfig(t))
	r.cancel()
	require.NoError(t, <-r.ended)
}

func TestGracePeriodEndsCalls(t *testing.T) {
	c := testConfig(t)
	c.GracePeriod = c.DrainWindow
	r := start(t, c)
	watch, err := healthpb.NewHealthClient(dial(t, r.Addresses().GRPC.String(), nil)).Watch(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	_, err = watch.Recv()
	require.NoError(t, err)
	r.cancel()
	require.NoError(t, <-r.ended)
}

func TestFailingSourceDrainsTheServer(t *testing.T) {
	r := start(t, testConfig(t))
	r.sync()
	stream, err := hello(t, dial(t, r.Addresses().GRPC.String(), nil), "a")
	require.NoError(t, err)
	r.source.fail <- errors.New("the directory is gone")
	drained, _ := toEnd(stream)
	require.True(t, drained)
	require.EqualError(t, <-r.ended, "source: the directory is gone")
}

func tlsConfig(t *testing.T) (Config, *authtest.CA) {
	c, ca := testConfig(t), authtest.NewCA(t)
	c.TLS = &tlsfiles.Files{CA: ca.File}
	c.TLS.Certificate, c.TLS.PrivateKey = ca.Server()
	return c, ca
}

func TestTLS(t *testing.T) {
	c, ca := tlsConfig(t)
	r := start(t, c)
	r.sync()
	address := r.Addresses().GRPC.String()
	_, err := hello(t, dial(t, address, ca.ClientTLS(ca.Node("a"))), "a")
	require.NoError(t, err)
	_, err = hello(t, dial(t, address, ca.ClientTLS(ca.Node("a"))), "b")
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	_, err = hello(t, dial(t, address, ca.ClientTLS()), "a")
	require.Equal(t, codes.Unauthenticated, status.Code(err))
	_, err = hello(t, dial(t, address, nil), "a")
	require.Equal(t, codes.Unavailable, status.Code(err), "plaintext")
	_, err = hello(t, dial(t, "unix:"+c.DebugSocket, nil), "")
	require.NoError(t, err, "the debug socket needs no credentials")
}

// TestWithdrawnCAs requires that taking a CA out of the file ends what its clients have open:
// streams on both transports, and the connections of readers of pages.
func TestWithdrawnCAs(t *testing.T) {
	c, ca := tlsConfig(t)
	withdrawn := authtest.NewCA(t)
	kept, err := os.ReadFile(ca.File)
	require.NoError(t, err)
	added, err := os.ReadFile(withdrawn.File)
	require.NoError(t, err)
	trust := func(cas ...[]byte) {
		require.NoError(t, os.WriteFile(ca.File+".new", slices.Concat(cas...), 0o600))
		require.NoError(t, os.Rename(ca.File+".new", ca.File))
	}
	trust(kept, added)
	r := start(t, c)
	r.sync()
	address := r.Addresses().GRPC.String()
	nodes := 0
	open := func(by *authtest.CA, protocols ...string) pb.DistributionService_StreamClient {
		nodes++ // a node has one stream
		node := fmt.Sprintf("node-%d", nodes)
		config := ca.ClientTLS(by.Node(node))
		config.NextProtos = protocols
		stream, err := hello(t, dial(t, address, config), node)
		require.NoError(t, err)
		return stream
	}
	for range 2 { // the second time, the server has looked at the CAs already
		ended := []pb.DistributionService_StreamClient{open(withdrawn, h2.Protocol, "h2"), open(withdrawn, "h2")}
		transport := &http.Transport{TLSClientConfig: ca.ClientTLS(withdrawn.Observer())}
		defer transport.CloseIdleConnections()
		read := func() int {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
				"https://"+r.Addresses().Metrics.String()+"/metrics", nil)
			require.NoError(t, err)
			response, err := transport.RoundTrip(request)
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, response.Body) // lets the connection be used again
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			return response.StatusCode
		}
		require.Equal(t, http.StatusOK, read())

		trust(kept)
		require.Equal(t, http.StatusUnauthorized, read())
		for _, stream := range ended {
			_, code := toEnd(stream)
			require.Equal(t, codes.Unavailable, code)
		}
		trust(kept, added)
	}
}

func TestReflection(t *testing.T) {
	c, ca := tlsConfig(t)
	r := start(t, c)
	list := func(conn *grpc.ClientConn) (services []string, err error) {
		stream, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
		require.NoError(t, err)
		err = stream.Send(&reflectionpb.ServerReflectionRequest{
			MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{},
		})
		if !errors.Is(err, io.EOF) {
			require.NoError(t, err)
		}
		answer, err := stream.Recv()
		for _, s := range answer.GetListServicesResponse().GetService() {
			services = append(services, s.GetName())
		}
		return services, err
	}
	want := []string{
		"grpc.channelz.v1.Channelz", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
		"grpc.reflection.v1alpha.ServerReflection", "slicecast.v1.DebugService", "slicecast.v1.DistributionService",
	}
	services, err := list(dial(t, "unix:"+c.DebugSocket, nil))
	require.NoError(t, err)
	require.ElementsMatch(t, want, services)
	services, err = list(dial(t, r.Addresses().GRPC.String(), ca.ClientTLS(ca.Observer())))
	require.NoError(t, err)
	require.ElementsMatch(t, want, services)
	_, err = list(dial(t, r.Addresses().GRPC.String(), ca.ClientTLS(ca.Node("a"))))
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	_, err = list(dial(t, r.Addresses().GRPC.String(), ca.ClientTLS()))
	require.Equal(t, codes.Unauthenticated, status.Code(err))
}

func TestMetrics(t *testing.T) {
	c, ca := tlsConfig(t)
	r := start(t, c)
	url := "https://" + r.Addresses().Metrics.String() + "/metrics"
	require.Contains(t, get(t, ca.ClientTLS(), url), "401 ")
	require.Contains(t, get(t, ca.ClientTLS(ca.Node("a")), url), "403 ")
	// Nobody is asked about a page that does not exist.
	require.Contains(t, get(t, ca.ClientTLS(), url+"/invented"), "404 ")
	require.Contains(t, get(t, ca.ClientTLS(ca.Node("a")), url+"/invented"), "404 ")
	metrics := get(t, ca.ClientTLS(ca.Operator()), url)
	require.Contains(t, metrics, "slicecast_server_streams 0")
	require.Contains(t, metrics, `slicecast_server_refused_requests_total{reason="observer"} 1`)
	require.Contains(t, metrics, "go_goroutines")

	plain := start(t, testConfig(t))
	require.Contains(t, get(t, nil, "http://"+plain.Addresses().Metrics.String()+"/metrics"), "slicecast_server_streams 0")
}

// TestPage checks that the page is shown to those who may see metrics, live, and until the server
// drains.
func TestPage(t *testing.T) {
	c, ca := tlsConfig(t)
	c.Page = true
	r := start(t, c)
	r.withWeb()
	url := "https://" + r.Addresses().Metrics.String() + page.Path
	for _, path := range []string{"", "main.js", "events", "node?id=1", "service?namespace=default&name=web", "change?shard=0&sequence=1"} {
		require.Contains(t, get(t, ca.ClientTLS(), url+path), "401 ")
		require.Contains(t, get(t, ca.ClientTLS(ca.Node("a")), url+path), "403 ")
	}
	require.Contains(t, get(t, ca.ClientTLS(ca.Observer()), url), "200 <!DOCTYPE html>")
	require.Contains(t, get(t, ca.ClientTLS(ca.Observer()), url+"service?namespace=default&name=web"), `"endpoints":2`)

	_, err := hello(t, dial(t, r.Addresses().GRPC.String(), ca.ClientTLS(ca.Node("node-a"))), "node-a")
	require.NoError(t, err)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"events", nil)
	require.NoError(t, err)
	response, err := (&http.Transport{TLSClientConfig: ca.ClientTLS(ca.Observer()), DisableKeepAlives: true}).RoundTrip(request)
	require.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for found := false; !found; found = strings.Contains(lines.Text(), `"node-a","agent","programming"`) {
		require.True(t, lines.Scan(), lines.Err())
	}
	r.cancel()
	for lines.Scan() { // until the server has ended the stream
	}
	require.NoError(t, lines.Err())
	require.NoError(t, <-r.ended)

	c, ca = tlsConfig(t)
	off := start(t, c)
	require.Contains(t, get(t, ca.ClientTLS(ca.Observer()), "https://"+off.Addresses().Metrics.String()+page.Path), "404 ")
}

// TestPortsAreBounded checks that the ports for health checks and metrics keep few connections of
// clients that send nothing, and answer probes and scrapes meanwhile.
func TestPortsAreBounded(t *testing.T) {
	c, ca := tlsConfig(t)
	r := start(t, c)
	r.sync()
	scraper, url := ca.ClientTLS(ca.Operator()), "https://"+r.Addresses().Metrics.String()+"/metrics"
	health := boundedtest.NewCrowd(t, r.Addresses().Healthz.String())
	metrics := boundedtest.NewCrowd(t, r.Addresses().Metrics.String())
	for i := range 2000 {
		health.Join(netip.MustParseAddr("127.0.0.1"), "")
		metrics.Join(netip.MustParseAddr("127.0.0.1"), "")
		if i%200 == 0 {
			require.Equal(t, "200 ok", r.readyz())
			require.Contains(t, get(t, scraper, url), "slicecast_server_streams 0")
			require.LessOrEqual(t, health.Held(), bounded.Health.PerAddress)
			require.LessOrEqual(t, metrics.Held(), bounded.Metrics.PerAddress)
		}
	}
	require.NotContains(t, get(t, scraper, url), `slicecast_server_displaced_connections_total{port="health"} 0`)
}

func TestErrorForAnAddressInUseNamesTheFlag(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, taken.Close()) }()
	for flag, set := range map[string]func(*Config){
		"--bind-address": func(c *Config) { c.BindAddress = taken.Addr().String() },
		"--shards":       func(c *Config) { c.Shards = 3 },
	} {
		c := testConfig(t)
		set(&c)
		_, err := New(c)
		require.ErrorContains(t, err, flag+": ")
		require.NoFileExists(t, c.DebugSocket)
	}
}

// TestOnlyTheStreamsPortIsNeeded asserts that a server whose other ports are taken serves nodes,
// counts and logs what it cannot serve, and serves it once the ports are free.
func TestOnlyTheStreamsPortIsNeeded(t *testing.T) {
	c := testConfig(t)
	log := &logtest.Buffer{}
	c.Logger = slog.New(slog.NewTextHandler(log, nil))
	var taken []net.Listener
	for _, address := range []*string{&c.HealthzBindAddress, &c.MetricsBindAddress} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		*address = l.Addr().String()
		taken = append(taken, l)
	}
	require.NoError(t, os.Mkdir(c.DebugSocket, 0o700))
	r := start(t, c)
	require.Equal(t, Addresses{GRPC: r.Addresses().GRPC}, r.Addresses())
	close(r.source.synced)
	require.Eventually(t, func() bool { return r.ready() == nil }, deadline, time.Millisecond)
	_, err := hello(t, dial(t, r.Addresses().GRPC.String(), nil), "a")
	require.NoError(t, err)
	for _, flag := range []string{"healthz-bind-address", "metrics-bind-address", "debug-socket"} {
		require.Eventually(t, func() bool { return log.Count("level=WARN", "Cannot serve", "flag=--"+flag) == 1 }, deadline, time.Millisecond)
	}
	for _, l := range taken {
		require.NoError(t, l.Close())
	}
	require.NoError(t, os.Remove(c.DebugSocket))
	require.Eventually(t, func() bool { return log.Count("level=INFO", "Serving again") == 3 }, deadline, time.Millisecond)
	require.Equal(t, "200 ok", get(t, nil, "http://"+c.HealthzBindAddress+"/readyz"))
	require.Contains(t, get(t, nil, "http://"+c.MetricsBindAddress+"/metrics"), `slicecast_server_serve_errors_total{flag="debug-socket"} `)
}
