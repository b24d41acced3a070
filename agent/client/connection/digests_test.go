// These tests prove when a client asks a server for what it holds differently.
package connection

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

var always = rate.NewLimiter(rate.Inf, 2)

func TestDivergenceIsToldOnceForADigest(t *testing.T) {
	held := &cache.Writer{Cache: cache.New()}
	require.NoError(t, held.Welcome(epoch, 2))
	require.NoError(t, held.InSync([]uint64{1, 1}, model.ResourceVersions{}))
	c := newComparison(always)
	beat := func(sequence uint64, digest byte) []uint32 {
		return c.diverged(&pb.Digests{Sequences: []uint64{1, sequence}, Digests: modeltest.Digests(0, digest)}, held.Cache)
	}
	require.Empty(t, beat(1, 0))
	require.Empty(t, beat(2, 7), "another position can't be compared")
	require.Equal(t, []uint32{1}, beat(1, 7))
	require.Empty(t, beat(1, 7), "it was asked for")
	require.Equal(t, []uint32{1}, beat(1, 8))
	require.Empty(t, beat(1, 0), "it has helped")
	require.Equal(t, []uint32{1}, beat(1, 8), "so that is worth it again")
	c = newComparison(always) // a new stream
	require.Equal(t, []uint32{1}, beat(1, 8), "on a new stream it is asked for again")
	require.Empty(t, c.diverged(&pb.Digests{Sequences: []uint64{1}, Digests: modeltest.Digests(9)}, held.Cache))
	require.Empty(t, c.diverged(&pb.Digests{Sequences: []uint64{1, 1}, Digests: []byte{9}}, held.Cache))
	both := &pb.Digests{Sequences: []uint64{1, 1}, Digests: modeltest.Digests(9, 9)}
	c.allowed = rate.NewLimiter(0, 1)
	require.Equal(t, []uint32{0}, c.diverged(both, held.Cache))
	c.allowed = always
	require.Equal(t, []uint32{1}, c.diverged(both, held.Cache), "it was not asked for")
}

// TestAllDivergedShardsAreMended checks that a client asks for each of many diverged shards while
// the server's state stays the same, whatever the interval between heartbeats.
func TestAllDivergedShardsAreMended(t *testing.T) {
	const shards = 16
	for _, interval := range []time.Duration{time.Second, repairInterval / 2, repairInterval, 3 * repairInterval} {
		synctest.Test(t, func(t *testing.T) {
			held := &cache.Writer{Cache: cache.New()}
			require.NoError(t, held.Welcome(epoch, shards))
			sequences, digests := make([]uint64, shards), make([]model.Digest, shards)
			for i := range sequences {
				sequences[i], digests[i] = 1, model.Digest{byte(i + 1)}
			}
			require.NoError(t, held.InSync(sequences, model.ResourceVersions{}))
			c := newComparison(rate.NewLimiter(rate.Every(repairInterval), repairBurst))
			state := model.StateDigest(digests)
			asked := make(map[uint32]int)
			for range 2 * shards * repairInterval / min(interval, repairInterval) {
				if c.asks(&pb.Heartbeat{SequenceSum: shards, Digest: state[:]}, held.Cache) {
					for _, shard := range c.diverged(&pb.Digests{Sequences: sequences, Digests: model.JoinDigests(digests)}, held.Cache) {
						asked[shard]++
					}
				}
				<-time.After(interval)
			}
			require.Len(t, asked, shards, interval)
			for shard, times := range asked {
				require.Equal(t, 1, times, "shard %d, although the server's answer did not help", shard)
			}
		})
	}
}

// TestHeartbeatsTellOfDivergence checks that a heartbeat makes the client ask only at the same
// position, and once per digest and stream.
func TestHeartbeatsTellOfDivergence(t *testing.T) {
	held := &cache.Writer{Cache: cache.New()}
	require.NoError(t, held.Welcome(epoch, 2))
	require.NoError(t, held.InSync([]uint64{1, 1}, model.ResourceVersions{}))
	c := newComparison(always)
	beat := func(sum uint64, digests ...model.Digest) bool {
		state := model.StateDigest(digests)
		return c.asks(&pb.Heartbeat{SequenceSum: sum, Digest: state[:]}, held.Cache)
	}
	require.False(t, beat(2, model.Digest{}, model.Digest{}), "it holds the same")
	require.False(t, beat(3, model.Digest{}, model.Digest{7}), "another position can't be compared")
	require.True(t, beat(2, model.Digest{}, model.Digest{7}))
	require.False(t, beat(2, model.Digest{}, model.Digest{7}), "it has asked")
	require.True(t, beat(2, model.Digest{}, model.Digest{8}))
	c = newComparison(always) // a new stream
	require.True(t, beat(2, model.Digest{}, model.Digest{8}), "on a new stream it asks again")
	require.False(t, c.asks(&pb.Heartbeat{}, held.Cache), "a sign of life has nothing to compare")
	require.False(t, c.asks(&pb.Heartbeat{SequenceSum: 2, Digest: []byte{1}}, held.Cache))
	c.allowed = rate.NewLimiter(0, 0)
	require.False(t, c.asks(&pb.Heartbeat{SequenceSum: 2, Digest: modeltest.Digests(9)}, held.Cache))
	c.allowed = always
	require.True(t, c.asks(&pb.Heartbeat{SequenceSum: 2, Digest: modeltest.Digests(9)}, held.Cache), "it was not allowed to ask")
}
