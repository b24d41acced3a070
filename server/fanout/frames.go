package fanout

import (
	"slices"
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
)

// frameKey identifies an Update that many streams may want. The Update leads a shard from one
// sequence to another, where from 0 means the whole shard, or it holds one of the shard's buckets
// as of a sequence. Keys name single buckets and not sets of them, so a snapshot has at most
// model.Buckets such frames whatever clients say they lack.
type frameKey struct {
	shard      uint32
	from, to   uint64
	bucket     uint32 // the bucket's number + 1; 0 means the whole shard
	more       bool   // whether further buckets follow
	exact      bool   // whether it may contain deltas, which apply at no position but from
	compressed bool
}

// frameCache holds snapshot, catch-up and bucket frames. It evicts the least recently used frames
// once their bytes exceed limit. A frame that many streams want at once is built once.
//
// Invariants, under mu:
//
//  1. bytes is the sum of the sizes of the entries in lru that are built.
//  2. bytes is at most limit, unless a single entry exceeds it.
type frameCache struct {
	limit int

	mu    sync.Mutex // guards the fields below
	bytes int
	lru   *simplelru.LRU[frameKey, *cachedFrame]
}

// cachedFrame is an Update in one or more frames.
type cachedFrame struct {
	once   sync.Once
	frames []wire.Frame
	err    error
}

// entryBytes is about what an entry takes in addition to its frames: its key, twice, and its links.
const entryBytes = 300

// size returns the bytes that the entry counts for.
func (f *cachedFrame) size() int { return entryBytes + wire.Bytes(f.frames) }

func newFrameCache(limit int) *frameCache {
	c := &frameCache{limit: limit}
	// The bytes bound the number of entries, as any frame has some. The list's own bound is never
	// reached.
	c.lru, _ = simplelru.NewLRU(1<<20, func(_ frameKey, f *cachedFrame) {
		if f.frames != nil { // an entry that is not built yet counts for nothing
			c.bytes -= f.size()
		}
	})
	return c
}

// get returns the frames of a key. If they are not cached, it builds them with build. An error is
// returned to all callers that wait for the build, and is not cached.
func (c *frameCache) get(key frameKey, build func() ([]wire.Frame, error)) ([]wire.Frame, error) {
	c.mu.Lock()
	f, ok := c.lru.Get(key)
	if !ok {
		f = &cachedFrame{}
		c.lru.Add(key, f)
	}
	c.mu.Unlock()

	f.once.Do(func() {
		frames, err := build()
		c.mu.Lock()
		defer c.mu.Unlock()
		current, ok := c.lru.Peek(key)
		f.frames, f.err = frames, err
		switch {
		case !ok || current != f: // it was evicted during the build
		case err != nil:
			f.frames = nil
			c.lru.Remove(key)
		default:
			c.bytes += f.size()
			for c.bytes > c.limit && c.lru.Len() > 1 {
				c.lru.RemoveOldest()
			}
		}
	})
	return f.frames, f.err
}

// forget drops all frames. Those that are being built will not be cached either.
func (c *frameCache) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lru.Purge()
}

// size returns the bytes that the cache holds.
func (c *frameCache) size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

// catchUp returns frames that lead from a sequence to a snapshot. A sequence of 0, or one whose
// changes are no longer known, gets the whole shard.
func (h *Hub) catchUp(snapshot *store.Snapshot, from uint64, compressed bool) ([]wire.Frame, error) {
	exact := false
	switch {
	case !snapshot.Knows(from):
		from = 0
	case snapshot.Sequence()-from <= exactPositions && h.ring.reaches(snapshot.Shard(), from):
		exact = true
	default:
		from = rounded(snapshot, from)
	}
	key := frameKey{shard: snapshot.Shard(), from: from, to: snapshot.Sequence(), exact: exact, compressed: compressed}
	return h.shared(key, func() *model.Update {
		if exact {
			return h.since(snapshot, from)
		}
		return snapshot.Since(from)
	})
}

// exactPositions is how many positions before a snapshot have catch-up frames of their own, with
// deltas. A delta applies at one position only, so these positions are not rounded.
const exactPositions = 16

// rounded returns a position at or before from, out of few for each snapshot. Clients may claim any
// position, and each distinct position would cost a frame. A frame applies at any position between
// its two, and rounding at most doubles the positions that it spans.
func rounded(snapshot *store.Snapshot, from uint64) uint64 {
	behind := uint64(1)
	for behind < snapshot.Sequence()-from {
		behind *= 2
	}
	if behind >= snapshot.Sequence() {
		return snapshot.Oldest()
	}
	return max(snapshot.Sequence()-behind, snapshot.Oldest())
}

// since returns the changes from a sequence to a snapshot, each object once. A slice is sent as a
// delta if the ring still has the version that the client holds.
func (h *Hub) since(snapshot *store.Snapshot, from uint64) *model.Update {
	u := snapshot.Since(from)
	if u.Full {
		return u
	}
	bases := h.ring.bases(snapshot.Shard(), from)
	u.Slices = slices.DeleteFunc(u.Slices, func(s *model.Slice) bool {
		base := bases[s.Key()]
		if base == nil {
			return false
		}
		d := model.Diff(base, s)
		if d != nil && d.Len() > 0 {
			u.Deltas = append(u.Deltas, d)
		}
		return d != nil // without a difference, the slice is what it was at from
	})
	return u
}

// inBuckets returns the frames of some of a snapshot's buckets. Together they are one Update.
func (h *Hub) inBuckets(snapshot *store.Snapshot, buckets []uint32, compressed bool) (frames []wire.Frame, err error) {
	for i, b := range buckets {
		key := frameKey{
			shard: snapshot.Shard(), to: snapshot.Sequence(), bucket: b + 1, more: i < len(buckets)-1, compressed: compressed,
		}
		of, err := h.shared(key, func() *model.Update { return snapshot.InBuckets([]uint32{b}) })
		if err != nil {
			return nil, err
		}
		frames = append(frames, of...)
	}
	return frames, nil
}

// shared returns the cached frames of an Update that many streams may want.
func (h *Hub) shared(key frameKey, update func() *model.Update) ([]wire.Frame, error) {
	return h.frames.get(key, func() ([]wire.Frame, error) {
		if key.compressed {
			key.compressed = false
			frames, err := h.shared(key, update)
			if err != nil {
				return nil, err
			}
			return wire.CompressParts(frames)
		}
		h.metrics.catchUps.Inc()
		u := h.asSeen(update())
		if key.more {
			return wire.EncodeBeginning(u)
		}
		return wire.EncodeParts(u)
	})
}

// asSeen limits the resource versions of an Update that was made from a snapshot, which may be from
// before the source went back in time.
func (h *Hub) asSeen(u *model.Update) *model.Update {
	u.ResourceVersions = u.ResourceVersions.Min(h.store.Seen())
	return u
}
