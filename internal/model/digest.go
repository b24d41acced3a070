package model

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"iter"
	"slices"
)

// HashSize is the size of versions and digests in bytes: SHA-256 (FIPS 180-4), truncated to 200
// bits. Whoever may write objects may choose both of two colliding contents, so the resistance to
// collisions counts. With 200 bits a collision costs 2^100 operations; with 128 bits it would cost
// 2^64.
const HashSize = 25

type hash [HashSize]byte

// Every hash input begins with one of these tags, or with field number 1 if the input encodes an
// object. Therefore an inner node of the digest tree never has the same input as an object or as a
// node of another kind.
const (
	tagLeaf   = 0x80 // some endpoints of a slice
	tagBucket = 0x81 // the versions of the objects in a bucket
	tagShard  = 0x82 // the digests of a shard's buckets
	tagState  = 0x83 // the digests of all shards
	tagNodes  = 0x84 // the versions of Nodes
)

func hashOf(b []byte) hash {
	sum := sha256.Sum256(b)
	return hash(sum[:HashSize])
}

// String returns 50 hexadecimal digits.
func (v Version) String() string { return hex.EncodeToString(v[:]) }

// ParseVersion returns the version that has these bytes on the wire.
func ParseVersion(b []byte) (v Version, err error) {
	if len(b) != HashSize {
		return v, fmt.Errorf("a version of %d bytes: want %d", len(b), HashSize)
	}
	return Version(b), nil
}

// Digest is a hash of the versions of any number of objects. Equal states have equal digests
// everywhere, independent of the order of objects. The zero value is the digest of no objects.
//
// Digests form a tree. The digest of a bucket is the hash of its objects' versions in ascending
// order, the digest of a shard is the hash of its buckets' digests, and the digest of the state is
// the hash of its shards' digests. None of them is a sum: a tenant who can choose many terms of a
// sum can forge it.
type Digest hash

// String returns 50 hexadecimal digits.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// BucketDigests returns the digests of the buckets of the shard that holds these objects.
func BucketDigests(objects iter.Seq2[Key, Version]) []Digest {
	var versions [Buckets][]Version
	for key, version := range objects {
		b := key.Bucket()
		versions[b] = append(versions[b], version)
	}
	out := make([]Digest, Buckets)
	for i, in := range versions {
		slices.SortFunc(in, func(a, b Version) int { return bytes.Compare(a[:], b[:]) })
		out[i] = digestOf(tagBucket, in)
	}
	return out
}

// ShardDigest returns the digest of the shard whose buckets have these digests.
func ShardDigest(buckets []Digest) Digest { return digestOf(tagShard, buckets) }

// ShardDigests returns the digests of all count shards of the state that holds these objects.
func ShardDigests(count uint32, objects iter.Seq2[Object, Version]) []Digest {
	type versioned struct {
		key     Key
		version Version
	}
	shards := make([][]versioned, count)
	for o, version := range objects {
		shard := o.ServiceKey().Shard(count)
		shards[shard] = append(shards[shard], versioned{o.Key(), version})
	}
	out := make([]Digest, count)
	for i, in := range shards {
		out[i] = ShardDigest(BucketDigests(func(yield func(Key, Version) bool) {
			for _, o := range in {
				if !yield(o.key, o.version) {
					return
				}
			}
		}))
	}
	return out
}

// StateDigest returns the digest of the state whose shards have these digests.
func StateDigest(shards []Digest) Digest { return digestOf(tagState, shards) }

// NodesDigest returns the digest of Nodes, independent of their order.
func NodesDigest(nodes []*Node) Digest {
	versions := make([]Version, 0, len(nodes))
	for _, n := range nodes {
		versions = append(versions, n.ContentVersion())
	}
	slices.SortFunc(versions, func(a, b Version) int { return bytes.Compare(a[:], b[:]) })
	return digestOf(tagNodes, versions)
}

// digestOf returns the hash of the tag and the list, or zero if all entries are zero.
func digestOf[T ~[HashSize]byte](tag byte, list []T) (d Digest) {
	var zero T
	empty := true
	b := make([]byte, 1, 1+len(list)*HashSize)
	b[0] = tag
	for i := range list {
		empty = empty && list[i] == zero
		b = append(b, list[i][:]...)
	}
	if empty {
		return d
	}
	return Digest(hashOf(b))
}

// JoinDigests returns the concatenated bytes of digests, as on the wire.
func JoinDigests(digests []Digest) []byte {
	out := make([]byte, 0, len(digests)*HashSize)
	for i := range digests {
		out = append(out, digests[i][:]...)
	}
	return out
}

// SplitDigests is the inverse of JoinDigests.
func SplitDigests(b []byte) ([]Digest, error) {
	if len(b)%HashSize != 0 {
		return nil, fmt.Errorf("%d bytes of digests: want a multiple of %d", len(b), HashSize)
	}
	out := make([]Digest, 0, len(b)/HashSize)
	for d := range slices.Chunk(b, HashSize) {
		out = append(out, Digest(d))
	}
	return out, nil
}
