package generate

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// Plan says which changes happen when: Count flips of an endpoint's readiness, at equal intervals from Start on, whether or
// not earlier ones have arrived anywhere (an open loop). Other things than changes can follow a plan too.
type Plan struct {
	// Start is when the first change is due.
	Start time.Time `json:"start"`
	// First is the number of the first change since the cluster was new: a plan goes on where the one before ended.
	First int `json:"first"`
	// Count of changes.
	Count int `json:"count"`
	// Rate is how many are due in a second.
	Rate float64 `json:"rate"`
}

// Change is a flip of one endpoint's readiness.
type Change struct {
	// Due is when it has to happen.
	Due time.Time
	// Slice that the endpoint is in.
	Slice model.Key
	// TriggerMS is the slice's last-change-trigger-time after the change, which travels with it: Due in milliseconds since
	// 1970, or the next one that the slice has not had, so that slice and time tell which change arrived.
	TriggerMS int64

	place place
}

// after is the time from the plan's start to a number of changes.
func (p Plan) after(count int) time.Duration {
	return time.Duration(math.Round(float64(count) / p.Rate * float64(time.Second)))
}

// Lag is how late what a plan says was done: what the machine owed the schedule.
type Lag struct {
	P99 time.Duration `json:"p99"`
	Max time.Duration `json:"max"`
}

// Follow does what is planned when it is due, by its number from 0 on, and tells how late that was. The error is that of do,
// or the context's.
func (p Plan) Follow(ctx context.Context, do func(i int) error) (Lag, error) {
	var lags []time.Duration
	for i := range p.Count {
		due := p.Start.Add(p.after(i))
		if err := sleepUntil(ctx, due); err != nil {
			return Lag{}, err
		}
		lags = append(lags, time.Since(due))
		if err := do(i); err != nil {
			return Lag{}, err
		}
	}
	if len(lags) == 0 {
		return Lag{}, nil
	}
	slices.Sort(lags)
	return Lag{P99: lags[(len(lags)-1)*99/100], Max: lags[len(lags)-1]}, nil
}

func sleepUntil(ctx context.Context, t time.Time) error {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return ctx.Err() // with both at hand, select takes either
	}
}

// Changes lists the plan's changes in their order.
func (g *Cluster) Changes(p Plan) []Change {
	out := make([]Change, 0, p.Count)
	last := make(map[uint32]int64)
	for i := range p.Count {
		due := p.Start.Add(p.after(i))
		c := Change{Due: due, TriggerMS: due.UnixMilli(), place: g.order[(p.First+i)%len(g.order)]}
		c.Slice = g.slices[c.place.slice].Key()
		if t, ok := last[c.place.slice]; ok && c.TriggerMS <= t {
			c.TriggerMS = t + 1
		}
		last[c.place.slice] = c.TriggerMS
		out = append(out, c)
	}
	return out
}

// Make makes a change and gives the slice as it is then.
func (g *Cluster) Make(c Change) *model.Slice {
	return g.flip(c.place.slice, c.TriggerMS, c.place.endpoint)
}

// flip turns endpoints of a slice not ready, or ready again.
func (g *Cluster) flip(slice uint32, triggerMS int64, endpoints ...uint32) *model.Slice {
	before := g.slices[slice]
	s := model.Slice{
		Namespace: before.Namespace, Name: before.Name, Service: before.Service, Family: before.Family, Ports: before.Ports,
		Endpoints: slices.Clone(before.Endpoints), LastChangeTriggerTimeMS: triggerMS,
	}
	for _, e := range endpoints {
		conditions := &s.Endpoints[e].Conditions
		conditions.Ready = !conditions.Ready
		conditions.Serving = conditions.Ready
	}
	g.slices[slice] = model.NewSlice(s)
	return g.slices[slice]
}
