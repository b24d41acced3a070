// Package source converts the state of a cluster into the objects of internal/model. Its
// sub-packages watch the place of that state (a Kubernetes API server, a directory of manifests,
// another server) and feed a Sink. The Sink is the store, so there is no second copy of the objects
// in between.
package source

import (
	"context"

	"github.com/slicecast/slicecast/internal/model"
)

// Sink receives what a source sees: each object is a *model.Service, *model.Slice or *model.Node. A
// Sink of WithServiceCIDRs also accepts a *ServiceCIDR. Calls may come from any goroutine, but
// calls for one kind are sequential. The sink ignores objects that are equal to its own.
type Sink interface {
	// Upsert adds or changes an object. A Slice may have moved to another Service.
	Upsert(o model.Keyed, resourceVersion uint64)
	// Remove removes the object, if it exists.
	Remove(key model.Key, resourceVersion uint64)
	// Replace makes objects the only objects of their kind, in one step.
	Replace(kind model.Kind, objects []model.Keyed, resourceVersion uint64)
	// Progress reports that the sink has been given everything of a kind up to a resourceVersion.
	// It is called if no change of an object of the kind has reported that.
	Progress(kind model.Kind, resourceVersion uint64)
	// Synced reports, once, that every kind has been given in full. From then on the sink may
	// serve.
	Synced()
}

// Source watches one place that holds the state of a cluster.
type Source interface {
	// Run feeds the sink until ctx ends, and then returns nil. It recovers from any failure that it
	// can recover from, such as a restarted API server or a file that does not parse. It returns an
	// error only if it cannot go on.
	Run(ctx context.Context, sink Sink) error
}
