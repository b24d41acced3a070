// These tests prove that the buckets whose digests differ make a client's cache equal to a server,
// whatever the cache held.
package client

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// state is a server's content of one shard.
type state map[model.Key]model.Object

func drawState(t *rapid.T, label string) state {
	s := state{}
	for range rapid.IntRange(0, 12).Draw(t, label) {
		service := fmt.Sprint("service-", rapid.IntRange(0, 4).Draw(t, "service"))
		if rapid.Bool().Draw(t, "a Service") {
			s.add(model.NewService(model.Service{
				Namespace: "default", Name: service, Type: model.ClusterIP, CreationTimeSeconds: rapid.Int64Range(0, 2).Draw(t, "created"),
			}))
		} else {
			s.add(named(fmt.Sprint("slice-", rapid.IntRange(0, 6).Draw(t, "slice")), service, rapid.IntRange(0, 2).Draw(t, "endpoints")))
		}
	}
	return s
}

func (s state) add(o model.Object) { s[o.Key()] = o }

func (s state) digests() (buckets []model.Digest, shard model.Digest) {
	buckets = model.BucketDigests(func(yield func(model.Key, model.Version) bool) {
		for key, o := range s {
			if !yield(key, o.ContentVersion()) {
				return
			}
		}
	})
	return buckets, model.ShardDigest(buckets)
}

// update returns an Update with the objects whose keys match.
func (s state) update(match func(model.Key) bool) *model.Update {
	u := &model.Update{}
	for _, key := range slices.SortedFunc(maps.Keys(s), model.Key.Compare) {
		switch o := s[key].(type) {
		case *model.Service:
			if match(key) {
				u.Services = append(u.Services, o)
			}
		case *model.Slice:
			if match(key) {
				u.Slices = append(u.Slices, o)
			}
		}
	}
	return u
}

// differing returns the Update with which a server answers bucket digests.
func (s state) differing(digests []model.Digest) *model.Update {
	own, _ := s.digests()
	var full []uint32
	for i := range own {
		if own[i] != digests[i] {
			full = append(full, uint32(i))
		}
	}
	u := s.update(func(key model.Key) bool { return slices.Contains(full, key.Bucket()) })
	u.FullBuckets = full
	return u
}

func (s state) requireHeld(t require.TestingT, c *Cache) {
	_, all := s.digests()
	_, digests := c.Digests()
	require.Equal(t, []model.Digest{all}, digests)
	held := state{}
	for _, key := range c.Services() {
		service, list := c.Service(key)
		if service != nil {
			held.add(service)
		}
		for _, slice := range list {
			held.add(slice)
		}
	}
	require.Equal(t, s, held)
}

// TestBucketsThatDifferMakeItEqual checks that the buckets whose digests differ make the client's
// content equal to the server's, whatever the client held.
func TestBucketsThatDifferMakeItEqual(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		before, after := drawState(t, "before"), drawState(t, "after")
		c := &cache.Writer{Cache: NewCache()}
		require.NoError(t, c.Welcome(epoch, 1))
		full := before.update(func(model.Key) bool { return true })
		full.Full, full.To = true, 3
		_, err := c.Apply(full)
		require.NoError(t, err)
		before.requireHeld(t, c.Cache)

		digests, ok := c.BucketDigests(0)
		require.True(t, ok)
		want, _ := before.digests()
		require.Equal(t, want, digests)
		u := after.differing(digests)
		if len(u.FullBuckets) == 0 {
			return
		}
		u.From, u.To = 100, 200 // an Update of whole buckets applies at any position
		half := *u
		half.Services, u.Services = u.Services, nil
		half.Slices = nil
		parts := cache.NewParts(1)
		whole, err := parts.Join(&half, true)
		require.NoError(t, err)
		require.Nil(t, whole)
		whole, err = parts.Join(u, false)
		require.NoError(t, err)
		_, err = c.Apply(whole)
		require.NoError(t, err)
		after.requireHeld(t, c.Cache)
		sequences, _ := c.Digests()
		require.Equal(t, []uint64{200}, sequences)
	})
}

// TestUnreadableObjectsInBuckets checks that an object that did not decode counts in digests with
// the server's version. A bucket that lacks the object removes it.
func TestUnreadableObjectsInBuckets(t *testing.T) {
	c := welcomed(t, 1)
	known, unknown := named("known", "web", 1), named("unknown", "web", 1)
	apply(t, c, &model.Update{From: 1, To: 2, Slices: []*model.Slice{known}})
	apply(t, c, &model.Update{From: 2, To: 3, Unreadable: []model.Unreadable{
		{Key: known.Key(), Version: model.Version{5}}, {Key: unknown.Key(), Version: model.Version{6}},
	}})
	require.True(t, cacheHas(c.Cache, known), "it stays as it was")
	require.True(t, c.IsUnreadable(0, unknown.Key()))
	want := model.BucketDigests(func(yield func(model.Key, model.Version) bool) {
		yield(known.Key(), model.Version{5})
		yield(unknown.Key(), model.Version{6})
	})
	digests, _ := c.BucketDigests(0)
	require.Equal(t, want, digests)
	_, all := c.Digests()
	require.Equal(t, []model.Digest{model.ShardDigest(want)}, all)

	out, err := c.Apply(&model.Update{To: 4, FullBuckets: []uint32{unknown.Key().Bucket()}})
	require.NoError(t, err)
	require.Contains(t, out.Readable, unknown.Key())
	require.False(t, c.IsUnreadable(0, unknown.Key()))
	out, err = c.Apply(&model.Update{To: 5, Full: true, Slices: []*model.Slice{known}})
	require.NoError(t, err)
	state{known.Key(): known}.requireHeld(t, c.Cache)
	require.NotContains(t, out.Readable, unknown.Key())
}

// repairBurst is the number of repairs that a client asks for at once.
const repairBurst = 8

// bucketServer returns a server with one shard, which answers bucket digests with the buckets that
// differ, compressed.
func bucketServer(t *testing.T, s state, epoch uint64) *scripted {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.Close()) })
	server := &scripted{play: says(welcome(&pb.Welcome{Epoch: epoch, ShardCount: 1}),
		&pb.StreamResponse{Message: &pb.StreamResponse_BucketQuery{BucketQuery: &pb.BucketQuery{Shards: []uint32{0}}}})}
	server.answer = func(g pb.DistributionService_StreamServer, r *pb.StreamRequest) error {
		digests, err := model.SplitDigests(r.GetResync().GetBucketDigests())
		if err != nil || len(digests) != model.Buckets {
			return errors.New("no digests")
		}
		u := s.differing(digests)
		u.To = 2
		f, err := wire.EncodeUpdate(u)
		if err != nil {
			return err
		}
		if err := g.Send(&pb.StreamResponse{Message: &pb.StreamResponse_Zstd{Zstd: w.EncodeAll(f, nil)}}); err != nil {
			return err
		}
		_, digest := s.digests()
		return says(inSync(2), heartbeat(digest))(g)
	}
	return server
}

// TestResumeByBuckets checks that the client answers a BucketQuery before it is in sync.
func TestResumeByBuckets(t *testing.T) {
	id := newIdentity(t)
	want := state{}
	for i := range 40 {
		want.add(named(fmt.Sprint("slice-", i), fmt.Sprint("service-", i), 2))
	}
	held := maps.Clone(want)
	delete(held, named("slice-3", "", 0).Key())
	held.add(named("extra", "service-4", 1))
	c := welcomed(t, 1)
	full := held.update(func(model.Key) bool { return true })
	full.Full, full.To = true, 17
	_, err := c.Apply(full)
	require.NoError(t, err)

	server := bucketServer(t, want, epoch+1)
	a := connect(t, id, c.Cache, nil, serve(t, id, server, fanout.ServerOption()).address)
	a.waitInSync(t, 1)
	want.requireHeld(t, c.Cache)
	hellos, requests := server.seen()
	require.Len(t, requests, 1)
	require.Equal(t, []pb.Capability{pb.Capability_CAPABILITY_ZSTD, pb.Capability_CAPABILITY_BUCKETS}, hellos[0].GetCapabilities())
	require.EqualValues(t, 1, a.resyncs(t, "resume"))
}

// TestDivergenceIsRepairedByBuckets checks that a cache which differs from a heartbeat asks for the
// digests of the shards and is repaired with the buckets that differ. It asks a server whose
// digests make no sense only a few times a minute.
func TestDivergenceIsRepairedByBuckets(t *testing.T) {
	id := newIdentity(t)
	want := state{}
	for i := range 20 {
		want.add(named(fmt.Sprint("slice-", i), "web", 2))
	}
	_, digest := want.digests()
	server := bucketServer(t, want, epoch)
	answer := server.answer
	var questions, answers int
	server.answer = func(g pb.DistributionService_StreamServer, r *pb.StreamRequest) error {
		if r.GetDigestQuery() != nil {
			if questions++; questions == 1 {
				return g.Send(digestsOf(digest))
			}
			return nil
		}
		switch answers++; answers {
		case 1:
			return answer(g, r)
		case 2:
			digests, err := model.SplitDigests(r.GetResync().GetBucketDigests())
			require.NoError(t, err)
			u := want.differing(digests)
			require.Len(t, u.FullBuckets, 1)
			u.To = 2
			if err := g.Send(update(wire.UpdateToProto(u))); err != nil {
				return err
			}
			for i := range byte(repairBurst + 5) {
				if err := g.Send(heartbeat(model.Digest{i})); err != nil {
					return err
				}
			}
			return says(&pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{
				Name: "node-1", Node: &pb.Node{Name: "node-1"}}}})(g)
		}
		return nil
	}
	cache := NewCache()
	a := connect(t, id, cache, func(r *wire.Response) {
		if r.InSync != nil {
			tamper(t, cache, named("slice-7", "web", 3))
		}
	}, serve(t, id, server, fanout.ServerOption()).address)
	require.Eventually(t, func() bool { return cache.Node() != nil }, patience, tick)
	want.requireHeld(t, cache)
	require.EqualValues(t, 1, a.resyncs(t, "digest"))
	// The first requests are the answer to the server's BucketQuery, a DigestQuery and a repair.
	// The latter two have used two tokens of the limit. The remaining tokens go to DigestQueries,
	// except for the last one: a DigestQuery needs another token, for a shard.
	for i, r := range server.waitRequests(t, 3+repairBurst-3) {
		if i == 0 || i == 2 {
			require.Len(t, r.GetResync().GetBucketDigests(), model.Buckets*model.HashSize)
		} else {
			require.NotNil(t, r.GetDigestQuery())
		}
	}
}
