package app

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/agent/pages"
	"github.com/slicecast/slicecast/internal/auth"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/ca"
	"github.com/slicecast/slicecast/internal/configfile"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/tlsfiles"
)

// newPages returns the server of kube-proxy's pages.
func (a *agent) newPages() *pages.Server {
	o := a.options
	flags := make(map[string]string)
	o.flags.VisitAll(func(f *pflag.Flag) { flags[f.Name] = f.Value.String() })
	return pages.New(pages.Options{
		Addresses: o.MetricsAddresses, Pages: o.Pages, Profiling: o.Profiling,
		Version: daemon.Version(), Mode: a.programmer.name, Metrics: a.registry,
		Config: o.configz(), Flags: flags,
		Logger: a.logger, Registerer: a.registry, Displaced: a.displaced,
	})
}

// configz returns the settings as the page configz has them: by the name of their API group.
func (o *Options) configz() map[string]any {
	effective := config.FromFlags(o.flags)
	addresses := strings.Join(o.MetricsAddresses, ",")
	effective.NodeName, effective.MetricsBindAddress = &o.NodeName, &addresses // as completed
	return map[string]any{configfile.Group: effective}
}

// serveMetrics serves metrics over TLS until ctx ends, if --secure-metrics-bind-address is set, to
// clients with a certificate or a token.
func (a *agent) serveMetrics(ctx context.Context) {
	const flag = "secure-metrics-bind-address"
	o := a.options
	if o.SecureMetricsAddress == "" {
		return
	}
	port := bounded.NewPort("metrics", bounded.Metrics, a.logger, a.displaced)
	// Each is nil until what it is made of could be read.
	var config *tls.Config
	var verify func([]*x509.Certificate) error
	var handler *http.ServeMux
	a.services.Serve(ctx, flag, func() (_ net.Listener, err error) {
		if config == nil {
			if config, verify, err = o.metricsTLS(a.logger); err != nil {
				return nil, err
			}
		}
		if handler == nil {
			if handler, err = a.metricsHandler(verify); err != nil {
				return nil, err
			}
		}
		return daemon.Listen(flag, o.SecureMetricsAddress)
	}, func(ctx context.Context, l net.Listener) error { return port.Serve(ctx, l, config, handler) })
}

// metricsHandler returns the handler of metrics for observers. verify is that of auth.Options.
func (a *agent) metricsHandler(verify func([]*x509.Certificate) error) (*http.ServeMux, error) {
	clients := auth.Options{
		Program: "agent", ClientCAFlag: "--metrics-client-ca-file", TokenFlags: "--metrics-token-audience",
		VerifyClient: verify, Logger: a.logger, Registerer: a.registry,
	}
	if a.options.MetricsTokenAudience != "" {
		var err error
		if clients.Tokens, err = a.options.metricsTokens(); err != nil {
			return nil, err
		}
	}
	handler := http.NewServeMux()
	handler.Handle("GET /metrics", auth.New(clients).Observers(daemon.MetricsHandler(a.registry)))
	return handler, nil
}

// metricsTLS returns the configuration of TLS for --secure-metrics-bind-address, and the function
// that verifies a client's certificate, which is nil if there can be none.
func (o *Options) metricsTLS(log *slog.Logger) (*tls.Config, func([]*x509.Certificate) error, error) {
	if o.MetricsCertFile == "" {
		self := &selfSigned{name: o.NodeName}
		config := tlsfiles.Config()
		config.NextProtos = []string{"http/1.1"}
		config.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return self.certificate() }
		return config, nil, nil
	}
	files, err := tlsfiles.Follow(tlsfiles.Files{
		Certificate: o.MetricsCertFile, PrivateKey: o.MetricsKeyFile, CA: o.MetricsClientCAFile,
	}, log)
	if err != nil {
		return nil, nil, fmt.Errorf("--metrics-cert-file, --metrics-key-file, --metrics-client-ca-file: %w", err)
	}
	return files.Server(true, "http/1.1"), files.VerifyClient, nil
}

// reuseVerdicts is how long the API server's verdict on a token for metrics is reused. With 10,000
// agents, a Prometheus then costs the API server 17 reviews a second.
const reuseVerdicts = 10 * time.Minute

// These bound the reviews that an agent requests, per second and at once: of all ServiceAccounts
// that may read its metrics, and of one of them, which has several tokens if Prometheus has several
// replicas. 10,000 agents make at most 500 requests per second, whatever tokens they are shown.
const (
	reviewsOfScrapers, reviewsOfScrapersBurst = 1. / 20, 16
	reviewsOfScraper, reviewsOfScraperBurst   = 1. / 60, 4
)

// keysOfScrapers and keysOfScrapersLife are the least interval of an agent's reads of the API
// server's keys, and how long it uses them. Each of them is longer by up to a half, by chance, so
// that agents do not read at the same time. Strangers can make all agents read with invented
// tokens: 10,000 agents then make 30 requests per second, and 5 otherwise.
const keysOfScrapers, keysOfScrapersLife = 10 * time.Minute, time.Hour

// metricsTokens returns the options for the review of tokens for metrics.
func (o *Options) metricsTokens() (*auth.TokenOptions, error) {
	config, err := kube.Config(o.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--metrics-token-audience: %w", err)
	}
	out := &auth.TokenOptions{
		Audience: o.MetricsTokenAudience, ObserversFlag: "--metrics-service-accounts", Reuse: reuseVerdicts,
		Budget:       auth.Limit{PerSecond: reviewsOfScrapers, AtOnce: reviewsOfScrapersBurst},
		Share:        auth.Limit{PerSecond: reviewsOfScraper, AtOnce: reviewsOfScraperBurst},
		KeysInterval: wait.Jitter(keysOfScrapers, 0.5), KeysLife: wait.Jitter(keysOfScrapersLife, 0.5),
	}
	out.Observers, _ = auth.ParseServiceAccounts("", o.MetricsAccounts) // validate has checked them
	// Without Access, only tokens of these accounts are reviewed. Any tenant can have others.
	out.Review, _, out.Get, err = kube.Reviews(config)
	return out, err
}

// selfSignedLife is how long a certificate of the agent's own is valid. It is replaced when half of
// the time is over.
const selfSignedLife = 365 * 24 * time.Hour

// selfSigned has a certificate of the agent's own, as kubelets do that have none from the cluster.
// Clients cannot verify it. Each process makes another one, and its key never leaves the process.
type selfSigned struct {
	name string // of the node

	mu      sync.Mutex // guards held and renewal
	held    *tls.Certificate
	renewal time.Time // when held is replaced
}

func (s *selfSigned) certificate() (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if now.Before(s.renewal) {
		return s.held, nil
	}
	// Clocks of clients may be behind.
	validity := ca.Validity{NotBefore: now.Add(-time.Hour), NotAfter: now.Add(selfSignedLife)}
	issuer, err := ca.New(s.name, validity)
	if err != nil {
		return nil, err
	}
	held, err := issuer.Issue(ca.Serving(s.name), validity)
	if err != nil {
		return nil, err
	}
	s.held, s.renewal = &held, now.Add(selfSignedLife/2)
	return s.held, nil
}
