package engine

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/fleet"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/usage"
	"github.com/slicecast/slicecast/loadtest/worker"
)

// Run plays the scenario as often as the options say, and shows its progress in the view. It stops
// after a repeat that fails. The report is not nil if there is anything to report; the check of the
// failed repeat then says why it failed. The error wraps fleet.ErrDiverged if nodes did not hold
// the true state at the end.
func Run(ctx context.Context, o Options, s *scenario.Scenario, view *progress.View) (*report.Report, error) {
	machine, err := usage.ThisMachine()
	if err != nil {
		return nil, err
	}
	out := &report.Report{
		Schema: report.Schema, Start: time.Now(), Peer: o.Peer, Nodes: s.Nodes, Server: o.Server, Source: o.source(),
		Scenario: report.Scenario{Name: s.Name, Description: s.Description, Parameters: o.parameters(s)},
		Machine:  machine, Versions: report.Versions{Slicecast: daemon.Version(), Go: runtime.Version()},
		Notes: []string{},
	}
	if o.KubeAPIServer != "" && o.KubeAPIServer != Own {
		out.Server = o.KubeAPIServer
	}
	out.Notes = append(out.Notes, remarks(&o)...)
	for range o.Repeats {
		r := &repeat{options: &o, scenario: s, view: view, report: out}
		if err = r.run(ctx); err != nil {
			break
		}
	}
	view.Set(nil)
	if len(out.Repeats) == 0 {
		return nil, err
	}
	out.Summarize()
	return out, err
}

// remarks returns notes that readers of any report with these options need.
func remarks(o *Options) (out []string) {
	note := func(is bool, text string) {
		if is {
			out = append(out, text)
		}
	}
	note(!o.writes(), "the changes are the cluster's own; latencies are measured from the slices' last-change-trigger-time, with the precision "+
		"and the clock of the controller that set it")
	note(o.Peer == report.KubeAPIServer && o.writes(), "the API server's CPU time includes the writes of the changes, but not etcd; "+
		"latencies are measured from when a change was due and include its way through etcd")
	note(o.Peer == report.KubeAPIServer, "all nodes together decode each object once, so their CPU time is not that of kube-proxies")
	behind := o.Peer == report.Slicecast && o.KubeAPIServer != "" && o.writes()
	note(behind && o.KubeAPIServer == Own, "the servers watch an API server; its CPU time, with the writes of the "+
		"changes but without etcd, is a metric of its own")
	note(behind && o.KubeAPIServer != Own, "the servers watch an API server; its CPU time is not in the figures")
	note(behind, "latencies are measured from when a change was due and include its way through etcd and the API server")
	return out
}

type repeat struct {
	options  *Options
	scenario *scenario.Scenario
	view     *progress.View
	report   *report.Report

	stack  *stack
	meter  *meter
	result report.Repeat
	// aside is the cost of the event. It is nil before the event.
	aside *report.Aside
}

func (r *repeat) run(ctx context.Context) (err error) {
	ctx, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	start := time.Now()
	r.result = report.Repeat{Start: start, Phases: []report.Phase{}, Notes: []string{}}
	r.stack = &stack{options: r.options, scenario: r.scenario, lost: lost, said: r.view.Log()}
	defer func() { err = errors.Join(err, r.stack.close()) }()
	r.meter = newMeter(r.stack, start)
	r.view.Set(func() progress.Status { return *r.meter.shown.Load() })
	r.meter.enter("start")
	if err := r.stack.start(ctx); err != nil {
		if err = because(ctx, err); len(r.report.Repeats) > 0 {
			err = r.failed(err)
		}
		return err
	}
	r.report.Processes = len(r.stack.workers)
	r.report.Versions.KubeAPIServer, r.report.Versions.Etcd = r.stack.kubeVersion, r.stack.etcdVersion

	metering, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { r.meter.run(metering) })
	err = r.course(ctx)
	last, readErr := r.meter.read(ctx)
	stop()
	running.Wait()
	if readErr != nil {
		last = r.meter.latest
	}
	err = cmp.Or(err, readErr)
	r.summarize(last.nodes)
	if err != nil && !errors.Is(err, fleet.ErrDiverged) {
		return r.failed(because(ctx, err))
	}
	r.report.Repeats = append(r.report.Repeats, r.result)
	return err
}

// summarize adds what is known only at the end, given the last sample of all nodes.
func (r *repeat) summarize(last worker.Sample) {
	r.reconnected(last.Reconnects)
	r.note(last.FetchedLists > 0, "nodes fetched %d lists, because the API server refused to stream them", last.FetchedLists)
	r.note(last.CompressedLists > 0, "the API server compressed %d lists and the watches that began with them, as Kubernetes "+
		"does from 1.37 on for the first 5 to 10 minutes of a watch; nodes reopened these watches at once, so that changes are "+
		"not compressed", last.CompressedLists)
	r.explainCPU()
	r.result.Series = r.meter.seconds
	if r.result.ClientPeakBytes == 0 { // floor has not set it; its own memory must not count
		r.result.ServerPeakBytes, r.result.ClientPeakBytes = r.meter.peaks()
	}
}

// failed adds the repeat to the report as far as it got, so that neither it nor earlier repeats are
// lost. It returns err.
func (r *repeat) failed(err error) error {
	r.result.Check = report.Check{Nodes: r.scenario.Nodes, Error: err.Error()}
	r.report.Repeats = append(r.report.Repeats, r.result)
	return err
}

// because returns the cause of the context's end if the context has ended, and err otherwise.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (r *repeat) course(ctx context.Context) error {
	if err := r.connect(ctx); err != nil {
		return err
	}
	if err := r.warmUp(ctx); err != nil {
		return err
	}
	if err := r.play(ctx); err != nil {
		return err
	}
	if r.scenario.Floor {
		if err := r.floor(ctx); err != nil {
			return err
		}
	}
	return r.check(ctx)
}

func (r *repeat) check(ctx context.Context) error {
	r.meter.enter("comparing all nodes with the true state")
	check := &r.result.Check
	check.Nodes = r.scenario.Nodes
	for _, w := range r.stack.workers {
		c, err := child.Call(ctx, w, (*worker.Worker).Check, r.options.Timeout)
		if err != nil {
			return err
		}
		check.Shards = c.Shards
		if c.Wrong != "" {
			check.Error += c.Wrong
		}
	}
	if check.OK = check.Error == ""; !check.OK {
		return diverged(check.Error)
	}
	return nil
}

// diverged is an error that wraps fleet.ErrDiverged. Its text comes from workers, which already say
// that nodes diverged.
type diverged string

// Error implements error.
func (d diverged) Error() string { return string(d) }

// Unwrap returns fleet.ErrDiverged.
func (diverged) Unwrap() error { return fleet.ErrDiverged }
