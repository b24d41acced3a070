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
// bits. Who may write objects may choose both of two contents that are to have the same hash, so
// what counts is the resistance to collisions: 2^100 operations. 128 bits would leave 2^64.
const HashSize = 25

type hash [HashSize]byte

// What is hashed begins with one of these, or, if it is an object, with the number of its first
// field, 1: so no inner node of the tree of digests has the encoding of an object or of another
// kind of node.
const (
	tagLeaf   = 0x80 // endpoints of a slice
	tagBucket = 0x81 // versions of the objects in a bucket
	tagShard  = 0x82 // digests of a shard's buckets
	tagState  = 0x83 // digests of all shards
	tagNodes  = 0x84 // versions of Nodes
)

func hashOf(b []byte) hash {
	sum := sha256.Sum256(b)
	return hash(sum[:HashSize])
}

// String returns 50 hexadecimal digits.
func (v Version) String() string { return hex.EncodeToString(v[:]) }

// ParseVersion returns the version that the wire has as bytes.
func ParseVersion(b []byte) (v Version, err error) {
	if len(b) != HashSize {
		return v, fmt.Errorf("a version of %d bytes: it has %d", len(b), HashSize)
	}
	return Version(b), nil
}

// Digest is a hash of the versions of any number of objects: equal state has equal digests
// everywhere and in any order. The zero value is the digest of no objects.
//
// Digests form a tree: that of a bucket is the hash of its objects' versions in ascending order,
// that of a shard the hash of its buckets' digests, and that of the whole state the hash of its
// shards' digests. There are no sums: sums of many terms that somebody may choose can be forged.
type Digest hash

// String returns 50 hexadecimal digits.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// BucketDigests returns the digests of a shard's buckets.
func BucketDigests(objects iter.Seq2[Key, Version]) []Digest {
	var versions [Buckets][]Version
	for key, version := range objects {
		b := key.Bucket()
		versions[b] = append(versions[b], version)
	}
	out := make([]Digest, Buckets)
	for i, in := range versions {
		if len(in) > 0 {
			slices.SortFunc(in, func(a, b Version) int { return bytes.Compare(a[:], b[:]) })
			out[i] = digestOf(tagBucket, in)
		}
	}
	return out
}

// ShardDigest returns the digest of the shard that has these buckets.
func ShardDigest(buckets []Digest) Digest { return digestOf(tagShard, buckets) }

// ShardDigests returns the digests of all shards, of which there are count, that hold these objects.
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

// StateDigest returns the digest of the state that has these shards.
func StateDigest(shards []Digest) Digest { return digestOf(tagState, shards) }

// NodesDigest returns the digest of Nodes.
func NodesDigest(nodes []*Node) Digest {
	versions := make([]Version, 0, len(nodes))
	for _, n := range nodes {
		versions = append(versions, n.ContentVersion())
	}
	slices.SortFunc(versions, func(a, b Version) int { return bytes.Compare(a[:], b[:]) })
	return digestOf(tagNodes, versions)
}

// digestOf returns the hash of a list, zero if all of it is.
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

// JoinDigests returns the bytes of digests one after the other, as the wire has them.
func JoinDigests(digests []Digest) []byte {
	out := make([]byte, 0, len(digests)*HashSize)
	for i := range digests {
		out = append(out, digests[i][:]...)
	}
	return out
}

// SplitDigests undoes JoinDigests.
func SplitDigests(b []byte) ([]Digest, error) {
	if len(b)%HashSize != 0 {
		return nil, fmt.Errorf("%d bytes of digests: each has %d", len(b), HashSize)
	}
	out := make([]Digest, 0, len(b)/HashSize)
	for d := range slices.Chunk(b, HashSize) {
		out = append(out, Digest(d))
	}
	return out, nil
}
