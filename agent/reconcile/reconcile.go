// Package reconcile makes the kernel follow the cache: what changed goes through the view to the programmer, and what is
// programmed is acknowledged.
//
// Nothing is programmed before the cache has been in sync once, so an agent that starts leaves what an earlier one
// programmed in place until it knows better; without any server it goes by the checkpoint after a while, see
// client.Checkpoint, and acknowledges nothing of that. While the kernel is being programmed, further changes wait in the cache
// and go together in the next step.
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
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// stepTimeout bounds one programming of the kernel: some minutes more than the slowest kernel interface takes for the
// largest clusters.
const stepTimeout = 5 * time.Minute

// Pauses before a failed programming is tried again.
const (
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// Repairs of what others removed are repairPause apart where they go on, but repairsAtOnce of them wait for nothing: who restarts a
// firewall removes everything twice, when it stops and when it starts.
const (
	repairPause   = time.Second
	repairsAtOnce = 3
)

// Reporter hears what became of the changes. client.Client and client.Local are Reporters.
type Reporter interface {
	// Ack tells that the kernel holds these positions of the epoch.
	Ack(epoch uint64, positions map[uint32]uint64)
	// Nack tells that something of this Service is not programmed; once for each reason.
	Nack(service model.ServiceKey, reason string)
	// Resolve tells that all of a Service that was nacked is programmed, or that it is gone.
	Resolve(service model.ServiceKey)
	// NackNode tells that nothing of one or both IP families is programmed; once for each reason.
	NackNode(reason string)
	// ResolveNode takes the last NackNode back: every IP family is programmed.
	ResolveNode()
}

// Flows hears what the kernel holds now, so that flows which lead elsewhere can be removed. It returns at once. A Service port
// that could not be programmed counts as if it were.
type Flows interface {
	// Changed follows a programmed difference.
	Changed(changes []view.Change)
	// Replaced follows a programming of everything. The map of Service ports is to be read before it returns.
	Replaced(state view.State)
	// Earlier follows the first Replaced, if a checkpoint was restored: with the UDP Service ports that
	// an earlier agent may have programmed, without backends. The map is to be read before it returns.
	Earlier(ports map[view.ServicePortID]*view.ServicePort)
}

// Health hears what health checks are to answer.
type Health interface {
	// Sync gives all of them, and the node that they are on, whenever one or the node has changed and what it tells of is
	// programmed. It returns at once.
	Sync(checks map[view.HealthCheckID]view.HealthCheck, node view.Node)
}

// Options set up a Reconciler. The first four are required.
type Options struct {
	Cache      *client.Cache
	View       *view.View
	Programmer programmer.Programmer
	Reporter   Reporter
	// MinSyncPeriod is the least time from the beginning of one programming to that of the next; changes gather meanwhile.
	MinSyncPeriod time.Duration
	// SyncPeriod is the time after which everything is programmed anew, whatever else there was; 0: never.
	SyncPeriod time.Duration
	Flows      Flows                 // nil: nobody hears of flows
	Health     Health                // nil: nobody hears of health checks
	Logger     *slog.Logger          // nil: slog's default
	Registerer prometheus.Registerer // nil: no metrics
}

// Reconciler is the loop.
type Reconciler struct {
	Options
	// replace: the kernel's state is not known, so the next step is a Replace.
	replace bool
	// began is when the last step began, replaced when the last Replace did.
	began, replaced time.Time
	// retryAt is when what has failed is tried again, repairAt when what others removed is programmed anew; zero: never.
	retryAt, repairAt time.Time
	retry             time.Duration
	// nextRepair is when the next repair were to be if none came sooner than repairPause after the one before.
	nextRepair time.Time
	// families are those of the programmer.
	families []model.Family
	// out are the IP families of which nothing is known to be programmed since the last Replace, and why.
	out map[model.Family]error
	// outReason is what the Reporter was told of out; "" means nothing.
	outReason string
	// lacking are the Services with something that the kernel lacks because their IP family is out: also
	// those that are gone, as the kernel may still have them.
	lacking map[model.Family]map[model.ServiceKey]struct{}
	// unacked are the positions that were taken from the cache and are not programmed yet.
	unacked map[uint32]uint64
	epoch   uint64
	// checks are the view's health checks, and toldChecks what Health was told of them. checksDue
	// means that Health may have to be told something else, as IP families or Service ports fail or
	// no longer do.
	checks, toldChecks map[view.HealthCheckID]view.HealthCheck
	checksDue          bool
	// failed are the Service ports that the kernel does not hold as it should, and why; nacked is what the Reporter was told
	// of them, and of what the view can't serve.
	failed map[view.ServicePortID]*programmer.PortError
	nacked map[model.ServiceKey]string
	// nowhere are the IP families of which noteNodePorts has told.
	nowhere map[model.Family]bool
	// lost gets a reason when others have removed something.
	lost chan string
	// begun is closed when an IP family has first been programmed, programmed when every one has.
	begun, programmed chan struct{}
	status            status

	seconds *prometheus.HistogramVec
	errors  *prometheus.CounterVec
	repairs prometheus.Counter
	ports   prometheus.Gauge
	nacks   prometheus.Gauge
	failing *prometheus.GaugeVec
}

// New makes a Reconciler.
func New(o Options) *Reconciler {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	f := promauto.With(o.Registerer)
	r := &Reconciler{
		Options: o, replace: true, unacked: make(map[uint32]uint64), lost: make(chan string, 1),
		begun: make(chan struct{}), programmed: make(chan struct{}),
		families: o.Programmer.Families(), lacking: make(map[model.Family]map[model.ServiceKey]struct{}),
		failed: make(map[view.ServicePortID]*programmer.PortError), nacked: make(map[model.ServiceKey]string),
		nowhere: make(map[model.Family]bool),
		seconds: f.NewHistogramVec(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "agent", Name: "program_duration_seconds",
			Help: "Time to program the kernel, by operation.", Buckets: prometheus.ExponentialBuckets(1e-4, 4, 10)}, []string{"operation"}),
		errors: f.NewCounterVec(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "program_errors_total",
			Help: "Times that the kernel could not be programmed, by operation."}, []string{"operation"}),
		repairs: f.NewCounter(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "repairs_total",
			Help: "Times that everything was programmed anew because others had removed or changed some of it."}),
		ports: f.NewGauge(prometheus.GaugeOpts{Namespace: "slicecast", Subsystem: "agent", Name: "service_ports",
			Help: "Service ports that the node serves, one for each port and IP family."}),
		nacks: f.NewGauge(prometheus.GaugeOpts{Namespace: "slicecast", Subsystem: "agent", Name: "failed_services",
			Help: "Services of which something is not programmed at present; the log and the status command say what, and why."}),
		failing: f.NewGaugeVec(prometheus.GaugeOpts{Namespace: "slicecast", Subsystem: "agent", Name: "failed_families",
			Help: "1 while nothing of the IP family is known to be programmed; the log and the status command say why."}, []string{"family"}),
	}
	r.status.families = make(map[model.Family]*familyStatus)
	for _, family := range r.families {
		r.status.families[family] = &familyStatus{}
		r.failing.WithLabelValues(family.String()).Set(0)
	}
	return r
}

// Programmed is closed once the kernel has held the whole state of every IP family.
func (r *Reconciler) Programmed() <-chan struct{} { return r.programmed }

// Run programs until the context ends. What is programmed stays.
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
		if at, ok := r.due(); ok {
			now := time.Now()
			if !at.After(now) && ctx.Err() == nil { // without the way through the scheduler that a timer takes
				r.run(ctx, now)
				continue
			}
			due = time.After(at.Sub(now))
		}
		select {
		case <-ctx.Done():
			return
		case <-r.Cache.Dirty():
			r.status.queued()
		case reason := <-r.lost:
			r.status.lost()
			if r.repairAt.IsZero() {
				r.Logger.Warn("Others have changed what was programmed; programming everything anew", "reason", reason)
				r.repairs.Inc()
				r.repairAt = r.nextRepair.Add(-(repairsAtOnce - 1) * repairPause)
			}
		case now := <-due:
			r.run(ctx, now)
		}
	}
}

// watch has a monitor watch once there is something to watch. The monitor tells of what was changed in the meantime, too.
func (r *Reconciler) watch(ctx context.Context, m programmer.Monitor) {
	select {
	case <-ctx.Done():
		return
	case <-r.begun:
	}
	m.Watch(ctx, func(reason string) {
		select {
		case r.lost <- reason:
		default: // one reason to program everything is enough
		}
	})
}

// due tells when the next step is to begin, if there is anything to do.
func (r *Reconciler) due() (at time.Time, ok bool) {
	consider := func(t time.Time) {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if !r.retryAt.IsZero() {
		consider(r.retryAt)
		if r.replace {
			return at, ok // a Replace has failed: all else waits for the next one
		}
	}
	if !r.repairAt.IsZero() {
		consider(r.repairAt)
	}
	if r.SyncPeriod > 0 && !r.replaced.IsZero() {
		consider(r.replaced.Add(r.SyncPeriod))
	}
	if r.status.changesPending() {
		consider(r.began.Add(r.MinSyncPeriod))
	}
	return at, ok
}

// run makes a step, and plans the next one where this one failed.
func (r *Reconciler) run(ctx context.Context, now time.Time) {
	reached := func(t time.Time) bool { return !t.IsZero() && !t.After(now) }
	if reached(r.retryAt) {
		r.replace, r.retryAt = true, time.Time{}
	}
	if reached(r.repairAt) {
		r.replace = true
		if r.nextRepair.Before(now) {
			r.nextRepair = now
		}
		r.nextRepair = r.nextRepair.Add(repairPause)
	}
	if r.SyncPeriod > 0 && reached(r.replaced.Add(r.SyncPeriod)) {
		r.replace = true
	}
	r.step(ctx)
	switch {
	case len(r.out) == 0 && !r.hopeful():
		r.retry, r.retryAt = 0, time.Time{}
	case r.retryAt.IsZero(): // else what failed earlier still waits for its time
		r.retry = min(max(2*r.retry, minRetry), maxRetry)
		r.retryAt = time.Now().Add(r.retry)
	}
}

// hopeful tells whether there are Service ports that the kernel may take when they are tried again.
func (r *Reconciler) hopeful() bool {
	for _, f := range r.failed {
		if !f.Lasting {
			return true
		}
	}
	return false
}

// step brings the kernel to what the cache holds now, as far as it takes it: r.out and r.failed have the
// rest. It ends what it has begun: an agent that stops leaves no half-done change behind.
func (r *Reconciler) step(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	defer r.status.step()()
	taken, ok := r.Cache.Take()
	if !ok {
		r.status.idle()
		return
	}
	r.began = time.Now()
	if taken.Epoch != r.epoch {
		clear(r.unacked)
		r.epoch = taken.Epoch
	}
	maps.Copy(r.unacked, taken.Positions)
	r.setNode()
	for _, key := range taken.Services {
		service, endpointSlices := r.Cache.Service(key)
		r.View.Set(key, service, endpointSlices)
	}
	changes, node := r.View.Changes()
	r.noteNodePorts(changes, node)
	r.replace = r.replace || node
	replaced, failed := r.program(ctx, changes)
	r.noteLacking(changes)
	r.reportFamilies()
	if r.nothing() {
		return
	}
	for _, f := range failed {
		if held := r.failed[f.ID]; held == nil || held.Lasting {
			r.failed[f.ID], r.checksDue = f, true
		}
	}
	served := r.served()
	acked := r.ackable(taken.Shards)
	r.status.reached(r.epoch, acked, served, replaced, r.out)
	r.ports.Set(float64(served))
	r.announce(served)
	r.tell(changes, replaced)
	r.report()
	r.Reporter.Ack(r.epoch, acked)
	maps.DeleteFunc(r.unacked, func(shard uint32, _ uint64) bool {
		_, ok := acked[shard]
		return ok
	})
	if replaced {
		debug.FreeOSMemory() // it takes as much again as what is kept, and is seldom
	}
}

// nothing reports whether every IP family is out.
func (r *Reconciler) nothing() bool {
	return !slices.ContainsFunc(r.families, func(f model.Family) bool { return r.out[f] == nil })
}

// announce closes begun and programmed when it is time.
func (r *Reconciler) announce(served int) {
	once := func(c chan struct{}) bool {
		select {
		case <-c:
			return false
		default:
			close(c)
			return true
		}
	}
	once(r.begun)
	if len(r.out) == 0 && once(r.programmed) {
		r.Logger.Info("The node is programmed", "service_ports", served)
	}
}

// served returns how many Service ports there are that have not failed, of IP families that are not
// out.
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

// noteLacking notes the Services that the kernel lacks something of because their IP family is out.
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

// ackable returns the unacked positions of shards, of so many, without a Service that the kernel lacks
// something of because its IP family is out.
func (r *Reconciler) ackable(shards uint32) map[uint32]uint64 {
	acked := maps.Clone(r.unacked)
	for _, services := range r.lacking {
		for key := range services {
			delete(acked, key.Shard(shards))
		}
	}
	return acked
}

// setNode gives the view the Node. A server sends it before it lets a cache be in sync, so if there is none at first, the cluster
// has none.
func (r *Reconciler) setNode() {
	n := r.Cache.Node()
	r.View.SetNode(n)
	if !r.replaced.IsZero() {
		return
	}
	if n == nil {
		r.Logger.Warn("There is no Node object for this node: its zone, addresses and pod CIDRs are unknown")
	}
}

// tell tells those who follow the kernel's state what it is now.
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
	if checks, changed := r.View.HealthChecks(); changed {
		r.checks = checks
		r.tellHealth()
	} else if r.checksDue {
		r.tellHealth()
	}
}

// tellHealth tells Health what health checks are to answer. Those of an IP family that is out stay
// as they were told last. A Service of which something is not programmed has no endpoints here that
// traffic would come to.
func (r *Reconciler) tellHealth() {
	r.checksDue = false
	if r.Health == nil {
		return
	}
	told := r.checks
	if len(r.out) > 0 || len(r.failed) > 0 {
		told = maps.Clone(told)
		for failed := range r.failed {
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

// reportFamilies logs, and tells the Reporter, what is news about IP families that are out.
func (r *Reconciler) reportFamilies() {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		failed := 0.0
		if r.out[family] != nil {
			failed = 1
		}
		r.failing.WithLabelValues(family.String()).Set(failed)
	}
	r.status.failed(r.families, r.out)
	reason := familiesReason(r.out)
	if reason == r.outReason {
		return
	}
	r.outReason = reason
	if reason == "" {
		r.Logger.Info("Every IP family is programmed now")
		r.Reporter.ResolveNode()
		return
	}
	r.Logger.Error("Can't program the node; what the kernel holds stays, and it is tried again", "reason", reason)
	r.Reporter.NackNode(reason)
}

// familiesReason says which IP families are out and why; "" if none is.
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

// report logs, and tells the Reporter, what is news about Services of which something is not programmed.
func (r *Reconciler) report() {
	reasons := make(map[model.ServiceKey][]string)
	for _, p := range r.View.Problems() {
		reasons[p.Service] = append(reasons[p.Service], p.Reason)
	}
	for id, f := range r.failed {
		reasons[id.Service] = append(reasons[id.Service], f.Error())
	}
	for service, list := range reasons {
		slices.Sort(list)
		if reason := strings.Join(list, "; "); r.nacked[service] != reason {
			r.nacked[service] = reason
			r.Logger.Warn("Some of a Service is not programmed; the rest is", "service", service.String(), "reason", reason)
			r.status.fails(service, reason)
			r.Reporter.Nack(service, reason)
		}
	}
	for service := range r.nacked {
		if _, ok := reasons[service]; !ok {
			delete(r.nacked, service)
			r.Logger.Info("All of the Service is programmed now, or it is gone", "service", service.String())
			r.status.resolved(service)
			r.Reporter.Resolve(service)
		}
	}
	r.nacks.Set(float64(len(r.nacked)))
}

// program applies the changes, or replaces everything where the kernel's state is not known, and tells
// which. It sets r.out, and returns the Service ports that failed.
func (r *Reconciler) program(ctx context.Context, changes []view.Change) (replaced bool, failed []*programmer.PortError) {
	var applied error
	if !r.replace {
		if changes = r.programmable(changes); len(changes) == 0 {
			return false, nil
		}
		applied = r.observe("apply", func() error { return r.Programmer.Apply(ctx, changes) })
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
	r.replaced, r.repairAt = time.Now(), time.Time{}
	select {
	case <-r.lost: // one flush is told of many times
	default:
	}
	r.checksDue = r.checksDue || len(r.out) > 0 || len(r.failed) > 0
	err := r.observe("replace", func() error { return r.Programmer.Replace(ctx, r.View.State()) })
	failed, r.out = programmer.Split(err, r.families)
	if applied != nil && len(r.out) == 0 {
		r.Logger.Warn("A change could not be applied; everything was programmed anew", "err", applied)
	}
	// While nothing is programmed, nothing but a Replace can help.
	r.replace = r.nothing()
	// Of a family that is out it is not known whether its Service ports still fail.
	maps.DeleteFunc(r.failed, func(id view.ServicePortID, _ *programmer.PortError) bool { return r.out[id.Family] == nil })
	return true, failed
}

func (r *Reconciler) observe(operation string, f func() error) error {
	start := time.Now()
	err := f()
	r.status.ran(start)
	r.seconds.WithLabelValues(operation).Observe(time.Since(start).Seconds())
	if err != nil {
		r.errors.WithLabelValues(operation).Inc()
	}
	return err
}
