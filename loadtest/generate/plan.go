package generate

import (
	"math"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
)

// Plan says which changes happen when: Count flips of an endpoint's readiness, at equal intervals from Start on, whether or
// not earlier ones have arrived anywhere (an open loop).
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

	slice, endpoint int // index in Cluster.slices; in the slice's endpoints
}

// after is the time from the plan's start to a number of changes.
func (p Plan) after(count int) time.Duration {
	return time.Duration(math.Round(float64(count) / p.Rate * float64(time.Second)))
}

// Changes lists the plan's changes in their order.
func (g *Cluster) Changes(p Plan) []Change {
	out := make([]Change, 0, p.Count)
	last := make(map[int]int64)
	for i := range p.Count {
		due := p.Start.Add(p.after(i))
		number := int(g.order[(p.First+i)%len(g.order)])
		service, endpoint := number/g.config.Endpoints, number%g.config.Endpoints
		c := Change{
			Due: due, TriggerMS: due.UnixMilli(),
			slice: service*g.config.slicesPerService() + endpoint/sliceSize, endpoint: endpoint % sliceSize,
		}
		c.Slice = g.slices[c.slice].Key()
		if t, ok := last[c.slice]; ok && c.TriggerMS <= t {
			c.TriggerMS = t + 1
		}
		last[c.slice] = c.TriggerMS
		out = append(out, c)
	}
	return out
}

// Make makes a change and gives the slice as it is then.
func (g *Cluster) Make(c Change) *model.Slice {
	before := g.slices[c.slice]
	s := model.Slice{
		Namespace: before.Namespace, Name: before.Name, Service: before.Service, Family: before.Family, Ports: before.Ports,
		Endpoints: slices.Clone(before.Endpoints), LastChangeTriggerTimeMS: c.TriggerMS,
	}
	conditions := &s.Endpoints[c.endpoint].Conditions
	conditions.Ready = !conditions.Ready
	conditions.Serving = conditions.Ready
	g.slices[c.slice] = model.NewSlice(s)
	return g.slices[c.slice]
}
