// These tests prove that clients that need whole shards take turns, with shares, order and time
// limits, and that limits on requests, streams and names hold over all streams of a client.
package fanout

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func begun(n *turn) bool {
	select {
	case <-n.begun:
		return true
	default:
		return false
	}
}

// turnsOf returns turns without small ones.
func turnsOf(budget int64) *turns {
	t := newTurns(budget)
	t.small = 0
	return t
}

// TestAnIdentityHasItsShareOfTurns checks that an identity gets its share and no more, however much
// it asks for, and that its other turns block no one.
func TestAnIdentityHasItsShareOfTurns(t *testing.T) {
	turns := turnsOf(8 * 100)
	hostile, honest := identity{"system:node:hostile", "hostile"}, identity{"system:node:honest", "honest"}
	var held []*turn
	for range 10 {
		held = append(held, turns.ask(hostile, 1<<40))
	}
	require.True(t, begun(held[0]))
	require.False(t, begun(held[1]))
	require.EqualValues(t, 700, turns.free)
	small := []*turn{turns.ask(honest, 40), turns.ask(honest, 40), turns.ask(honest, 40)}
	require.Equal(t, []bool{true, true, false}, []bool{begun(small[0]), begun(small[1]), begun(small[2])})
	require.True(t, small[0].end())
	require.False(t, small[0].end(), "once")
	require.True(t, begun(small[2]))
	require.False(t, held[1].end(), "it has not begun")
	require.True(t, held[0].end())
	require.True(t, begun(held[2]))
	for _, n := range append(held, small...) {
		n.end()
	}
	require.EqualValues(t, turns.budget, turns.free)
	require.Empty(t, turns.held)
	require.Empty(t, turns.queue)
}

// TestSmallTurns checks that what is small needs no turn, and that nothing larger is small.
func TestSmallTurns(t *testing.T) {
	turns := newTurns(1)
	turns.ask(identity{user: "another"}, 1<<20)
	for range 100 {
		require.True(t, begun(turns.ask(identity{user: "small"}, smallTurn)))
	}
	require.False(t, begun(turns.ask(identity{user: "small"}, smallTurn+1)))
	require.Equal(t, 1, turns.waiting())
}

// TestTurnsInOrder checks that identities without a recent turn come first, in order of arrival,
// and that small turns do not overtake large ones.
func TestTurnsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := turnsOf(1)
		ask := func(name string) *turn { return turns.ask(identity{user: name}, 5) }
		again := ask("a")
		again.end()
		now := ask("b")
		order := map[string]*turn{"a": ask("a"), "c": ask("c"), "b again": ask("b"), "d": ask("d")}
		for _, next := range []string{"c", "d", "a", "b again"} {
			now.end()
			for name, n := range order {
				require.Equal(t, name == next, begun(n), "%s when it is the turn of %s", name, next)
			}
			now = order[next]
			delete(order, next)
		}
		now.end()
		time.Sleep(turnMemory) //nolint:forbidigo // of the bubble's clock
		now, first, second := ask("x"), ask("a"), ask("y")
		now.end()
		require.True(t, begun(first), "it is forgotten")
		require.False(t, begun(second))

		turns = turnsOf(8 * 100)
		for i := range 7 {
			turns.ask(identity{user: fmt.Sprint(i)}, 100)
		}
		turns.ask(identity{user: "half"}, 50)
		large, small := turns.ask(identity{user: "large"}, 100), turns.ask(identity{user: "small"}, 10)
		require.False(t, begun(large))
		require.False(t, begun(small))
	})
}

// TestATurnEndsWhenBytesStopMoving checks that a turn lasts while the client accepts bytes fast
// enough to be done in time.
func TestATurnEndsWhenBytesStopMoving(t *testing.T) {
	for name, c := range map[string]struct {
		taken func(elapsed time.Duration) uint64
		after time.Duration
	}{
		"nothing is taken":       {func(time.Duration) uint64 { return 0 }, turnCheck},
		"a byte a second":        {func(d time.Duration) uint64 { return uint64(d / time.Second) }, turnCheck},
		"it stops in the middle": {func(d time.Duration) uint64 { return uint64(min(d, 10*time.Second)/time.Second) * 10_000 }, 7 * turnCheck},
		"it is never done":       {func(d time.Duration) uint64 { return uint64(d/time.Second) * 10_000 }, turnTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				turns := turnsOf(800)
				n := turns.ask(identity{}, 250_000)
				begin := time.Now()
				var stalled atomic.Bool
				defer n.watch(func() uint64 { return 7 + c.taken(time.Since(begin)) }, func() { stalled.Store(true) })()
				time.Sleep(c.after - time.Millisecond) //nolint:forbidigo // of the bubble's clock
				synctest.Wait()
				require.False(t, stalled.Load())
				time.Sleep(time.Millisecond) //nolint:forbidigo // of the bubble's clock
				synctest.Wait()
				require.True(t, stalled.Load())
				require.EqualValues(t, 800, turns.free)
			})
		})
	}
}

// TestWhoWaitsTooLongIsRefused checks that a client that waits too long is told when to come back.
func TestWhoWaitsTooLongIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, stop := run(t, Options{Store: filled(t, 4), ColdBytes: 1})
		defer stop()
		h.turns.small = 0
		other := h.turns.ask(identity{user: "another"}, 1)
		defer other.end()
		begin := time.Now()
		p := connect(t, h, &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
		defer p.cancel()
		err := <-p.done
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		require.ErrorContains(t, err, "try again in")
		require.Len(t, status.Convert(err).Details(), 1)
		require.Equal(t, admissionWait, time.Since(begin))
		require.EqualValues(t, 1, testutil.ToFloat64(h.metrics.starts.WithLabelValues("refused")))
		require.Empty(t, h.turns.queue)
	})
}

// asked begins a stream whose client is asked for its buckets.
func asked(t *testing.T, h *Hub, s *store.Store, kind pb.ClientKind) *pipe {
	t.Helper()
	hello := resuming(s)
	hello.Kind, hello.NodeName = kind, "a"
	p := connect(t, h, hello)
	p.hears(t, 0, func(r *wire.Response) bool { return r.DigestQuery != nil })
	require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: modeltest.Digests(1, 2)}}}))
	p.hears(t, 0, func(r *wire.Response) bool { return r.BucketQuery != nil })
	return p
}

// TestOneAnswerForEachQuestion checks that each query has one answer. Other answers are refused
// before the client is in sync, and count as requests after that.
func TestOneAnswerForEachQuestion(t *testing.T) {
	s := filled(t, 40)
	h := running(t, Options{Store: s, ColdBytes: 1})
	h.turns.small = 0
	eventually(t, func() bool { return s.Snapshot(0).Sequence() > 0 })
	t.Run("a second answer", func(t *testing.T) {
		p := asked(t, h, s, pb.ClientKind_CLIENT_KIND_AGENT)
		require.NoError(t, p.say(bucketsOf(s.Snapshot(0), 1)))
		require.Equal(t, codes.InvalidArgument, status.Code(p.say(bucketsOf(s.Snapshot(0), 2))))
		require.Error(t, p.close())
	})
	t.Run("no question", func(t *testing.T) {
		for n := range coldShares {
			defer h.turns.ask(identity{user: fmt.Sprint("another-", n)}, h.turns.budget).end()
		}
		p := connect(t, h, &pb.Hello{NodeName: "b", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
		p.hears(t, 0, func(r *wire.Response) bool { return r.Welcome != nil })
		require.Equal(t, codes.InvalidArgument, status.Code(p.say(bucketsOf(s.Snapshot(0), 1))))
		require.Equal(t, codes.InvalidArgument, status.Code(p.say(resyncOf(&pb.Resync{}))))
		require.Error(t, p.close())
	})
	t.Run("the whole shard instead, and objects of it", func(t *testing.T) {
		p := asked(t, h, s, pb.ClientKind_CLIENT_KIND_AGENT)
		defer p.cancel()
		key := wire.KeyToProto(service(1).Key())
		shard := service(1).ServiceKey().Shard(2)
		require.NoError(t, p.say(resyncOf(&pb.Resync{Shard: shard, Keys: []*pb.ObjectKey{key}})))
		require.NoError(t, p.say(resyncOf(&pb.Resync{Shard: shard})))
		require.False(t, p.session.synced.Load(), "the other shard's answer is still to come")
		require.NoError(t, p.say(bucketsOf(s.Snapshot(1-shard))))
		eventually(t, p.session.synced.Load)
		var updates []*wire.Response
		for _, r := range p.read(t) {
			if r.Update != nil {
				updates = append(updates, r)
			}
		}
		require.Len(t, updates, 1, "the objects come with their shard")
		require.True(t, updates[0].Update.Full)
	})
	t.Run("objects before it is in sync", func(t *testing.T) {
		p := asked(t, h, s, pb.ClientKind_CLIENT_KIND_OBSERVER)
		defer p.cancel()
		var err error
		n := 0
		for ; err == nil && n < 3*resyncsBurst; n++ {
			err = p.say(resyncOf(&pb.Resync{Keys: []*pb.ObjectKey{wire.KeyToProto(service(1).Key())}}))
		}
		require.Equal(t, codes.ResourceExhausted, status.Code(err))
		require.Less(t, n, 2*resyncsBurst)
	})
}

// TestANewStreamHasNoNewLimits checks that the limits on a client's requests apply to all of its
// streams together.
func TestANewStreamHasNoNewLimits(t *testing.T) {
	for kind := range pb.ClientKind_name {
		t.Run(pb.ClientKind(kind).String(), func(t *testing.T) {
			h := running(t, Options{Store: filled(t, 4)})
			hello := &pb.Hello{Kind: pb.ClientKind(kind)}
			if hello.GetKind() == pb.ClientKind_CLIENT_KIND_AGENT {
				hello.NodeName = "a"
			}
			refused := 0
			for range 5 {
				p := connect(t, h, hello)
				eventually(t, p.session.synced.Load)
				for range resyncsBurst / 2 {
					if p.say(resyncOf(&pb.Resync{})) != nil {
						refused++
					}
				}
				require.Error(t, p.close())
			}
			require.Greater(t, refused, resyncsBurst)
		})
	}
}

// TestStreamsOfOneIdentityHaveLimitsOfTheirOwn checks that observers or relays that share an
// identity do not use up each other's limits.
func TestStreamsOfOneIdentityHaveLimitsOfTheirOwn(t *testing.T) {
	h := running(t, Options{Store: filled(t, 4)})
	for range 4 {
		p := connect(t, h, &pb.Hello{})
		defer p.cancel()
		eventually(t, p.session.synced.Load)
		for range resyncsBurst {
			require.NoError(t, p.say(resyncOf(&pb.Resync{Keys: []*pb.ObjectKey{wire.KeyToProto(service(1).Key())}})))
			eventually(t, func() bool { // the request is processed
				p.session.mu.Lock()
				defer p.session.mu.Unlock()
				return len(p.session.requests.resyncs) == 0
			})
		}
	}
}

// TestStartsAreBounded checks that a client that opens stream after stream is asked to come back
// later while others are served. As many clients as may share an identity can all start at once.
func TestStartsAreBounded(t *testing.T) {
	h := running(t, Options{Store: filled(t, 4), Authorize: func(_ context.Context, kind pb.ClientKind, node string) (string, time.Time, error) {
		if kind == pb.ClientKind_CLIENT_KIND_AGENT {
			return "agents", time.Time{}, nil
		}
		return node, time.Time{}, nil
	}})
	tooOften := func() float64 { return testutil.ToFloat64(h.metrics.starts.WithLabelValues("too_often")) }
	agent := &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT}
	begin, started := time.Now(), 0
	for ; started < 10*startsBurst; started++ {
		p := connect(t, h, agent)
		var end error
		eventually(t, func() bool {
			select {
			case end = <-p.done:
				return true
			default:
				return p.session.synced.Load()
			}
		})
		if end != nil {
			require.Equal(t, codes.ResourceExhausted, status.Code(end))
			require.ErrorContains(t, end, "try again in")
			require.Len(t, status.Convert(end).Details(), 1)
			require.Empty(t, p.read(t), "it costs nothing")
			break
		}
		require.Error(t, p.close())
	}
	require.GreaterOrEqual(t, started, startsBurst)
	require.LessOrEqual(t, started, startsBurst+1+int(time.Since(begin)/time.Second)*startsPerSecond)
	require.EqualValues(t, 1, tooOften())
	another := connect(t, h, &pb.Hello{NodeName: "b", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	defer another.cancel()
	eventually(t, another.session.synced.Load)

	for range maxOthers {
		p := connect(t, h, &pb.Hello{NodeName: "observer"})
		defer p.cancel()
		eventually(t, p.session.synced.Load)
	}
	require.EqualValues(t, 1, tooOften())
}

// TestLogOfAnIdentityIsBounded checks that a client that opens stream after stream cannot flood the
// log.
func TestLogOfAnIdentityIsBounded(t *testing.T) {
	var log lines
	h := New(Options{Store: filled(t, 1), Logger: slog.New(&log), Authorize: anybody})
	s := []*Session{h.Open(nil), h.Open(nil)}
	for n := range 20 * 5 {
		s := s[n%2]
		if n%10 < 2 { // another stream
			*s = *h.Open(nil)
			s.kind, s.node = pb.ClientKind_CLIENT_KIND_AGENT, "a"
			s.lent = s.hub.allowance(s.identity()).lend()
			defer s.lent.giveBack()
		}
		s.receiveNack(&pb.Nack{Reason: fmt.Sprint(n)})
		require.NoError(t, s.receiveResync(&pb.Resync{Keys: []*pb.ObjectKey{wire.KeyToProto(service(1).Key())}}))
	}
	require.EqualValues(t, 2*5, log.n.Load())
}

// lines counts log lines.
type lines struct {
	slog.Handler
	n atomic.Int64
}

func (l *lines) Enabled(context.Context, slog.Level) bool  { return true }
func (l *lines) Handle(context.Context, slog.Record) error { l.n.Add(1); return nil }

// TestIdentities checks that an agent is identified by its node, whatever its credentials are, and
// other clients by their users.
func TestIdentities(t *testing.T) {
	of := func(kind pb.ClientKind, user, node string) identity {
		return (&client{kind: kind, user: user, node: node}).identity()
	}
	agent, relay := pb.ClientKind_CLIENT_KIND_AGENT, pb.ClientKind_CLIENT_KIND_RELAY
	require.Equal(t, of(agent, "system:node:a", "a"), of(agent, "system:serviceaccount:ns:agent", "a"))
	require.NotEqual(t, of(agent, "agent", "a"), of(agent, "agent", "b"))
	require.NotEqual(t, of(relay, "relay/1", ""), of(relay, "relay/2", ""))
	observer := pb.ClientKind_CLIENT_KIND_OBSERVER
	require.Equal(t, of(observer, "o", "a"), of(observer, "o", "b"))
}

// TestFramesOfALotOfClientsAreFew checks that few frames are built, whatever positions and sets of
// buckets clients claim.
func TestFramesOfALotOfClientsAreFew(t *testing.T) {
	s := filled(t, 200)
	ringed := New(Options{Store: s})
	for n := range 3 * ringEntries {
		s.Upsert(slice(n%200, 3+n%7), 0)
		ringed.publish()
	}
	h := New(Options{Store: s})
	snapshot := s.Snapshot(0)
	for n := range uint64(1000) {
		var buckets []uint32
		for b := range uint32(model.Buckets) {
			if (n*0x9e3779b97f4a7c15)>>b&1 == 1 {
				buckets = append(buckets, b)
			}
		}
		frames, err := h.inBuckets(snapshot, buckets, false)
		require.NoError(t, err)
		require.Len(t, frames, len(buckets))
		for i, f := range frames {
			r, err := wire.Decode(f)
			require.NoError(t, err)
			require.Equal(t, buckets[i:i+1], r.Update.FullBuckets)
			require.Equal(t, i < len(buckets)-1, r.More)
		}
	}
	require.LessOrEqual(t, testutil.ToFloat64(h.metrics.catchUps), 2.0*model.Buckets)
	// The ring has nothing at first, then everything, and then everything no longer.
	for _, passed := range []bool{false, false, true} {
		if passed {
			for range ringEntries {
				h.beat()
			}
		}
		before := testutil.ToFloat64(h.metrics.catchUps)
		for from := range snapshot.Sequence() {
			frames, err := h.catchUp(snapshot, from, false)
			require.NoError(t, err)
			r, err := wire.Decode(frames[0])
			require.NoError(t, err)
			require.LessOrEqual(t, r.Update.From, from)
			if from > 0 {
				require.False(t, r.Update.Full)
				require.Less(t, snapshot.Sequence()-r.Update.From, 2*(snapshot.Sequence()-from))
			}
			if len(r.Update.Deltas) > 0 {
				require.Equal(t, from, r.Update.From, "deltas lead from nowhere else")
			}
		}
		require.LessOrEqual(t, testutil.ToFloat64(h.metrics.catchUps)-before, 15.0+exactPositions)
		h = ringed
	}
}

// TestPositionsInAcksAreBounded checks that positions in acks are bounded and count as messages.
func TestPositionsInAcksAreBounded(t *testing.T) {
	h := running(t, Options{Store: filled(t, 4)})
	p := connect(t, h, &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	defer p.cancel()
	eventually(t, p.session.synced.Load)
	ack := &pb.Ack{}
	for range maxPositions {
		ack.Positions = append(ack.Positions, &pb.ShardPosition{Shard: 1, Sequence: 1})
	}
	most := &pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: proto.CloneOf(ack)}}
	require.NoError(t, p.say(most))
	ack.Positions = append(ack.Positions, &pb.ShardPosition{})
	require.Equal(t, codes.InvalidArgument, status.Code(p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: ack}})))
	n, err := 0, error(nil)
	for ; err == nil && n < messagesBurst; n++ {
		err = p.say(most)
	}
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Less(t, n, 2*messagesBurst*positionsPerMessage/maxPositions)
}
