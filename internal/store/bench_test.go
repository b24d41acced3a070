package store

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/loadtest/generate"
)

// standard is the state that figures are about: 1000 Services × 50 endpoints and one with 5000, in slices of at most 100.
var standard = generate.Config{
	Nodes: 3000, Services: []generate.Group{{Count: 1000, Least: 50, Most: 50}}, Changing: []generate.Group{{Count: 1, Least: 5000, Most: 5000}},
	Seed: 1, Change: generate.Flip,
}

// filled gives a store with the standard state, and its slices.
func filled(t testing.TB) (*Store, []*model.Slice) {
	cluster, err := generate.New(standard)
	require.NoError(t, err)
	s := synced(t, Options{})
	var endpointSlices []*model.Slice
	for i, o := range cluster.Objects() {
		s.Upsert(o, uint64(i+1))
		if slice, ok := o.(*model.Slice); ok {
			endpointSlices = append(endpointSlices, slice)
		}
	}
	s.Publish()
	return s, endpointSlices
}

// flipped gives a slice with one endpoint less, or more, that is ready.
func flipped(s *model.Slice) *model.Slice {
	c := model.Slice{
		Namespace: s.Namespace, Name: s.Name, Service: s.Service, Family: s.Family, Ports: s.Ports, Endpoints: slices.Clone(s.Endpoints),
	}
	e := &c.Endpoints[len(c.Endpoints)/2]
	e.Conditions.Ready = !e.Conditions.Ready
	return model.NewSlice(c)
}

// BenchmarkIngest writes slices of 100 endpoints, one of which changes, and publishes each of them at once, which is the most
// that it can cost. It tells how many the writer's thread does in a second of its CPU time (updates/cpu-s), with and without
// readers that follow on other threads.
func BenchmarkIngest(b *testing.B) {
	for _, readers := range []int{0, 100} {
		b.Run(fmt.Sprintf("readers=%d", readers), func(b *testing.B) {
			s, all := filled(b)
			var versions [2][]*model.Slice // of each slice with 100 endpoints, in turns
			for _, slice := range all {
				if len(slice.Endpoints) == 100 {
					versions[0], versions[1] = append(versions[0], flipped(slice)), append(versions[1], slice)
				}
			}
			stop := follow(s, readers)
			runtime.GC()
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			b.ReportAllocs()
			before := threadTime(b)
			b.ResetTimer()
			for i := range b.N {
				round, number := i/len(versions[0]), i%len(versions[0])
				s.Upsert(versions[round%2][number], uint64(len(all)+i))
				if len(s.Publish().Updates) != 1 {
					b.Fatal("nothing was published")
				}
			}
			b.StopTimer()
			used := threadTime(b) - before
			if read := stop(); readers > 0 {
				b.ReportMetric(float64(read)/float64(readers)/b.Elapsed().Seconds(), "reads/s/reader")
			}
			b.ReportMetric(float64(b.N)/used.Seconds(), "updates/cpu-s")
		})
	}
}

// follow starts readers, each of which takes what has changed in every shard twenty times a second. What it gives stops
// them and tells how many objects they have taken.
func follow(s *Store, readers int) (stop func() int64) {
	var taken atomic.Int64
	var running sync.WaitGroup
	ended := make(chan struct{})
	for range readers {
		running.Go(func() {
			positions := make([]uint64, s.Shards())
			for shard := range positions {
				positions[shard] = s.Snapshot(uint32(shard)).Sequence()
			}
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-ended:
					return
				case <-tick.C:
				}
				for shard, position := range positions {
					snapshot := s.Snapshot(uint32(shard))
					if snapshot.Sequence() != position {
						taken.Add(int64(snapshot.Since(position).Len()))
						positions[shard] = snapshot.Sequence()
					}
				}
			}
		})
	}
	return func() int64 {
		close(ended)
		running.Wait()
		return taken.Load()
	}
}

// threadTime is the CPU time of the calling thread.
func threadTime(t testing.TB) time.Duration {
	var u unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_THREAD, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestHeapOfTheStandardState(t *testing.T) {
	const limit = 60 << 20
	before := heap()
	s, endpointSlices := filled(t)
	endpoints := 0
	for _, slice := range endpointSlices {
		endpoints += len(slice.Endpoints)
	}
	used := heap() - before
	t.Logf("%d Services, %d slices, %d endpoints: %d bytes", 1001, len(endpointSlices), endpoints, used)
	require.Equal(t, 55_000, endpoints)
	require.Less(t, used, int64(limit))
	runtime.KeepAlive(s)
}

func heap() int64 {
	for range 2 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
