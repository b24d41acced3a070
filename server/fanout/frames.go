package fanout

import (
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"

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

type cachedFrame struct {
	once  sync.Once
	frame wire.Frame
	err   error
}

func newFrameCache(limit int) *frameCache {
	c := &frameCache{limit: limit}
	// The number of entries is bounded by their bytes, not by the list: any frame has some.
	c.lru, _ = simplelru.NewLRU(1<<20, func(_ frameKey, f *cachedFrame) { c.bytes -= len(f.frame) })
	return c
}

// get gives the frame, made by build if it is not there. Errors are not kept.
func (c *frameCache) get(key frameKey, build func() (wire.Frame, error)) (wire.Frame, error) {
	c.mu.Lock()
	f, ok := c.lru.Get(key)
	if !ok {
		f = &cachedFrame{}
		c.lru.Add(key, f)
	}
	c.mu.Unlock()

	f.once.Do(func() {
		frame, err := build()
		c.mu.Lock()
		defer c.mu.Unlock()
		current, ok := c.lru.Peek(key)
		f.frame, f.err = frame, err
		switch {
		case !ok || current != f: // evicted meanwhile
		case err != nil:
			f.frame = nil
			c.lru.Remove(key)
		default:
			c.bytes += len(frame)
			for c.bytes > c.limit && c.lru.Len() > 1 {
				c.lru.RemoveOldest()
			}
		}
	})
	return f.frame, f.err
}

// size gives the bytes that the cache holds.
func (c *frameCache) size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}
