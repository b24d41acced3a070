// These tests prove what the pages answer and in which form, that they are served on loopback
// addresses only, with bounded connections, and that a port in use is taken over once it is free.
// The sockets and requests are real.
package pages

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/bounded/boundedtest"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// The address is free, because the tests have a network namespace of their own.
const (
	address = "127.0.0.1:10249"
	url     = "http://" + address
)

// newServer returns a server of all pages that is not running.
func newServer(change func(*Options)) (*Server, *logtest.Buffer) {
	registry, log := prometheus.NewRegistry(), &logtest.Buffer{}
	o := Options{
		Addresses: []string{address}, Pages: Names, Version: "v1.2.3", Mode: "nftables", Metrics: registry, Registerer: registry,
		Config: map[string]any{"slicecast.io": map[string]string{"kind": "AgentConfiguration"}},
		Flags:  map[string]string{"node-name": "a", "config": "/etc/b"}, Displaced: bounded.NewDisplaced(registry, "agent"),
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	}
	if change != nil {
		change(&o)
	}
	return New(o), log
}

// run runs a server until the test ends.
func run(t *testing.T, s *Server) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		s.Run(ctx)
		close(ended)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
}

// answer is what a page answers.
func answer(s *Server, method, path, accept string) *httptest.ResponseRecorder {
	w, r := httptest.NewRecorder(), httptest.NewRequest(method, path, nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	s.handler.ServeHTTP(w, r)
	return w
}

func TestPages(t *testing.T) {
	s, _ := newServer(nil)
	for path, want := range map[string]struct{ kind, body string }{
		"/metrics":         {"text/plain", "slicecast_agent_metrics_listen_errors_total 0"},
		"/proxyMode":       {"text/plain; charset=utf-8", "nftables"},
		"/configz":         {"application/json", `{"slicecast.io":{"kind":"AgentConfiguration"}}`},
		"/healthz":         {"text/plain; charset=utf-8", "ok"},
		"/healthz/ping":    {"text/plain; charset=utf-8", "ok"},
		"/healthz?verbose": {"text/plain; charset=utf-8", "[+]ping ok\nhealthz check passed\n"},
		"/livez":           {"text/plain; charset=utf-8", "ok"},
		"/livez?verbose":   {"text/plain; charset=utf-8", "[+]ping ok\nlivez check passed\n"},
		"/statusz":         {"text/plain; charset=utf-8", "Binary version: v1.2.3\nPaths: /configz /flagz /healthz /livez /metrics /proxyMode\n"},
		"/flagz":           {"text/plain; charset=utf-8", "config=/etc/b\nnode-name=a\n"},
	} {
		r := answer(s, http.MethodGet, path, "")
		require.Equal(t, http.StatusOK, r.Code, path)
		require.Contains(t, r.Header().Get("Content-Type"), want.kind, path)
		require.Contains(t, r.Body.String(), want.body, path)
		require.Equal(t, "slicecast-agent", r.Header().Get("Server"), path)
		require.Equal(t, http.StatusMethodNotAllowed, answer(s, http.MethodPost, path, "").Code, path)
	}
	for _, path := range []string{"/", "/debug/pprof/", "/metrics/slis", "/readyz"} {
		r := answer(s, http.MethodGet, path, "")
		require.Equal(t, http.StatusNotFound, r.Code, path)
		require.Equal(t, "slicecast-agent", r.Header().Get("Server"), path)
	}
	// /proxyMode is exactly the mode, because programs compare it.
	require.Equal(t, "nftables", answer(s, http.MethodGet, "/proxyMode", "").Body.String())
}

// TestEachPageCanBeSwitchedOff asserts that a page that is not chosen is not found, and all others
// are.
func TestEachPageCanBeSwitchedOff(t *testing.T) {
	for i, off := range Names {
		s, _ := newServer(func(o *Options) {
			o.Pages = append(append([]string{}, Names[:i]...), Names[i+1:]...)
		})
		for _, page := range Names {
			want := http.StatusOK
			if page == off {
				want = http.StatusNotFound
			}
			require.Equal(t, want, answer(s, http.MethodGet, "/"+page, "").Code, "%s without %s", page, off)
		}
		if off != "statusz" {
			require.NotContains(t, answer(s, http.MethodGet, "/statusz", "").Body.String(), "/"+off)
		}
	}
}

// TestStructuredPages asserts that /statusz and /flagz answer as Kubernetes 1.37 does: with objects
// of the group config.k8s.io, for clients that ask for them, and otherwise with text.
func TestStructuredPages(t *testing.T) {
	s, _ := newServer(nil)
	s.started = time.Now().Add(-90 * time.Second)
	for _, version := range []string{"v1beta1", "v1alpha1"} {
		r := answer(s, http.MethodGet, "/statusz", "application/json;v="+version+";g=config.k8s.io;as=Statusz")
		require.Equal(t, "application/json", r.Header().Get("Content-Type"))
		var status map[string]any
		require.NoError(t, json.Unmarshal(r.Body.Bytes(), &status))
		require.InDelta(t, 90, status["uptimeSeconds"], 30)
		_, err := time.Parse(time.RFC3339, status["startTime"].(string))
		require.NoError(t, err)
		require.NotEmpty(t, status["goVersion"])
		require.Equal(t, "v1.2.3", status["binaryVersion"])
		require.Equal(t, "Statusz", status["kind"])
		require.Equal(t, "config.k8s.io/"+version, status["apiVersion"])
		require.Equal(t, map[string]any{"name": "slicecast-agent"}, status["metadata"])
		require.Contains(t, status["paths"], "/metrics")

		r = answer(s, http.MethodGet, "/flagz", "text/html, application/json;as=Flagz;v="+version+";g=config.k8s.io, */*")
		require.JSONEq(t, `{"kind": "Flagz", "apiVersion": "config.k8s.io/`+version+`", "metadata": {"name": "slicecast-agent"},
			"flags": {"config": "/etc/b", "node-name": "a"}}`, r.Body.String())
	}
	r := answer(s, http.MethodGet, "/flagz", "application/yaml;v=v1beta1;g=config.k8s.io;as=Flagz")
	require.Equal(t, "application/yaml", r.Header().Get("Content-Type"))
	require.Contains(t, r.Body.String(), "flags:\n  config: /etc/b\n  node-name: a\n")
	for _, accept := range []string{"*/*", "text/*;q=0.9", "text/html,*/*;q=0.8", "application/json, text/plain", " "} {
		require.Contains(t, answer(s, http.MethodGet, "/flagz", accept).Body.String(), "slicecast-agent flagz\n", accept)
	}
	for _, accept := range []string{
		"application/json", "application/json;v=v2;g=config.k8s.io;as=Flagz", "application/json;v=v1beta1;g=config.k8s.io;as=Statusz", "image/png", ";",
	} {
		r := answer(s, http.MethodGet, "/flagz", accept)
		require.Equal(t, http.StatusNotAcceptable, r.Code, accept)
		require.Contains(t, r.Body.String(), "as=Flagz")
	}
}

func TestProfiling(t *testing.T) {
	s, _ := newServer(func(o *Options) { o.Profiling = true })
	run(t, s)
	for _, path := range []string{"/debug/pprof", "/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/profile?seconds=1", "/debug/pprof/symbol"} {
		require.Eventually(t, func() bool { return status(url+path) == http.StatusOK }, 30*time.Second, 10*time.Millisecond, path)
	}
	require.Equal(t, http.StatusOK, answer(s, http.MethodPost, "/debug/pprof/symbol", "").Code)
	require.Equal(t, http.StatusMethodNotAllowed, answer(s, http.MethodPost, "/debug/pprof/heap", "").Code)
}

func TestOnlyLoopbackAddresses(t *testing.T) {
	for _, a := range []string{"127.0.0.1:10249", "127.1.2.3:1", "[::1]:10249"} {
		require.NoError(t, ValidateAddress(a))
	}
	for a, says := range map[string]string{
		"0.0.0.0:10249": "not a loopback address", ":10249": "not a loopback address", "192.168.0.2:1": "not a loopback address",
		"[::]:1": "not a loopback address", "localhost:1": "not a loopback address", "example.com:1": "not a loopback address",
		"127.0.0.1": "host:port", "127.0.0.1:": "host:port", "": "host:port",
	} {
		require.ErrorContains(t, ValidateAddress(a), says)
	}
}

// TestPagesAreBounded asserts that the port keeps only few connections of clients that ask for
// nothing, and answers others meanwhile.
func TestPagesAreBounded(t *testing.T) {
	s, _ := newServer(nil)
	run(t, s)
	require.Eventually(t, func() bool { return status(url+"/healthz") == http.StatusOK }, 30*time.Second, 10*time.Millisecond)
	crowd := boundedtest.NewCrowd(t, address)
	for i := range 1000 {
		crowd.Join(netip.MustParseAddr("127.0.0.1"), "")
		if i%100 == 0 {
			require.Equal(t, http.StatusOK, status(url+"/metrics"))
			require.LessOrEqual(t, crowd.Held(), bounded.Metrics.PerAddress)
		}
	}
	require.NotZero(t, testutil.ToFloat64(s.Displaced.WithLabelValues("pages")))
}

// TestPortsInUse asserts that an address that another program uses is logged once, tried again, and
// served once it is free, and that other addresses are served meanwhile.
func TestPortsInUse(t *testing.T) {
	kubeProxy, err := net.Listen("tcp", address)
	require.NoError(t, err)
	s, log := newServer(func(o *Options) { o.Addresses = append(o.Addresses, "[::1]:10249") })
	s.retry = time.Millisecond
	run(t, s)
	require.Eventually(t, func() bool { return status("http://[::1]:10249/healthz") == http.StatusOK }, 30*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return testutil.ToFloat64(s.failures) >= 4 }, 30*time.Second, time.Millisecond)
	require.Equal(t, 1, log.Count("level=WARN"))
	require.Equal(t, 1, log.Count("address=127.0.0.1:10249"))
	require.NoError(t, kubeProxy.Close())
	require.Eventually(t, func() bool { return status(url+"/healthz") == http.StatusOK }, 60*time.Second, 10*time.Millisecond)
	require.Equal(t, 1, log.Count("level=INFO"))
}

// status returns the status of a GET, or 0 if there is no answer.
func status(url string) int {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	r, err := client.Get(url)
	if err != nil {
		return 0
	}
	defer r.Body.Close()
	_, _ = io.Copy(io.Discard, r.Body)
	return r.StatusCode
}
