package reconcile

import "time"

// minRetry and maxRetry bound the back-off before a failed step is tried again.
const (
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// repairPause is the time between repairs of what others removed, if they keep removing it.
// repairsAtOnce repairs may follow each other without that pause, because restarting a firewall
// removes everything twice: when the firewall stops and when it starts.
const (
	repairPause   = time.Second
	repairsAtOnce = 3
)

// schedule decides when a step begins, and whether it has to be a Replace.
//
// Invariants:
//
//  1. While retryAt is set, a step has failed since the last one that succeeded. Further failures
//     do not postpone the retry.
//  2. At most repairsAtOnce repairs, and one more for each repairPause, begin in any period.
type schedule struct {
	// minSyncPeriod and syncPeriod are those of Options.
	minSyncPeriod, syncPeriod time.Duration
	// replace means that the next step is a Replace, because the kernel's state is not known.
	replace bool
	// began is when the last step with changes began, and replaced when the last Replace began.
	began, replaced time.Time
	// retryAt is when what has failed is tried again, and retry the back-off that led to it.
	// repairAt is when what others removed is programmed again. Zero means never.
	retryAt, repairAt time.Time
	retry             time.Duration
	// nextRepair is the time of the next repair if all repairs were repairPause apart. A repair may
	// come up to repairsAtOnce-1 pauses before it.
	nextRepair time.Time
}

// next returns when the next step should begin. changes means that changes wait to be programmed.
// ok is false if there is nothing to do.
func (s *schedule) next(changes bool) (at time.Time, ok bool) {
	consider := func(t time.Time) {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if !s.retryAt.IsZero() {
		consider(s.retryAt)
		if s.replace {
			return at, ok // after a failed Replace, everything else waits for the retry
		}
	}
	if !s.repairAt.IsZero() {
		consider(s.repairAt)
	}
	if s.syncPeriod > 0 && !s.replaced.IsZero() {
		consider(s.replaced.Add(s.syncPeriod))
	}
	if changes {
		consider(s.began.Add(s.minSyncPeriod))
	}
	return at, ok
}

// begin makes the step that begins now a Replace if the time for a retry, for a repair, or for the
// periodic Replace has come.
func (s *schedule) begin(now time.Time) {
	reached := func(t time.Time) bool { return !t.IsZero() && !t.After(now) }
	if reached(s.retryAt) {
		s.replace, s.retryAt = true, time.Time{}
	}
	if reached(s.repairAt) {
		s.replace = true
		if s.nextRepair.Before(now) {
			s.nextRepair = now
		}
		s.nextRepair = s.nextRepair.Add(repairPause)
	}
	if s.syncPeriod > 0 && reached(s.replaced.Add(s.syncPeriod)) {
		s.replace = true
	}
}

// repair schedules a repair. It returns false if one is scheduled already.
func (s *schedule) repair() bool {
	if !s.repairAt.IsZero() {
		return false
	}
	s.repairAt = s.nextRepair.Add(-(repairsAtOnce - 1) * repairPause)
	return true
}

// succeeded ends the back-off after a step.
func (s *schedule) succeeded() { s.retry, s.retryAt = 0, time.Time{} }

// failed schedules a retry after a step, unless an earlier failure has its time for one already.
func (s *schedule) failed() {
	if s.retryAt.IsZero() {
		s.retry = min(max(2*s.retry, minRetry), maxRetry)
		s.retryAt = time.Now().Add(s.retry)
	}
}
