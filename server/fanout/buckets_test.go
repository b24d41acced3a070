package fanout

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// digestsOf makes the Resync of a client that holds what a snapshot does, but for what is wrong in one bucket.
func digestsOf(s *store.Snapshot, wrong ...uint32) *pb.StreamRequest {
	digests := slices.Clone(s.Buckets())
	for _, bucket := range wrong {
		digests[bucket]++
	}
	return &pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: &pb.Resync{Shard: s.Shard(), BucketDigests: digests}}}
}

// resuming is the Hello of a client that holds something else.
func resuming(s *store.Store) *pb.Hello {
	h := holding(s)
	h.Epoch++
	for i := range h.Digests {
		h.Digests[i]++
	}
	h.Capabilities = []pb.Capability{pb.Capability_CAPABILITY_BUCKETS}
	return h
}

func TestResumeByBuckets(t *testing.T) {
	s := filled(t, 40)
	f := start(t, s)
	c := f.hello(resuming(s))
	require.NotNil(t, c.recv().GetWelcome())
	require.Equal(t, []uint32{0, 1}, c.recv().GetBucketQuery().GetShards())
	wrong := slice(1, 3).Key().Bucket(store.Buckets)
	shard := slice(1, 3).ServiceKey().Shard(2)
	c.send(digestsOf(s.Snapshot(shard), wrong))
	u := c.update()
	require.Equal(t, []uint32{wrong}, u.GetFullBuckets())
	require.False(t, u.GetFull())
	for _, o := range u.GetSlices() {
		require.Equal(t, wrong, model.Key{Kind: model.KindSlice, Namespace: "default", Name: o.GetName()}.Bucket(store.Buckets))
	}

	// The cluster has become again what the other shard's part of the client is.
	c.send(digestsOf(s.Snapshot(1 - shard)))
	require.NotNil(t, c.recv().GetInSync(), "nothing differs")
	_, updates, _ := f.hello(&pb.Hello{}).inSync()
	require.Len(t, updates, 2)
	for _, u := range updates {
		require.True(t, u.GetFull())
		require.Len(t, u.GetServices(), s.Snapshot(u.GetShard()).Len()/2)
	}
}

// What a client says of its buckets may be older than what it has been sent since.
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
	require.NoError(t, p.say(digestsOf(before)))
	published(slice(1, 3)) // as it was
	p.set(true)
	eventually(t, func() bool { c.take(t, p.read(t)); return c.sequences[shard] == s.Snapshot(shard).Sequence() })
	require.True(t, c.equals(s))
}
