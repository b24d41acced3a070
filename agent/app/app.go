package app

import (
	"context"
	"io"
	"log/slog"
	"os"
	"runtime"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/agent/config"
	"github.com/slicecast/slicecast/agent/conntrack"
	"github.com/slicecast/slicecast/agent/health"
	"github.com/slicecast/slicecast/agent/nodeport"
	"github.com/slicecast/slicecast/agent/programmer/iptables"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/agent/reconcile"
	"github.com/slicecast/slicecast/agent/verify"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/agent/warnings"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/file"
	"github.com/slicecast/slicecast/internal/source/kube"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
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
		Short: "Program the kernel of this node for the Services of the cluster",
		Long: `slicecast-agent programs the kernel of this node so that Services are reached, as kube-proxy does. It follows a
slicecast-server (--servers, --server-service). Without a server, it is standalone and follows a Kubernetes API server
(--source=kube) or a directory of manifests (--source=file).

Its rules stay in the kernel when it stops, so that an upgrade or a crash interrupts no traffic. To remove them, run
"slicecast-agent cleanup".`,
		Args:              cobra.NoArgs,
		SilenceUsage:      true,
		SilenceErrors:     true, // main prints the error
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(c *cobra.Command, _ []string) error {
			if o.MigrateFile != "" {
				return o.migrateConfig(c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr())
			}
			if err := o.file.Read(config.Kind, &config.Agent{}, c.Flags()); err != nil {
				return err
			}
			logger, err := o.Log.NewLogger(c.ErrOrStderr())
			if err != nil {
				return o.file.Named(err)
			}
			slog.SetDefault(logger)
			kube.RouteLogs(logger)
			return Run(c.Context(), *o, logger, c.OutOrStdout())
		},
	}
	daemon.AddVersion(c)
	o.AddFlags(c.Flags())
	c.AddCommand(newCleanupCommand(), newExplainCommand(), newInspectCommand(), newProbeCommand(), newStatusCommand(), newVerifyCommand())
	return c
}

// feed is where the agent's state comes from: client.Client or client.Local.
type feed interface {
	reconcile.Reporter
	// Warn reports that something should be mended on the node; see warnings.Options.
	Warn(w pb.NodeWarning, reason string)
	Run(ctx context.Context) error
}

// Run runs an agent until ctx ends. The printer writes to out. Errors name the flags, or the fields
// of the configuration file, that they are about.
func Run(ctx context.Context, o Options, logger *slog.Logger, out io.Writer) error {
	if err := o.complete(); err != nil {
		return err
	}
	if o.InitOnly {
		if err := o.validateProgrammer(); err != nil {
			return o.file.Named(err)
		}
		o.Node.tune(logger)
		o.prepareKernel(ctx, logger)
		return nil
	}
	a, err := newAgent(ctx, &o, logger, out)
	if err == nil {
		return a.run(ctx)
	}
	if ctx.Err() == nil {
		return o.file.Named(err)
	}
	return nil // stopped before it has begun
}

// agent has the parts of an agent.
type agent struct {
	options    *Options
	logger     *slog.Logger
	registry   daemon.Registry
	programmer *chosen
	cache      *client.Cache
	checkpoint *checkpoint.Checkpoint // nil if the agent keeps none
	settled    chan struct{}          // closed once nothing is programmed any more
	feed       feed
	reconciler *reconcile.Reconciler
	flows      *conntrack.Cleaner
	health     *health.Server
	warnings   *warnings.Warnings
	displaced  *prometheus.CounterVec // of the ports for health checks and metrics
	services   *daemon.Services
}

// newAgent connects the parts of an agent. Nothing runs yet. If ctx ends before a programmer is
// chosen, newAgent returns an error.
func newAgent(ctx context.Context, o *Options, logger *slog.Logger, out io.Writer) (*agent, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	viewOptions, err := o.Node.view(o.NodeName)
	if err != nil {
		return nil, err
	}
	a := &agent{options: o, logger: logger, registry: o.Registry, cache: client.NewCache(), settled: make(chan struct{})}
	if a.registry == nil {
		a.registry = daemon.NewRegistry()
	}
	o.Registry = a.registry
	kube.RegisterClientMetrics(a.registry)
	programming := a.registry // of metrics about what the agent programs
	if o.Programmer == programmerShadow {
		programming = nil
	} else {
		o.iptablesMetrics = iptables.NewMetrics(programming)
	}
	if a.programmer, err = o.choose(ctx, logger, out); err != nil {
		return nil, err
	}
	a.programmer.observe(a.registry)
	if a.programmer.name == programmerIPVS {
		viewOptions.Schedulers = ipvs.Schedulers()
	}
	a.openCheckpoint()
	if a.feed, err = a.newFeed(); err != nil {
		return nil, err
	}
	a.warnings = warnings.New(warnings.Options{
		Check: a.check(viewOptions), Report: a.feed.Warn, Logger: logger, Registerer: a.registry,
	})
	a.displaced = bounded.NewDisplaced(a.registry, "agent")
	a.services = newServices(logger, a.registry)
	a.flows = conntrack.New(conntrack.Options{Logger: logger, Registerer: programming})
	a.health = health.New(health.Options{
		Node: a.cache.Node, MinSyncPeriod: o.Node.MinSyncPeriod, Addresses: o.HealthzAddresses, Displaced: a.displaced,
		Logger: logger, Registerer: a.registry,
	})
	options := reconcile.Options{
		Ahead: a.checkpoint != nil && a.checkpoint.Ahead(),
		Cache: a.cache, View: view.New(viewOptions), Programmer: a.programmer.Programmer, Reporter: a.feed,
		MinSyncPeriod: o.Node.MinSyncPeriod, SyncPeriod: o.Node.SyncPeriod, Mode: a.programmer.name,
		Shadow: o.Programmer == programmerShadow, Logger: logger, Registerer: a.registry,
	}
	if !o.programsNothing() {
		o.Node.tune(logger)
		options.Flows, options.Health = a.flows, a.health
	}
	a.reconciler = reconcile.New(options)
	return a, nil
}

// run runs the agent until ctx ends. Only what programming needs may end it with an error: the feed
// of a standalone agent.
func (a *agent) run(ctx context.Context) error {
	o := a.options
	g, ctx := errgroup.WithContext(ctx)
	served := a.newPages()
	g.Go(func() error { a.serveMetrics(ctx); return nil })
	g.Go(func() error { served.Run(ctx); return nil })
	g.Go(func() error { a.serveStatus(ctx); return nil })
	if a.checkpoint != nil {
		g.Go(func() error { a.checkpoint.Run(ctx); return nil })
	}
	var programming sync.WaitGroup
	programming.Add(2)
	g.Go(func() error { defer programming.Done(); return a.feed.Run(ctx) })
	g.Go(func() error { defer programming.Done(); a.reconciler.Run(ctx); return nil })
	g.Go(func() error { programming.Wait(); close(a.settled); return nil })
	g.Go(func() error { a.flows.Run(ctx); return nil })
	g.Go(func() error { a.health.Run(ctx, a.reconciler); return nil })
	g.Go(func() error { a.warnings.Run(ctx); return nil })
	if shadow, ok := a.programmer.Programmer.(*verify.Shadow); ok {
		g.Go(func() error { shadow.Run(ctx); return nil })
	}
	if !o.Node.AllowExternalIPs {
		a.logger.Info("External IPs of Services are not served, because --allow-service-external-ips is false")
	}
	if addresses, err := nodeport.Local(); err == nil {
		o.Node.warn(a.logger, addresses)
	}
	a.logger.Info("Agent started", "version", daemon.Version(), "node", o.NodeName, "programmer", a.programmer.name,
		"reason", a.programmer.reason, "standalone", o.standalone())
	if err := g.Wait(); err != nil {
		return err
	}
	a.logger.Info("Agent stopped, its rules stay in the kernel")
	return nil
}

// openCheckpoint opens the checkpoint, if the agent keeps one, and restores the cache from it.
func (a *agent) openCheckpoint() {
	if a.options.Checkpoint == "" {
		return
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		a.logger.Warn("Cannot find out which boot of the machine this is; if this agent is killed, the next one may "+
			"program older rules", "err", err)
	}
	a.checkpoint = checkpoint.Open(checkpoint.Options{
		Path: a.options.Checkpoint, NodeName: a.options.NodeName, Cache: a.cache, Boot: string(boot), Settled: a.settled,
		Logger: a.logger, Registerer: a.registry,
	})
}

func (a *agent) newFeed() (feed, error) {
	o := a.options
	if o.standalone() {
		src, err := a.newSource()
		if err != nil {
			return nil, err
		}
		s, err := store.New(store.Options{})
		if err != nil {
			return nil, err
		}
		return &client.Local{Source: src, Store: s, Cache: a.cache, NodeName: o.NodeName}, nil
	}
	servers, cas, err := o.discovery(a.logger)
	if err != nil {
		return nil, err
	}
	return client.New(client.Options{
		Servers: servers, ServerName: client.ServerName(o.Credentials.ServerName, o.Servers), DialOptions: o.Credentials.DialOptions(cas, a.logger),
		NodeName: o.NodeName, Version: daemon.Version(), Programmer: a.programmer.name,
		Cache: a.cache, Observe: observer(a.logger, a.cache), Logger: a.logger, Registerer: a.registry,
	}), nil
}

// newSource returns the source of a standalone agent.
func (a *agent) newSource() (source.Source, error) {
	o := a.options
	if o.Source == "file" {
		return file.New(file.Options{
			Directory: o.Manifests, ServiceProxyName: o.ProxyName, Log: a.logger, Metrics: a.registry,
		})
	}
	config, err := kube.Config(o.Kubeconfig)
	if err != nil {
		return nil, err
	}
	return kube.New(kube.Options{Config: config, ServiceProxyName: o.ProxyName, Log: a.logger, Metrics: a.registry})
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
		logger.Debug("Received update", "shard", u.Shard, "from", u.From, "sequence", u.To, "full", u.Full, "bytes", size,
			"services", len(u.Services), "slices", len(u.Slices), "deltas", len(u.Deltas), "removed", len(u.Removed))
		for _, d := range u.Deltas {
			slice := cache.Slice(u.Shard, d.Key())
			if slice == nil {
				continue // the client has requested the slice again
			}
			whole, err := wire.EncodeUpdate(&model.Update{
				Shard: u.Shard, From: u.From, To: u.To, Slices: []*model.Slice{slice},
			})
			if err != nil {
				continue // a debug line is not worth an error
			}
			logger.Debug("Received delta", "slice", d.Key().String(), "endpoints_changed", len(d.Endpoints)+len(d.Conditions),
				"endpoints_removed", len(d.Removed), "endpoints", len(slice.Endpoints), "bytes", size, "slice_bytes", len(whole))
		}
	}
}
