package generate

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Arrivals is how the times of a schedule are distributed.
type Arrivals string

// The arrivals.
const (
	// Even: at equal intervals.
	Even Arrivals = "even"
	// Poisson: independently of each other, as what has many unrelated causes comes: some at nearly the same time, and then none
	// for a while. The intervals are distributed exponentially.
	Poisson Arrivals = "poisson"
)

// Schedule says when things happen: Count of them from Start on, whether or not earlier ones have arrived anywhere (an open
// loop).
type Schedule struct {
	// Start is when the first is due.
	Start time.Time `json:"start"`
	Count int       `json:"count"`
	// Rate is how many are due in a second, on average.
	Rate float64 `json:"rate"`
	// Arrivals are Even if empty.
	Arrivals Arrivals `json:"arrivals,omitempty"`
	// Seed of the intervals that are drawn.
	Seed uint64 `json:"seed,omitempty"`
}

// After is the time from the schedule's start to so many of its things, on average.
func (s Schedule) After(count int) time.Duration {
	return time.Duration(math.Round(float64(count) / s.Rate * float64(time.Second)))
}

// times gives when each thing is due, by its number from 0 on. It is to be asked for them in order, and may be for some only.
func (s Schedule) times() func(i int) time.Time {
	if s.Arrivals != Poisson {
		return func(i int) time.Time { return s.Start.Add(s.After(i)) }
	}
	random := rand.New(rand.NewPCG(s.Seed, 0))
	drawn, intervals := 0, 0.0
	return func(i int) time.Time {
		for ; drawn < i; drawn++ {
			intervals += random.ExpFloat64()
		}
		return s.Start.Add(time.Duration(intervals / s.Rate * float64(time.Second)))
	}
}

// Follow does what is scheduled when it is due, by its number from 0 on, and tells how late that was. The error is that of
// do, or the context's.
func (s Schedule) Follow(ctx context.Context, do func(i int) error) (Lag, error) {
	var lags Lags
	due := s.times()
	for i := range s.Count {
		if err := lags.Await(ctx, due(i)); err != nil {
			return Lag{}, err
		}
		if err := do(i); err != nil {
			return Lag{}, err
		}
	}
	return lags.Lag(), nil
}

// Lag is how late what a schedule says was done: what the machine owed the schedule.
type Lag struct {
	P99 time.Duration `json:"p99"`
	Max time.Duration `json:"max"`
}

// Lags collects how late each thing was.
type Lags struct{ all []time.Duration }

// Await waits until something is due, and takes it for done then. The error is the context's.
func (l *Lags) Await(ctx context.Context, due time.Time) error {
	err := Await(ctx, due)
	if err == nil {
		l.Done(due)
	}
	return err
}

// Done takes note that something is done now.
func (l *Lags) Done(due time.Time) { l.all = append(l.all, max(0, time.Since(due))) }

// Merge adds what others have collected.
func (l *Lags) Merge(others Lags) { l.all = append(l.all, others.all...) }

// Await waits until something is due. The error is the context's.
func Await(ctx context.Context, due time.Time) error {
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return ctx.Err() // with both at hand, select takes either
}

// Lag is what all come to; zero if there was nothing.
func (l *Lags) Lag() Lag {
	if len(l.all) == 0 {
		return Lag{}
	}
	slices.Sort(l.all)
	return Lag{P99: l.all[(len(l.all)-1)*99/100], Max: l.all[len(l.all)-1]}
}
