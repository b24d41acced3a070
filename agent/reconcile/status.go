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
	// Time and Duration of the last programming, be it one that failed; zero: there was none.
	Time     time.Time
	Duration time.Duration
	// Err says which IP families are not programmed as a whole, and why; "" means that all are.
	Err string
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

// Families returns the IP families that the node is to have, ascending.
func (r *Reconciler) Families() []model.Family {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	return slices.Sorted(maps.Keys(r.status.families))
}

// Pending reports whether the kernel lacks anything of an IP family, and since when: changes that
// wait to be programmed, what others have removed, or, if the family could not be programmed, all
// of it. While a step is made it may lack something, whatever the step is for, as changes that come
// meanwhile are not noticed.
func (r *Reconciler) Pending(family model.Family) (since time.Time, pending bool) {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	since = earlier(r.status.pending, r.status.stepping)
	if f := r.status.families[family]; f != nil {
		since = earlier(since, f.broken)
	}
	return since, !since.IsZero()
}

// earlier returns the earlier of two times, of which a zero one is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// LastProgrammed returns when the kernel last had everything that there was of an IP family; zero means
// never.
func (r *Reconciler) LastProgrammed(family model.Family) time.Time {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	if f := r.status.families[family]; f != nil {
		return f.programmed
	}
	return time.Time{}
}

// status takes note of what the loop does.
type status struct {
	mu       sync.Mutex
	now      Status // without Failures
	failures map[model.ServiceKey]Failure
	// pending is since when changes wait; zero means that none do.
	pending time.Time
	// stepping is since when the step has been made that is made now; zero means that none is.
	stepping time.Time
	// families are the IP families that the node is to have.
	families map[model.Family]*familyStatus
}

// familyStatus is how the kernel stands in an IP family.
type familyStatus struct {
	// broken is since when a Replace is needed, whatever changes there are; zero means that none is.
	broken time.Time
	// programmed is when the kernel last had everything.
	programmed time.Time
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
	for _, f := range s.families {
		if f.broken.IsZero() {
			f.broken = time.Now()
		}
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

// step takes note of a step that begins. The function that it returns does so when the step has
// ended.
func (s *status) step() (end func()) {
	set := func(t time.Time) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.stepping = t
	}
	set(time.Now())
	return func() { set(time.Time{}) }
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

// failed takes note of the IP families that are out. They are since the changes that wait came, or
// since the last programming began, whatever was first. A family that is not among the programmer's
// is to be there for as long as it is out: it is the primary one, or another programmer has served
// it.
func (s *status) failed(families []model.Family, out map[model.Family]error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Err = familiesReason(out)
	since := earlier(s.now.Time, s.pending)
	maps.DeleteFunc(s.families, func(f model.Family, _ *familyStatus) bool { return out[f] == nil && !slices.Contains(families, f) })
	for family := range out {
		if s.families[family] == nil {
			s.families[family] = &familyStatus{}
		}
		if f := s.families[family]; f.broken.IsZero() {
			f.broken = since
		}
	}
}

// reached takes note of positions that the kernel has from now on, and of how many Service ports it
// serves. replaced means that everything was programmed anew. Nothing is reached of the IP families that
// are out.
func (s *status) reached(epoch uint64, positions map[uint32]uint64, ports int, replaced bool, out map[model.Family]error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now.Epoch != epoch || s.now.Positions == nil {
		s.now.Epoch, s.now.Positions = epoch, make(map[uint32]uint64)
	}
	maps.Copy(s.now.Positions, positions)
	s.now.ServicePorts, s.pending = ports, time.Time{}
	for family, f := range s.families {
		if out[family] != nil {
			continue
		}
		if f.programmed = time.Now(); replaced {
			f.broken = time.Time{}
		}
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
