package cache

import "github.com/slicecast/slicecast/internal/model"

// Hello is what the Hello of a stream says of a cache, so that the server sends only what differs.
type Hello struct {
	// Epoch is the epoch of the sequences. 0 means that there is none yet.
	Epoch uint64
	// Sequences is indexed by shard. A shard without a position has 0, which makes the server compare
	// digests.
	Sequences []uint64
	// Digest is the digest of the whole state.
	Digest model.Digest
	// ResourceVersions are the versions that the cache reflects.
	ResourceVersions model.ResourceVersions
	// Cluster identifies the cluster of the content; see model.ClusterService. 0 means unknown.
	Cluster int64
}

// Status summarizes the content of a cache.
type Status struct {
	// Epoch is the epoch of the sequences. 0 means that there is none yet.
	Epoch uint64
	// Sequences and Digests are indexed by shard.
	Sequences []uint64
	Digests   []model.Digest
	// ResourceVersions are the versions that the cache reflects.
	ResourceVersions model.ResourceVersions
	// Services, Slices and Endpoints are the numbers of objects in the cache.
	Services, Slices, Endpoints int
	// InSync reports that the cache has been in sync since the process started. Stale reports that
	// a checkpoint counts although no server has confirmed it.
	InSync, Stale bool
}

// Status returns a summary of the cache.
func (c *Cache) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := Status{Epoch: c.epoch, ResourceVersions: c.seen, InSync: c.inSync, Stale: c.stale}
	out.Sequences, out.Digests = c.digestsLocked()
	for i := range c.shards {
		s := &c.shards[i]
		out.Slices += len(s.slices)
		out.Services += s.len() - len(s.slices)
		for _, slice := range s.slices {
			out.Endpoints += len(slice.Endpoints)
		}
	}
	return out
}

// Epoch returns the epoch of the sequences, or 0 if there is none yet.
func (c *Cache) Epoch() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.epoch
}

// Sequence returns the sequence of a shard, or 0 if there is none.
func (c *Cache) Sequence(shard uint32) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return 0
	}
	return c.shards[shard].sequence
}

// Digests returns the sequence and the digest of every shard.
func (c *Cache) Digests() (sequences []uint64, digests []model.Digest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.digestsLocked()
}

func (c *Cache) digestsLocked() (sequences []uint64, digests []model.Digest) {
	for i := range c.shards {
		sequences = append(sequences, c.shards[i].sequence)
		digests = append(digests, c.shards[i].currentDigest())
	}
	return sequences, digests
}

// Differs reports whether a server whose sequences have this sum is at the same position and has
// another digest of the state. At another position, digests cannot be compared.
func (c *Cache) Differs(sequenceSum uint64, digest model.Digest) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.shards {
		sequenceSum -= c.shards[i].sequence
	}
	if sequenceSum != 0 {
		return false
	}
	_, own := c.digestsLocked()
	return model.StateDigest(own) != digest
}

// BucketDigests returns the digests of a shard's buckets, by number. ok is false if there is no
// such shard.
func (c *Cache) BucketDigests(shard uint32) (digests []model.Digest, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return nil, false
	}
	return c.shards[shard].bucketDigests(), true
}
