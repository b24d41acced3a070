// These tests prove that a client with other content is sent the buckets that differ, and waits for
// its turn where it needs whole shards.
package fanout

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// bucketsOf returns the Resync of a client that holds the same as a snapshot, except for the
// buckets in wrong.
func bucketsOf(s *store.Snapshot, wrong ...uint32) *pb.StreamRequest {
	digests := slices.Clone(s.Buckets())
	for _, bucket := range wrong {
		digests[bucket][0]++
	}
	return &pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: &pb.Resync{Shard: s.Shard(), BucketDigests: model.JoinDigests(digests)}}}
}

// resuming returns the Hello of a client that holds other content, from another epoch.
func resuming(s *store.Store) *pb.Hello {
	h := holding(s)
	h.Epoch++
	h.Digest[0]++
	h.Capabilities = []pb.Capability{pb.Capability_CAPABILITY_BUCKETS}
	return h
}

// tellDigests receives the DigestQuery, which must come next, and answers it.
func (c *call) tellDigests(digests []byte) {
	c.t.Helper()
	require.NotNil(c.t, c.recv().GetDigestQuery())
	c.send(&pb.StreamRequest{Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: digests}}})
}

func TestResumeByBuckets(t *testing.T) {
	s := filled(t, 40)
	f := start(t, s)
	c := f.hello(resuming(s))
	require.NotNil(t, c.recv().GetWelcome())
	c.tellDigests(modeltest.Digests(1, 2))
	require.Equal(t, []uint32{0, 1}, c.recv().GetBucketQuery().GetShards())
	wrong := slice(1, 3).Key().Bucket()
	shard := slice(1, 3).ServiceKey().Shard(2)
	c.send(bucketsOf(s.Snapshot(1 - shard)))
	c.send(bucketsOf(s.Snapshot(shard), wrong))
	u := c.update()
	require.Equal(t, []uint32{wrong}, u.GetFullBuckets())
	require.False(t, u.GetFull())
	for _, o := range u.GetSlices() {
		require.Equal(t, wrong, model.Key{Kind: model.KindSlice, Namespace: "default", Name: o.GetName()}.Bucket())
	}
	require.NotNil(t, c.recv().GetInSync(), "nothing differs in the other shard")
	_, updates, _ := f.hello(&pb.Hello{}).inSync()
	require.Len(t, updates, 2)
	for _, u := range updates {
		require.True(t, u.GetFull())
		require.Len(t, u.GetServices(), s.Snapshot(u.GetShard()).Len()/2)
	}
}

// TestBucketsOfAClientThatHasMovedOn checks that a client's bucket digests may be older than what
// it has been sent since.
func TestBucketsOfAClientThatHasMovedOn(t *testing.T) {
	s := filled(t, 2)
	h := running(t, Options{Store: s})
	<-s.WaitPublished()
	p := connect(t, h, &pb.Hello{})
	defer func() { _ = p.close() }()
	c := &copyOf{objects: map[placed]model.Object{}, sequences: map[uint32]uint64{}, shards: 2}
	eventually(t, func() bool { c.take(t, p.read(t)); return c.inSyncs == 1 })

	changed := slice(1, 9)
	shard := changed.ServiceKey().Shard(2)
	before := s.Snapshot(shard)
	published := func(o *model.Slice) {
		from := s.Snapshot(shard).Sequence()
		s.Upsert(o, 0)
		eventually(t, func() bool { return s.Snapshot(shard).Sequence() > from })
	}
	p.set(false)
	published(changed)
	eventually(t, func() bool { return p.waiting() }) // with the change
	require.NoError(t, p.say(bucketsOf(before)))
	published(slice(1, 3)) // as it was
	p.set(true)
	eventually(t, func() bool { c.take(t, p.read(t)); return c.sequences[shard] == s.Snapshot(shard).Sequence() })
	require.True(t, c.equals(s))
}

// TestOtherShardsAreComparedByBuckets checks that a server with another number of shards asks for
// buckets. The client holds the same objects in other shards.
func TestOtherShardsAreComparedByBuckets(t *testing.T) {
	s := filled(t, 40)
	f := start(t, s)
	hello := resuming(s)
	hello.Sequences = make([]uint64, 4)
	c := f.hello(hello)
	require.NotNil(t, c.recv().GetWelcome())
	c.tellDigests(modeltest.Digests(1, 2))
	require.Equal(t, []uint32{0, 1}, c.recv().GetBucketQuery().GetShards())
	c.send(bucketsOf(s.Snapshot(0)))
	c.send(bucketsOf(s.Snapshot(1), 7))
	require.Equal(t, []uint32{7}, c.update().GetFullBuckets())
	require.NotNil(t, c.recv().GetInSync())
}

// TestAStartIsInTurn checks that a client that needs much waits for its turn, whatever it holds and
// claims, and that other clients do not wait.
func TestAStartIsInTurn(t *testing.T) {
	s := filled(t, 40)
	h := running(t, Options{Store: s, Heartbeat: time.Millisecond, ColdBytes: 1})
	h.turns.small = 0
	before := holding(s)
	for i := range 40 {
		s.Upsert(slice(i, 4), 3)
	}
	eventually(t, func() bool { return s.Snapshot(0).Sequence() > 1 && s.Snapshot(1).Sequence() > 1 })
	other := h.turns.ask(identity{user: "another"}, 1)
	<-other.begun
	all := make([]uint32, model.Buckets)
	for i := range all {
		all[i] = uint32(i)
	}
	withoutBuckets := resuming(s)
	withoutBuckets.Capabilities = nil
	var waiting []*pipe
	for _, c := range []struct {
		hello *pb.Hello
		wrong []uint32 // buckets
	}{{&pb.Hello{}, nil}, {before, nil}, {withoutBuckets, nil}, {resuming(s), all}, {resuming(s), all[:maxBuckets]}} {
		p := connect(t, h, c.hello)
		defer p.cancel()
		if len(c.wrong) > 0 {
			p.hears(t, 0, func(r *wire.Response) bool { return r.DigestQuery != nil })
			require.NoError(t, p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: modeltest.Digests(1, 2)}}}))
			p.hears(t, 0, func(r *wire.Response) bool { return r.BucketQuery != nil })
			for shard := range s.Shards() {
				require.NoError(t, p.say(bucketsOf(s.Snapshot(shard), c.wrong...)))
			}
		}
		waiting = append(waiting, p)
		eventually(t, func() bool { return h.turns.waiting() == len(waiting) })
	}
	for _, p := range waiting {
		p.hears(t, 2, nil)
	}
	quick := connect(t, h, holding(s))
	defer quick.cancel()
	eventually(t, quick.session.synced.Load)
	other.end()
	for _, p := range waiting {
		eventually(t, p.session.synced.Load)
	}
}

// TestResyncsAreAnsweredInTurn checks that a client waits for its turn with whatever it requests,
// that its updates do not wait, and that the answer is of the state of its turn.
func TestResyncsAreAnsweredInTurn(t *testing.T) {
	key := wire.KeyToProto(slice(1, 3).Key())
	shard := slice(1, 3).ServiceKey().Shard(2)
	for name, request := range map[string]func(*store.Store) *pb.StreamRequest{
		"whole shard": func(*store.Store) *pb.StreamRequest { return resyncOf(&pb.Resync{Shard: shard}) },
		"objects": func(*store.Store) *pb.StreamRequest {
			return resyncOf(&pb.Resync{Shard: shard, Keys: []*pb.ObjectKey{key}})
		},
		"buckets": func(s *store.Store) *pb.StreamRequest {
			return bucketsOf(s.Snapshot(shard), slice(1, 3).Key().Bucket())
		},
	} {
		for kind := range pb.ClientKind_name {
			t.Run(name+" "+pb.ClientKind(kind).String(), func(t *testing.T) {
				s := filled(t, 40)
				h := running(t, Options{Store: s, ColdBytes: 1})
				h.turns.small = 0
				hello := &pb.Hello{Kind: pb.ClientKind(kind)}
				if hello.GetKind() == pb.ClientKind_CLIENT_KIND_AGENT {
					hello.NodeName = "a"
				}
				p := connect(t, h, hello)
				defer p.cancel()
				c := &copyOf{objects: map[placed]model.Object{}, sequences: map[uint32]uint64{}, shards: 2}
				eventually(t, func() bool { c.take(t, p.read(t)); return c.inSyncs == 1 })
				other := h.turns.ask(identity{user: "another"}, 1)
				<-other.begun
				require.NoError(t, p.say(request(s)))
				eventually(t, func() bool { return h.turns.waiting() == 1 })
				for n := range 3 {
					from := s.Snapshot(shard).Sequence()
					s.Upsert(slice(1, 5+n), 0)
					eventually(t, func() bool { c.take(t, p.read(t)); return c.sequences[shard] > from && c.equals(s) })
				}
				again := 0
				for p.say(request(s)) == nil {
					again++
				}
				require.Less(t, again, resyncsBurst+resyncsPerSecond*int(patience/time.Second))
				require.Equal(t, 1, h.turns.waiting())
				delete(c.objects, placed{shard, slice(1, 3).Key()})
				other.end()
				eventually(t, func() bool { c.take(t, p.read(t)); return c.equals(s) })
				eventually(t, func() bool {
					p.session.mu.Lock()
					defer p.session.mu.Unlock()
					return p.session.requests.size == 0
				})
				require.Zero(t, h.turns.waiting())
			})
		}
	}
	t.Run("until the stream ends", func(t *testing.T) {
		s := filled(t, 40)
		h := running(t, Options{Store: s, ColdBytes: 1})
		h.turns.small = 0
		p := connect(t, h, &pb.Hello{})
		eventually(t, p.session.synced.Load)
		other := h.turns.ask(identity{user: "another"}, 1)
		require.NoError(t, p.say(resyncOf(&pb.Resync{})))
		eventually(t, func() bool { return h.turns.waiting() == 1 })
		require.Error(t, p.close())
		require.Zero(t, h.turns.waiting())
		other.end()
		require.EqualValues(t, 1, h.turns.free)
	})
}
