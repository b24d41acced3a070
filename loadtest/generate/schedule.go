package generate

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// Arrivals is the distribution of the times of a schedule.
type Arrivals string

// Supported distributions.
const (
	// Even means equal intervals.
	Even Arrivals = "even"
	// Poisson means that the times are independent of each other, like events with many unrelated
	// causes. Some are close together, and there are long gaps. The intervals are distributed
	// exponentially.
	Poisson Arrivals = "poisson"
)

// Schedule says when things happen: Count of them, from Start on. Each is due at its time whether
// or not earlier ones have arrived anywhere (an open loop).
type Schedule struct {
	// Start is when the first is due.
	Start time.Time `json:"start"`
	Count int       `json:"count"`
	// Rate is how many are due per second, on average.
	Rate float64 `json:"rate"`
	// Arrivals is the distribution of the times. Empty means Even.
	Arrivals Arrivals `json:"arrivals,omitempty"`
	// Seed is the seed of random intervals.
	Seed uint64 `json:"seed,omitempty"`
}

// After returns the average time from the start of the schedule until item number count.
func (s Schedule) After(count int) time.Duration {
	return time.Duration(math.Round(float64(count) / s.Rate * float64(time.Second)))
}

// times returns a function that returns the due time of item i. Callers must ask in increasing
// order of i, but may skip items.
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

// Follow calls do for each item when it is due, with its number from 0 on. It returns how late the
// calls were. The error is that of do or of the context.
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

// Lag is how late the items of a schedule were done.
type Lag struct {
	P99 time.Duration `json:"p99"`
	Max time.Duration `json:"max"`
}

// Lags collects how late each item was done.
type Lags []time.Duration

// Await waits until an item is due, and records it as done then. The error is that of the context.
func (l *Lags) Await(ctx context.Context, due time.Time) error {
	err := Await(ctx, due)
	if err == nil {
		l.Done(due)
	}
	return err
}

// Done records that an item is done now.
func (l *Lags) Done(due time.Time) { *l = append(*l, max(0, time.Since(due))) }

// Await waits until a due time. The error is that of the context.
func Await(ctx context.Context, due time.Time) error {
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return ctx.Err() // if both channels are ready, select picks either
}

// Lag summarizes the records. It is zero if there are none.
func (l Lags) Lag() Lag {
	if len(l) == 0 {
		return Lag{}
	}
	slices.Sort(l)
	return Lag{P99: l[(len(l)-1)*99/100], Max: l[len(l)-1]}
}
