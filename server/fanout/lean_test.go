package fanout

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// pipe is a transport that accepts frames at once while it is open. The test reads them.
type pipe struct {
	ctx     context.Context
	cancel  context.CancelFunc
	session *Session
	done    chan error
	taken   atomic.Uint64

	mu     sync.Mutex
	opened sync.Cond
	open   bool
	frames []wire.Frame
	tried  int  // accepted calls of TrySend
	waits  bool // whether Send blocks until the pipe is open
}

// connect begins a stream.
func connect(t require.TestingT, h *Hub, hello *pb.Hello) *pipe {
	p := &pipe{open: true, done: make(chan error, 1)}
	p.begin(t, h, p, hello)
	return p
}

// begin begins the stream on as, a transport that may do more than the pipe.
func (p *pipe) begin(t require.TestingT, h *Hub, as Transport, hello *pb.Hello) {
	p.opened.L = &p.mu
	p.ctx, p.cancel = context.WithCancel(context.Background())
	context.AfterFunc(p.ctx, p.opened.Broadcast)
	p.session = h.Open(as)
	go func() { p.done <- p.session.Serve() }()
	require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: hello}}))
}

func (p *pipe) say(r *pb.StreamRequest) error {
	b, err := proto.Marshal(r)
	if err != nil {
		return err
	}
	return p.session.Message(b)
}

func (p *pipe) Context() context.Context { return p.ctx }

func (p *pipe) Send(frames ...wire.Frame) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.waits = true; !p.open && p.ctx.Err() == nil; {
		p.opened.Wait()
	}
	p.waits = false
	p.frames = append(p.frames, frames...)
	p.taken.Add(uint64(wire.Bytes(frames)))
	return p.ctx.Err()
}

func (p *pipe) TrySend(frames ...wire.Frame) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		p.frames = append(p.frames, frames...)
		p.tried++
	}
	return p.open, nil
}

// Taken implements Transport.
func (p *pipe) Taken() uint64 { return p.taken.Load() }

func (p *pipe) set(open bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = open
	p.opened.Broadcast()
}

func (p *pipe) waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.waits
}

// read returns the frames sent since the last call, decoded.
func (p *pipe) read(t require.TestingT) []*wire.Response {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []*wire.Response
	for _, f := range p.frames {
		r, err := wire.Decode(f)
		require.NoError(t, err)
		require.Empty(t, r.Problems)
		out = append(out, r)
	}
	p.frames = nil
	return out
}

// close ends the stream and returns its status.
func (p *pipe) close() error {
	p.cancel()
	return <-p.done
}

// eventually polls a condition, which may fail the test itself, until it holds.
func eventually(t require.TestingT, condition func() bool) {
	for deadline := time.Now().Add(patience); !condition(); {
		require.True(t, time.Now().Before(deadline), "it has not happened within %v", patience)
		<-time.After(tick / 10)
	}
}

// running returns a hub that publishes.
func running(t *testing.T, o Options) *Hub {
	h, stop := run(t, o)
	t.Cleanup(stop)
	return h
}

// anybody authorizes every client.
func anybody(context.Context, pb.ClientKind, string) (string, time.Time, error) {
	return "", time.Time{}, nil
}

func run(t require.TestingT, o Options) (h *Hub, stop func()) {
	o.Logger = slog.New(slog.DiscardHandler)
	if o.Authorize == nil {
		o.Authorize = anybody
	}
	h = New(o)
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	wait.Go(func() { h.Run(ctx) })
	return h, func() { cancel(); wait.Wait() }
}

// placed is an object in a shard. A slice that moves to a Service of another shard may be in both
// for a moment.
type placed struct {
	shard uint32
	key   model.Key
}

// copyOf is a client that holds what it was sent. It is a plain implementation of the wire
// contract.
type copyOf struct {
	objects   map[placed]model.Object
	sequences map[uint32]uint64
	wanted    *subscription
	shards    uint32
	inSyncs   int
	// changing is set from a change of the subscription until the next InSync. Meanwhile, what was
	// wanted before may still arrive.
	changing bool
	before   *subscription
}

func (c *copyOf) take(t require.TestingT, responses []*wire.Response) {
	for _, r := range responses {
		if r.InSync != nil {
			c.inSyncs++
			c.changing = false
			for i, s := range r.InSync.GetSequences() {
				c.sequences[uint32(i)] = s
			}
		}
		u := r.Update
		if u == nil {
			continue
		}
		at := c.sequences[u.Shard]
		if !u.Full {
			require.LessOrEqual(t, u.From, at, "an update that leaves a gap")
			require.GreaterOrEqual(t, u.To, at, "an update from the past")
		}
		c.sequences[u.Shard] = u.To
		if u.Full {
			maps.DeleteFunc(c.objects, func(at placed, _ model.Object) bool { return at.shard == u.Shard })
		}
		for _, key := range u.Removed {
			delete(c.objects, placed{u.Shard, key})
		}
		for _, s := range u.Services {
			c.put(t, s)
		}
		for _, s := range u.Slices {
			c.put(t, s)
		}
		for _, d := range u.Deltas {
			old, ok := c.objects[placed{u.Shard, d.Key()}].(*model.Slice)
			require.True(t, ok, "a delta of a slice that was never sent")
			if old.ContentVersion() == d.Version {
				continue
			}
			s, err := d.Apply(old)
			require.NoError(t, err)
			c.objects[placed{u.Shard, d.Key()}] = s
		}
	}
}

func (c *copyOf) put(t require.TestingT, o model.Object) {
	require.True(t, c.wanted.wants(o.ServiceKey()) || c.changing && c.before.wants(o.ServiceKey()), "%v was not asked for", o.Key())
	c.objects[placed{o.ServiceKey().Shard(c.shards), o.Key()}] = o
}

// equals reports whether the copy equals the wanted part of the store.
func (c *copyOf) equals(s *store.Store) bool {
	n := 0
	for i := range s.Shards() {
		u := s.Snapshot(i).Where(c.wanted.wants)
		for _, o := range u.Services {
			if have := c.objects[placed{i, o.Key()}]; have == nil || have.ContentVersion() != o.ContentVersion() {
				return false
			}
		}
		for _, o := range u.Slices {
			if have := c.objects[placed{i, o.Key()}]; have == nil || have.ContentVersion() != o.ContentVersion() {
				return false
			}
		}
		n += u.Len()
	}
	return n == len(c.objects)
}

// TestStreamsAgainstTheStore lets streams stall, join, leave and change their subscriptions at any
// moment. All of them must come to hold the store's state, and nothing that they did not subscribe
// to.
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
		wanted := func(t *rapid.T) *pb.Subscription {
			p := &pb.Subscription{}
			for i := range rapid.IntRange(0, 3).Draw(t, "services wanted") {
				p.Services = append(p.Services, &pb.ServiceName{Namespace: "default", Name: fmt.Sprint("service-", i)})
			}
			return p
		}
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
				if rapid.Bool().Draw(t, "narrowed") {
					hello.Subscription = wanted(t)
				}
				c := &client{connect(t, h, hello), &copyOf{
					objects: map[placed]model.Object{}, sequences: map[uint32]uint64{}, shards: 4,
				}}
				c.copy.wanted, err = newSubscription(hello.GetSubscription())
				require.NoError(t, err)
				clients = append(clients, c)
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
			"change of mind": func(t *rapid.T) {
				if len(clients) == 0 {
					return
				}
				settle()
				c := clients[rapid.IntRange(0, len(clients)-1).Draw(t, "client")]
				p := wanted(t)
				synced := c.copy.inSyncs
				c.set(true)
				eventually(t, c.session.s.admitted.Load)
				require.NoError(t, c.say(&pb.StreamRequest{Message: &pb.StreamRequest_Subscribe{Subscribe: p}}))
				c.copy.before, c.copy.changing = c.copy.wanted, true
				c.copy.wanted, err = newSubscription(p)
				require.NoError(t, err)
				eventually(t, func() bool {
					c.copy.take(t, c.read(t))
					return c.copy.inSyncs > synced
				})
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
		p.session.s.mu.Lock()
		defer p.session.s.mu.Unlock()
		return p.session.s.live
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

// TestANodesNewestStreamCounts checks that a new stream of a node's agent ends the previous one.
// The stream of an observer that follows the Node goes on.
func TestANodesNewestStreamCounts(t *testing.T) {
	h := running(t, Options{Store: filled(t, 1)})
	agent := &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT}
	first := connect(t, h, agent)
	require.Eventually(t, func() bool { return len(h.Streams(nil)) == 1 }, patience, tick)
	observer := connect(t, h, &pb.Hello{NodeName: "a"})
	second := connect(t, h, agent)
	require.Equal(t, "Aborted", status.Code(<-first.done).String())
	require.Eventually(t, func() bool { return len(h.Streams(nil)) == 2 && h.nodes.Load() == 1 }, patience, tick)
	_ = observer.close()
	_ = second.close()
	require.Eventually(t, func() bool { return h.nodes.Load() == 0 && len(h.Streams(nil)) == 0 }, patience, tick)
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
	eventually(t, lasting.session.s.synced.Load)
	require.Len(t, h.Streams(nil), 1)
	_ = lasting.close()
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
	require.Eventually(t, func() bool { return len(h.Streams(nil)) == maxOthers }, patience, tick)
	err := <-observe("greedy").done
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.ErrorContains(t, err, `for "greedy"`)
	require.EqualValues(t, 1, testutil.ToFloat64(h.metrics.starts.WithLabelValues("too_many")))
	modest := observe("modest")
	eventually(t, modest.session.s.synced.Load)
	_ = pipes[0].close()
	pipes[0] = observe("greedy")
	eventually(t, pipes[0].session.s.synced.Load)
	for _, p := range append(pipes, modest) {
		_ = p.close()
	}
	require.Eventually(t, func() bool { return len(h.Streams(nil)) == 0 }, patience, tick)
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Empty(t, h.others)
}

// TestWhatAStreamHoldsIsBounded checks that the memory of a stream that accepts nothing does not
// grow with what it misses.
func TestWhatAStreamHoldsIsBounded(t *testing.T) {
	s := filled(t, 2)
	h := running(t, Options{Store: s})
	p := connect(t, h, &pb.Hello{})
	defer p.cancel()
	require.Eventually(t, func() bool { return len(p.read(t)) > 0 && len(h.Streams(nil)) == 1 }, patience, tick)
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
	c := newConvergence(1, newMetrics(nil, &Hub{}))
	var done []uint64
	c.done = func(_ uint32, to completed) { done = append(done, to.sequence) }
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	c.published(0, 1, at(0))
	require.Equal(t, []uint64{1}, done, "nobody has to have it")

	a, b, relay := c.joinAgent("a"), c.joinAgent("b"), c.joinRelay("relay")
	c.resize(relay, 2)
	c.published(0, 2, at(0))
	c.published(0, 3, at(10))
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
		c.published(0, uint64(4+n), at(50))
	}
	require.Len(t, c.shards[0].open, maxOpen)
	c.resize(b, 0)
	c.resize(relay, 0)
	c.resize(late, 0)
	require.Empty(t, c.shards[0].open)
}

// End implements Transport.
func (p *pipe) End(error) { p.cancel() }
