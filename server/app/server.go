package app

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/auth"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/certificates"
	"github.com/slicecast/slicecast/server/debug"
	"github.com/slicecast/slicecast/server/fanout"
	"github.com/slicecast/slicecast/server/h2"
	"github.com/slicecast/slicecast/server/page"
	"github.com/slicecast/slicecast/server/relay"
)

// Server is a server whose addresses are bound. It serves while Run runs.
//
// Invariants:
//
//  1. After New, only draining changes. Run may be called once.
//  2. Once draining is closed, /readyz and gRPC's health checks say that the server is not ready,
//     and no stream begins.
type Server struct {
	config Config
	store  *store.Store
	hub    *fanout.Hub
	debug  *debug.Service
	health *health.Server

	parts       []part // what Run serves
	services    *daemon.Services
	grpcServers []*grpc.Server
	mux         *h2.Mux            // nil without TLS
	lean        *h2.Server         // serves agents behind mux; nil without TLS
	tls         *tlsfiles.Follower // nil without TLS
	// certificates is nil if the server has none of its own.
	certificates *certificates.Manager
	addresses    Addresses
	draining     chan struct{} // closed when the server begins to drain
}

// part is a listener, with the function that serves on it until ctx ends.
type part struct {
	name string
	// listener is nil if it could not be opened yet.
	listener net.Listener
	serve    func(ctx context.Context, l net.Listener) error
	// open opens the listener, which flag is about. It is nil for the one that serves nodes, without
	// which a server is of no use. What the others lack does not keep nodes from being served.
	flag string
	open func() (net.Listener, error)
}

// Addresses has the addresses on which a server listens; nil where it does not, or not yet.
type Addresses struct {
	GRPC, Healthz, Metrics, DebugSocket net.Addr
}

// New returns a server with bound addresses. The caller must run it.
func New(c Config) (_ *Server, err error) {
	s := &Server{config: c, health: health.NewServer(), draining: make(chan struct{})}
	defer func() {
		if err != nil {
			for _, p := range s.parts {
				if p.listener != nil {
					_ = p.listener.Close() // the first error says more
				}
			}
		}
	}()
	s.store, err = store.New(store.Options{Shards: c.Shards, Tombstones: c.Tombstones, Relayed: c.Upstream != nil})
	if err != nil {
		return nil, fmt.Errorf("--shards: %w", err)
	}
	hostname, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("read the host name, which is the server's name: %w", err)
	}
	authentication := auth.New(auth.Options{
		Program: "server", ClientCAFlag: "--client-ca-file",
		TokenFlags: "--agent-service-account or --relay-service-account", Diagnosis: c.diagnosis(hostname),
		Tokens: c.Tokens, KnownNode: func(name string) bool { return s.store.Node(name) != nil }, Now: c.Now,
		Refused: refused, VerifyClient: func(chain []*x509.Certificate) error { return s.tls.VerifyClient(chain) }, Logger: c.Logger, Registerer: c.Registry,
	})
	options := fanout.Options{
		Store: s.store, Authorize: authentication.Authorize, Now: c.Now, ServerName: hostname, ServerVersion: daemon.Version(),
		Heartbeat: c.HeartbeatInterval, DrainWindow: c.DrainWindow, MaxBehindWait: c.MaxBehindWait, ColdBytes: c.MaxColdSyncBytes,
		Servers: c.Servers, ServerService: c.ServerService, Logger: c.Logger, Registerer: c.Registry,
	}
	var connection func() client.Connection
	if c.Upstream != nil {
		upstream := relay.New(*c.Upstream, s.store)
		s.config.Source, options.Upstream, connection = upstream, upstream, upstream.Connection
	}
	if c.Events != nil {
		options.Warn = func(node string, w pb.NodeWarning, reason string) { c.Events.Warn(node, eventReason(w), reason) }
	}
	answers := debug.Options{Store: s.store, Source: c.SourceKind, Upstream: connection}
	if x, ok := s.config.Source.(interface{ Stale() (time.Time, string) }); ok {
		options.Stale = x.Stale
		if c.Upstream == nil { // a relay's connection says it
			answers.Stale = x.Stale
		}
	}
	if x, ok := s.config.Source.(interface{ LastEvent() time.Time }); ok {
		answers.LastEvent = x.LastEvent
	}
	s.hub = fanout.New(options)
	answers.Hub = s.hub
	s.debug = debug.New(answers)
	s.setServing(healthpb.HealthCheckResponse_NOT_SERVING)
	if err := s.listen(authentication); err != nil {
		return nil, err
	}
	return s, nil
}

// diagnosis returns the command that shows the state of the server without a token. It returns an
// empty string if there is none.
func (c *Config) diagnosis(hostname string) string {
	if c.DebugSocket == "" {
		return ""
	}
	command := "slicecast-server status --debug-socket=" + c.DebugSocket
	if c.Tokens == nil || c.Tokens.Namespace == "" {
		return command + " on " + hostname
	}
	return fmt.Sprintf("kubectl -n %s exec %s -- %s", c.Tokens.Namespace, hostname, command)
}

func (s *Server) listen(authentication *auth.Auth) error {
	c := s.config
	serverTLS, err := s.followTLS()
	if err != nil {
		return err
	}
	displaced := bounded.NewDisplaced(c.Registry, "server")
	port := func(name string, limits bounded.Limits) *bounded.Port {
		return bounded.NewPort(name, limits, c.Logger, displaced)
	}
	l := c.Listener
	if l == nil {
		if l, err = daemon.Listen("bind-address", c.BindAddress); err != nil {
			return err
		}
	}
	// Only requests of pages that exist are reviewed. A review costs the API server two requests,
	// and a verdict is about one path.
	guard, metricsTLS := authentication.Observers, (*tls.Config)(nil)
	if serverTLS != nil {
		s.addresses.GRPC = s.addTLS(l, serverTLS(), authentication)
		metricsTLS = serverTLS("http/1.1")
	} else {
		guard = func(h http.Handler) http.Handler { return h }
		l = port("plaintext", bounded.Plaintext).Listener(l)
		s.addresses.GRPC = s.addGRPC("gRPC", l, s.newGRPC(nil, authentication, auth.Operator("anybody")))
	}
	s.services = daemon.NewServices("server", "something other than nodes, by flag: debug-socket, healthz-bind-address or "+
		"metrics-bind-address.", c.Logger, c.Registry)
	if c.DebugSocket != "" {
		serve := s.serveGRPC(s.newGRPC(nil, authentication, auth.Operator("debug socket")))
		s.addresses.DebugSocket = s.addBeside("debug socket", "debug-socket", serve, func() (net.Listener, error) {
			l, err := daemon.ListenSocket(c.DebugSocket)
			if err != nil {
				return nil, fmt.Errorf("--debug-socket: %w", err)
			}
			return l, nil
		})
	}
	s.addresses.Healthz = s.addHTTP("health checks", "healthz-bind-address", c.HealthzBindAddress,
		port("health", bounded.Health), nil, daemon.HealthHandler(s.ready))
	s.addresses.Metrics = s.addHTTP("metrics", "metrics-bind-address", c.MetricsBindAddress,
		port("metrics", bounded.Metrics), metricsTLS, s.pages(guard))
	return nil
}

// pages returns the handler of the port of metrics. guard refuses those who may not see a page.
func (s *Server) pages(guard func(http.Handler) http.Handler) http.Handler {
	mux := http.NewServeMux()
	metrics := guard(daemon.MetricsHandler(s.config.Registry))
	mux.Handle("GET /metrics", metrics)
	// The API server has metrics at /metrics, too. A right to this path is one to Slicecast's only.
	mux.Handle("GET /page/metrics", metrics)
	if s.config.Page && s.config.MetricsBindAddress != "" {
		page.New(page.Options{
			Server: struct {
				*debug.Service
				*fanout.Hub
			}{s.debug, s.hub},
			Draining: s.draining, Logger: s.config.Logger, Registerer: s.config.Registry,
		}).Handle(mux, guard)
	}
	return mux
}

// followTLS returns a function that returns the configuration of a listener for some protocols
// (ALPN). It returns nil if the server is plaintext.
func (s *Server) followTLS() (func(protocols ...string) *tls.Config, error) {
	c := s.config
	var err error
	switch {
	case c.Certificates != nil:
		s.certificates = certificates.New(*c.Certificates)
		s.tls = tlsfiles.FollowFunc("Secret "+c.Certificates.Secret.String(), s.certificates.Content, c.Logger)
		s.tls.Now = c.Certificates.Now
	case c.TLS != nil:
		if s.tls, err = tlsfiles.Follow(*c.TLS, c.Logger); err != nil {
			return nil, fmt.Errorf("--tls-cert-file, --tls-private-key-file, --client-ca-file: %w", err)
		}
		s.tls.Now = c.Now
	default:
		return nil, nil
	}
	registerExpiry(c.Registry, s.tls)
	clients := c.TLS == nil || c.TLS.CA != "" // clients without a certificate may have a token
	return func(protocols ...string) *tls.Config { return s.tls.Server(clients, protocols...) }, nil
}

// recheckClients closes connections whose client certificates are no longer accepted, each time
// that the CAs have changed, until ctx ends.
func (s *Server) recheckClients(ctx context.Context) {
	tick := time.NewTicker(recheckInterval)
	defer tick.Stop()
	// None at first: handshakes may have used CAs that have changed since.
	var checked *x509.CertPool
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := s.tls.CAs(); now != checked {
			s.mux.Recheck(s.tls.VerifyClient)
			checked = now
		}
	}
}

// registerExpiry registers metrics of when the server's certificate and its CA end.
func registerExpiry(r prometheus.Registerer, follower *tlsfiles.Follower) {
	seconds := func(end time.Time) float64 {
		if end.IsZero() {
			return 0
		}
		return float64(end.Unix())
	}
	promauto.With(r).NewGaugeFunc(prometheus.GaugeOpts{
		Name: "slicecast_server_certificate_expiry_timestamp_seconds",
		Help: "Time at which the server's certificate ends, in seconds since 1970; 0 while there is none.",
	}, func() float64 { certificate, _ := follower.Ends(); return seconds(certificate) })
	promauto.With(r).NewGaugeFunc(prometheus.GaugeOpts{
		Name: "slicecast_server_ca_expiry_timestamp_seconds",
		Help: "Time at which the last CA of --client-ca-file or --tls-secret ends, in seconds since 1970; 0 while there " +
			"is none.",
	}, func() float64 { _, ca := follower.Ends(); return seconds(ca) })
}

// addGRPC adds a gRPC server on a listener, whose address it returns.
func (s *Server) addGRPC(name string, l net.Listener, server *grpc.Server) net.Addr {
	s.parts = append(s.parts, part{name: name, listener: l, serve: s.serveGRPC(server)})
	return l.Addr()
}

// serveGRPC returns the function of a part that is a gRPC server.
func (s *Server) serveGRPC(server *grpc.Server) func(context.Context, net.Listener) error {
	s.grpcServers = append(s.grpcServers, server)
	return func(_ context.Context, l net.Listener) error {
		if err := server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return err
		}
		return nil
	}
}

// addHTTP adds an HTTP server on an address, the value of a flag, and returns the bound address. If
// the address is empty, it adds and returns nothing.
func (s *Server) addHTTP(
	name, flag, address string, port *bounded.Port, config *tls.Config, handler http.Handler,
) net.Addr {
	if address == "" {
		return nil
	}
	return s.addBeside(name, flag, func(ctx context.Context, l net.Listener) error {
		return port.Serve(ctx, l, config, handler)
	}, func() (net.Listener, error) { return daemon.Listen(flag, address) })
}

// addBeside adds a part that may fail. It returns the bound address, or nil if it cannot be bound
// yet: Run tries again, and reports why.
func (s *Server) addBeside(
	name, flag string, serve func(context.Context, net.Listener) error, open func() (net.Listener, error),
) net.Addr {
	p := part{name: name, serve: serve, flag: flag, open: open}
	defer func() { s.parts = append(s.parts, p) }()
	l, err := open()
	if err != nil {
		return nil
	}
	p.listener = l
	return l.Addr()
}

// Addresses returns the addresses on which the server listens.
func (s *Server) Addresses() Addresses { return s.addresses }

// Run serves until ctx ends or a part of the server fails. In both cases it first sends the clients
// elsewhere, within the grace period. The end of ctx is not an error.
func (s *Server) Run(ctx context.Context) error {
	log := s.config.Logger
	// stopping is done when the server begins to stop. Everything that streams need goes on until
	// the streams have ended.
	stopping, stop := context.WithCancel(ctx)
	defer stop()
	running, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()

	var all errgroup.Group
	start := func(name string, run func() error) {
		all.Go(func() error {
			defer stop()
			if err := run(); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
	log.Info("Server started", "version", daemon.Version(), "tls", s.mux != nil)
	if s.mux == nil {
		log.Warn("Serving without TLS: anyone who can reach the server can read all Services and act as any node")
	}
	for _, p := range s.parts {
		if p.listener != nil {
			log.Info("Listening", "for", p.name, "address", p.listener.Addr().String())
		}
		start(p.name, func() error {
			if p.open == nil {
				return p.serve(running, p.listener)
			}
			s.services.Serve(running, p.flag, func() (net.Listener, error) {
				if l := p.listener; l != nil {
					p.listener = nil
					return l, nil
				}
				return p.open()
			}, p.serve)
			return nil
		})
	}
	if s.config.Events != nil {
		start("events", func() error { s.config.Events.Run(running); return nil })
	}
	if s.mux != nil {
		start("client certificates", func() error { s.recheckClients(running); return nil })
	}
	if s.certificates != nil {
		start("certificates", func() error { s.certificates.Run(running); return nil })
	}
	start("source", func() error { return s.config.Source.Run(running, s.store) })
	start("publisher", func() error { s.hub.Run(running); return nil })
	all.Go(func() error { s.serveWhenSynced(stopping); return nil })

	<-stopping.Done()
	s.drain()
	end()
	err := all.Wait()
	log.Info("Server stopped")
	return err
}

func (s *Server) serveWhenSynced(ctx context.Context) {
	begin := time.Now()
	select {
	case <-s.store.WaitPublished():
		s.setServing(healthpb.HealthCheckResponse_SERVING)
		s.config.Logger.Info("Synced with the source, serving", "after", time.Since(begin))
	case <-ctx.Done():
	}
}

func (s *Server) setServing(status healthpb.HealthCheckResponse_ServingStatus) {
	s.health.SetServingStatus("", status)
	s.health.SetServingStatus(pb.DistributionService_ServiceDesc.ServiceName, status)
}

// eventReason returns the reason of Events about a warning.
func eventReason(w pb.NodeWarning) string {
	switch w {
	case pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV4, pb.NodeWarning_NODE_WARNING_POD_RANGE_IPV6:
		return "PodRangeMismatch"
	case pb.NodeWarning_NODE_WARNING_KUBE_PROXY:
		return "KubeProxyRunning"
	case pb.NodeWarning_NODE_WARNING_KERNEL_DIFFERS:
		return "KernelDiffers"
	case pb.NodeWarning_NODE_WARNING_NOT_SERVED:
		return "NotServed"
	}
	return "SlicecastWarning"
}

// ready returns what /readyz reports: nil, or why the server is not ready.
func (s *Server) ready() error {
	select {
	case <-s.draining:
		return errors.New("draining")
	default:
	}
	if !s.store.Published() {
		return errors.New("not synced with the source yet")
	}
	if s.certificates != nil {
		_, err := s.certificates.Content()
		return err
	}
	return nil
}

// drain makes the server not ready, sends the clients elsewhere, and waits for their calls to end,
// for the grace period at most.
func (s *Server) drain() {
	s.config.Logger.Info("Draining", "grace_period", s.config.GracePeriod)
	close(s.draining)
	s.health.Shutdown()
	s.hub.Drain()
	ctx, cancel := context.WithTimeout(context.Background(), s.config.GracePeriod)
	defer cancel()
	if s.mux != nil {
		_ = s.mux.Close() // only closing a listener can fail
	}
	stop := context.AfterFunc(ctx, func() {
		s.config.Logger.Warn("Grace period is over, canceling the remaining calls")
		for _, server := range s.grpcServers {
			server.Stop()
		}
	})
	defer stop()
	var all errgroup.Group
	if s.lean != nil {
		// The warning above reports calls that were cut off.
		all.Go(func() error { _ = s.lean.GracefulStop(ctx); return nil })
	}
	for _, server := range s.grpcServers {
		all.Go(func() error { server.GracefulStop(); return nil })
	}
	_ = all.Wait() // no part of it can fail
}
