// Package memo lets thousands of simulated nodes in one process share the results of computations.
package memo

import (
	"sync"

	"github.com/cespare/xxhash/v2"
	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// Memo caches the results of a pure function for the most recently used arguments. It computes each
// result at most once while it is cached.
type Memo[K comparable, V any] struct {
	limit int

	// mu guards the fields below. It is not held while a result is computed.
	mu   sync.Mutex
	cost int
	lru  *simplelru.LRU[K, *computed[V]]
}

// Bytes identifies bytes by their length and a hash of all of them.
type Bytes struct {
	length int
	hash   uint64
}

// KeyOf returns the key for bytes.
func KeyOf(b []byte) Bytes { return Bytes{len(b), xxhash.Sum64(b)} }

type computed[V any] struct {
	cost  int
	once  sync.Once
	value V
	err   error
}

// New returns a memo that keeps results up to a total cost.
func New[K comparable, V any](limit int) *Memo[K, V] {
	m := &Memo[K, V]{limit: limit}
	// The cost of entries bounds their number, because each costs at least 1. NewLRU fails only for
	// a limit below 1.
	m.lru, _ = simplelru.NewLRU(limit, func(_ K, c *computed[V]) { m.cost -= c.cost })
	return m
}

// Get returns the result for a key, which stands for the arguments. The first caller computes it.
// cost is the result's share of the limit.
func (m *Memo[K, V]) Get(key K, cost int, compute func() (V, error)) (V, error) {
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
