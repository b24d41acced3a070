package reconcile

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// Status is how the kernel stands.
type Status struct {
	// Positions that the kernel has, by shard, in the epoch Epoch.
	Epoch     uint64
	Positions map[uint32]uint64
	// ServicePorts that it serves, one for each port and IP family.
	ServicePorts int
	// Time and Duration of the last programming, be it one that failed; zero: there was none. Err is why it failed as a whole.
	Time     time.Time
	Duration time.Duration
	Err      error
	// Failures are the Services of which something can't be programmed, by name.
	Failures []Failure
}

// Failure is a Service of which something can't be programmed.
type Failure struct {
	Service model.ServiceKey
	Reason  string
	Since   time.Time
}

// Status tells how the kernel stands.
func (r *Reconciler) Status() Status {
	s := &r.status
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.now
	out.Positions = maps.Clone(out.Positions)
	out.Failures = slices.SortedFunc(maps.Values(s.failures), func(a, b Failure) int {
		return cmp.Or(cmp.Compare(a.Service.Namespace, b.Service.Namespace), cmp.Compare(a.Service.Name, b.Service.Name))
	})
	return out
}

// Pending tells whether the kernel lacks anything, and since when: changes that wait to be programmed, what others have removed, or,
// where everything could not be programmed, all of it.
func (r *Reconciler) Pending() (since time.Time, pending bool) {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	since = r.status.pending
	if broken := r.status.broken; since.IsZero() || !broken.IsZero() && broken.Before(since) {
		since = broken
	}
	return since, !since.IsZero()
}

// LastProgrammed tells when the kernel last had everything that there was; zero: never.
func (r *Reconciler) LastProgrammed() time.Time {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	return r.status.programmed
}

// status takes note of what the loop does.
type status struct {
	mu       sync.Mutex
	now      Status // without Failures
	failures map[model.ServiceKey]Failure
	// pending is since when changes wait, zero: none do; programmed is when the last were programmed.
	pending, programmed time.Time
	// broken is since when a Replace is needed, whatever changes there are; zero: none is.
	broken time.Time
}

// changesPending tells whether changes wait.
func (s *status) changesPending() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.pending.IsZero()
}

// lost takes note that the kernel does not hold what it was given.
func (s *status) lost() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken.IsZero() {
		s.broken = time.Now()
	}
}

// queued takes note that there is something to program.
func (s *status) queued() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending.IsZero() {
		s.pending = time.Now()
	}
}

// idle takes note that there is nothing to program after all.
func (s *status) idle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending = time.Time{}
}

// ran takes note of an operation of the programmer.
func (s *status) ran(begin time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Time, s.now.Duration = begin, time.Since(begin)
}

// failed takes note that nothing is known to be programmed.
func (s *status) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Err = err
	if s.broken.IsZero() {
		s.broken = s.now.Time
	}
}

// reached takes note of positions that the kernel has from now on; replaced: of everything.
func (s *status) reached(epoch uint64, positions map[uint32]uint64, ports int, replaced bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now.Epoch != epoch || s.now.Positions == nil {
		s.now.Epoch, s.now.Positions = epoch, make(map[uint32]uint64)
	}
	maps.Copy(s.now.Positions, positions)
	s.now.ServicePorts, s.now.Err = ports, nil
	s.pending, s.programmed = time.Time{}, time.Now()
	if replaced {
		s.broken = time.Time{}
	}
}

// fails takes note of a Service that fails, for a reason that may be new.
func (s *status) fails(service model.ServiceKey, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.failures[service]
	if !ok {
		f = Failure{Service: service, Since: time.Now()}
	}
	f.Reason = reason
	if s.failures == nil {
		s.failures = make(map[model.ServiceKey]Failure)
	}
	s.failures[service] = f
}

// resolved takes note of a Service that fails no more.
func (s *status) resolved(service model.ServiceKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.failures, service)
}
