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
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
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

// Reporter hears what became of the changes. client.Client and client.Local are Reporters.
type Reporter interface {
	// Ack tells that the kernel holds these positions of the epoch.
	Ack(epoch uint64, positions map[uint32]uint64)
	// Nack tells that something of this Service could not be programmed; once for each reason.
	Nack(service model.ServiceKey, reason string)
	// Resolve tells that nothing of a Service that was nacked waits to be programmed any more.
	Resolve(service model.ServiceKey)
}

// Options set up a Reconciler. All are required but Logger and Registerer.
type Options struct {
	Cache      *client.Cache
	View       *view.View
	Programmer programmer.Programmer
	Reporter   Reporter
	Logger     *slog.Logger          // nil: slog's default
	Registerer prometheus.Registerer // nil: no metrics
}

// Reconciler is the loop.
type Reconciler struct {
	Options
	// replace: the kernel's state is not known, so the next step is a Replace.
	replace bool
	// unacked are the positions that were taken from the cache and are not programmed yet.
	unacked map[uint32]uint64
	epoch   uint64
	retry   time.Duration
	// failed are the Service ports that the kernel does not hold as it should, and why; nacked is what the Reporter was told
	// of them.
	failed map[view.ServicePortID]string
	nacked map[model.ServiceKey]string
	// programmed is closed after the first success.
	programmed chan struct{}
	status     status

	seconds *prometheus.HistogramVec
	errors  *prometheus.CounterVec
	ports   prometheus.Gauge
}

// New makes a Reconciler.
func New(o Options) *Reconciler {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	f := promauto.With(o.Registerer)
	return &Reconciler{
		Options: o, replace: true, unacked: make(map[uint32]uint64), programmed: make(chan struct{}),
		failed: make(map[view.ServicePortID]string), nacked: make(map[model.ServiceKey]string),
		seconds: f.NewHistogramVec(prometheus.HistogramOpts{Namespace: "slicecast", Subsystem: "agent", Name: "program_duration_seconds",
			Help: "Time to program the kernel, by operation.", Buckets: prometheus.ExponentialBuckets(1e-4, 4, 10)}, []string{"operation"}),
		errors: f.NewCounterVec(prometheus.CounterOpts{Namespace: "slicecast", Subsystem: "agent", Name: "program_errors_total",
			Help: "Times that the kernel could not be programmed, by operation."}, []string{"operation"}),
		ports: f.NewGauge(prometheus.GaugeOpts{Namespace: "slicecast", Subsystem: "agent", Name: "service_ports",
			Help: "Service ports that the node serves, one for each port and IP family."}),
	}
}

// Programmed is closed once the kernel has held the whole state.
func (r *Reconciler) Programmed() <-chan struct{} { return r.programmed }

// Run programs until the context ends. What is programmed stays.
func (r *Reconciler) Run(ctx context.Context) {
	var retry <-chan time.Time
	for {
		dirty := r.Cache.Dirty()
		if r.replace && retry != nil {
			dirty = nil // a Replace has failed: changes wait for the next one
		}
		select {
		case <-ctx.Done():
			return
		case <-dirty:
		case <-retry:
			retry, r.replace = nil, true
		}
		err := r.step(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && retry == nil:
			r.retry = min(max(2*r.retry, minRetry), maxRetry)
			retry = time.After(r.retry)
			r.Logger.Error("Can't program the node; what is programmed stays, and it is tried again", "in", r.retry, "err", err)
		case err != nil:
			r.Logger.Error("Can't program the node; what is programmed stays, and it is tried again", "err", err)
		case retry == nil: // else a Service port of an earlier change still waits for its retry
			r.retry = 0
		}
	}
}

// step brings the kernel to what the cache holds now. It ends what it has begun: an agent that stops leaves no half-done
// change behind.
func (r *Reconciler) step(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	taken, ok := r.Cache.Take()
	if !ok {
		return nil
	}
	if taken.Epoch != r.epoch {
		clear(r.unacked)
		r.epoch = taken.Epoch
	}
	maps.Copy(r.unacked, taken.Positions)
	var changes []view.Change
	for _, key := range taken.Services {
		service, endpointSlices := r.Cache.Service(key)
		changes = append(changes, r.View.Update(key, service, endpointSlices)...)
	}
	err := r.program(ctx, changes)
	failed, partly := programmer.PortErrors(err)
	if !partly {
		r.status.failed(err)
		return err
	}
	state := r.View.State()
	r.status.reached(r.epoch, r.unacked, len(state.Ports))
	r.ports.Set(float64(len(state.Ports)))
	select {
	case <-r.programmed:
	default:
		close(r.programmed)
		r.Logger.Info("The node is programmed", "service_ports", len(state.Ports))
	}
	for _, f := range failed {
		r.failed[f.ID] = f.Error()
	}
	r.report()
	r.Reporter.Ack(r.epoch, r.unacked)
	r.unacked = make(map[uint32]uint64)
	if len(failed) > 0 {
		return fmt.Errorf("%d Service ports failed: %w", len(failed), err)
	}
	return nil
}

// report tells the Reporter what is news about the Service ports that fail.
func (r *Reconciler) report() {
	reasons := make(map[model.ServiceKey][]string)
	for id, reason := range r.failed {
		reasons[id.Service] = append(reasons[id.Service], reason)
	}
	for service, list := range reasons {
		slices.Sort(list)
		if reason := strings.Join(list, "; "); r.nacked[service] != reason {
			r.nacked[service] = reason
			r.status.fails(service, reason)
			r.Reporter.Nack(service, reason)
		}
	}
	for service := range r.nacked {
		if _, ok := reasons[service]; !ok {
			delete(r.nacked, service)
			r.status.resolved(service)
			r.Reporter.Resolve(service)
		}
	}
}

// program applies the changes, or replaces everything where the kernel's state is not known.
func (r *Reconciler) program(ctx context.Context, changes []view.Change) error {
	if !r.replace {
		if len(changes) == 0 {
			return nil
		}
		err := r.observe("apply", func() error { return r.Programmer.Apply(ctx, changes) })
		if _, partly := programmer.PortErrors(err); partly {
			for _, c := range changes {
				delete(r.failed, c.ID())
			}
			return err
		}
		r.Logger.Warn("A change could not be applied; programming everything", "err", err)
		r.replace = true
	}
	err := r.observe("replace", func() error { return r.Programmer.Replace(ctx, r.View.State()) })
	if _, partly := programmer.PortErrors(err); partly {
		r.replace = false
		clear(r.failed)
		return err
	}
	return errors.Join(errNothing, err)
}

var errNothing = errors.New("nothing of it is known to be programmed")

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
