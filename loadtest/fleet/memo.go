package fleet

import (
	"sync"

	"github.com/cespare/xxhash/v2"
	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

const (
	// maxFrameBytes bounds the frames whose decoded form is kept: the state of a large cluster as it is sent to new nodes.
	maxFrameBytes = 64 << 20
	// maxApplied bounds the results of deltas that are kept. Nodes apply the same delta within a moment.
	maxApplied = 4096
)

// memo remembers the results of a pure function for the arguments used last, and computes each of them once.
type memo[K comparable, V any] struct {
	limit int

	// mu guards what follows. It is not held while a result is computed.
	mu   sync.Mutex
	cost int
	lru  *simplelru.LRU[K, *computed[V]]
}

type computed[V any] struct {
	cost  int
	once  sync.Once
	value V
	err   error
}

// newMemo makes a memo that keeps results up to a total cost.
func newMemo[K comparable, V any](limit int) *memo[K, V] {
	m := &memo[K, V]{limit: limit}
	// What bounds the number of entries is their cost, of which each has some. The only error is a size of 0.
	m.lru, _ = simplelru.NewLRU(limit, func(_ K, c *computed[V]) { m.cost -= c.cost })
	return m
}

func (m *memo[K, V]) get(key K, cost int, compute func() (V, error)) (V, error) {
	m.mu.Lock()
	c, ok := m.lru.Get(key)
	if !ok {
		c = &computed[V]{cost: cost}
		m.lru.Add(key, c)
		m.cost += cost
		for m.cost > m.limit && m.lru.Len() > 1 {
			m.lru.RemoveOldest()
		}
	}
	m.mu.Unlock()
	c.once.Do(func() { c.value, c.err = compute() })
	return c.value, c.err
}

// shared makes what all nodes of the process hold one set of objects, as the nodes of a real cluster cannot: it
// decodes a frame once, and applies a delta to a slice once, for all who come with the very same. It never decides that
// two things are equal by what they say of themselves, so a node that holds something else still does.
type shared struct {
	frames  *memo[frameKey, *wire.Response]
	applied *memo[applyKey, *model.Slice]
}

type frameKey struct {
	length int
	hash   uint64
}

// applyKey holds the arguments themselves: pointers to immutable objects.
type applyKey struct {
	delta *model.SliceDelta
	slice *model.Slice
}

func newShared() *shared {
	return &shared{frames: newMemo[frameKey, *wire.Response](maxFrameBytes), applied: newMemo[applyKey, *model.Slice](maxApplied)}
}

func (s *shared) decode(f wire.Frame) (*wire.Response, error) {
	return s.frames.get(frameKey{len(f), xxhash.Sum64(f)}, max(1, len(f)), func() (*wire.Response, error) { return wire.Decode(f) })
}

func (s *shared) apply(d *model.SliceDelta, to *model.Slice) (*model.Slice, error) {
	return s.applied.get(applyKey{d, to}, 1, func() (*model.Slice, error) { return d.Apply(to) })
}
