// These tests prove the error of the sketch in which times are counted, and the bound on the memory
// of Updates that some node lacks.
package fanout

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// requireClose requires that a time is at least the true one, and exceeds it by at most a sketch's
// error.
func requireClose(t require.TestingT, truth, got time.Duration, what ...any) {
	require.GreaterOrEqual(t, got, truth, what...)
	require.LessOrEqual(t, got, max(truth+truth/sketchError, truth+sketchUnit), what...)
}

func TestSketch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nanoseconds := rapid.Custom(func(t *rapid.T) time.Duration { // of any order of magnitude
			most := 1 << rapid.IntRange(1, 42).Draw(t, "bits")
			return time.Duration(rapid.IntRange(1, most-1).Draw(t, "time"))
		})
		var s sketch
		var all []time.Duration
		for _, d := range rapid.SliceOfN(nanoseconds, 1, 200).Draw(t, "times") {
			nodes := rapid.IntRange(1, 3).Draw(t, "nodes")
			s.add(d, nodes)
			all = append(all, slices.Repeat([]time.Duration{d}, nodes)...)
		}
		slices.Sort(all)
		require.Equal(t, all[len(all)-1], s.rank(len(all)), "the maximum is exact")
		for i, truth := range all {
			requireClose(t, truth, s.rank(i+1), "rank %d of %v", i+1, all)
		}
		done := 0
		for _, step := range s.steps() {
			require.Greater(t, step.Nodes, done)
			requireClose(t, all[step.Nodes-1], step.Time, "step at %d of %v", step.Nodes, all)
			done = step.Nodes
		}
		require.Equal(t, len(all), done)
	})
}

func TestSketchAtItsEnds(t *testing.T) {
	for _, d := range []time.Duration{math.MinInt64, -1, 0, 1, sketchUnit - 1} {
		require.Zero(t, bucket(d), d)
	}
	for _, d := range []time.Duration{sketchLimit - 1, sketchLimit, math.MaxInt64} {
		require.Equal(t, sketchBuckets-1, bucket(d), d)
	}
	for b := range sketchBuckets - 1 {
		require.Equal(t, b, bucket(upperEdge(b)-1))
		require.Equal(t, b+1, bucket(upperEdge(b)))
	}
	var s sketch
	s.add(sketchLimit+time.Hour, 1)
	s.add(sketchLimit+time.Minute, 1)
	require.Equal(t, sketchLimit+time.Hour, s.rank(1), "beyond its limit a time counts as the maximum")
}

// TestMemoryOfOpenUpdates checks the bound on the memory of Updates that some node lacks. It holds
// for any number of Updates and shards, any times of the other nodes, and any node names that
// relays report.
func TestMemoryOfOpenUpdates(t *testing.T) {
	const worst = 24 << 20
	var p openUpdate
	now := time.Now()
	for b := range sketchBuckets {
		p.took(now.Add(upperEdge(b)-1), 1, "")
	}
	p.took(now.Add(time.Millisecond), 1, "")
	require.Len(t, p.slowest, keptNodes)
	size := int(unsafe.Sizeof(p)+unsafe.Sizeof(&p)) + 4*cap(p.times.counts) + cap(p.slowest)*(int(unsafe.Sizeof(NodeTime{}))+maxNodeName)
	require.LessOrEqual(t, maxAllOpen*size, worst, "%d bytes each", size)

	for _, shards := range []uint32{1, 2, 64, 4096} {
		t.Run(fmt.Sprint(shards), func(t *testing.T) {
			c := newConvergence(shards, newMetrics(nil), nil)
			c.joinAgent("stuck")
			quick := c.joinAgent("quick")
			relay := c.joinRelay("relay")
			for sequence := uint64(1); sequence <= maxOpen+1; sequence++ {
				c.resize(relay, int(sequence)) // the relay's weights are bounded, too
				for shard := range shards {
					c.published(shard, sequence, now, Changed{})
					c.ack(quick, shard, sequence, now, "")
				}
			}
			open, weights := 0, 0
			for i := range c.shards {
				open += len(c.shards[i].open)
				weights += len(relay.weights[i])
				require.LessOrEqual(t, len(c.shards[i].open), maxOpen)
			}
			require.LessOrEqual(t, open, maxAllOpen)
			require.Equal(t, open, c.openUpdates())
			require.LessOrEqual(t, weights, open+int(shards))
			require.Equal(t, min(maxOpen*int(shards), maxAllOpen), open)
		})
	}
}
