// These tests prove that an agent which starts with a checkpoint gets only what differs, and that a
// checkpoint of another cluster does not count.
package client

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
)

// openCheckpoint returns a cache that is restored from a checkpoint of node-1, and a function that
// saves it.
func openCheckpoint(t *testing.T, path string) (held *Cache, save func()) {
	t.Helper()
	held = NewCache()
	registry := prometheus.NewRegistry()
	k := checkpoint.Open(checkpoint.Options{
		Path: path, NodeName: "node-1", Cache: held, Logger: slog.New(slog.DiscardHandler), Registerer: registry,
	})
	return held, func() {
		t.Helper()
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		begin := time.Now()
		k.Run(ctx) // it starts a save when it ends, and does not wait long for a slow disk
		require.Eventually(t, func() bool { return k.Saved().After(begin) }, patience, tick)
		require.Zero(t, metric(t, registry, "checkpoint_errors_total"))
	}
}

// TestResumeFromACheckpoint checks that an agent which starts with a checkpoint gets only the
// differences, from the same server and from another one.
func TestResumeFromACheckpoint(t *testing.T) {
	id := newIdentity(t)
	path := filepath.Join(t.TempDir(), "checkpoint")
	s := filled(t, 200)
	server := serveStore(t, id, s, noHeartbeat)
	// restart starts an agent with the checkpoint and returns the number of updates and the bytes
	// of other messages that the agent received.
	restart := func(s *store.Store, server *instance) (updates, otherBytes int) {
		t.Helper()
		held, save := openCheckpoint(t, path)
		a := connect(t, id, held, nil, server.address)
		a.waitInSync(t, 1)
		waitHolds(t, held, s)
		save()
		a.stop()
		updates, _, otherBytes, _ = a.counts()
		return updates, otherBytes
	}
	updates, _ := restart(s, server)
	require.EqualValues(t, s.Shards(), updates, "without a checkpoint: all")
	updates, other := restart(s, server)
	require.Zero(t, updates)
	t.Logf("resume from a checkpoint, nothing changed: %d bytes", other)
	require.Less(t, other, 200)

	s.Upsert(named("slice-7", "service-7", 11), 0)
	require.Eventually(t, func() bool {
		return s.Snapshot(named("slice-7", "service-7", 11).ServiceKey().Shard(s.Shards())).Sequence() > 1
	}, patience, tick)
	updates, _ = restart(s, server)
	require.Equal(t, 1, updates)

	replica := filled(t, 200)
	replica.Upsert(named("slice-7", "service-7", 11), 0)
	replica.Publish()
	updates, _ = restart(replica, serveStore(t, id, replica, noHeartbeat))
	require.Zero(t, updates)
}

// TestCheckpointOfAnotherCluster checks an agent that starts with the checkpoint of another
// cluster, whose resource versions are higher. The server does not let it wait, and once the server
// has answered, the checkpoint does not count, so nothing of it is programmed.
func TestCheckpointOfAnotherCluster(t *testing.T) {
	const old, now = 1_700_000_000, 1_800_000_000
	id := newIdentity(t)
	cluster := func(created int64, version uint64) *store.Store {
		s := filled(t, 5)
		if created != 0 {
			key := model.ClusterService
			s.Upsert(model.NewService(model.Service{
				Namespace: key.Namespace, Name: key.Name, Type: model.ClusterIP, CreationTimeSeconds: created,
			}), version)
		}
		s.Upsert(named("slice-0", "service-0", int(version)), version)
		s.Publish()
		require.Equal(t, created, s.Cluster())
		return s
	}
	for name, c := range map[string]struct {
		from, to int64
		counts   bool
	}{
		"the same cluster":          {old, old, true},
		"another cluster":           {old, now, false},
		"a checkpoint of any":       {0, now, true},
		"a server that cannot know": {old, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "checkpoint")
			held, save := openCheckpoint(t, path)
			s := cluster(c.from, 9)
			a := connect(t, id, held, nil, serveStore(t, id, s, noHeartbeat).address)
			a.waitInSync(t, 1)
			waitHolds(t, held, s)
			save()
			a.stop()

			held, _ = openCheckpoint(t, path)
			to := cluster(c.to, 3)
			welcomed := make(chan bool, 1)
			a = connect(t, id, held, func(r *wire.Response) {
				if r.Welcome != nil && len(welcomed) == 0 {
					welcomed <- held.UseRestored()
				}
			}, serveStore(t, id, to, 5*time.Millisecond).address)
			require.Equal(t, c.counts, <-welcomed)
			if !c.counts {
				waitHolds(t, held, to)
				_, ok := held.Take()
				require.True(t, ok, "the server has confirmed it")
			}
			a.stop()
		})
	}
}
