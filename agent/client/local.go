package client

import (
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Local keeps a Cache up to date from a source in its own process, for a node without a server. The
// store's updates go to the cache without being encoded.
type Local struct {
	// Source is where the state comes from.
	Source source.Source
	// Store receives the source's state. The Local owns it.
	Store *store.Store
	// Cache is the cache to keep up to date.
	Cache *Cache
	// NodeName is the name of the Node that the process runs on.
	NodeName string
}

// Run feeds the cache until the context ends or the source fails for good.
func (l *Local) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return l.Source.Run(ctx, l.Store) })
	g.Go(func() error { return l.follow(ctx) })
	return g.Wait()
}

func (l *Local) follow(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-l.Store.WaitSynced():
	}
	w := &cache.Writer{Cache: l.Cache}
	if err := w.Welcome(l.Store.Epoch(), l.Store.Shards()); err != nil {
		return err
	}
	for first := true; ; first = false {
		for _, u := range l.Store.Publish().Updates {
			// The updates of one store are consecutive, so each delta finds its base.
			if _, err := w.Apply(u); err != nil {
				return err
			}
		}
		w.SetNode(l.Store.Node(l.NodeName))
		if first {
			var sequences []uint64
			for i := range l.Store.Shards() {
				sequences = append(sequences, l.Store.Snapshot(i).Sequence())
			}
			if err := w.InSync(sequences, model.ResourceVersions{}); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-l.Store.Dirty():
		}
	}
}

// Ack does nothing, since no server waits for it.
func (l *Local) Ack(uint64, map[uint32]uint64) {}

// Nack does nothing, since the caller has already logged the failure.
func (l *Local) Nack(model.ServiceKey, string) {}

// Resolve does nothing; see Nack.
func (l *Local) Resolve(model.ServiceKey) {}

// NackNode does nothing; see Nack.
func (l *Local) NackNode(string) {}

// ResolveNode does nothing; see Nack.
func (l *Local) ResolveNode() {}

// Warn does nothing; see Nack.
func (l *Local) Warn(pb.NodeWarning, string) {}
