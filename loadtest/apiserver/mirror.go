package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/source/kube"
)

// Mirror follows the current state of an API server as a Slicecast server reads it. A plain list
// would not do: in a large cluster that changes all the time, it is outdated before it is complete.
type Mirror struct {
	mu      sync.Mutex // guards objects
	objects map[model.Key]model.Object

	synced chan struct{}
}

var _ source.Sink = (*Mirror)(nil)

// StartMirror watches the API server of a kubeconfig until the context ends, in a goroutine of
// running. It returns once the mirror has the whole state.
func StartMirror(
	ctx context.Context, running *sync.WaitGroup, kubeconfig, serviceProxyName string, logger *slog.Logger,
) (*Mirror, error) {
	config, err := kube.Config(kubeconfig)
	if err != nil {
		return nil, err
	}
	watched, err := kube.New(kube.Options{Config: config, ServiceProxyName: serviceProxyName, Log: logger, Metrics: prometheus.NewRegistry()})
	if err != nil {
		return nil, err
	}
	m := &Mirror{objects: make(map[model.Key]model.Object), synced: make(chan struct{})}
	running.Go(func() { _ = watched.Run(ctx, m) }) // it returns only when the context ends
	select {
	case <-m.synced:
		return m, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("get the API server's state for comparison: %w", ctx.Err())
	}
}

// Objects returns the Services and slices.
func (m *Mirror) Objects() []model.Object {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.objects))
}

// Upsert implements source.Sink.
func (m *Mirror) Upsert(o model.Keyed, _ uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.putLocked(o)
}

// putLocked stores Services and slices. It ignores Nodes, because each simulated node has its own.
func (m *Mirror) putLocked(o model.Keyed) {
	if o, ok := o.(model.Object); ok {
		m.objects[o.Key()] = o
	}
}

// Remove implements source.Sink.
func (m *Mirror) Remove(key model.Key, _ uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.objects, key)
}

// Replace implements source.Sink.
func (m *Mirror) Replace(kind model.Kind, objects []model.Keyed, _ uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.objects, func(key model.Key, _ model.Object) bool { return key.Kind == kind })
	for _, o := range objects {
		m.putLocked(o)
	}
}

// Progress implements source.Sink.
func (*Mirror) Progress(model.Kind, uint64) {}

// Synced implements source.Sink.
func (m *Mirror) Synced() { close(m.synced) }
