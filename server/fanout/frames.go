package fanout

import (
	"slices"
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
)

// frameKey names an Update that many streams may want: it leads a shard from one sequence to another, from 0 the whole shard; or it
// holds one of the shard's buckets as of a sequence. There is one for each bucket, not for each set of buckets that a client may say it
// lacks: so there are no more than the shard has buckets.
type frameKey struct {
	shard      uint32
	from, to   uint64
	bucket     uint32 // its number + 1; 0 means all of the shard
	more       bool   // further buckets follow
	exact      bool   // there may be deltas, which lead from no position but from
	compressed bool
}

// frameCache holds snapshot, catch-up and bucket frames, least recently used ones out first, bounded by their bytes. A frame
// that many streams want at once is made once.
type frameCache struct {
	limit int

	mu    sync.Mutex
	bytes int
	lru   *simplelru.LRU[frameKey, *cachedFrame]
}

// cachedFrame is an Update, in as many frames as it needs.
type cachedFrame struct {
	once   sync.Once
	frames []wire.Frame
	err    error
}

// entryBytes is what an entry of the cache takes beside its frame's bytes: its key, twice, and what links it.
const entryBytes = 300

// size is what an entry counts as.
func (f *cachedFrame) size() int { return entryBytes + wire.Bytes(f.frames) }

func newFrameCache(limit int) *frameCache {
	c := &frameCache{limit: limit}
	// The number of entries is bounded by their bytes, not by the list: any frame has some.
	c.lru, _ = simplelru.NewLRU(1<<20, func(_ frameKey, f *cachedFrame) {
		if f.frames != nil { // or else it does not count yet
			c.bytes -= f.size()
		}
	})
	return c
}

// get gives the frames, made by build if they are not there. Errors are not kept.
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
		case !ok || current != f: // evicted meanwhile
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

// size gives the bytes that the cache holds.
func (c *frameCache) size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

// catchUp gives the frames that lead from a sequence to a snapshot; 0: the whole shard.
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
	return h.shared(frameKey{shard: snapshot.Shard(), from: from, to: snapshot.Sequence(), exact: exact, compressed: compressed}, func() *model.Update {
		if exact {
			return h.since(snapshot, from)
		}
		return snapshot.Since(from)
	})
}

// exactPositions is from how many positions before a snapshot there are frames with deltas. A delta leads
// from one position only, so these are not rounded.
const exactPositions = 16

// rounded returns a position at or before another one, of few that there are for a snapshot: clients may say that they are anywhere, and
// each position is a frame. A frame leads from any position between its two, and with this has at most twice as many changes.
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

// since gives what leads from a sequence to a snapshot: each object once, and as a delta where the ring still has what the
// client holds.
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
		return d != nil // without a change it has become what it was
	})
	return u
}

// inBuckets gives the frames that hold some of a snapshot's buckets, as one Update.
func (h *Hub) inBuckets(snapshot *store.Snapshot, buckets []uint32, compressed bool) (frames []wire.Frame, err error) {
	for i, b := range buckets {
		key := frameKey{shard: snapshot.Shard(), to: snapshot.Sequence(), bucket: b + 1, more: i < len(buckets)-1, compressed: compressed}
		of, err := h.shared(key, func() *model.Update { return snapshot.InBuckets([]uint32{b}) })
		if err != nil {
			return nil, err
		}
		frames = append(frames, of...)
	}
	return frames, nil
}

// shared gives the frames of an Update that many may want.
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
		if key.more {
			return orInternal(key.shard)(wire.EncodeBeginning(update()))
		}
		return encodeParts(update())
	})
}

// encodeParts returns the frames of an Update, or the status of a stream that can't have them.
func encodeParts(u *model.Update) ([]wire.Frame, error) {
	return orInternal(u.Shard)(wire.EncodeParts(u))
}

// orInternal makes an error the status of a stream.
func orInternal(shard uint32) func([]wire.Frame, error) ([]wire.Frame, error) {
	return func(frames []wire.Frame, err error) ([]wire.Frame, error) {
		if err != nil {
			return nil, status.Errorf(codes.Internal, "shard %d: %v", shard, err)
		}
		return frames, nil
	}
}
