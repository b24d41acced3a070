package cache

import (
	"fmt"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// maxUnfinished bounds the memory, in bytes, of the updates whose last part is still to come. A
// shard of the largest objects takes 400 MiB.
const maxUnfinished = 1 << 30

// Parts joins the parts in which one stream's Updates arrive, so that each is applied as a whole.
//
// Invariants:
//
//  1. waiting holds, by shard, what has arrived of an Update whose last part is still to come. The
//     spare capacity of its lists belongs to Parts alone, because other caches may share a part.
//  2. memory is the sum of the memory of all that is in waiting, which is at most maxUnfinished.
type Parts struct {
	shards  uint32
	waiting map[uint32]unfinished
	memory  int
}

// unfinished is what has arrived of an Update.
type unfinished struct {
	*model.Update
	memory int
}

// NewParts returns a Parts for a stream whose server has this number of shards.
func NewParts(shards uint32) *Parts {
	return &Parts{shards: shards, waiting: make(map[uint32]unfinished)}
}

// Waiting reports whether the last part of an Update is still to come.
func (p *Parts) Waiting() bool { return len(p.waiting) > 0 }

// Join adds a part. more reports that further parts follow. With the last part, Join returns the
// whole Update, and nil before.
func (p *Parts) Join(u *model.Update, more bool) (whole *model.Update, err error) {
	if u.Shard >= p.shards {
		return nil, fmt.Errorf("%w: update of shard %d of %d", ErrProtocol, u.Shard, p.shards)
	}
	first, waits := p.waiting[u.Shard]
	if !waits && !more {
		return u, nil
	}
	size := u.Memory()
	if p.memory+size > maxUnfinished {
		return nil, fmt.Errorf("%w: unfinished updates of more than %d bytes", ErrProtocol, maxUnfinished)
	}
	if waits {
		if first.From != u.From || first.To != u.To || first.Full != u.Full {
			return nil, fmt.Errorf("%w: parts of different updates of shard %d", ErrProtocol, u.Shard)
		}
		if n := len(first.FullBuckets) + len(u.FullBuckets); n > model.Buckets {
			return nil, fmt.Errorf("%w: an update of %d buckets of %d", ErrProtocol, n, model.Buckets)
		}
		u = join(first.Update, u)
	} else {
		u = clipped(u)
	}
	if more {
		p.memory += size
		p.waiting[u.Shard] = unfinished{u, first.memory + size}
		return nil, nil
	}
	p.memory -= first.memory
	delete(p.waiting, u.Shard)
	return u, nil
}

// clipped returns a copy of an Update's first part, whose lists have no spare capacity. Other
// caches may share the part, so join must not write to the arrays of its lists.
func clipped(u *model.Update) *model.Update {
	c := *u
	c.FullBuckets = slices.Clip(c.FullBuckets)
	c.Services = slices.Clip(c.Services)
	c.Slices = slices.Clip(c.Slices)
	c.Deltas = slices.Clip(c.Deltas)
	c.Removed = slices.Clip(c.Removed)
	c.Unreadable = slices.Clip(c.Unreadable)
	c.Unverified = slices.Clip(c.Unverified)
	return &c
}

// join returns two parts of an Update as one. It appends to the lists of a, which comes from
// clipped or join, so that joining many parts takes linear time.
func join(a, b *model.Update) *model.Update {
	j := *a
	j.ResourceVersions = j.ResourceVersions.Max(b.ResourceVersions)
	j.FullBuckets = append(j.FullBuckets, b.FullBuckets...)
	j.Services = append(j.Services, b.Services...)
	j.Slices = append(j.Slices, b.Slices...)
	j.Deltas = append(j.Deltas, b.Deltas...)
	j.Removed = append(j.Removed, b.Removed...)
	j.Unreadable = append(j.Unreadable, b.Unreadable...)
	j.Unverified = append(j.Unverified, b.Unverified...)
	return &j
}
