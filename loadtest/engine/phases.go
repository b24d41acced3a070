package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sync/errgroup"

	"github.com/slicecast/slicecast/loadtest/child"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/target"
	"github.com/slicecast/slicecast/loadtest/worker"
)

const (
	// leadTime is the time from the start of a plan's preparation to its first change, enough to
	// pass the plan to all processes. Kinds other than Flip need leadPerPod more for each pod, to
	// compute its placement.
	leadTime   = 300 * time.Millisecond
	leadPerPod = 100 * time.Microsecond
)

// all calls a method of all workers concurrently, and returns their replies.
func all[A, R any](
	ctx context.Context, workers []*child.Process, method func(*worker.Worker, A, *R) error, args A,
) ([]R, error) {
	replies := make([]R, len(workers))
	calls, ctx := errgroup.WithContext(ctx)
	for i, w := range workers {
		calls.Go(func() (err error) {
			replies[i], err = child.Call(ctx, w, method, args)
			return err
		})
	}
	return replies, calls.Wait()
}

// within is like all, with a timeout of --timeout. After a timeout, its error says what was awaited
// and names a node that is behind.
func within[A, R any](
	ctx context.Context, r *repeat, what string, method func(*worker.Worker, A, *R) error, args A,
) ([]R, error) {
	patient, cancel := context.WithTimeout(ctx, r.options.Timeout)
	defer cancel()
	replies, err := all(patient, r.stack.workers, method, args)
	if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
		return replies, err
	}
	for _, w := range r.stack.workers {
		if name, err := child.Call(ctx, w, (*worker.Worker).Missing, child.None{}); err == nil && name != "" {
			what += fmt.Sprintf("; one node that is behind is %s", name)
			break
		}
	}
	return nil, fmt.Errorf("%s: timeout after %v (raise --timeout, or see --log-level=info)", what, r.options.Timeout)
}

// connect starts the nodes, which hold nothing, and measures their cold sync.
func (r *repeat) connect(ctx context.Context) error {
	state, err := r.memory(ctx)
	if err != nil {
		return err
	}
	r.meter.enter("nodes receive the state")
	before, err := r.meter.read(ctx)
	if err != nil {
		return err
	}
	if _, err := all(ctx, r.stack.workers, (*worker.Worker).Run, child.None{}); err != nil {
		return err
	}
	phase, after, err := r.synced(ctx, "cold sync", report.ColdSync, before)
	if err != nil {
		return err
	}
	r.add(phase, after.machine-before.machine)
	connected, err := r.memory(ctx)
	if err != nil {
		return err
	}
	if state != nil {
		r.result.ServerMemory = &report.ServerMemory{State: *state, Connected: *connected}
	}
	return nil
}

// synced waits until all awaited nodes are in sync, and returns the phase.
func (r *repeat) synced(ctx context.Context, name string, kind report.PhaseKind, before reading) (p report.Phase, after reading, err error) {
	cold, err := within(ctx, r, "not all nodes are in sync", (*worker.Worker).Synced, child.None{})
	if err != nil {
		return p, after, err
	}
	if after, err = r.meter.read(ctx); err != nil {
		return p, after, err
	}
	p = r.phase(name, kind, before, after)
	p.ReceivedBytes = 0 // the sum below covers only awaited nodes, each until it was in sync
	took := report.NewHistogram()
	var versions []string
	for _, c := range cold {
		versions = append(versions, c.ServerVersions...)
		for _, n := range c.Nodes {
			p.Updates++
			p.ReceivedBytes += n.Bytes
			p.MessageBytes += n.MessageBytes
			p.MaxNodeBytes = max(p.MaxNodeBytes, n.Bytes)
			_ = took.RecordValue(min(n.Duration, report.MaxDuration).Microseconds()) // in range
		}
	}
	p.Latency = report.DistributionOf(took)
	if kind == report.ColdSync {
		r.result.State = report.State{Services: cold[0].Services, Slices: cold[0].Slices, Endpoints: cold[0].Endpoints}
		if r.options.Server != "" { // servers that the run started have the load tester's version
			slices.Sort(versions)
			r.report.Versions.Server = strings.Join(slices.Compact(versions), ", ")
		}
	}
	return p, after, nil
}

// memory returns the memory of all servers that the run started, once their state is complete. It
// returns nil if the run started none.
func (r *repeat) memory(ctx context.Context) (*report.Memory, error) {
	var sum *report.Memory
	for _, one := range r.stack.all() {
		m, err := child.Call(ctx, one.Process, (*target.Servant).Memory, child.None{})
		if err != nil {
			return nil, err
		}
		if sum == nil {
			sum = &report.Memory{}
		}
		sum.Heap += m.Heap
		sum.Stacks += m.Stacks
		sum.Resident += m.Resident
		sum.Anonymous += m.Anonymous
	}
	return sum, nil
}

// phase returns a phase with the costs between two readings.
func (r *repeat) phase(name string, kind report.PhaseKind, before, after reading) report.Phase {
	p := report.Phase{
		Name: name, Kind: kind, StartSeconds: before.at.Sub(r.result.Start).Seconds(), Seconds: after.at.Sub(before.at).Seconds(),
		ReceivedBytes: after.nodes.ReceivedBytes - before.nodes.ReceivedBytes, SentBytes: after.nodes.SentBytes - before.nodes.SentBytes,
		ClientCPU: report.CPUOf(after.client.Sub(before.client)), Reconnects: after.nodes.Reconnects - before.nodes.Reconnects,
	}
	p.ServerCPU = r.meter.serverCPU(before, after)
	if r.stack.besideOwn() {
		p.APIServerCPU = new(report.CPUOf(after.apiServer.Sub(before.apiServer)))
	}
	return p
}

func (r *repeat) warmUp(ctx context.Context) error {
	if r.stack.cluster == nil {
		return nil
	}
	plan := r.scenario.WarmUpPlan(time.Now().Add(leadTime).Truncate(time.Millisecond))
	if plan.Count == 0 {
		return nil
	}
	r.meter.enter("warm-up")
	return r.changes(ctx, "warm-up", report.WarmUp, plan, nil)
}

// play makes the measured changes, or observes the changes of others. The event of the scenario
// happens meanwhile.
func (r *repeat) play(ctx context.Context) error {
	if _, err := all(ctx, r.stack.workers, (*worker.Worker).Collect, false); err != nil {
		return err
	}
	var event func(context.Context, time.Time) error
	if r.scenario.Event != scenario.None {
		event = r.event
	}
	switch {
	case r.stack.cluster == nil:
		r.meter.enter("the cluster's own changes are observed")
		if err := r.observe(ctx, event); err != nil {
			return err
		}
	case r.scenario.Change != generate.None:
		r.meter.enter("changes")
		lead := leadTime
		if r.scenario.Change != generate.Flip {
			lead += time.Duration(r.endpoints()) * leadPerPod
		}
		if err := r.changes(ctx, "changes", report.Changes, r.scenario.Plan(time.Now().Add(lead).Truncate(time.Millisecond)), event); err != nil {
			return err
		}
	case event != nil:
		r.meter.enter(string(r.scenario.Event))
		if err := event(ctx, time.Now().Add(r.scenario.At)); err != nil {
			return err
		}
	}
	_, err := all(ctx, r.stack.workers, (*worker.Worker).Collect, true)
	return err
}

// endpoints returns an upper bound on the number of endpoints of all Services.
func (r *repeat) endpoints() (n int) {
	for _, g := range slices.Concat(r.scenario.Services, r.scenario.Changing) {
		n += g.Count * g.Most
	}
	return n
}

// changes carries out a plan and waits until all nodes have received all of its changes.
func (r *repeat) changes(ctx context.Context, name string, kind report.PhaseKind, plan generate.Plan, event func(context.Context, time.Time) error) error {
	if _, err := all(ctx, r.stack.workers, (*worker.Worker).Expect, plan); err != nil {
		return err
	}
	r.stack.plans = append(r.stack.plans, plan)
	playing, played := errgroup.WithContext(ctx)
	var before reading
	playing.Go(func() (err error) {
		before, err = r.meter.readFor(played, plan.Start)
		return err
	})
	var lag *generate.Lag
	playing.Go(func() (err error) {
		lag, err = r.carryOut(played, plan)
		return err
	})
	if event != nil {
		playing.Go(func() error { return event(played, plan.Start.Add(r.scenario.At)) })
	}
	if err := playing.Wait(); err != nil {
		return err
	}
	got, err := within(ctx, r, name+": not all nodes have received all updates", (*worker.Worker).Received, child.None{})
	if err != nil {
		return err
	}
	after, err := r.meter.read(ctx)
	if err != nil {
		return err
	}
	p := r.received(name, kind, got, before, after)
	p.Changes, p.Updates = got[0].Changes, int64(got[0].Changes)*int64(r.scenario.Nodes)
	if lag != nil {
		p.SourceLag = &report.Lag{P99: millis(lag.P99), Max: millis(lag.Max)}
	}
	p.Convergence = convergence(got)
	p.Aside = r.aside
	r.add(p, after.machine-before.machine)
	return nil
}

// carryOut makes the servers or the writer carry out a plan, and returns how late the changes were.
// It returns nil if all servers that could say so were killed.
func (r *repeat) carryOut(ctx context.Context, plan generate.Plan) (*generate.Lag, error) {
	if r.stack.writer != nil {
		lag, err := r.stack.writer.Play(ctx, plan)
		return &lag, err
	}
	servers := r.meter.servers()
	for _, one := range servers {
		if _, err := child.Call(ctx, one.Process, (*target.Servant).Play, plan); err != nil {
			return nil, err
		}
	}
	var worst *generate.Lag
	for _, one := range servers {
		lag, err := child.Call(ctx, one.Process, (*target.Servant).Played, child.None{})
		switch {
		case err != nil && one.leaving.Load():
			continue // it was killed; another server, or its successor, has the same plan
		case err != nil:
			return nil, err
		case worst == nil:
			worst = &lag
		default:
			worst = &generate.Lag{P99: max(worst.P99, lag.P99), Max: max(worst.Max, lag.Max)}
		}
	}
	return worst, nil
}

// observe measures the changes that others make, for the duration of the scenario.
func (r *repeat) observe(ctx context.Context, event func(context.Context, time.Time) error) error {
	if _, err := all(ctx, r.stack.workers, (*worker.Worker).Expect, generate.Plan{}); err != nil {
		return err
	}
	before, err := r.meter.read(ctx)
	if err != nil {
		return err
	}
	if event != nil {
		if err := event(ctx, before.at.Add(r.scenario.At)); err != nil {
			return err
		}
	}
	if err := generate.Await(ctx, before.at.Add(r.scenario.Duration)); err != nil {
		return err
	}
	got, err := all(ctx, r.stack.workers, (*worker.Worker).Received, child.None{})
	if err != nil {
		return err
	}
	after, err := r.meter.read(ctx)
	if err != nil {
		return err
	}
	p := r.received("changes", report.Changes, got, before, after)
	for _, g := range got {
		p.Updates += g.Objects
	}
	p.Aside = r.aside
	r.note(p.Updates > 0 && p.Latency.Count == 0, "no changed slice has a last-change-trigger-time, so there are no latencies")
	r.add(p, after.machine-before.machine)
	return nil
}

// received returns a phase in which the state changed, with the latencies.
func (r *repeat) received(name string, kind report.PhaseKind, got []worker.Received, before, after reading) report.Phase {
	p := r.phase(name, kind, before, after)
	ordinary, slow := report.NewHistogram(), report.NewHistogram()
	for _, g := range got {
		ordinary.Merge(hdrhistogram.Import(g.Latencies))
		slow.Merge(hdrhistogram.Import(g.Slow))
	}
	p.Latency = report.DistributionOf(ordinary)
	if slow.TotalCount() > 0 {
		p.SlowLatency = new(report.DistributionOf(slow))
	}
	return p
}

// event makes the scenario's event happen at its time. It returns when all nodes are back.
func (r *repeat) event(ctx context.Context, at time.Time) error {
	if err := generate.Await(ctx, at); err != nil {
		return err
	}
	tier, address := r.meter.servers(), ""
	if len(r.stack.relays) > 0 {
		tier = r.stack.relays
	}
	var victim *server
	if r.scenario.Event != scenario.Reconnect {
		victim = tier[len(tier)-1]
		address = victim.setup.Address
	}
	before, err := r.meter.read(ctx)
	if err != nil {
		return err
	}
	if _, err := all(ctx, r.stack.workers, (*worker.Worker).AwaitSync, address); err != nil {
		return err
	}
	down, err := r.strike(ctx, victim)
	if err != nil {
		return fmt.Errorf("%s: %w", r.scenario.Event, err)
	}
	p, after, err := r.synced(ctx, string(r.scenario.Event), report.Resync, before)
	if err != nil {
		return err
	}
	p.DownSeconds = down.Seconds()
	p.Reconnects = max(0, p.Reconnects-p.Updates)
	costs := r.phase("", "", before, after)
	r.aside = &report.Aside{
		Seconds: costs.Seconds, Updates: after.nodes.Applied - before.nodes.Applied,
		ReceivedBytes: costs.ReceivedBytes, SentBytes: costs.SentBytes, ServerCPU: costs.ServerCPU,
	}
	r.add(p, after.machine-before.machine)
	return nil
}

// strike kills a server, or cuts all connections if victim is nil. It starts the server again if
// the scenario says so, and returns for how long the server was down.
func (r *repeat) strike(ctx context.Context, victim *server) (down time.Duration, err error) {
	struck := time.Now()
	if victim == nil {
		_, err := all(ctx, r.stack.workers, (*worker.Worker).Cut, child.None{})
		return 0, err
	}
	if err := r.meter.kill(victim); err != nil || r.scenario.Event != scenario.Restart {
		return 0, err
	}
	one := &server{setup: victim.setup}
	if err := r.stack.startServer(ctx, one); err != nil {
		return 0, err
	}
	r.meter.join(one)
	return time.Since(struck), nil
}
