package fabric

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/wire"
)

const (
	// slowWindow is the flow control window of clients that are slow: what they take in while they read nothing.
	slowWindow = 64 << 10
	// slowCost bounds what such a client costs the server beside a connection: what waits for it (h2: 64 KiB), and the part of the
	// ring that is being sent (64 KiB), which would otherwise be gone. The client, which is in the same process here, holds its
	// window.
	slowCost = 64<<10 + 64<<10 + slowWindow
	// sharedCost is for what there is once: the ring's latest frames, and buffers.
	sharedCost = 2 << 20
)

// Clients that read nothing while there are thousands of publishes cost bounded memory, hold up nobody, and get what has
// changed once and as it is in the end.
func TestSlowClients(t *testing.T) {
	const slow, publishes, many = 20, 20_000, 50
	var objects []source.Object
	keys := make([]model.Key, many)
	for i := range keys {
		s := modeltest.WebSlice(5)
		s.Name = fmt.Sprint("web-", i)
		keys[i] = model.NewSlice(s).Key()
		objects = append(objects, model.NewSlice(s))
	}
	c := newCluster(append(objects, modeltest.Web(), web(100))...)
	s := serve(t, &watch{cluster: c}, quietServer)

	gate := make(chan struct{}) // closed: clients read
	var closed atomic.Bool
	fast := follow(t, agentOptions{node: nodes[0], servers: []string{s.address()}})
	fast.waitEquals(t, c)
	// publish makes a change and gives how long it took to arrive.
	publish := func(o *model.Slice) time.Duration {
		begin := time.Now()
		c.upsert(o)
		for fast.cache.Slice(o.ServiceKey().Shard(64), o.Key()).ContentVersion() != o.ContentVersion() {
			<-fast.updated
		}
		return time.Since(begin)
	}
	small := func(i int) *model.Slice {
		n := modeltest.WebSlice(5)
		n.Name = keys[i%many].Name
		n.Ports[0].Port = uint16(1 + i%60_000)
		return model.NewSlice(n)
	}
	var alone []time.Duration
	for i := range 2000 {
		alone = append(alone, publish(small(i)))
	}

	var waking []*agent
	for range slow {
		waking = append(waking, follow(t, agentOptions{
			servers: []string{s.address()}, count: true,
			dial: []grpc.DialOption{grpc.WithStaticStreamWindowSize(slowWindow), grpc.WithStaticConnWindowSize(slowWindow)},
			before: func(wire.Frame) {
				if closed.Load() {
					<-gate
				}
			},
		}))
	}
	for _, a := range waking {
		a.waitEquals(t, c)
	}
	before := heap()

	// First they get so much of one slice that nothing passes any more.
	closed.Store(true)
	frames := func() float64 { return s.metric(t, "slicecast_server_sent_frames_total") }
	for i, unchanged := 0, 0; unchanged < 10; i++ {
		sent := frames()
		publish(web(50 + i%2*50))
		if unchanged++; frames() > sent+1 {
			unchanged = 0
		}
	}
	for _, a := range waking {
		a.mu.Lock()
		clear(a.updates)
		a.mu.Unlock()
	}
	var beside []time.Duration
	for i := range publishes {
		beside = append(beside, publish(small(1000+i)))
	}
	require.GreaterOrEqual(t, s.metric(t, "slicecast_server_updates_total"), float64(publishes))
	grown := heap() - before
	t.Logf("%d clients that read nothing during %d publishes: %d KiB each (at most %d)", slow, publishes,
		grown/slow>>10, (slowCost+sharedCost/slow)>>10)
	require.LessOrEqual(t, grown, int64(slow*slowCost+sharedCost))

	close(gate)
	for _, a := range waking {
		a.waitEquals(t, c)
		a.mu.Lock()
		for _, key := range keys {
			require.Equal(t, 1, a.updates[key], "%v", key)
		}
		a.mu.Unlock()
	}
	require.GreaterOrEqual(t, s.metric(t, "slicecast_server_lapped_streams_total"), float64(slow))

	// If it waited for one of them, it would wait forever; the bound is for a machine that is busy.
	t.Logf("p99 to another client: %v alone, %v beside them", p99(alone), p99(beside))
	require.Less(t, p99(beside), 5*p99(alone)+50*time.Millisecond)
}

func p99(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)*99/100]
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A connection of which nothing is heard any more, not even its end, is found by keepalive.
func TestHalfOpenConnection(t *testing.T) {
	t.Parallel()
	c := newCluster(modeltest.Web(), web(1))
	s := serve(t, &watch{cluster: c}, quietServer)
	p := newProxy(t, s.address())
	gone := follow(t, agentOptions{node: nodes[0], servers: []string{p.address()}})
	there := follow(t, agentOptions{node: nodes[1], servers: []string{s.address()}})
	gone.waitEquals(t, c)
	there.waitEquals(t, c)
	p.dead.Store(true)
	c.upsert(web(2))
	there.waitEquals(t, c)
	require.EqualValues(t, 2, s.metric(t, "slicecast_server_streams"))
	require.True(t, eventually(func() bool { return s.metric(t, "slicecast_server_streams") == 1 }))
	c.upsert(web(3))
	there.waitEquals(t, c)
	require.EqualValues(t, 1, there.inSyncs.Load(), "it was silent too, but answered")
	require.Equal(t, 1, gone.endpoints())
}
