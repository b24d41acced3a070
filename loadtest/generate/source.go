package generate

import (
	"context"
	"time"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// maxPlans is the maximum number of plans that wait to be carried out.
const maxPlans = 16

// Source provides a Cluster to a server and changes it as plans say. Servers with the same plans
// make the same changes at the same times, with the same resource versions, so one server can take
// over from another.
type Source struct {
	cluster *Cluster
	early   []Plan
	plans   chan Plan
	played  chan Lag

	// The following fields are used only by Run.
	sink            source.Sink
	resourceVersion uint64
	begun           time.Time
	serving         bool // the sink has received the state
}

var _ source.Source = (*Source)(nil)

// NewSource returns a source, which then owns the cluster. No plan must have been carried out on
// the cluster. Changes of the given plans that are due before Run starts are part of the state that
// it starts with.
func NewSource(g *Cluster, plans ...Plan) *Source {
	return &Source{
		cluster: g, early: plans, plans: make(chan Plan, maxPlans), played: make(chan Lag, maxPlans+len(plans)), resourceVersion: 1,
	}
}

// Play queues a plan, to be carried out after those before it.
func (s *Source) Play(ctx context.Context, p Plan) error {
	select {
	case s.plans <- p:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Played waits until one more plan has been carried out, and returns how late its changes were
// made.
func (s *Source) Played(ctx context.Context) (Lag, error) {
	select {
	case lag := <-s.played:
		return lag, nil
	case <-ctx.Done():
		return Lag{}, ctx.Err()
	}
}

// Run implements source.Source.
func (s *Source) Run(ctx context.Context, sink source.Sink) error {
	s.sink, s.begun = sink, time.Now()
	for _, p := range s.early {
		if !s.carryOut(ctx, p) {
			return nil
		}
	}
	s.serve()
	for {
		select {
		case <-ctx.Done():
			return nil
		case p := <-s.plans:
			if !s.carryOut(ctx, p) {
				return nil
			}
		}
	}
}

// carryOut makes the changes of a plan: at once if they were due before Run started, otherwise when
// they are due. It returns false if the context has ended.
func (s *Source) carryOut(ctx context.Context, p Plan) bool {
	var lags Lags
	for _, step := range s.cluster.steps(p) {
		if !step.due.Before(s.begun) {
			s.serve()
			if lags.Await(ctx, step.due) != nil {
				return false
			}
		}
		for _, c := range step.make(step.due) {
			s.resourceVersion++
			switch {
			case !s.serving:
			case c.Removed:
				s.sink.Remove(c.Key, s.resourceVersion)
			default:
				s.sink.Upsert(c.Slice, s.resourceVersion)
			}
		}
	}
	select {
	case s.played <- lags.Lag():
		return true
	case <-ctx.Done():
		return false
	}
}

// serve passes the current state to the sink, the first time that it is called.
func (s *Source) serve() {
	if s.serving {
		return
	}
	s.serving = true
	var services, endpointSlices, nodes []model.Keyed
	for _, o := range s.cluster.Objects() {
		if o.Key().Kind == model.KindService {
			services = append(services, o)
		} else {
			endpointSlices = append(endpointSlices, o)
		}
	}
	for _, o := range s.cluster.nodes {
		nodes = append(nodes, o)
	}
	s.sink.Replace(model.KindNode, nodes, s.resourceVersion)
	s.sink.Replace(model.KindService, services, s.resourceVersion)
	s.sink.Replace(model.KindSlice, endpointSlices, s.resourceVersion)
	s.sink.Synced()
}
