package app

import (
	"context"
	"crypto/tls"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/agent/pages"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/tlsfiles"
)

// newPages returns the server of kube-proxy's pages.
func (a *agent) newPages() *pages.Server {
	o := a.options
	effective := config.FromFlags(o.flags)
	addresses := strings.Join(o.MetricsAddresses, ",")
	effective.NodeName, effective.MetricsBindAddress = &o.NodeName, &addresses // as completed
	flags := make(map[string]string)
	o.flags.VisitAll(func(f *pflag.Flag) { flags[f.Name] = f.Value.String() })
	return pages.New(pages.Options{
		Addresses: o.MetricsAddresses, Pages: o.Pages, Profiling: o.Profiling,
		Version: daemon.Version(), Mode: a.programmer.name, Metrics: a.registry,
		Config: map[string]any{config.Group: effective}, Flags: flags,
		Logger: a.logger, Registerer: a.registry, Displaced: a.displaced,
	})
}

// serveMetrics serves metrics, to clients with a certificate, if --secure-metrics-bind-address is
// set.
func (a *agent) serveMetrics(ctx context.Context, g *errgroup.Group) error {
	o := a.options
	if o.SecureMetricsAddress == "" {
		return nil
	}
	files, err := tlsfiles.Follow(tlsfiles.Files{
		Certificate: o.MetricsCertFile, PrivateKey: o.MetricsKeyFile, CA: o.MetricsClientCAFile,
	}, a.logger)
	if err != nil {
		return fmt.Errorf("--metrics-cert-file, --metrics-key-file, --metrics-client-ca-file: %w", err)
	}
	l, err := daemon.Listen("secure-metrics-bind-address", o.SecureMetricsAddress)
	if err != nil {
		return err
	}
	port := bounded.NewPort("metrics", bounded.Metrics, a.logger, a.displaced)
	config := files.Server(tls.RequireAndVerifyClientCert, "http/1.1")
	g.Go(func() error { return port.Serve(ctx, l, config, daemon.MetricsHandler(a.registry)) })
	return nil
}
