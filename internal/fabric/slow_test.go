// These tests prove that clients that read nothing cost bounded memory, hold up nobody, and later
// receive the final state once. They also prove that a half-open connection is detected.
package fabric

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/wire"
)

const (
	// slowWindow is the flow-control window of slow clients: what they receive while they read
	// nothing.
	slowWindow = 64 << 10
	// slowCost bounds what a slow client costs in addition to a connection, in bytes. That is what
	// waits for it (h2: 64 KiB), and the batch of the ring that is being sent to it (64 KiB), which
	// is kept alive. The client holds its window, and is in the same process here.
	slowCost = 64<<10 + 64<<10 + slowWindow
	// sharedCost bounds what exists once, in bytes: the latest frames of the ring, and buffers.
	sharedCost = 2 << 20
)

// sleepers are clients that read nothing while their gate is shut.
type sleepers struct {
	agents []*agent
	shut   atomic.Bool
	gate   chan struct{} // closed while they read
	open   func()
}

// newSleepers starts clients of a server that is in sync with the cluster. They are still awake.
func newSleepers(t *testing.T, c *cluster, s *server, count int) *sleepers {
	t.Helper()
	z := &sleepers{gate: make(chan struct{})}
	z.open = sync.OnceFunc(func() { close(z.gate) })
	for i := range count {
		z.agents = append(z.agents, follow(t, agentOptions{
			node: fmt.Sprint("slow-", i), servers: []string{s.address()}, count: true,
			dial: []grpc.DialOption{grpc.WithStaticStreamWindowSize(slowWindow), grpc.WithStaticConnWindowSize(slowWindow)},
			before: func(wire.Frame) {
				if z.shut.Load() {
					<-z.gate
				}
			},
		}))
	}
	t.Cleanup(z.open) // it runs before the clients are stopped
	for _, a := range z.agents {
		a.waitEquals(t, c)
	}
	return z
}

// sleep stops all reads, and publishes until the sleepers are sent nothing more. From then on, only
// the given number of others is sent what is published.
func (z *sleepers) sleep(t *testing.T, s *server, others int, publish func(*model.Slice)) {
	t.Helper()
	z.shut.Store(true)
	for i, unchanged := 0, 0; unchanged < 10; i++ {
		sent := s.frames(t)
		publish(web(50 + i%2*50))
		if unchanged++; s.frames(t) > sent+float64(others) {
			unchanged = 0
		}
	}
	for _, a := range z.agents {
		a.mu.Lock()
		clear(a.updates)
		a.mu.Unlock()
	}
}

// wake lets the clients read again. Each must receive changed objects once, in their final state.
func (z *sleepers) wake(t *testing.T, c *cluster, changed []model.Key) {
	t.Helper()
	z.open()
	for _, a := range z.agents {
		a.waitEquals(t, c)
		a.mu.Lock()
		for _, key := range changed {
			require.Equal(t, 1, a.updates[key], "%v", key)
		}
		a.mu.Unlock()
	}
}

func (s *server) frames(t *testing.T) float64 {
	return s.metric(t, "slicecast_server_sent_frames_total")
}

// smallSlices is the number of small slices.
const smallSlices = 50

// small returns a version of one of the small slices. Higher numbers return other versions.
func small(i int) *model.Slice {
	n := modeltest.WebSlice(5)
	n.Name = fmt.Sprint("web-", i%smallSlices)
	n.Ports[0].Port = uint16(1 + i%60_000)
	return model.NewSlice(n)
}

// newSmallCluster returns a cluster with the small slices and a larger one. keys has the keys of
// the small ones.
func newSmallCluster() (c *cluster, keys []model.Key) {
	objects := []model.Keyed{modeltest.Web(), web(100)}
	for i := range smallSlices {
		keys = append(keys, small(i).Key())
		objects = append(objects, small(i))
	}
	return newCluster(objects...), keys
}

// published makes a change, and waits until the agents have it.
func published(t *testing.T, c *cluster, o *model.Slice, agents ...*agent) {
	t.Helper()
	c.upsert(o)
	late := time.After(patience)
	for _, a := range agents {
		for a.cache.Slice(o.ServiceKey().Shard(64), o.Key()).ContentVersion() != o.ContentVersion() {
			select {
			case <-a.updated:
			case <-late:
				t.Fatalf("%s has not got %v within %v", a.node, o.Key(), patience)
			}
		}
	}
}

// TestSlowClients checks that clients that read nothing during thousands of publishes cost bounded
// memory. Later they receive what has changed once, in its final state.
func TestSlowClients(t *testing.T) {
	const slow, publishes = 20, 20_000
	c, keys := newSmallCluster()
	s := serve(t, &watch{cluster: c}, quietServer)
	fast := follow(t, agentOptions{node: nodes[0], servers: []string{s.address()}})
	fast.waitEquals(t, c)
	publish := func(o *model.Slice) { published(t, c, o, fast) }
	for i := range 2000 { // everything that exists only once is allocated after this
		publish(small(i))
	}
	asleep := newSleepers(t, c, s, slow)
	before := heap()
	asleep.sleep(t, s, 1, publish)
	for i := range publishes {
		publish(small(2000 + i))
	}
	require.GreaterOrEqual(t, s.metric(t, "slicecast_server_updates_total"), float64(publishes))
	grown := heap() - before
	t.Logf("%d clients that read nothing during %d publishes: %d KiB each (at most %d)", slow, publishes,
		grown/slow>>10, (slowCost+sharedCost/slow)>>10)
	require.LessOrEqual(t, grown, int64(slow*slowCost+sharedCost))
	asleep.wake(t, c, keys)
	require.GreaterOrEqual(t, s.metric(t, "slicecast_server_lapped_streams_total"), float64(slow))
}

// TestSlowClientsHoldUpNobody checks that each publish reaches all other clients while two in a
// hundred read nothing. If any of the others waited for these, it would wait for ever. The times
// are only logged, as machines differ.
func TestSlowClientsHoldUpNobody(t *testing.T) {
	const fast, slow, publishes = 200, 4, 100
	c, keys := newSmallCluster()
	s := serve(t, &watch{cluster: c}, quietServer)
	var begin atomic.Int64
	took := make([][]time.Duration, fast)
	agents := make([]*agent, fast)
	for i := range agents {
		agents[i] = follow(t, agentOptions{
			node: fmt.Sprint("fast-", i), servers: []string{s.address()},
			before: func(wire.Frame) { took[i] = append(took[i], time.Duration(time.Now().UnixNano()-begin.Load())) },
		})
	}
	for _, a := range agents {
		a.waitEquals(t, c)
	}
	publish := func(o *model.Slice) {
		begin.Store(time.Now().UnixNano())
		published(t, c, o, agents...)
	}
	// measure publishes, and returns how long each client waited for each publish.
	measure := func(first int) (all []time.Duration) {
		var from [fast]int
		for i := range agents {
			from[i] = len(took[i])
		}
		sent := s.frames(t)
		for i := range publishes {
			publish(small(first + i))
		}
		require.EqualValues(t, fast*publishes, s.frames(t)-sent, "each to each of them, and nothing else")
		for i := range agents {
			all = append(all, took[i][from[i]:]...)
		}
		require.Len(t, all, fast*publishes)
		slices.Sort(all)
		return all
	}
	publish(small(1)) // after this, what they appended is visible here
	alone := measure(100)
	asleep := newSleepers(t, c, s, slow)
	asleep.sleep(t, s, fast, publish)
	beside := measure(1000)
	t.Logf("to %d clients, without and beside %d that read nothing: half within %v and %v, 99 %% within %v and %v", fast, slow,
		part(alone, 50), part(beside, 50), part(alone, 99), part(beside, 99))
	asleep.wake(t, c, keys)
}

// part returns the time within which that many percent of the sorted times are.
func part(sorted []time.Duration, percent int) time.Duration {
	return sorted[(len(sorted)-1)*percent/100].Round(time.Microsecond)
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestHalfOpenConnection checks that keepalive detects a connection on which nothing arrives any
// more, not even its end.
func TestHalfOpenConnection(t *testing.T) {
	t.Parallel()
	c := newCluster(modeltest.Web(), web(1))
	s := serve(t, &watch{cluster: c}, quietServer)
	p := proxytest.New(t, s.address())
	gone := follow(t, agentOptions{node: nodes[0], servers: []string{p.Address()}})
	there := follow(t, agentOptions{node: nodes[1], servers: []string{s.address()}})
	gone.waitEquals(t, c)
	there.waitEquals(t, c)
	p.Die()
	c.upsert(web(2))
	there.waitEquals(t, c)
	require.EqualValues(t, 2, s.metric(t, "slicecast_server_streams"))
	require.True(t, eventually(func() bool { return s.metric(t, "slicecast_server_streams") == 1 }))
	c.upsert(web(3))
	there.waitEquals(t, c)
	require.EqualValues(t, 1, there.inSyncs.Load(), "it was silent too, but answered")
	require.Equal(t, 1, gone.endpoints())
}
