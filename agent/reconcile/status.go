package reconcile

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// Status describes what the kernel holds, and what of the wanted state it lacks.
type Status struct {
	// Positions are what the kernel has programmed, by shard, in the epoch Epoch.
	Epoch     uint64
	Positions map[uint32]uint64
	// ServicePorts is the number of Service ports that the node serves, counted once for each port and
	// IP family.
	ServicePorts int
	// Time and Duration are those of the programmer's last operation, even if it failed. They are zero
	// if there was none.
	Time     time.Time
	Duration time.Duration
	// Err says which IP families are not programmed as a whole, and why; "" means that all are.
	Err string
	// Failures are the Services of which something cannot be programmed, sorted by namespace and name.
	Failures []Failure
}

// Failure describes a Service of which something cannot be programmed.
type Failure struct {
	Service model.ServiceKey
	Reason  string
	Since   time.Time
}

// Status returns the present status.
func (r *Reconciler) Status() Status {
	s := &r.status
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.now
	out.Positions = maps.Clone(out.Positions)
	out.Failures = slices.SortedFunc(maps.Values(s.failures), func(a, b Failure) int {
		x, y := a.Service, b.Service
		return cmp.Or(cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name))
	})
	return out
}

// Families returns the IP families that the node should have, ascending.
func (r *Reconciler) Families() []model.Family {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	return slices.Sorted(maps.Keys(r.status.families))
}

// Pending reports whether the kernel lacks anything of an IP family, and since when. It may lack
// changes that wait to be programmed, what others have removed, or, if the family could not be
// programmed, everything. A step in progress counts as pending, whatever it is for, because changes
// that arrive during a step are not noticed until it ends.
func (r *Reconciler) Pending(family model.Family) (since time.Time, pending bool) {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	since = earlier(r.status.pending, r.status.stepping)
	if f := r.status.families[family]; f != nil {
		since = earlier(since, f.broken)
	}
	return since, !since.IsZero()
}

// earlier returns the earlier of two times. A zero time does not count.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// LastProgrammed returns when the kernel last held everything of an IP family; zero means never.
func (r *Reconciler) LastProgrammed(family model.Family) time.Time {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	if f := r.status.families[family]; f != nil {
		return f.programmed
	}
	return time.Time{}
}

// status records what the loop does, for other goroutines to read. Only the loop changes it, so the
// loop reads it without mu.
//
// Invariants:
//
//  1. pending is set from when the loop notices changes until a step has programmed them or has
//     found none.
//  2. A family is broken from a loss or a failure until a Replace has programmed it.
type status struct {
	mu       sync.Mutex // guards all other fields
	now      Status     // without Failures
	failures map[model.ServiceKey]Failure
	// pending is when the oldest of the waiting changes arrived; zero means that none waits.
	pending time.Time
	// stepping is when the present step began; zero means that no step is in progress.
	stepping time.Time
	// families are the IP families that the node should have.
	families map[model.Family]*familyStatus
}

// familyStatus is the status of one IP family.
type familyStatus struct {
	// broken is since when the family needs a Replace, whether there are changes or not; zero means
	// that it needs none.
	broken time.Time
	// programmed is when the kernel last held everything of the family; zero means never.
	programmed time.Time
}

// change calls f, which changes fields.
func (s *status) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// setPending records when the oldest of the waiting changes arrived; zero means that none waits.
func (s *status) setPending(t time.Time) { s.change(func() { s.pending = t }) }

// setStepping records when the present step began; zero means that no step is in progress.
func (s *status) setStepping(t time.Time) { s.change(func() { s.stepping = t }) }

// lost records that the kernel no longer holds what was programmed.
func (s *status) lost() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.families {
		f.broken = earlier(f.broken, time.Now())
	}
}

// failed records the IP families that are out. They count as broken since the oldest waiting change
// arrived or since the last operation began, whichever was earlier. A family that the programmer
// does not have is recorded only while it is out. It is then the node's primary family, or another
// programmer has served it.
func (s *status) failed(families []model.Family, out map[model.Family]error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Err = familiesReason(out)
	since := earlier(s.now.Time, s.pending)
	maps.DeleteFunc(s.families, func(f model.Family, _ *familyStatus) bool {
		return out[f] == nil && !slices.Contains(families, f)
	})
	for family := range out {
		if s.families[family] == nil {
			s.families[family] = &familyStatus{}
		}
		if f := s.families[family]; f.broken.IsZero() {
			f.broken = since
		}
	}
}

// reached records positions that the kernel has programmed, and how many Service ports it serves.
// replaced means that everything was programmed anew. IP families that are out have not reached
// anything.
func (s *status) reached(
	epoch uint64, positions map[uint32]uint64, ports int, replaced bool, out map[model.Family]error,
) {
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
