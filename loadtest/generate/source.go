package generate

import (
	"context"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// Source gives a Cluster to a server and changes it as plans say.
type Source struct {
	cluster *Cluster
	plans   chan Plan
	done    chan Lag
}

var _ source.Source = (*Source)(nil)

// Lag is how late the changes of a plan were made: what the machine owed the schedule.
type Lag struct {
	P99 time.Duration `json:"p99"`
	Max time.Duration `json:"max"`
}

// NewSource makes a source, which then owns the cluster.
func NewSource(g *Cluster) *Source {
	return &Source{cluster: g, plans: make(chan Plan), done: make(chan Lag)}
}

// Run implements source.Source.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	var services, endpointSlices, nodes []source.Object
	for _, o := range s.cluster.services {
		services = append(services, o)
	}
	for _, o := range s.cluster.slices {
		endpointSlices = append(endpointSlices, o)
	}
	for _, o := range s.cluster.nodes {
		nodes = append(nodes, o)
	}
	resourceVersion := uint64(1)
	sink.Replace(model.KindNode, nodes, resourceVersion)
	sink.Replace(model.KindService, services, resourceVersion)
	sink.Replace(model.KindSlice, endpointSlices, resourceVersion)
	sink.Synced()
	for {
		var p Plan
		select {
		case <-ctx.Done():
			return nil
		case p = <-s.plans:
		}
		var lags []time.Duration
		for _, c := range s.cluster.Changes(p) {
			if !sleepUntil(ctx, c.Due) {
				return nil
			}
			resourceVersion++
			lags = append(lags, time.Since(c.Due))
			sink.Upsert(s.cluster.Make(c), resourceVersion)
		}
		select {
		case <-ctx.Done():
			return nil
		case s.done <- lagOf(lags):
		}
	}
}

// Churn has a plan carried out and tells how that went. It returns when the last change is made, or the context ends.
func (s *Source) Churn(ctx context.Context, p Plan) (Lag, error) {
	select {
	case <-ctx.Done():
		return Lag{}, ctx.Err()
	case s.plans <- p:
	}
	select {
	case <-ctx.Done():
		return Lag{}, ctx.Err()
	case l := <-s.done:
		return l, nil
	}
}

func lagOf(lags []time.Duration) Lag {
	if len(lags) == 0 {
		return Lag{}
	}
	slices.Sort(lags)
	return Lag{P99: lags[(len(lags)-1)*99/100], Max: lags[len(lags)-1]}
}

func sleepUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
