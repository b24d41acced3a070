// Package pages serves what kube-proxy 1.37 serves at its metrics port
// (cmd/kube-proxy/app/server.go of Kubernetes), so that whatever watches kube-proxy goes on
// working: /metrics, /proxyMode, /configz, /healthz, /livez, /statusz, /flagz and, if profiling is
// on, /debug/pprof.
//
// As with kube-proxy, nobody is asked for credentials. So the package listens only on loopback
// addresses, and no page has secrets: settings name the files of keys and tokens, and never their
// content.
//
// Each answer has a Server header, which kube-proxy's answers lack. Package kubeproxy tells the two
// apart by it.
package pages

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/daemon"
)

// Names are the pages that can be chosen, in the order in which help texts list them.
var Names = []string{"metrics", "proxyMode", "configz", "healthz", "livez", "statusz", "flagz"}

// minRetry is the first back-off before a failed attempt to listen is repeated.
const minRetry = time.Second

// Options configure the pages. Mode, Metrics, Config, Flags and Displaced are required.
type Options struct {
	// Addresses are where the pages are served, as "host:port". Each host is a loopback address; see
	// ValidateAddress.
	Addresses []string
	// Pages are the pages to serve, of Names.
	Pages []string
	// Profiling adds /debug/pprof.
	Profiling bool

	// Version is the program's version, for /statusz.
	Version string
	// Mode is the answer of /proxyMode.
	Mode string
	// Metrics are the answer of /metrics.
	Metrics prometheus.Gatherer
	// Config is the answer of /configz: configurations by the names of their API groups.
	Config map[string]any
	// Flags are the answer of /flagz: the values of flags by their names.
	Flags map[string]string

	Logger     *slog.Logger          // nil means slog's default logger
	Registerer prometheus.Registerer // nil means that metrics are not registered
	// Displaced is the result of bounded.NewDisplaced.
	Displaced *prometheus.CounterVec
}

// ValidateAddress returns an error unless an address to listen on is a loopback address with a
// port. Names of hosts are refused, because they may come to mean another address.
func ValidateAddress(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil || port == "" {
		return fmt.Errorf("%q is not host:port", address)
	}
	if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
		return fmt.Errorf("%q is not a loopback address, and nobody is asked for credentials there", address)
	}
	return nil
}

// Server serves the pages while Run runs.
type Server struct {
	Options
	started  time.Time
	handler  http.Handler
	port     *bounded.Port
	failures prometheus.Counter
	retry    time.Duration // the first back-off
}

// New returns a Server for a process that starts now.
func New(o Options) *Server {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	s := &Server{
		Options: o, started: time.Now(), retry: minRetry,
		port: bounded.NewPort("pages", bounded.Metrics, o.Logger, o.Displaced),
		failures: promauto.With(o.Registerer).NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "metrics_listen_errors_total",
			Help: "Number of failed attempts to open a port of --metrics-bind-address, most likely because a kube-proxy " +
				"uses it.",
		}),
	}
	s.handler = s.newHandler()
	return s
}

// Run serves the pages on all addresses until ctx ends. An address that is in use is tried again
// and again, because kube-proxy may still run on the node.
func (s *Server) Run(ctx context.Context) {
	var serving sync.WaitGroup
	for _, address := range s.Addresses {
		serving.Go(func() { s.serve(ctx, address) })
	}
	serving.Wait()
}

// serve serves the pages on one address until ctx ends. It logs the first of several failures, and
// when they are over.
func (s *Server) serve(ctx context.Context, address string) {
	failed := false
	daemon.ServeAgain(ctx, s.retry, func() (net.Listener, error) {
		return (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	}, func(ctx context.Context, l net.Listener) error {
		return s.port.Serve(ctx, l, nil, s.handler)
	}, func(err error) {
		switch {
		case err == nil && failed:
			s.Logger.Info("Serving the pages of kube-proxy", "address", address)
		case err != nil && !failed:
			s.Logger.Warn("Cannot serve the pages of kube-proxy, trying again; if no kube-proxy uses the address, set "+
				"another --metrics-bind-address", "address", address, "err", err)
		}
		if failed = err != nil; failed {
			s.failures.Inc()
		}
	})
}

// newHandler returns the handler of all pages.
func (s *Server) newHandler() http.Handler {
	mux := http.NewServeMux()
	add := func(page string, paths map[string]http.HandlerFunc) {
		if slices.Contains(s.Pages, page) {
			for path, handler := range paths {
				mux.HandleFunc("GET "+path, handler)
			}
		}
	}
	metrics := daemon.MetricsHandler(s.Metrics)
	add("metrics", map[string]http.HandlerFunc{"/metrics": metrics.ServeHTTP})
	add("proxyMode", map[string]http.HandlerFunc{"/proxyMode": func(w http.ResponseWriter, _ *http.Request) {
		text(w, s.Mode)
	}})
	add("configz", map[string]http.HandlerFunc{"/configz": func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, s.Config)
	}})
	for _, page := range []string{"healthz", "livez"} {
		add(page, map[string]http.HandlerFunc{"/" + page: alive(page), "/" + page + "/ping": alive("ping")})
	}
	add("statusz", map[string]http.HandlerFunc{"/statusz": s.statusz})
	add("flagz", map[string]http.HandlerFunc{"/flagz": s.flagz})
	if s.Profiling {
		mux.Handle("GET /debug/pprof", http.RedirectHandler("/debug/pprof/", http.StatusFound))
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol) // for large requests
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", daemon.AgentServer)
		mux.ServeHTTP(w, r)
	})
}

// alive answers that the process is alive, as kube-proxy does at its metrics port. The health of
// the node is at --healthz-bind-address.
func alive(page string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("verbose") && page != "ping" {
			text(w, "[+]ping ok\n"+page+" check passed\n")
			return
		}
		text(w, "ok")
	}
}

// paths returns the served paths, ascending, as kube-proxy lists them in /statusz.
func (s *Server) paths() []string {
	var out []string
	for _, page := range s.Pages {
		if page != "statusz" {
			out = append(out, "/"+page)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// text writes a plain answer. A browser must not take it for anything else.
func text(w http.ResponseWriter, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = strings.NewReader(body).WriteTo(w) // an error concerns only the client
}
