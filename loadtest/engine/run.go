package engine

import (
	"context"
	"errors"
	"runtime"
	"time"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/loadtest/fleet"
	"github.com/slicecast/slicecast/loadtest/progress"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// Run plays the scenario of the options as often as it is to be played, and shows in the view how that goes. A repeat that fails is the
// last one. The report is there all the same if it has anything to tell; that repeat's check then says why it failed. The error
// wraps fleet.ErrDiverged if nodes do not hold the true state at its end.
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

// remarks are what readers of any report of such a run have to know.
func remarks(o *Options) (out []string) {
	note := func(is bool, text string) {
		if is {
			out = append(out, text)
		}
	}
	note(!o.writes(), "the changes are the cluster's own; latencies are from the slices' last-change-trigger-time, as precise as that is and by the "+
		"clock of who set it")
	note(o.Peer == report.KubeAPIServer && o.writes(), "the API server's CPU time includes the writes of the changes, but not etcd's; "+
		"latencies are from when a change was due, its way through etcd included")
	note(o.Peer == report.KubeAPIServer, "the nodes decode what they get once for all; their CPU time is not a kube-proxy's")
	behind := o.Peer == report.Slicecast && o.KubeAPIServer != "" && o.writes()
	note(behind && o.KubeAPIServer == Own, "the servers watch an API server, whose CPU time, with the writes of the changes and without etcd's, is a figure of its own")
	note(behind && o.KubeAPIServer != Own, "the servers watch an API server, whose own CPU time is not in the figures")
	note(behind, "latencies are from when a change was due, its way through etcd and the API server included")
	return out
}

// repeat is one course of the scenario.
type repeat struct {
	options  *Options
	scenario *scenario.Scenario
	view     *progress.View
	report   *report.Report

	stack  *stack
	meter  *meter
	result report.Repeat
	// aside is what the event cost; nil: there was none yet.
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
	r.view.Set(r.meter.status)
	r.meter.enter("start")
	if err := r.stack.start(ctx); err != nil {
		if err = because(ctx, err); len(r.report.Repeats) > 0 {
			err = r.failed(err)
		}
		return err
	}
	r.report.Processes = len(r.stack.workers)
	r.report.Versions.KubeAPIServer, r.report.Versions.Etcd = r.stack.kubeVersion, r.stack.etcdVersion

	reading, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.meter.run(reading)
	}()
	err = r.course(ctx)
	last, readErr := r.meter.read(ctx)
	stop()
	<-ended
	if readErr != nil {
		last = r.meter.latest
	}
	if err == nil {
		err = readErr
	}
	r.reconnected(last.nodes.Reconnects)
	fetched := last.nodes.FetchedLists
	r.note(fetched > 0, "nodes fetched %d lists, which the API server refused to stream", fetched)
	compressed := last.nodes.CompressedWatches
	r.note(compressed > 0, "the API server compressed %d watches, as it does from Kubernetes 1.37 on with those that begin with a list, until they end after 5 to 10 "+
		"minutes: the watches after them take more bytes and less CPU time", compressed)
	r.explainCPU()
	r.result.Series = r.meter.seconds
	if r.result.ClientPeakBytes == 0 { // before a floor: what that takes is not the nodes'
		r.result.ServerPeakBytes, r.result.ClientPeakBytes = r.meter.peaks()
	}
	if err != nil && !errors.Is(err, fleet.ErrDiverged) {
		return r.failed(because(ctx, err))
	}
	r.report.Repeats = append(r.report.Repeats, r.result)
	return err
}

// failed has the repeat in the report as far as it came, so that neither it nor the ones before are lost. It gives the error.
func (r *repeat) failed(err error) error {
	r.result.Check = report.Check{Nodes: r.scenario.Nodes, Error: err.Error()}
	r.report.Repeats = append(r.report.Repeats, r.result)
	return err
}

// because gives why a context has ended, if it has, and else the error.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// course takes the nodes through the scenario.
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

// check compares all nodes with the true state.
func (r *repeat) check(ctx context.Context) error {
	r.meter.enter("all nodes are compared with the true state")
	check := &r.result.Check
	check.Nodes = r.scenario.Nodes
	for _, w := range r.stack.workers {
		c, err := w.Check(ctx, r.options.Timeout)
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

// diverged is fleet.ErrDiverged with what workers have found, which says so itself.
type diverged string

// Error implements error.
func (d diverged) Error() string { return string(d) }

// Unwrap gives fleet.ErrDiverged.
func (diverged) Unwrap() error { return fleet.ErrDiverged }
