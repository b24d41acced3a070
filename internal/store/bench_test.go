// BenchmarkIngest measures how many changes one writer thread can store and publish, with and
// without readers. TestHeapOfTheStandardState proves a bound on the memory of the state of the
// published figures.
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

// standard is the state of published figures: 1000 Services with 50 endpoints each and one with
// 5000, in slices of at most 100.
var standard = generate.Config{
	Nodes: 3000, Services: []generate.Group{{Count: 1000, Least: 50, Most: 50}}, Changing: []generate.Group{{Count: 1, Least: 5000, Most: 5000}},
	Seed: 1, Change: generate.Flip,
}

// filled returns a store with the standard state, and the slices in it.
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

// flipped returns a copy of a slice in which the readiness of one endpoint is inverted.
func flipped(s *model.Slice) *model.Slice {
	c := model.Slice{
		Namespace: s.Namespace, Name: s.Name, Service: s.Service, Family: s.Family, Ports: s.Ports, Endpoints: slices.Clone(s.Endpoints),
	}
	e := &c.Endpoints[len(c.Endpoints)/2]
	e.Conditions.Ready = !e.Conditions.Ready
	return model.NewSlice(c)
}

// BenchmarkIngest changes one endpoint of a slice of 100 and publishes the change at once, which is
// the most expensive way to ingest changes. It reports updates per second of the writer thread's
// CPU time (updates/cpu-s), with and without readers on other threads.
func BenchmarkIngest(b *testing.B) {
	for _, readers := range []int{0, 100} {
		b.Run(fmt.Sprintf("readers=%d", readers), func(b *testing.B) {
			s, all := filled(b)
			// two states of each slice with 100 endpoints, written alternately
			var versions [2][]*model.Slice
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

// follow starts readers, each of which reads the changes of every shard twenty times a second. stop
// ends them and returns the number of objects that they have read.
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

// threadTime returns the CPU time of the calling thread.
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
