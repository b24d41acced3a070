package chaos

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/probe"
)

// Counts are numbers of requests, by what became of them.
type Counts struct {
	Requests int `json:"requests"`
	// Answered requests were answered by a Pod of the Service. They include the misrouted ones.
	Answered int `json:"answered"`
	Refused  int `json:"refused"`
	TimedOut int `json:"timedOut"`
	Failed   int `json:"failed"` // for another reason
	// Misrouted requests were answered by a Pod of another Service, or by one that had not
	// been a ready endpoint for longer than [Grace] when the request began.
	Misrouted int `json:"misrouted"`
	// Broken is the number of open TCP connections that ended although their Pod should have
	// stayed. Their requests are in no other count.
	Broken int `json:"broken"`
}

// Lost returns the number of requests without an answer.
func (c Counts) Lost() int { return c.Refused + c.TimedOut + c.Failed }

// Plus returns the sum of both.
func (c Counts) Plus(d Counts) Counts {
	return Counts{
		Requests: c.Requests + d.Requests, Answered: c.Answered + d.Answered, Refused: c.Refused + d.Refused,
		TimedOut: c.TimedOut + d.TimedOut, Failed: c.Failed + d.Failed, Misrouted: c.Misrouted + d.Misrouted,
		Broken: c.Broken + d.Broken,
	}
}

// tally counts requests in one window of time after the other.
type tally struct {
	mu     sync.Mutex // guards all fields, and what they point to
	counts *Counts
	// firsts are the first errors of the window.
	firsts *[]string
}

// maxFirsts bounds the errors that a report shows of a window.
const maxFirsts = 6

// window begins a window. Requests count for the window in which they began.
func (t *tally) window(counts *Counts, firsts *[]string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counts, t.firsts = counts, firsts
}

// misroutedError says why a Pod should not have answered.
type misroutedError struct{ error }

// begin returns the function that counts a request that begins now, by its outcome.
func (t *tally) begin() func(error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	counts, firsts := t.counts, t.firsts
	return func(err error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		counts.Requests++
		if err == nil {
			counts.Answered++
			return
		}
		defer remember(firsts, err)
		if errors.As(err, &misroutedError{}) {
			counts.Answered++
			counts.Misrouted++
			return
		}
		switch probe.OutcomeOf(err) {
		case probe.Refused:
			counts.Refused++
		case probe.TimedOut:
			counts.TimedOut++
		default:
			counts.Failed++
		}
	}
}

// broken counts an open connection that has ended.
func (t *tally) broken(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counts.Broken++
	remember(t.firsts, err)
}

// remember adds an error to the first ones.
func remember(firsts *[]string, err error) {
	if len(*firsts) < maxFirsts {
		*firsts = append(*firsts, err.Error())
	}
}

// read returns the counts of a window, which may still grow.
func (t *tally) read(counts *Counts) Counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	return *counts
}

// Grace is the time in which all nodes have to follow an endpoint that is not ready any more, while
// nothing is broken. The Pods of the traffic serve for longer than that after their end has begun.
const Grace = 10 * time.Second

// ledger knows since when which Pods should not receive requests.
type ledger struct {
	mu sync.Mutex // guards gone
	// gone has all Pods that were ready endpoints, with the time since when they are not. It is the
	// zero time while they are.
	gone map[string]time.Time
}

// update records which Pods are ready endpoints at a time.
func (l *ledger) update(ready map[string]bool, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for pod, since := range l.gone {
		if !ready[pod] && since.IsZero() {
			l.gone[pod] = now
		}
	}
	for pod := range ready {
		l.gone[pod] = time.Time{}
	}
}

// judge returns an error if a request that began at a time should not have reached a Pod. The Pods
// of a Service have names that begin with the Service's.
func (l *ledger) judge(service, pod string, began time.Time) error {
	if len(pod) <= len(service) || pod[:len(service)+1] != service+"-" {
		return misroutedError{fmt.Errorf("%s was reached, a Pod of another Service", pod)}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	gone := l.gone[pod]
	if since := began.Sub(gone); !gone.IsZero() && since > Grace {
		return misroutedError{fmt.Errorf("%s was reached, which had not been a ready endpoint for %s", pod, since.Round(time.Millisecond))}
	}
	return nil
}
