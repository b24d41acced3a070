// This test proves that a node without a server follows a source in its own process.
package client

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/store"
)

// sourceFunc is a source.Source for tests.
type sourceFunc func(ctx context.Context, sink source.Sink) error

func (f sourceFunc) Run(ctx context.Context, sink source.Sink) error { return f(ctx, sink) }

func TestLocal(t *testing.T) {
	s, err := store.New(store.Options{Shards: 2})
	require.NoError(t, err)
	cache := NewCache()
	l := &Local{Store: s, Cache: cache, NodeName: "n", Source: sourceFunc(func(ctx context.Context, sink source.Sink) error {
		sink.Upsert(service("web"), 1)
		sink.Upsert(&model.Node{Name: "n"}, 1)
		sink.Synced()
		<-cache.Dirty()
		sink.Upsert(named("s", "web", 2), 2)
		<-cache.Dirty()
		sink.Upsert(named("s", "web", 3), 3)
		sink.Remove(model.Key{Kind: model.KindNode, Name: "n"}, 3)
		<-ctx.Done()
		return nil
	})}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	require.Eventually(t, func() bool { return cacheHas(cache, named("s", "web", 3)) }, patience, tick)
	require.True(t, holds(cache, s))
	changes, ok := cache.Take()
	require.True(t, ok)
	require.Equal(t, []model.ServiceKey{service("web").ServiceKey()}, changes.Services)
	require.Equal(t, s.Epoch(), changes.Epoch)
	cancel()
	require.NoError(t, <-done)
}
