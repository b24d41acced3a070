// Package source turns the state of a cluster into the objects of internal/model. Its sub-packages watch where the state
// is kept (a Kubernetes API server, a directory of manifests) and feed a Sink, which is the store: there is no second
// copy of the objects in between.
package source

import (
	"context"

	"github.com/slicecast/slicecast/internal/model"
)

// Sink takes what a source sees. Calls come from any goroutine, but those for one kind come one after the other.
// The sink drops what is equal to what it has.
type Sink interface {
	// Upsert adds or changes an object. A Slice may come with another Service than before.
	Upsert(o Object, resourceVersion uint64)
	// Remove removes the object, if it is there.
	Remove(key model.Key, resourceVersion uint64)
	// Replace makes the objects of that kind exactly these, in one step.
	Replace(kind model.Kind, objects []Object, resourceVersion uint64)
	// Progress tells that everything of a kind up to a resourceVersion was given, when nothing else does.
	Progress(kind model.Kind, resourceVersion uint64)
	// Synced tells, once, that every kind has been given in full: from now on the sink may serve.
	Synced()
}

// Object is a *model.Service, *model.Slice or *model.Node; or a *ServiceCIDR, which only a Sink of WithServiceCIDRs takes.
type Object = model.Keyed

// Source watches one place where state is kept.
type Source interface {
	// Run feeds the sink until the context ends, which is no error; it survives whatever can be survived (a restarted
	// API server, a file that does not parse) and returns an error only when going on makes no sense.
	Run(ctx context.Context, sink Sink) error
}
