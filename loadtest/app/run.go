package app

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/fleet"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/target"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// leadTime is between the decision to churn and the first change: enough for the source to know of it.
const leadTime = 200 * time.Millisecond

// run is one run.
type run struct {
	options  Options
	log      *slog.Logger
	progress *progress.View
	meter    *meter
	fleet    *fleet.Fleet

	// process is the server's, set up with setup, and cluster what it serves; nil where a running server is observed.
	process *target.Process
	setup   target.Setup
	cluster *generate.Cluster
	// churned is how many changes have been made.
	churned int
	// identity gives the TLS configuration of a node.
	identity identity
	// muted keeps nodes from telling what is known.
	muted atomic.Bool
}

// Run runs a load test and writes its report to out, and what is under way to progressOut. The error wraps
// fleet.ErrDiverged if nodes do not hold the true state at the end; the report is written all the same.
func Run(ctx context.Context, o Options, logger *slog.Logger, out, progressOut io.Writer) (err error) {
	if err := o.validate(); err != nil {
		return err
	}
	r := &run{options: o, log: logger, progress: progress.New(progressOut)}
	if !o.GRPCGo {
		r.identity.protocols = []string{wire.Protocol}
	}
	defer func() {
		if r.process != nil {
			err = errors.Join(err, r.process.Close())
		}
	}()
	node, server, err := r.startServer(ctx)
	if err != nil {
		return err
	}
	names := make([]string, o.Nodes)
	for i := range names {
		names[i] = generate.NodeName(i)
	}
	if r.fleet, err = fleet.New(fleet.Options{
		Server: server, Names: names, Credentials: node, Connecting: o.Connecting,
		Logger: slog.New(mutable{logger.Handler(), &r.muted}),
	}); err != nil {
		return err
	}
	pid := o.ServerPID
	if r.process != nil {
		pid = r.process.PID()
	}
	r.meter = &meter{server: pid, fleet: r.fleet}

	running, stop := context.WithCancel(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer stop()
	parts.Go(func() { r.progress.Run(running) })
	result, err := r.measure(running, &parts)
	if err != nil && !errors.Is(err, fleet.ErrDiverged) {
		return err
	}
	result.Summarize()
	stop()
	parts.Wait() // the last of the progress is there
	return errors.Join(err, o.Present(result, out, progressOut))
}

// startServer gives the credentials of nodes, and the address, of the server that is there or started.
func (r *run) startServer(ctx context.Context) (node func(string) (credentials.TransportCredentials, error), address string, err error) {
	o := r.options
	if o.Server != "" {
		if o.InsecurePlaintext {
			return func(string) (credentials.TransportCredentials, error) { return insecure.NewCredentials(), nil }, o.Server, nil
		}
		authority, err := testca.Load(o.NodeCACertFile, o.NodeCAKeyFile)
		if err != nil {
			return nil, "", err
		}
		pem, err := os.ReadFile(o.CAFile)
		if err != nil {
			return nil, "", fmt.Errorf("--ca-file: %w", err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return nil, "", fmt.Errorf("--ca-file %s: there is no PEM certificate", o.CAFile)
		}
		r.identity.authority, r.identity.roots, r.identity.serverName = authority, roots, o.ServerName
		return r.identity.credentials, o.Server, nil
	}
	authority, err := testca.New()
	if err != nil {
		return nil, "", err
	}
	r.identity.authority, r.identity.roots = authority, authority.Pool()
	r.setup = target.Setup{Cluster: o.cluster(), ClientCA: authority.PEM()}
	serving, err := authority.Server("127.0.0.1")
	if err != nil {
		return nil, "", err
	}
	if r.setup.Certificate, r.setup.PrivateKey, err = testca.EncodePEM(serving); err != nil {
		return nil, "", err
	}
	if r.cluster, err = generate.New(o.cluster()); err != nil {
		return nil, "", err
	}
	if err := r.startProcess(ctx); err != nil {
		return nil, "", err
	}
	return r.identity.credentials, r.process.Address, nil
}

// startProcess starts the server with the state as it is.
func (r *run) startProcess(ctx context.Context) (err error) {
	r.setup.Changed = r.churned
	arguments := []string{serveCommand, "--log-level=" + r.options.Log.Level, "--log-format=" + r.options.Log.Format}
	r.process, err = target.Start(ctx, arguments, r.setup)
	return err
}

// identity is what nodes know themselves and the server by.
type identity struct {
	authority  *testca.CA
	roots      *x509.CertPool
	serverName string
	// protocols that nodes offer before "h2".
	protocols []string
}

// tlsConfig gives a node a certificate.
func (i *identity) tlsConfig(node string) (*tls.Config, error) {
	certificate, err := i.authority.Node(node)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: i.roots, ServerName: i.serverName, Certificates: []tls.Certificate{certificate},
		NextProtos: i.protocols,
	}, nil
}

func (i *identity) credentials(node string) (credentials.TransportCredentials, error) {
	config, err := i.tlsConfig(node)
	if err != nil {
		return nil, err
	}
	return credentials.NewTLS(config), nil
}

// measure takes the fleet through the run. What it starts, it adds to parts, which end with the context.
func (r *run) measure(ctx context.Context, parts *sync.WaitGroup) (*report.Report, error) {
	result, err := r.newReport()
	if err != nil {
		return nil, err
	}
	state, err := r.memory(ctx)
	if err != nil {
		return nil, err
	}
	start, err := r.meter.read()
	if err != nil {
		return nil, err
	}
	parts.Go(func() { r.fleet.Run(ctx) })
	if err := r.awaitSync(ctx, r.fleet.Sync()); err != nil {
		return nil, err
	}
	synced, err := r.meter.read()
	if err != nil {
		return nil, err
	}
	repeat := &result.Repeats[0]
	repeat.State.Services, repeat.State.Slices, repeat.State.Endpoints = r.fleet.Objects()
	repeat.Phases = append(repeat.Phases, r.syncPhase("cold sync", report.ColdSync, r.fleet.Sync(), start, synced))
	connected, err := r.memory(ctx)
	if err != nil {
		return nil, err
	}
	if r.process != nil {
		repeat.ServerMemory = &report.ServerMemory{State: state, Connected: connected}
	}

	if err := r.churn(ctx, repeat); err != nil {
		return nil, err
	}
	if r.options.Floor {
		if err := r.floor(ctx, repeat); err != nil {
			return nil, err
		}
	}
	if r.options.Restart {
		if err := r.restart(ctx, repeat); err != nil {
			return nil, err
		}
	}
	if err := r.check(ctx, parts, repeat); err != nil {
		if !errors.Is(err, fleet.ErrDiverged) {
			return nil, err
		}
		return result, err
	}
	r.progress.Set(nil)
	return result, nil
}

// awaitSync waits until all nodes are in sync.
func (r *run) awaitSync(ctx context.Context, s *fleet.Sync) error {
	r.progress.Set(func() progress.Status {
		status := r.status("nodes get the state")
		status.NodesUp = s.Reached()
		return status
	})
	if err := r.wait(ctx, s.Done()); err != nil {
		return fmt.Errorf("%d of %d nodes have the server's state; node %s, for one, does not get it (--log-level=info tells more): %w",
			s.Reached(), r.options.Nodes, s.Missing(), err)
	}
	return nil
}

// wait waits for a channel to be closed, as long as that makes sense.
func (r *run) wait(ctx context.Context, done <-chan struct{}) error {
	timeout := time.NewTimer(r.options.Timeout)
	defer timeout.Stop()
	var ended <-chan struct{}
	if r.process != nil {
		ended = r.process.Ended()
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-ended:
		return errors.New("the server's process has ended; what it said is above")
	case <-timeout.C:
		return fmt.Errorf("not within %v (--timeout)", r.options.Timeout)
	}
}

// churn lets the state change: first unmeasured, then measured.
func (r *run) churn(ctx context.Context, result *report.Repeat) error {
	if r.cluster == nil || r.options.Churn == 0 {
		return r.observe(ctx, result)
	}
	if r.options.WarmUp > 0 {
		if err := r.changes(ctx, result, "warm-up", report.WarmUp, r.options.WarmUp); err != nil {
			return err
		}
	}
	defer pauseCollection()()
	return r.changes(ctx, result, "changes", report.Changes, r.options.Duration)
}

// changes has changes made for a time, and measures that.
func (r *run) changes(ctx context.Context, result *report.Repeat, name string, kind report.PhaseKind, d time.Duration) error {
	made := r.churned
	before, err := r.meter.read()
	if err != nil {
		return err
	}
	window, lag, err := r.carryOut(ctx, name, d)
	if err != nil {
		return err
	}
	after, err := r.meter.read()
	if err != nil {
		return err
	}
	p := r.changesPhase(name, kind, window, before, after)
	p.Changes, p.SourceLag = r.churned-made, new(lagOf(lag))
	_, p.Updates = window.Progress()
	r.measured(result, p, before, after)
	return nil
}

// observe measures whatever comes.
func (r *run) observe(ctx context.Context, result *report.Repeat) error {
	defer pauseCollection()()
	before, err := r.meter.read()
	if err != nil {
		return err
	}
	window := r.fleet.Open(nil)
	r.progress.Set(func() progress.Status {
		status := r.status("observing")
		status.Received = window.Objects()
		return status
	})
	timer := time.NewTimer(r.options.Duration)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	after, err := r.meter.read()
	if err != nil {
		return err
	}
	if r.cluster == nil {
		result.Notes = append(result.Notes,
			"latencies are from the slices' last-change-trigger-time, as precise as that is and by the clock of who set it")
	}
	p := r.changesPhase("observed", report.Changes, window, before, after)
	p.Updates = window.Objects()
	r.measured(result, p, before, after)
	return nil
}

// measured adds a phase with changes.
func (r *run) measured(result *report.Repeat, p report.Phase, before, after reading) {
	result.Phases = append(result.Phases, p)
	peaks(result, after)
	if p.Kind == report.Changes {
		r.notes(result, p, runtime.NumCPU(), after.machine-before.machine)
	}
}

// status is what can be said of all phases, once all nodes have the state.
func (r *run) status(phase string) progress.Status {
	s := progress.Status{Phase: phase, Nodes: r.options.Nodes, NodesUp: r.options.Nodes}
	s.Bytes, _ = r.fleet.Traffic()
	return s
}

// plan is for changes from now on.
func (r *run) plan(d time.Duration) generate.Plan {
	return generate.Plan{
		Start: time.Now().Add(leadTime).Truncate(time.Millisecond), First: r.churned,
		Count: max(1, int(math.Round(r.options.Churn*d.Seconds()))), Rate: r.options.Churn,
	}
}

// carryOut has changes made for a time and waits until all nodes have received all of them.
func (r *run) carryOut(ctx context.Context, name string, d time.Duration) (*fleet.Window, generate.Lag, error) {
	plan := r.plan(d)
	r.churned += plan.Count
	changes := r.cluster.Changes(plan)
	window := r.fleet.Open(changes)
	r.progress.Set(func() progress.Status {
		status := r.status(name)
		status.Received, status.Planned = window.Progress()
		due := int64(time.Since(plan.Start).Seconds() * plan.Rate)
		status.Sent = min(max(due, 0)*int64(r.options.Nodes), status.Planned)
		return status
	})
	lag, err := r.process.Churn(ctx, plan)
	if err != nil {
		return nil, lag, err
	}
	for _, c := range changes {
		r.cluster.Make(c)
	}
	if err := r.wait(ctx, window.Delivered()); err != nil {
		reached, all := window.Progress()
		err = fmt.Errorf("%s: nodes have received %d of %d updates: %w", name, reached, all, err)
		if node, missing := r.fleet.Behind(window); missing > 0 {
			err = fmt.Errorf("%w; node %s, for one, lacks %d of %d", err, node, missing, plan.Count)
		}
		return nil, lag, err
	}
	return window, lag, nil
}

// check compares all nodes with the true state: what was generated, or what the running server tells one more stream.
func (r *run) check(ctx context.Context, parts *sync.WaitGroup, result *report.Repeat) error {
	r.progress.Set(func() progress.Status { return r.status("checking that all nodes hold the true state") })
	ctx, cancel := context.WithTimeout(ctx, r.options.Timeout)
	defer cancel()
	shards := r.fleet.Shards()
	truth := func() fleet.Truth { return fleet.TruthOf(r.cluster.Objects(), shards) }
	if r.cluster == nil {
		reference, done, err := r.fleet.StartReference(ctx)
		if err != nil {
			return err
		}
		parts.Go(func() { <-done })
		truth = reference.Truth
	}
	err := r.fleet.Check(ctx, truth)
	result.Check = report.Check{Nodes: r.options.Nodes, Shards: shards, OK: err == nil}
	if err != nil {
		result.Check.Error = err.Error()
	}
	return err
}

// meter reads what has been used so far.
type meter struct {
	server int // process; 0: unknown
	fleet  *fleet.Fleet
}

type reading struct {
	at                         time.Time
	server, client             usage.CPU
	machine                    time.Duration
	received, sent             int64
	reconnects                 int64
	serverMemory, clientMemory usage.Memory
}

func (m *meter) read() (r reading, err error) {
	r.at = time.Now()
	r.received, r.sent = m.fleet.Traffic()
	r.reconnects = m.fleet.Reconnects()
	if m.server != 0 {
		if r.server, err = usage.CPUOf(m.server); err != nil {
			return r, err
		}
		if r.serverMemory, err = usage.MemoryOf(m.server); err != nil {
			return r, err
		}
	}
	if r.client, err = usage.CPUOf(os.Getpid()); err != nil {
		return r, err
	}
	if r.clientMemory, err = usage.MemoryOf(os.Getpid()); err != nil {
		return r, err
	}
	r.machine, err = usage.MachineCPU()
	return r, err
}
