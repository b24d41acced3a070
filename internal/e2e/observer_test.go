// This file runs a client without an agent, which records the updates that every agent of the
// cluster receives.
package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/wire"
)

// observer is the client of an agent without an agent. It receives what every agent of the cluster
// receives, and records it.
type observer struct {
	c     *cluster
	cache *client.Cache

	mu      sync.Mutex // guards updates
	updates []received
}

// received is an update with the size of its frame.
type received struct {
	model.Update
	// size is the size of the frame in bytes.
	size int
}

// Observe starts an observer and waits until it is in sync. The observer runs until the end of the
// test.
func (c *cluster) Observe() *observer {
	c.t.Helper()
	o := &observer{c: c, cache: client.NewCache()}
	observing := client.New(client.Options{
		Servers:     client.Static("unix://" + c.debugSocket),
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
		Cache:       o.cache,
		Observe: func(r *wire.Response, size int) {
			if r.Update != nil {
				o.mu.Lock()
				defer o.mu.Unlock()
				o.updates = append(o.updates, received{*r.Update, size})
			}
		},
		Logger: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = observing.Run(ctx) }) // returns nil when the context ends
	c.t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	o.AwaitTruth()
	return o
}

// Forget removes the updates recorded so far.
func (o *observer) Forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.updates = nil
}

// AwaitUpdates waits for at least one update and returns all updates since Forget.
func (o *observer) AwaitUpdates() []received {
	o.c.t.Helper()
	var updates []received
	testenv.Eventually(o.c.t, settleTimeout, func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.updates) == 0 {
			return fmt.Errorf("no update was received")
		}
		updates = slices.Clone(o.updates)
		return nil
	})
	return updates
}

// AwaitTruth waits until the observer holds exactly the Services and slices of the API, with the
// same content.
func (o *observer) AwaitTruth() {
	o.c.t.Helper()
	testenv.Eventually(o.c.t, settleTimeout, func() error {
		want, err := o.c.versions(o.c.t.Context())
		if err != nil {
			return err
		}
		have := map[model.Key]model.Version{}
		for _, key := range o.cache.Services() {
			service, slices := o.cache.Service(key)
			if service != nil {
				have[service.Key()] = service.ContentVersion()
			}
			for _, slice := range slices {
				have[slice.Key()] = slice.ContentVersion()
			}
		}
		for key := range want {
			if have[key] != want[key] {
				return fmt.Errorf("%s has version %s in the API, and %s in the observer's cache", key, want[key], have[key])
			}
		}
		if len(have) != len(want) {
			return fmt.Errorf("the observer holds %d objects, the API %d", len(have), len(want))
		}
		return nil
	})
}

// versions returns the versions of all objects of the API that nodes receive.
func (c *cluster) versions(ctx context.Context) (map[model.Key]model.Version, error) {
	services, endpointSlices, err := c.list(ctx)
	if err != nil {
		return nil, err
	}
	converter := source.NewConverter("")
	versions := map[model.Key]model.Version{}
	for i := range services {
		if s, _ := converter.FromService(&services[i]); s != nil {
			versions[s.Key()] = s.ContentVersion()
		}
	}
	for i := range endpointSlices {
		if s, _ := converter.FromEndpointSlice(&endpointSlices[i]); s != nil {
			versions[s.Key()] = s.ContentVersion()
		}
	}
	return versions, nil
}

// RequireOneDelta requires that exactly one update was received since Forget, with one delta of one
// slice and nothing else. It returns the delta and the size of the update in bytes.
func (o *observer) RequireOneDelta() (*model.SliceDelta, int) {
	o.c.t.Helper()
	updates := o.AwaitUpdates()
	require.Len(o.c.t, updates, 1, "%+v", updates)
	require.Len(o.c.t, updates[0].Deltas, 1, "%+v", updates)
	require.Equal(o.c.t, 1, updates[0].Len(), "objects in the update: %+v", updates)
	return updates[0].Deltas[0], updates[0].size
}
