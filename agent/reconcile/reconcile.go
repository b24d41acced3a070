// Package reconcile makes the kernel follow the cache. Changes go through the view to the
// programmer, and what has been programmed is acknowledged.
//
// Nothing is programmed before the cache has been in sync once. An agent that starts therefore
// leaves what an earlier agent programmed until it knows the present state. If no server can be
// reached, it uses the checkpoint after a while (see checkpoint.Checkpoint), and acknowledges
// nothing of it. If the kernel is ahead of the checkpoint, it stays as it is as long as it is
// intact. While the kernel is being programmed, further changes wait in the cache and are
// programmed together in the next step.
package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/bounded"
	"github.com/slicecast/slicecast/internal/model"
)

// stepTimeout bounds one step. It is some minutes longer than the slowest kernel interface needs
// for the largest clusters.
const stepTimeout = 5 * time.Minute

// Reporter receives the results of programming. client.Client and client.Local implement it.
type Reporter interface {
	// Ack reports that the kernel holds everything up to these positions of the epoch.
	Ack(epoch uint64, positions map[uint32]uint64)
	// Nack reports that something of this Service is not programmed. It is called once for each
	// reason.
	Nack(service model.ServiceKey, reason string)
	// Resolve reports that a nacked Service is programmed completely, or was removed.
	Resolve(service model.ServiceKey)
	// NackNode reports that nothing of one or both IP families is programmed. It is called once for
	// each reason.
	NackNode(reason string)
	// ResolveNode withdraws the last NackNode, because every IP family is programmed.
	ResolveNode()
}

// Flows receives what the kernel holds, so that it can remove flows that lead elsewhere. Its
// methods return at once. A Service port that could not be programmed is treated as if it had been.
type Flows interface {
	// Changed reports a difference that was programmed.
	Changed(changes []view.Change)
	// Replaced reports the state after a Replace. The callee has to read the map of Service ports
	// before it returns.
	Replaced(state view.State)
	// Earlier reports, after the first Replaced, the UDP Service ports that an earlier agent may
	// have programmed, without backends. It is called only if a checkpoint was restored. The callee
	// has to read the map before it returns.
	Earlier(ports map[view.ServicePortID]*view.ServicePort)
}

// Health receives what health checks should answer.
type Health interface {
	// Sync reports all health checks, and the node that they are on. It is called when a check or
	// the node has changed, once the change is programmed. It returns at once.
	Sync(checks map[view.HealthCheckID]view.HealthCheck, node view.Node)
}

// Options configure a Reconciler. Cache, View, Programmer and Reporter are required.
type Options struct {
	Cache      *client.Cache
	View       *view.View
	Programmer programmer.Programmer
	Reporter   Reporter
	// Ahead means that the kernel may hold later content than a checkpoint, from an earlier agent.
	// Then the checkpoint is not programmed while the Programmer finds the kernel intact.
	Ahead bool
	// MinSyncPeriod is the least time between the beginnings of two steps for changes, which are
	// collected meanwhile. 0 means that changes are programmed at once.
	MinSyncPeriod time.Duration
	// SyncPeriod is the time after a Replace at which everything is programmed anew; 0 means never.
	SyncPeriod time.Duration
	// Mode is kube-proxy's name for what the Programmer uses: iptables, ipvs or nftables. It
	// decides which of kube-proxy's metrics there are.
	Mode string
	// Shadow means that the Programmer programs nothing, and something else programs the node. Then
	// kube-proxy's metrics, which are about programming, are not registered.
	Shadow bool
	// FreeMemory returns unused memory to the operating system. nil means debug.FreeOSMemory.
	FreeMemory func()
	Flows      Flows                 // nil means that nobody follows flows
	Health     Health                // nil means that nobody follows health checks
	Logger     *slog.Logger          // nil means slog's default logger
	Registerer prometheus.Registerer // nil means that metrics are not registered
}

// Reconciler is the loop that makes the kernel follow the cache. Except for Programmed and the
// methods in status.go, only the goroutine of Run uses it.
//
// Invariants, between two steps:
//
//  1. For each IP family not in out, the kernel holds what the View's State says, except for the
//     Service ports in failed and for what others have changed since.
//  2. A position that the cache has handed out is in unacked until it is acknowledged or the epoch
//     changes.
//  3. lacking has an entry for exactly the IP families in out. The entry contains every Service of
//     which the kernel lacks something in that family. The positions of these Services' shards are
//     not acknowledged.
//  4. outReason, status.failures and toldChecks are what the Reporter and Health were last told.
type Reconciler struct {
	Options
	schedule schedule
	// families are the programmer's IP families.
	families []model.Family
	// out contains the IP families of which nothing is known to have been programmed since the last
	// Replace, with the reasons.
	out map[model.Family]error
	// outReason is what the Reporter was last told about out; "" means nothing.
	outReason string
	// lacking contains, for each IP family in out, the Services of which the kernel lacks
	// something. Removed Services are included, because the kernel may still have them.
	lacking map[model.Family]map[model.ServiceKey]struct{}
	// unacked contains the positions that were taken from the cache and are not programmed yet, by
	// shard.
	unacked map[uint32]uint64
	epoch   uint64
	// checks are the view's health checks, and toldChecks are those that Health was last told.
	// checksDue means that what to tell Health may have changed because IP families or Service
	// ports have failed or recovered.
	checks, toldChecks map[view.HealthCheckID]view.HealthCheck
	checksDue          bool
	// failed contains the Service ports that the kernel does not hold as it should, with the
	// reasons. status.failures contains what the Reporter was told about them, and about what the
	// view cannot serve.
	failed map[view.ServicePortID]*programmer.PortError
	// problems are what the view cannot serve, by Service. due contains the Services whose report
	// may differ from what the Reporter was last told.
	problems map[model.ServiceKey]string
	due      map[model.ServiceKey]struct{}
	lines    *bounded.Lines // about Services
	// nowhere contains the IP families about which noteNodePorts has logged.
	nowhere map[model.Family]bool
	// kept means that the kernel is as an earlier agent left it, and is left so.
	kept bool
	// lost receives a reason when others have removed something.
	lost chan string
	// begun is closed once an IP family has been programmed, and programmed once all have been.
	begun, programmed chan struct{}
	status            status
	metrics           *metrics
	kubeProxy         *kubeProxyMetrics
}

// New returns a Reconciler.
func New(o Options) *Reconciler {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.FreeMemory == nil {
		o.FreeMemory = debug.FreeOSMemory
	}
	r := &Reconciler{
		Options:  o,
		schedule: schedule{minSyncPeriod: o.MinSyncPeriod, syncPeriod: o.SyncPeriod, replace: true},
		families: o.Programmer.Families(),
		unacked:  make(map[uint32]uint64),
		lacking:  make(map[model.Family]map[model.ServiceKey]struct{}),
		failed:   make(map[view.ServicePortID]*programmer.PortError),
		problems: make(map[model.ServiceKey]string),
		due:      make(map[model.ServiceKey]struct{}),
		lines:    bounded.NewLines(),
		nowhere:  make(map[model.Family]bool),
		lost:     make(chan string, 1),
		begun:    make(chan struct{}), programmed: make(chan struct{}),
		metrics: newMetrics(o.Registerer),
	}
	registerer := o.Registerer
	if o.Shadow {
		registerer = nil
	}
	r.kubeProxy = newKubeProxyMetrics(registerer, o.Mode, o.Cache, r.families)
	r.status.families = make(map[model.Family]*familyStatus)
	r.status.failures = make(map[model.ServiceKey]Failure)
	for _, family := range r.families {
		r.status.families[family] = &familyStatus{}
		r.metrics.failing.WithLabelValues(family.String()).Set(0)
	}
	return r
}

// Programmed returns a channel that is closed once the kernel has held the whole state of every IP
// family.
func (r *Reconciler) Programmed() <-chan struct{} { return r.programmed }

// Run programs the kernel until ctx ends. What is programmed then stays.
func (r *Reconciler) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	if m, ok := r.Programmer.(programmer.Monitor); ok {
		watching.Go(func() { r.watch(ctx, m) })
	}
	for {
		var due <-chan time.Time
		if at, ok := r.schedule.next(!r.status.pending.IsZero()); ok {
			now := time.Now()
			if !at.After(now) && ctx.Err() == nil { // a timer would add a pass through the scheduler
				r.run(ctx, now)
				continue
			}
			due = time.After(at.Sub(now))
		}
		select {
		case <-ctx.Done():
			return
		case <-r.Cache.Dirty():
			r.status.setPending(earlier(r.status.pending, time.Now()))
			r.kubeProxy.queued(r.families)
		case reason := <-r.lost:
			r.status.lost()
			r.kubeProxy.queued(r.families)
			if r.schedule.repair() {
				r.Logger.Warn("Others have changed the rules, programming the whole state again", "reason", reason)
				r.metrics.repairs.Inc()
			}
		case now := <-due:
			r.run(ctx, now)
		}
	}
}

// watch starts the programmer's monitor once something is programmed. The monitor also reports
// changes that others made before it started.
func (r *Reconciler) watch(ctx context.Context, m programmer.Monitor) {
	select {
	case <-ctx.Done():
		return
	case <-r.begun:
	}
	m.Watch(ctx, func(reason string) {
		select {
		case r.lost <- reason:
		default: // one pending reason is enough to program everything anew
		}
	})
}

// run makes a step, and schedules a retry if something failed.
func (r *Reconciler) run(ctx context.Context, now time.Time) {
	r.schedule.begin(now)
	r.step(ctx)
	if len(r.out) == 0 && !r.hopeful() {
		r.schedule.succeeded()
	} else {
		r.schedule.failed()
	}
}

// hopeful reports whether there are failed Service ports that the kernel may accept in a retry.
func (r *Reconciler) hopeful() bool {
	for _, f := range r.failed {
		if !f.Lasting {
			return true
		}
	}
	return false
}

// step makes the kernel hold what the cache holds now. What the kernel refuses is in r.out and
// r.failed afterwards. A step that has begun runs to its end even if ctx ends, so that an agent
// that stops leaves no half-done change behind.
func (r *Reconciler) step(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	r.status.setStepping(time.Now())
	defer r.status.setStepping(time.Time{})
	taken, ok := r.Cache.Take()
	if !ok {
		r.status.setPending(time.Time{})
		return
	}
	first := r.schedule.began.IsZero()
	r.schedule.began = time.Now()
	if taken.Epoch != r.epoch {
		clear(r.unacked)
		r.epoch = taken.Epoch
	}
	maps.Copy(r.unacked, taken.Positions)
	r.kubeProxy.wait(taken.Triggers)
	if taken.Node || first {
		r.setNode()
	}
	for _, key := range taken.Services {
		service, endpointSlices := r.Cache.Service(key)
		r.View.Set(key, service, endpointSlices)
	}
	changes, node := r.View.Update()
	r.noteProblems()
	r.noteNodePorts(changes, node)
	r.schedule.replace = r.schedule.replace || node
	if r.keeps(ctx, taken.Stale) {
		r.keep(changes)
		return
	}
	replaced, failed := r.program(ctx, changes)
	r.noteLacking(changes)
	r.reportFamilies()
	if r.nothing() {
		return
	}
	for _, f := range failed {
		if held := r.failed[f.ID]; held == nil || held.Lasting && (held.Served || !f.Served) {
			r.failed[f.ID], r.checksDue = f, true
		}
	}
	served := r.served()
	acked := r.ackable(taken.Shards)
	r.status.reached(r.epoch, acked, served, replaced, r.out)
	r.record(changes, replaced)
	r.metrics.ports.Set(float64(served))
	r.announce(served)
	r.tell(changes, replaced)
	r.report()
	r.Reporter.Ack(r.epoch, acked)
	maps.DeleteFunc(r.unacked, func(shard uint32, _ uint64) bool {
		_, ok := acked[shard]
		return ok
	})
	if replaced {
		r.FreeMemory() // a Replace needs as much memory again as is kept, and is rare
	}
}

// keptCheck is how often a kernel that is kept is checked.
const keptCheck = 10 * time.Second

// keeps reports whether the kernel stays as an earlier agent left it. That ends with a Replace.
func (r *Reconciler) keeps(ctx context.Context, stale bool) bool {
	was := r.kept
	k, ok := r.Programmer.(programmer.Keeper)
	r.kept = ok && r.Ahead && stale && r.schedule.replaced.IsZero() && k.Intact(ctx, r.View.State())
	switch {
	case r.kept && !was:
		r.Logger.Warn("Keeping the rules of the last agent, which was killed, because they may be later than the checkpoint")
	case was && !r.kept && stale:
		r.Logger.Warn("Others have changed the rules of the last agent, programming the checkpoint")
	}
	return r.kept
}

// keep is what a step does instead of programming while the kernel is kept. To health checks and
// metrics, the node is programmed with the checkpoint, which the kernel serves or has served.
func (r *Reconciler) keep(changes []view.Change) {
	r.schedule.replace, r.schedule.repairAt = true, time.Now().Add(keptCheck)
	served := r.served()
	r.status.reached(r.epoch, nil, served, true, nil)
	r.record(changes, true)
	r.metrics.ports.Set(float64(served))
	once(r.programmed)
	r.tellChecks()
	r.report()
}

// record records for kube-proxy's metrics what the kernel holds after a step.
func (r *Reconciler) record(changes []view.Change, replaced bool) {
	incomplete := make(map[model.Family]bool)
	for id := range r.failed {
		incomplete[id.Family] = true
	}
	for _, family := range r.families {
		if r.out[family] == nil && !incomplete[family] {
			r.kubeProxy.lastTimestamp.WithLabelValues(family.String()).SetToCurrentTime()
		}
	}
	var whole *view.State
	if replaced {
		state := r.View.State()
		whole = &state
	}
	r.kubeProxy.countLocal(r.families, changes, whole)
	r.kubeProxy.programmed(time.Now(), r.lacks())
}

// lacks returns a function that reports whether the kernel lacks something of a Service in a
// family.
func (r *Reconciler) lacks() func(model.ServiceKey, model.Family) bool {
	type part struct {
		service model.ServiceKey
		family  model.Family
	}
	failed := make(map[part]bool)
	for id := range r.failed {
		failed[part{id.Service, id.Family}] = true
	}
	return func(service model.ServiceKey, family model.Family) bool {
		return r.out[family] != nil || failed[part{service, family}]
	}
}

// nothing reports whether every IP family is out.
func (r *Reconciler) nothing() bool {
	return !slices.ContainsFunc(r.families, func(f model.Family) bool { return r.out[f] == nil })
}

// announce closes begun, and also programmed if no IP family is out.
func (r *Reconciler) announce(served int) {
	once(r.begun)
	if len(r.out) == 0 && once(r.programmed) {
		r.Logger.Info("The node is programmed", "service_ports", served)
	}
}

// once closes a channel, and reports whether it was open.
func once(c chan struct{}) bool {
	select {
	case <-c:
		return false
	default:
		close(c)
		return true
	}
}

// served returns the number of Service ports that have not failed, in IP families that are not out.
func (r *Reconciler) served() int {
	ports := r.View.State().Ports
	if len(r.out) == 0 && len(r.failed) == 0 {
		return len(ports)
	}
	n := 0
	for id := range ports {
		if r.out[id.Family] == nil && r.failed[id] == nil {
			n++
		}
	}
	return n
}

// noteLacking updates r.lacking after changes were programmed, or could not be because their IP
// family is out.
func (r *Reconciler) noteLacking(changes []view.Change) {
	for family := range r.lacking {
		if r.out[family] == nil {
			delete(r.lacking, family)
		}
	}
	for family := range r.out {
		if r.lacking[family] == nil {
			r.lacking[family] = make(map[model.ServiceKey]struct{})
			for id := range r.View.State().Ports {
				if id.Family == family {
					r.lacking[family][id.Service] = struct{}{}
				}
			}
		}
	}
	for _, c := range changes {
		if id := c.ID(); r.out[id.Family] != nil {
			r.lacking[id.Family][id.Service] = struct{}{}
		}
	}
}

// ackable returns the unacked positions, without those of shards that have a Service in r.lacking
// (invariant 3). shards is the cluster's number of shards.
func (r *Reconciler) ackable(shards uint32) map[uint32]uint64 {
	acked := maps.Clone(r.unacked)
	for _, services := range r.lacking {
		for key := range services {
			delete(acked, key.Shard(shards))
		}
	}
	return acked
}

// setNode passes the Node to the view. A server sends the Node before it declares a cache in sync,
// so if there is none at first, the cluster has none.
func (r *Reconciler) setNode() {
	n := r.Cache.Node()
	r.View.SetNode(n)
	if n == nil && r.schedule.replaced.IsZero() {
		r.Logger.Warn("No Node object for this node: its zone, addresses and pod CIDRs are unknown")
	}
}

// tell reports the kernel's present state to Flows and Health.
func (r *Reconciler) tell(changes []view.Change, replaced bool) {
	if r.Flows != nil {
		if replaced {
			r.Flows.Replaced(r.View.State())
			if earlier := r.Cache.TakeRestored(); len(earlier) > 0 {
				r.Flows.Earlier(r.View.PortsOf(earlier))
			}
		} else if changes = r.programmable(changes); len(changes) > 0 {
			r.Flows.Changed(changes)
		}
	}
	r.tellChecks()
}

// tellChecks reports to Health what has changed for it.
func (r *Reconciler) tellChecks() {
	checks, changed := r.View.TakeHealthChecks()
	if changed {
		r.checks = checks
	}
	if changed || r.checksDue {
		r.tellHealth()
	}
}

// tellHealth reports to Health what health checks should answer. The checks of an IP family that is
// out stay as they were last reported. A Service of which something is not served reports no local
// endpoints, because traffic to this node might not reach them.
func (r *Reconciler) tellHealth() {
	r.checksDue = false
	if r.Health == nil {
		return
	}
	told := r.checks
	if len(r.out) > 0 || len(r.failed) > 0 {
		told = maps.Clone(told)
		for failed, why := range r.failed {
			if why.Served {
				continue
			}
			id := view.HealthCheckID{Service: failed.Service, Family: failed.Family}
			if check, ok := told[id]; ok {
				check.LocalEndpoints = 0
				told[id] = check
			}
		}
		isOut := func(id view.HealthCheckID, _ view.HealthCheck) bool { return r.out[id.Family] != nil }
		maps.DeleteFunc(told, isOut)
		for id, check := range r.toldChecks {
			if isOut(id, check) {
				told[id] = check
			}
		}
	}
	r.toldChecks = told
	r.Health.Sync(told, r.View.State().Node)
}

// programmable returns the changes without those of IP families that are out.
func (r *Reconciler) programmable(changes []view.Change) []view.Change {
	if len(r.out) == 0 {
		return changes
	}
	return slices.DeleteFunc(slices.Clone(changes), func(c view.Change) bool { return r.out[c.ID().Family] != nil })
}

// reportFamilies logs and reports changes in which IP families are out, and why.
func (r *Reconciler) reportFamilies() {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		failed := 0.0
		if r.out[family] != nil {
			failed = 1
		}
		r.metrics.failing.WithLabelValues(family.String()).Set(failed)
	}
	r.status.failed(r.families, r.out)
	reason := familiesReason(r.out)
	if reason == r.outReason {
		return
	}
	r.outReason = reason
	if reason == "" {
		r.Logger.Info("All IP families are programmed again")
		r.Reporter.ResolveNode()
		return
	}
	r.Logger.Error("Cannot program the node, trying again; the rules in the kernel stay", "reason", reason)
	r.Reporter.NackNode(reason)
}

// familiesReason says which IP families are out, and why. It returns "" if none is.
func familiesReason(out map[model.Family]error) string {
	var reasons []string
	byReason := make(map[string][]string)
	for _, family := range slices.Sorted(maps.Keys(out)) {
		reason := out[family].Error()
		if byReason[reason] == nil {
			reasons = append(reasons, reason)
		}
		byReason[reason] = append(byReason[reason], family.String())
	}
	for i, reason := range reasons {
		reasons[i] = fmt.Sprintf("nothing of %s is programmed: %s", strings.Join(byReason[reason], " and "), reason)
	}
	return strings.Join(reasons, "; ")
}

// noteProblems records what the view cannot serve, as far as that has changed.
func (r *Reconciler) noteProblems() {
	for _, p := range r.View.TakeProblems() {
		if p.Reason != "" {
			r.problems[p.Service] = p.Reason
			r.due[p.Service] = struct{}{}
			continue
		}
		delete(r.problems, p.Service)
		if _, reported := r.status.failures[p.Service]; reported {
			r.due[p.Service] = struct{}{}
		} else {
			delete(r.due, p.Service) // otherwise names would gather while nothing can be programmed
		}
	}
}

// loggerOf returns the logger for a line about a Service. It discards the line if the bound of such
// lines is reached.
func (r *Reconciler) loggerOf(service model.ServiceKey) *slog.Logger {
	if l := r.lines.Logger(r.Logger, service.Namespace); l != nil {
		return l.With("service", service.String())
	}
	return discard
}

var discard = slog.New(slog.DiscardHandler)

// report logs and reports changes in which Services are not programmed completely, and why. It
// costs nothing for the Services whose problems have not changed.
func (r *Reconciler) report() {
	for id := range r.failed {
		r.due[id.Service] = struct{}{}
	}
	reasons := make(map[model.ServiceKey][]string, len(r.due))
	for service := range r.due {
		if p := r.problems[service]; p != "" {
			reasons[service] = []string{p}
		}
	}
	for id, f := range r.failed {
		reasons[id.Service] = append(reasons[id.Service], f.Error())
	}
	failures := r.status.failures
	for service := range r.due {
		list := reasons[service]
		slices.Sort(list)
		f, known := failures[service]
		switch reason := strings.Join(list, "; "); {
		case reason == f.Reason: // "" if there is neither
		case reason == "":
			r.status.change(func() { delete(failures, service) })
			r.loggerOf(service).Info("Service is completely programmed, or was removed")
			r.Reporter.Resolve(service)
		default:
			if !known {
				f = Failure{Service: service, Since: time.Now()}
			}
			f.Reason = reason
			r.status.change(func() { failures[service] = f })
			r.loggerOf(service).Warn("Service is not completely programmed", "reason", reason)
			r.Reporter.Nack(service, reason)
		}
	}
	clear(r.due)
	for id := range r.failed { // what has failed may work the next time
		r.due[id.Service] = struct{}{}
	}
	r.metrics.nacks.Set(float64(len(failures)))
}

// program applies the changes, or replaces everything if the kernel's state is not known. replaced
// reports which of the two it did last. It sets r.out, and returns the Service ports that failed.
func (r *Reconciler) program(
	ctx context.Context, changes []view.Change,
) (replaced bool, failed []*programmer.PortError) {
	var applied error
	if !r.schedule.replace {
		if changes = r.programmable(changes); len(changes) == 0 {
			return false, nil
		}
		applied = r.observe("apply", familiesOf(changes), func() error { return r.Programmer.Apply(ctx, changes) })
		failed, out := programmer.Split(applied, r.families)
		if len(out) == 0 {
			for _, c := range changes {
				if r.failed[c.ID()] != nil {
					delete(r.failed, c.ID())
					r.checksDue = true
				}
			}
			return false, failed
		}
	}
	r.schedule.replaced, r.schedule.repairAt = time.Now(), time.Time{}
	select {
	case <-r.lost: // others may report the same loss several times
	default:
	}
	r.checksDue = r.checksDue || len(r.out) > 0 || len(r.failed) > 0
	err := r.observe("replace", r.families, func() error { return r.Programmer.Replace(ctx, r.View.State()) })
	failed, r.out = programmer.Split(err, r.families)
	if applied != nil && len(r.out) == 0 {
		r.Logger.Warn("Cannot apply a change, programmed the whole state again", "err", applied)
	}
	// While nothing is programmed, only a Replace can help.
	r.schedule.replace = r.nothing()
	// If a family is out, it is not known whether its Service ports would still fail.
	maps.DeleteFunc(r.failed, func(id view.ServicePortID, _ *programmer.PortError) bool {
		return r.out[id.Family] == nil
	})
	return true, failed
}

// observe measures an operation of the programmer that concerns these families.
func (r *Reconciler) observe(operation string, families []model.Family, f func() error) error {
	start := time.Now()
	err := f()
	took := time.Since(start)
	r.status.change(func() { r.status.now.Time, r.status.now.Duration = start, took })
	r.metrics.seconds.WithLabelValues(operation).Observe(took.Seconds())
	r.kubeProxy.observe(operation == "replace", families, took, err)
	if err != nil {
		r.metrics.errors.WithLabelValues(operation).Inc()
	}
	return err
}

// familiesOf returns the IP families of changes, ascending.
func familiesOf(changes []view.Change) []model.Family {
	var families []model.Family
	for _, c := range changes {
		if family := c.ID().Family; !slices.Contains(families, family) {
			families = append(families, family)
		}
	}
	slices.Sort(families)
	return families
}
