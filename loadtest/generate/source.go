package generate

import (
	"context"

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
		changes := s.cluster.Changes(p)
		lag, err := p.Follow(ctx, func(i int) error {
			resourceVersion++
			sink.Upsert(s.cluster.Make(changes[i]), resourceVersion)
			return nil
		})
		if err != nil {
			continue // the context has ended
		}
		select {
		case <-ctx.Done():
			return nil
		case s.done <- lag:
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
