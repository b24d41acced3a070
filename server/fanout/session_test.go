// These tests prove that streams that stall, join and leave at random come to hold exactly what the
// store holds, and that a stream's memory and number are bounded. A
// transport in memory stands for the connection.
package fanout

import (
	"context"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestStreamsAgainstTheStore lets streams stall, join and leave at any moment. All of them must
// come to hold the store's state, and nothing else.
func TestStreamsAgainstTheStore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, err := store.New(store.Options{Shards: 4, Tombstones: 4})
		require.NoError(t, err)
		s.Synced()
		h, stop := run(t, Options{Store: s})
		defer stop()
		<-s.WaitPublished()
		type client struct {
			*pipe
			copy *copyOf
		}
		var clients []*client
		defer func() {
			for _, c := range clients {
				_ = c.close()
			}
		}()
		markers := int64(0)
		settle := func() {
			// The change that is written last is published last.
			markers++
			marker := model.NewService(model.Service{Namespace: "default", Name: "marker", Type: model.ClusterIP, CreationTimeSeconds: markers})
			s.Upsert(marker, 0)
			eventually(t, func() bool {
				o := s.Snapshot(marker.ServiceKey().Shard(4)).Get(marker.Key())
				return o != nil && o.ContentVersion() == marker.ContentVersion()
			})
			eventually(t, func() bool {
				for _, c := range clients {
					c.set(true)
					c.copy.take(t, c.read(t))
					if !c.copy.equals(s) {
						return false
					}
				}
				return true
			})
		}
		t.Repeat(map[string]func(*rapid.T){
			"upsert": func(t *rapid.T) {
				i := rapid.IntRange(0, 5).Draw(t, "service")
				s.Upsert(service(i), 0)
				s.Upsert(slice(i, rapid.IntRange(0, 30).Draw(t, "endpoints")), 0)
			},
			"hand over": func(t *rapid.T) {
				o := *slice(rapid.IntRange(0, 5).Draw(t, "slice"), 2)
				o.Service = fmt.Sprint("service-", rapid.IntRange(0, 5).Draw(t, "service"))
				s.Upsert(model.NewSlice(o), 0)
			},
			"remove": func(t *rapid.T) {
				i := rapid.IntRange(0, 5).Draw(t, "service")
				s.Remove(service(i).Key(), 0)
				s.Remove(slice(i, 0).Key(), 0)
			},
			"join": func(t *rapid.T) {
				if len(clients) == 5 {
					return
				}
				hello := &pb.Hello{NodeName: fmt.Sprint("node-", len(clients)), Kind: pb.ClientKind_CLIENT_KIND_AGENT}
				clients = append(clients, &client{connect(t, h, hello), &copyOf{
					objects: map[placed]model.Object{}, sequences: map[uint32]uint64{}, shards: 4,
				}})
			},
			"leave": func(t *rapid.T) {
				if len(clients) == 0 {
					return
				}
				last := len(clients) - 1
				_ = clients[last].close()
				clients = clients[:last]
			},
			"shut": func(t *rapid.T) {
				if len(clients) == 0 {
					return
				}
				clients[rapid.IntRange(0, len(clients)-1).Draw(t, "client")].set(false)
			},
			"settle": func(*rapid.T) { settle() },
		})
		settle()
	})
}

// TestAStreamThatKeepsUpIsSentToByTheFanOut checks that the fan-out sends to streams that keep up
// without their goroutines. A stream that does not accept a frame delays none of them, and is sent
// everything once it accepts frames again.
func TestAStreamThatKeepsUpIsSentToByTheFanOut(t *testing.T) {
	s := filled(t, 3)
	h := running(t, Options{Store: s})
	quick, slow := connect(t, h, &pb.Hello{}), connect(t, h, &pb.Hello{})
	defer quick.cancel()
	defer slow.cancel()
	live := func(p *pipe) bool {
		p.session.mu.Lock()
		defer p.session.mu.Unlock()
		return p.session.live
	}
	require.Eventually(t, func() bool { return live(quick) && live(slow) }, patience, tick)
	quick.read(t)
	slow.read(t)

	slow.set(false)
	for n := range 10 {
		s.Upsert(slice(1, 4+n), 0)
		require.Eventually(t, func() bool {
			r := quick.read(t)
			return len(r) == 1 && len(r[0].Update.Deltas) == 1
		}, patience, tick)
	}
	require.Equal(t, 10, quick.tried, "each by the fan-out")
	require.False(t, live(slow))
	slow.set(true)
	require.Eventually(t, func() bool { return live(slow) }, patience, tick)
	at := placed{slice(1, 3).ServiceKey().Shard(2), slice(1, 3).Key()}
	copied := &copyOf{objects: map[placed]model.Object{at: slice(1, 3)}, sequences: map[uint32]uint64{0: 1, 1: 1}, shards: 2}
	missed := slow.read(t)
	require.LessOrEqual(t, len(missed), 2, "one that was on its way, and what the others come to")
	for _, r := range missed {
		require.Len(t, r.Update.Deltas, 1)
	}
	copied.take(t, missed)
	require.Equal(t, slice(1, 13).ContentVersion(), copied.objects[at].ContentVersion())
}

// TestStreamsShareMemory checks that the fan-out sends all streams that keep up the same bytes from
// the same memory.
func TestStreamsShareMemory(t *testing.T) {
	s := filled(t, 4)
	h := start(t, s).Hub
	pipes := []*pipe{connect(t, h, &pb.Hello{}), connect(t, h, &pb.Hello{}), connect(t, h, &pb.Hello{})}
	for _, p := range pipes {
		defer p.cancel()
		eventually(t, func() bool {
			p.session.mu.Lock()
			defer p.session.mu.Unlock()
			return p.session.live
		})
		p.read(t)
	}
	for n := range 20 {
		s.Upsert(slice(1, 4+n), 0)
		s.Upsert(slice(2, 4+n), 0)
		e := entry{}
		for _, u := range s.Publish().Updates {
			f, err := wire.EncodeUpdate(u)
			require.NoError(t, err)
			e.add(u, []wire.Frame{f})
		}
		h.add(e)
		for _, p := range pipes {
			var got []wire.Frame
			eventually(t, func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				got, p.frames = append(got, p.frames...), nil
				return len(got) == len(e.frames)
			})
			for i, f := range got {
				require.Same(t, unsafe.SliceData(e.frames[i]), unsafe.SliceData(f))
			}
			require.Equal(t, n+1, p.tried, "by the fan-out")
		}
	}
}

// TestANodesNewestStreamCounts checks that a new stream of a node's agent ends the previous one.
// The stream of an observer that follows the Node goes on.
func TestANodesNewestStreamCounts(t *testing.T) {
	h := running(t, Options{Store: filled(t, 1)})
	agent := &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT}
	first := connect(t, h, agent)
	require.Eventually(t, func() bool { return len(h.Agents(nil)) == 1 }, patience, tick)
	observer := connect(t, h, &pb.Hello{NodeName: "a"})
	second := connect(t, h, agent)
	require.Equal(t, "Aborted", status.Code(<-first.done).String())
	require.Eventually(t, func() bool { return len(h.Agents(nil)) == 2 && h.servedNodes.Load() == 1 }, patience, tick)
	_ = observer.close()
	_ = second.close()
	require.Eventually(t, func() bool { return h.servedNodes.Load() == 0 && len(h.Agents(nil)) == 0 }, patience, tick)
}

// TestStreamEndsWithItsCredentials checks that a stream ends when the credentials that it began
// with expire.
func TestStreamEndsWithItsCredentials(t *testing.T) {
	until := time.Now().Add(20 * time.Millisecond)
	h := running(t, Options{Store: filled(t, 1), Authorize: func(_ context.Context, _ pb.ClientKind, node string) (string, time.Time, error) {
		if node == "brief" {
			return node, until, nil
		}
		return node, time.Now().Add(time.Hour), nil
	}})
	lasting := connect(t, h, &pb.Hello{NodeName: "lasting"})
	err := <-connect(t, h, &pb.Hello{NodeName: "brief"}).done
	require.Equal(t, codes.Unauthenticated, status.Code(err))
	require.False(t, time.Now().Before(until))
	eventually(t, lasting.session.synced.Load)
	require.Len(t, h.Agents(nil), 1)
	_ = lasting.close()
}

// TestCredentialsExpireByTheServersClock checks that a stream goes on if its credentials have ended
// by the machine's clock only, and ends if they have ended by the hub's.
func TestCredentialsExpireByTheServersClock(t *testing.T) {
	for _, ahead := range []time.Duration{-48 * time.Hour, 48 * time.Hour} {
		until := time.Now().Add(ahead / 2)
		h := running(t, Options{
			Store: filled(t, 1), Now: func() time.Time { return time.Now().Add(ahead) },
			Authorize: func(_ context.Context, _ pb.ClientKind, node string) (string, time.Time, error) {
				return node, until, nil
			},
		})
		c := connect(t, h, &pb.Hello{NodeName: "a"})
		if ahead > 0 {
			require.Equal(t, codes.Unauthenticated, status.Code(<-c.done))
			continue
		}
		eventually(t, c.session.synced.Load)
		require.Len(t, h.Agents(nil), 1)
		_ = c.close()
	}
}

// TestStreamsOfOneIdentityAreBounded checks that one observer or relay cannot use up the streams of
// others.
func TestStreamsOfOneIdentityAreBounded(t *testing.T) {
	h := running(t, Options{Store: filled(t, 1), Authorize: func(_ context.Context, _ pb.ClientKind, node string) (string, time.Time, error) {
		return node, time.Time{}, nil
	}})
	observe := func(as string) *pipe { return connect(t, h, &pb.Hello{NodeName: as}) }
	var pipes []*pipe
	for range maxOthers {
		pipes = append(pipes, observe("greedy"))
	}
	require.Eventually(t, func() bool { return len(h.Agents(nil)) == maxOthers }, patience, tick)
	err := <-observe("greedy").done
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.ErrorContains(t, err, `"greedy" has`)
	require.EqualValues(t, 1, testutil.ToFloat64(h.metrics.starts.WithLabelValues("too_many")))
	modest := observe("modest")
	eventually(t, modest.session.synced.Load)
	_ = pipes[0].close()
	pipes[0] = observe("greedy")
	eventually(t, pipes[0].session.synced.Load)
	for _, p := range append(pipes, modest) {
		_ = p.close()
	}
	require.Eventually(t, func() bool { return len(h.Agents(nil)) == 0 }, patience, tick)
	h.sessions.mu.Lock()
	defer h.sessions.mu.Unlock()
	require.Empty(t, h.sessions.others)
}

// TestWhatAStreamHoldsIsBounded checks that the memory of a stream that accepts nothing does not
// grow with what it misses.
func TestWhatAStreamHoldsIsBounded(t *testing.T) {
	s := filled(t, 2)
	h := running(t, Options{Store: s})
	p := connect(t, h, &pb.Hello{})
	defer p.cancel()
	require.Eventually(t, func() bool { return len(p.read(t)) > 0 && len(h.Agents(nil)) == 1 }, patience, tick)
	p.set(false)
	for n := range 3 * ringEntries {
		s.Upsert(slice(1, 1+n%100), 0)
		h.publish()
	}
	h.ring.mu.RLock()
	defer h.ring.mu.RUnlock()
	require.LessOrEqual(t, h.ring.held, ringBytes)
	require.LessOrEqual(t, h.ring.head.Load()-h.ring.tail, uint64(ringEntries))
	require.LessOrEqual(t, h.frames.size(), frameCacheBytes)
}

func TestConvergence(t *testing.T) {
	var done []uint64
	c := newConvergence(1, newMetrics(nil), func(_ uint32, to completed) { done = append(done, to.sequence) })
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	c.published(0, 1, at(0), Changed{})
	require.Equal(t, []uint64{1}, done, "nobody has to have it")

	a, b, relay := c.joinAgent("a"), c.joinAgent("b"), c.joinRelay("relay")
	c.resize(relay, 2)
	c.published(0, 2, at(0), Changed{})
	c.published(0, 3, at(10), Changed{})
	c.ack(a, 0, 2, at(5), "")
	c.ack(b, 0, 3, at(15), "")
	open := c.latest()
	require.Len(t, open, 2)
	require.Equal(t, Convergence{
		Sequence: 2, Published: at(0), Nodes: 4, Programmed: 2, Times: [3]time.Duration{15 * time.Millisecond},
		Last: []NodeTime{{"relay", 0}, {"b", 15 * time.Millisecond}, {"a", 5 * time.Millisecond}},
	}, open[1])
	require.Equal(t, 1, open[0].Programmed)
	sequences, behind := c.lag(a, at(110))
	require.EqualValues(t, 1, sequences)
	require.Equal(t, 100*time.Millisecond, behind)
	require.True(t, c.has(a, 0, 2))
	require.False(t, c.has(a, 0, 3))

	late := c.joinAgent("late") // no Update waits for it
	c.ack(relay, 0, 2, at(20), "")
	require.Equal(t, []uint64{1, 2}, done)
	c.ack(relay, 0, 3, at(30), "")
	require.Equal(t, []uint64{1, 2}, done, "a lacks it")
	c.resize(a, 0)
	require.Equal(t, []uint64{1, 2, 3}, done, "and is gone")
	require.Len(t, c.latest(), 2)
	require.Equal(t, 20*time.Millisecond, c.latest()[1].Times[2])
	c.ack(late, 0, 1, at(40), "") // from before it joined
	require.Equal(t, []uint64{1, 2, 3}, done)

	for n := range 2 * maxOpen {
		c.published(0, uint64(4+n), at(50), Changed{})
	}
	require.Len(t, c.shards[0].open, maxOpen)
	c.resize(b, 0)
	c.resize(relay, 0)
	c.resize(late, 0)
	require.Empty(t, c.shards[0].open)
}
