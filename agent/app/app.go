package app

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/conntrack"
	"github.com/slicecast/slicecast/agent/health"
	"github.com/slicecast/slicecast/agent/reconcile"
	"github.com/slicecast/slicecast/agent/status"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/file"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
)

// UseOneCPU limits this process's Go code to one CPU at a time, unless the environment variable
// GOMAXPROCS is set. A change passes from goroutine to goroutine on its way to the kernel. With
// more CPUs, the runtime would wake another CPU for each of these steps, which costs CPU time and
// saves none.
func UseOneCPU() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
}

// NewCommand returns the command slicecast-agent.
func NewCommand() *cobra.Command {
	o := &Options{}
	c := &cobra.Command{
		Use:   "slicecast-agent",
		Short: "Program this node's kernel with where Services lead",
		Long: `slicecast-agent keeps this node's kernel programmed with where Services lead. It follows a slicecast-server (--servers,
--server-service) or, standalone, a Kubernetes API server (--source=kube) or a directory of manifests (--source=file).

What it has programmed stays when it ends, so that an update or a crash interrupts nothing; "slicecast-agent cleanup" removes it.`,
		Version:           daemon.Version(),
		Args:              cobra.NoArgs,
		SilenceUsage:      true,
		SilenceErrors:     true, // main prints errors
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(c *cobra.Command, _ []string) error {
			if o.MigrateFile != "" {
				return o.migrateConfig(c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr())
			}
			if err := o.readConfig(c.Flags()); err != nil {
				return err
			}
			logger, err := o.Log.NewLogger(c.ErrOrStderr())
			if err != nil {
				return o.named(err)
			}
			slog.SetDefault(logger)
			kube.RouteLogs(logger)
			return Run(c.Context(), *o, logger, c.OutOrStdout())
		},
	}
	c.SetVersionTemplate(fmt.Sprintln("slicecast-agent", "{{.Version}}"))
	o.AddFlags(c.Flags())
	c.AddCommand(newCleanupCommand(), newStatusCommand())
	return c
}

// feed is where the agent's state comes from: client.Client or client.Local.
type feed interface {
	reconcile.Reporter
	Run(ctx context.Context) error
}

// Run runs an agent until ctx ends. The printer writes to out.
func Run(ctx context.Context, o Options, logger *slog.Logger, out io.Writer) error {
	if err := o.complete(); err != nil {
		return err
	}
	if o.InitOnly {
		if err := o.validateProgrammer(); err != nil {
			return o.named(err)
		}
		o.Node.tune(logger)
		o.prepareKernel(ctx, logger)
		return nil
	}
	if err := o.validate(); err != nil {
		return o.named(err)
	}
	viewOptions, err := o.Node.view(o.NodeName)
	if err != nil {
		return o.named(err)
	}
	registry := o.Registry
	if registry == nil {
		registry = daemon.NewRegistry()
	}
	p, err := o.choose(logger, out)
	if err != nil {
		return o.named(err)
	}
	p.observe(registry)
	viewOptions.Schedulers = p.schedulers()
	cache := client.NewCache()
	checkpoint, err := o.openCheckpoint(cache, logger, registry)
	if err != nil {
		return err
	}
	f, err := o.newFeed(cache, p.name, logger, registry)
	if err != nil {
		return err
	}
	displaced := bounded.NewDisplaced(registry, "agent")
	flows := conntrack.New(conntrack.Options{Logger: logger, Registerer: registry})
	// The health server queries the reconciler, and the reconciler tells it what to answer. So its
	// field Programming is set later.
	healthServer := health.New(health.Options{
		Node: cache.Node, MinSyncPeriod: o.Node.MinSyncPeriod, Addresses: o.HealthzAddresses, Logger: logger, Registerer: registry,
		Displaced: displaced,
	})
	options := reconcile.Options{
		Cache: cache, View: view.New(viewOptions), Programmer: p.Programmer, Reporter: f, MinSyncPeriod: o.Node.MinSyncPeriod, SyncPeriod: o.Node.SyncPeriod,
		Logger: logger, Registerer: registry,
	}
	if p.name != programmerPrinter { // the printer leaves the machine alone
		o.Node.tune(logger)
		options.Flows, options.Health = flows, healthServer
	}
	r := reconcile.New(options)
	healthServer.Programming = r

	g, ctx := errgroup.WithContext(ctx)
	if err := o.serveMetrics(ctx, g, registry, displaced, logger); err != nil {
		return err
	}
	servers, _ := f.(*client.Client) // nil if standalone
	err = o.serveStatus(ctx, g, status.Options{
		Programmer: p.name, ProgrammerReason: p.reason, Client: servers, Checkpoint: checkpoint, Cache: cache, Reconciler: r,
	})
	if err != nil {
		return err
	}
	if checkpoint != nil {
		g.Go(func() error { checkpoint.Run(ctx); return nil })
	}
	g.Go(func() error { return f.Run(ctx) })
	g.Go(func() error { r.Run(ctx); return nil })
	g.Go(func() error { flows.Run(ctx); return nil })
	g.Go(func() error { healthServer.Run(ctx); return nil })
	if !o.Node.AllowExternalIPs {
		logger.Info("External IPs of Services are not served on this node (--allow-service-external-ips=false)")
	}
	logger.Info("Started", "version", daemon.Version(), "node", o.NodeName, "programmer", p.name, "reason", p.reason, "standalone", o.standalone())
	if err := g.Wait(); err != nil {
		return err
	}
	logger.Info("Stopped; what was programmed stays")
	return nil
}

// openCheckpoint opens the checkpoint and restores the cache from it. It returns nil if the agent
// keeps no checkpoint.
func (o *Options) openCheckpoint(cache *client.Cache, logger *slog.Logger, registry daemon.Registry) (*client.Checkpoint, error) {
	if o.Checkpoint == "" {
		return nil, nil
	}
	checkpoint, err := client.OpenCheckpoint(client.CheckpointOptions{
		Path: o.Checkpoint, NodeName: o.NodeName, Cache: cache, Logger: logger, Registerer: registry,
	})
	if err != nil {
		return nil, fmt.Errorf("--checkpoint: %w", err)
	}
	return checkpoint, nil
}

// newFeed returns the feed. programmer is the name that is reported to the servers.
func (o *Options) newFeed(cache *client.Cache, programmer string, logger *slog.Logger, registry daemon.Registry) (feed, error) {
	if o.standalone() {
		src, err := o.newSource(logger, registry)
		if err != nil {
			return nil, err
		}
		s, err := store.New(store.Options{})
		if err != nil {
			return nil, err
		}
		return &client.Local{Source: src, Store: s, Cache: cache, NodeName: o.NodeName}, nil
	}
	dial, err := o.dialOptions(logger)
	if err != nil {
		return nil, err
	}
	servers, err := o.discovery(logger)
	if err != nil {
		return nil, err
	}
	return client.New(client.Options{
		Servers: servers, ServerName: client.ServerName(o.ServerName, o.Servers), NodeName: o.NodeName, Version: daemon.Version(), Programmer: programmer, DialOptions: dial,
		Cache: cache, Observe: observer(logger, cache), Logger: logger, Registerer: registry,
	}), nil
}

func (o *Options) newSource(logger *slog.Logger, registry daemon.Registry) (source.Source, error) {
	if o.Source == "file" {
		return file.New(file.Options{Directory: o.Manifests, ServiceProxyName: o.ProxyName, Log: logger, Metrics: registry})
	}
	config, err := kube.Config(o.Kubeconfig)
	if err != nil {
		return nil, err
	}
	return kube.New(kube.Options{Config: config, ServiceProxyName: o.ProxyName, Log: logger, Metrics: registry})
}

// serveMetrics serves metrics if --metrics-bind-address is given.
func (o *Options) serveMetrics(
	ctx context.Context, g *errgroup.Group, registry daemon.Registry, displaced *prometheus.CounterVec, logger *slog.Logger,
) error {
	if o.MetricsBindAddress == "" {
		return nil
	}
	config, err := o.metricsTLS(logger)
	if err != nil {
		return err
	}
	l, err := daemon.Listen("metrics-bind-address", o.MetricsBindAddress)
	if err != nil {
		return err
	}
	port := bounded.NewPort("metrics", bounded.Metrics, logger, displaced)
	g.Go(func() error {
		return daemon.ServeHTTP(ctx, tls.NewListener(port.Listener(l), config), port.Server(daemon.MetricsHandler(registry)))
	})
	return nil
}

// observer returns a function that logs, at level debug, each update and each delta that arrives. A
// delta is logged with its size and the size of the whole slice, which would otherwise have been
// sent.
func observer(logger *slog.Logger, cache *client.Cache) func(*wire.Response, int) {
	return func(r *wire.Response, size int) {
		u := r.Update
		if u == nil || !logger.Enabled(context.Background(), slog.LevelDebug) {
			return
		}
		logger.Debug("Update", "shard", u.Shard, "from", u.From, "sequence", u.To, "full", u.Full, "bytes", size,
			"services", len(u.Services), "slices", len(u.Slices), "deltas", len(u.Deltas), "removed", len(u.Removed))
		for _, d := range u.Deltas {
			slice := cache.Slice(u.Shard, d.Key())
			if slice == nil {
				continue // the client has requested the slice again
			}
			whole, err := wire.EncodeUpdate(&model.Update{Shard: u.Shard, From: u.From, To: u.To, Slices: []*model.Slice{slice}})
			if err != nil {
				continue // a debug line is not worth an error
			}
			logger.Debug("Delta", "slice", d.Key().String(), "endpoints_changed", len(d.Endpoints)+len(d.Conditions),
				"endpoints_removed", len(d.Removed), "endpoints", len(slice.Endpoints), "bytes", size, "slice_bytes", len(whole))
		}
	}
}
