package connection

import (
	"fmt"
	"time"

	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// The client asks for diverged shards at most once per repairInterval, after an initial burst of
// repairBurst requests.
const (
	repairInterval = 10 * time.Second
	repairBurst    = 8
)

// questions notes which digests the server has asked for. It may ask for each only once per stream,
// because an answer has all of them.
type questions struct {
	digests bool                // whether a DigestQuery has arrived
	buckets map[uint32]struct{} // the shards that BucketQueries have named
}

// comparison finds what the cache holds differently from the server, by the digests of one stream.
//
// Invariants:
//
//  1. The client asks once for a digest. If that did not help, repeating it would not help either.
//  2. Only digests of the same position are compared.
//  3. While the limit has kept the client from asking for some diverged shard, state is zero, so
//     that the next heartbeat leads to that shard even if the server's state stays the same.
type comparison struct {
	// allowed limits the requests of all streams.
	allowed *rate.Limiter
	// state is the server's digest of the whole state for which the client last asked for digests.
	// shards has the server's digest of each shard for which the client last asked for that shard.
	state  model.Digest
	shards map[uint32]model.Digest
}

// asks reports whether to ask the server for the digests of its shards, because a heartbeat has the
// cache's position but another digest. It assumes that the caller then asks.
func (c *comparison) asks(m *pb.Heartbeat, held *cache.Cache) bool {
	digests, err := model.SplitDigests(m.GetDigest())
	if err != nil || len(digests) != 1 || digests[0] == c.state {
		return false
	}
	// One request is for the digests, and at least one must be left for a shard.
	if !held.Differs(m.GetSequenceSum(), digests[0]) || c.allowed.Tokens() < 2 || !c.allowed.Allow() {
		return false
	}
	c.state = digests[0]
	return true
}

// diverged returns the shards to ask the server for, because their digest differs from the server's
// at the same sequence. It assumes that the caller then asks.
func (c *comparison) diverged(m *pb.Digests, held *cache.Cache) (shards []uint32) {
	sequences, own := held.Digests()
	digests, err := model.SplitDigests(m.GetDigests())
	if err != nil || len(m.GetSequences()) != len(own) || len(digests) != len(own) {
		return nil
	}
	for i, digest := range digests {
		shard := uint32(i)
		if sequences[i] != m.GetSequences()[i] {
			continue
		}
		if own[i] == digest {
			delete(c.shards, shard) // if the shard diverges again, asking may help again
			continue
		}
		if asked, ok := c.shards[shard]; ok && asked == digest {
			continue
		}
		if !c.allowed.Allow() {
			c.state = model.Digest{} // invariant 3
			continue
		}
		c.shards[shard] = digest
		shards = append(shards, shard)
	}
	return shards
}

// newComparison returns the comparison of a stream, whose requests count in allowed.
func newComparison(allowed *rate.Limiter) comparison {
	return comparison{allowed: allowed, shards: make(map[uint32]model.Digest)}
}

// compareShards asks the server for the differences in the shards whose digests differ.
func (s *stream) compareShards(m *pb.Digests) error {
	for _, shard := range s.digests.diverged(m, s.cache.Cache) {
		s.log.Warn("State differs from the server's, requesting the differences", "shard", shard)
		if err := s.repair(shard, "digest", "the digest differs"); err != nil {
			return err
		}
	}
	return nil
}

// repair asks the server, unprompted, for the differences in a shard.
func (s *stream) repair(shard uint32, label, reason string) error {
	r, err := s.bucketResync(shard, label, reason)
	if err == nil {
		s.Outbox.resync(r)
	}
	return err
}

// bucketResync returns a request for the differences in a shard, by its bucket digests.
func (s *stream) bucketResync(shard uint32, label, reason string) (*pb.Resync, error) {
	digests, ok := s.cache.BucketDigests(shard)
	if !ok {
		return nil, fmt.Errorf("%w: bucket_query for shard %d, which does not exist", cache.ErrProtocol, shard)
	}
	s.metrics.resyncs.WithLabelValues(label).Inc()
	return &pb.Resync{Shard: shard, BucketDigests: model.JoinDigests(digests), Reason: reason}, nil
}

// answerDigests answers a DigestQuery.
func (s *stream) answerDigests() error {
	if s.questions.digests {
		return fmt.Errorf("%w: a second digest_query", cache.ErrProtocol)
	}
	s.questions.digests = true
	_, digests := s.cache.Digests()
	answer := &pb.Digests{Digests: model.JoinDigests(digests)}
	s.Outbox.request(&pb.StreamRequest{Message: &pb.StreamRequest_Digests{Digests: answer}})
	return nil
}

// answerBuckets answers a BucketQuery.
func (s *stream) answerBuckets(q *pb.BucketQuery) error {
	for _, shard := range q.GetShards() {
		if _, again := s.questions.buckets[shard]; again {
			return fmt.Errorf("%w: a second bucket_query for shard %d", cache.ErrProtocol, shard)
		}
		answer, err := s.bucketResync(shard, "resume", "resuming with another digest")
		if err != nil {
			return err
		}
		s.questions.buckets[shard] = struct{}{}
		s.Outbox.request(&pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: answer}})
	}
	return nil
}
