// This test proves that an agent which starts with a checkpoint gets only what differs.
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
	"github.com/slicecast/slicecast/internal/store"
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
