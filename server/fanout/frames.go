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

// frameKey names a frame that many streams may want: it leads a shard from one sequence to another, from 0 the whole shard;
// or it holds some of the shard's buckets as of a sequence.
type frameKey struct {
	shard      uint32
	from, to   uint64
	buckets    uint64 // one bit for each; 0: all of the shard
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
	if !snapshot.Knows(from) {
		from = 0
	}
	return h.shared(frameKey{snapshot.Shard(), from, snapshot.Sequence(), 0, compressed}, func() *model.Update {
		return h.since(snapshot, from)
	})
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

// inBuckets gives the frames that hold some of a snapshot's buckets.
func (h *Hub) inBuckets(snapshot *store.Snapshot, buckets []uint32, compressed bool) ([]wire.Frame, error) {
	key := frameKey{shard: snapshot.Shard(), to: snapshot.Sequence(), compressed: compressed}
	for _, b := range buckets {
		key.buckets |= 1 << b
	}
	return h.shared(key, func() *model.Update { return snapshot.InBuckets(buckets) })
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
		return encodeParts(update())
	})
}

// encodeParts returns the frames of an Update, or the status of a stream that can't have them.
func encodeParts(u *model.Update) ([]wire.Frame, error) {
	frames, err := wire.EncodeParts(u)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "shard %d: %v", u.Shard, err)
	}
	return frames, nil
}
