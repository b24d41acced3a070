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

// observer is the agent's client, without an agent: it gets what every agent of the cluster gets, and notes it.
type observer struct {
	c     *cluster
	cache *client.Cache

	mu      sync.Mutex
	updates []received
}

// received is an update with the size that it came in.
type received struct {
	model.Update
	// size of the frame in bytes.
	size int
}

// Observe starts an observer that runs until the test ends, and waits until it is in sync.
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
	wg.Go(func() { _ = observing.Run(ctx) }) // ends with the context only, and then without an error
	c.t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	o.AwaitTruth()
	return o
}

// Forget forgets the updates so far.
func (o *observer) Forget() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.updates = nil
}

// AwaitUpdates waits for updates and gives all that have come since Forget.
func (o *observer) AwaitUpdates() []received {
	o.c.t.Helper()
	var updates []received
	testenv.Eventually(o.c.t, settleTimeout, func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.updates) == 0 {
			return fmt.Errorf("no update has come")
		}
		updates = slices.Clone(o.updates)
		return nil
	})
	return updates
}

// AwaitTruth waits until the observer holds the Services and slices of the API, no others, and nothing else of them.
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
				return fmt.Errorf("%s is at version %s in the API, at %s with the observer", key, want[key], have[key])
			}
		}
		if len(have) != len(want) {
			return fmt.Errorf("the observer holds %d objects, the API %d", len(have), len(want))
		}
		return nil
	})
}

// versions gives the versions of all objects of the API that nodes are told of.
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

// RequireOneDelta requires that one update has come since Forget, with one delta of one slice and nothing else. It gives
// the delta and the size of the update in bytes.
func (o *observer) RequireOneDelta() (*model.SliceDelta, int) {
	o.c.t.Helper()
	updates := o.AwaitUpdates()
	require.Len(o.c.t, updates, 1, "%+v", updates)
	require.Len(o.c.t, updates[0].Deltas, 1, "%+v", updates)
	require.Equal(o.c.t, 1, updates[0].Len(), "objects in the update: %+v", updates)
	return updates[0].Deltas[0], updates[0].size
}
