package verify

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/agent/trace"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// ShadowOptions configure a Shadow. Logger is required.
type ShadowOptions struct {
	// Settle is how long a difference must last to count. Whatever programs the kernel may need
	// that long for a change.
	Settle time.Duration
	// Beside and MasqueradeMark are as in Options.
	Beside         bool
	MasqueradeMark uint32
	// Period is the time between two comparisons without a change.
	Period     time.Duration
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil means that the metrics are not registered
}

// Shadow is a Programmer that programs nothing. It compares what the kernel does, which something
// else programs, with what it should: after each change and periodically.
type Shadow struct {
	ShadowOptions
	changed     chan struct{}
	differences prometheus.Gauge
	unjudged    prometheus.Gauge
	seconds     prometheus.Histogram

	mu sync.Mutex // guards the fields below
	// state is what should be programmed; known means that there is one.
	state view.State
	known bool
	// reason says what differs, as of the last comparison; empty if nothing does.
	reason string
}

var _ programmer.Programmer = (*Shadow)(nil)

// NewShadow returns a Shadow, which compares while Run runs.
func NewShadow(o ShadowOptions) *Shadow {
	f := promauto.With(o.Registerer)
	return &Shadow{
		ShadowOptions: o, changed: make(chan struct{}, 1), state: view.State{Ports: map[view.ServicePortID]*view.ServicePort{}},
		differences: f.NewGauge(prometheus.GaugeOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "shadow_differences",
			Help: "Number of differences between the kernel and what it should do, with the programmer shadow.",
		}),
		unjudged: f.NewGauge(prometheus.GaugeOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "shadow_unjudged",
			Help: "Number of rules and packets that could not be judged, with the programmer shadow.",
		}),
		seconds: f.NewHistogram(prometheus.HistogramOpts{
			Namespace: "slicecast", Subsystem: "agent", Name: "shadow_duration_seconds",
			Help:    "Time to compare the kernel with what it should do in seconds, with the programmer shadow.",
			Buckets: prometheus.ExponentialBuckets(1e-3, 4, 8),
		}),
	}
}

// Families returns the IP families that the kernel has.
func (s *Shadow) Families() (out []model.Family) {
	for _, f := range []model.Family{model.IPv4, model.IPv6} {
		if trace.Has(f) {
			out = append(out, f)
		}
	}
	return out
}

// Replace makes the state the one that the kernel is compared with.
func (s *Shadow) Replace(_ context.Context, state view.State) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state, s.known = view.State{Node: state.Node, Ports: maps.Clone(state.Ports)}, true
	s.signal()
	return nil
}

// Apply changes the state that the kernel is compared with.
func (s *Shadow) Apply(_ context.Context, changes []view.Change) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range changes {
		if c.After == nil {
			delete(s.state.Ports, c.ID())
		} else {
			s.state.Ports[c.ID()] = c.After
		}
	}
	s.signal()
	return nil
}

// Cleanup does nothing, since nothing was programmed.
func (s *Shadow) Cleanup(context.Context) error { return nil }

func (s *Shadow) signal() {
	select {
	case s.changed <- struct{}{}:
	default: // a comparison is due already
	}
}

// current returns a copy of the state.
func (s *Shadow) current() (state view.State, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return view.State{Node: s.state.Node, Ports: maps.Clone(s.state.Ports)}, s.known
}

// Reason says what differs, in one line, or "" if nothing does.
func (s *Shadow) Reason() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reason
}

// idle is by how much longer the Shadow waits than it compares, at least. It bounds the CPU time
// that the comparisons of a large cluster take.
const idle = 10

// Run compares until ctx ends. It compares after changes, again while something differs, and
// periodically. A difference counts once it has lasted for Settle.
func (s *Shadow) Run(ctx context.Context) {
	since := map[about]time.Time{} // when each difference was first seen
	for {
		wait := s.Period
		if state, known := s.current(); known {
			begin := time.Now()
			r, err := Kernel(ctx, Options{State: state, Beside: s.Beside, MasqueradeMark: s.MasqueradeMark})
			took := time.Since(begin)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				s.failed(err)
				wait = min(wait, max(s.Settle, idle*took))
			} else {
				s.seconds.Observe(took.Seconds())
				s.note(r, since, begin)
				if len(since) > 0 {
					wait = min(wait, max(s.Settle/4, idle*took))
				}
			}
			if !pauseFor(ctx, max(idle*took, s.Settle/4)) {
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-s.changed:
		case <-time.After(wait):
		}
	}
}

// failed records that a comparison was not possible. What was found before no longer counts as the
// state of the kernel.
func (s *Shadow) failed(err error) {
	s.Logger.Warn("Cannot compare the kernel with what it should do", "err", err)
	s.unjudged.Set(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reason = fmt.Sprintf("the kernel cannot be compared with what it should do: %v", err)
}

// pauseFor waits. It reports false if ctx ends before.
func pauseFor(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// note records the result of a comparison.
func (s *Shadow) note(r Result, since map[about]time.Time, now time.Time) {
	present := map[about]struct{}{}
	var lasting []Difference
	for _, d := range r.Differences {
		about := d.about()
		present[about] = struct{}{}
		if _, known := since[about]; !known {
			since[about] = now
		}
		if now.Sub(since[about]) >= s.Settle {
			lasting = append(lasting, d)
		}
	}
	maps.DeleteFunc(since, func(d about, _ time.Time) bool {
		_, ok := present[d]
		return !ok
	})
	s.differences.Set(float64(len(lasting)))
	s.unjudged.Set(float64(len(r.Unjudged)))
	reason := ""
	switch {
	case len(lasting) == 1:
		reason = lasting[0].String()
	case len(lasting) > 1:
		reason = fmt.Sprintf("%v (and %d more; run slicecast-agent verify)", lasting[0], len(lasting)-1)
	case len(r.Unjudged) > 0:
		reason = fmt.Sprintf("not everything can be judged: %s", r.Unjudged[0])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reason = reason
}
