// Package warnings keeps what should be mended on the node, although everything is programmed, in
// the log, the metrics, the agent's status and the servers' status.
package warnings

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// interval is the time between two checks. A minute has several, so that whatever one check misses
// is still noticed within a minute.
const interval = 15 * time.Second

// Options configure Warnings. Check, Report and Logger are required.
type Options struct {
	// Check returns what should be mended now, with the reasons. ctx ends when the agent stops.
	Check func(ctx context.Context) map[pb.NodeWarning]string
	// Report is called for each warning that is new or has another reason, so that the servers hear of
	// it. An empty reason means that the warning is over.
	Report func(w pb.NodeWarning, reason string)
	Logger *slog.Logger
	// Registerer registers the metrics; nil means that they are not registered.
	Registerer prometheus.Registerer
}

// Warnings are the present warnings of a node. Run keeps them up to date.
type Warnings struct {
	options Options
	metric  *prometheus.GaugeVec

	mu   sync.Mutex // guards open
	open map[pb.NodeWarning]*pb.AgentWarning
}

// New returns Warnings that are empty until Run.
func New(o Options) *Warnings {
	w := &Warnings{options: o, open: make(map[pb.NodeWarning]*pb.AgentWarning)}
	w.metric = promauto.With(o.Registerer).NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "slicecast", Subsystem: "agent", Name: "warnings",
		Help: "1 while something should be mended on the node, although everything is programmed, 0 otherwise. The log and " +
			"the status command say what.",
	}, []string{"warning"})
	// The last name is for warnings that a server does not know. An agent knows its own.
	for _, name := range wire.WarningNames[:len(wire.WarningNames)-1] {
		w.metric.WithLabelValues(name).Set(0)
	}
	return w
}

// Run checks again and again until ctx ends.
func (w *Warnings) Run(ctx context.Context) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		w.check(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// check checks once, and logs and reports what has changed.
func (w *Warnings) check(ctx context.Context) {
	now := w.options.Check(ctx)
	if ctx.Err() != nil {
		return // the check may have been cut short
	}
	for _, warning := range w.List() {
		if kind := warning.GetWarning(); now[kind] == "" {
			w.set(kind, nil)
			w.metric.WithLabelValues(wire.WarningName(kind)).Set(0)
			w.options.Logger.Info("A warning is over", "warning", wire.WarningName(kind))
			w.options.Report(kind, "")
		}
	}
	for kind, reason := range now {
		before := w.open[kind] // only this goroutine changes it
		if before.GetReason() == reason {
			continue
		}
		next := &pb.AgentWarning{Warning: kind, Reason: reason, Time: timestamppb.Now()}
		if before != nil {
			next.Time = before.GetTime()
		}
		w.set(kind, next)
		w.metric.WithLabelValues(wire.WarningName(kind)).Set(1)
		w.options.Logger.Warn("Something should be mended on this node", "warning", wire.WarningName(kind), "reason", reason)
		w.options.Report(kind, reason)
	}
}

// set sets or, with nil, removes a warning.
func (w *Warnings) set(kind pb.NodeWarning, to *pb.AgentWarning) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if to == nil {
		delete(w.open, kind)
	} else {
		w.open[kind] = to
	}
}

// List returns the present warnings, by kind. They must not be changed.
func (w *Warnings) List() []*pb.AgentWarning {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := make([]*pb.AgentWarning, 0, len(w.open))
	for _, warning := range w.open {
		out = append(out, warning)
	}
	slices.SortFunc(out, func(a, b *pb.AgentWarning) int { return int(a.GetWarning() - b.GetWarning()) })
	return out
}
