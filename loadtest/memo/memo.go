// Package memo has one process compute once what a thousand simulated nodes would each compute for themselves.
package memo

import (
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// Memo remembers the results of a pure function for the arguments used last, and computes each of them once.
type Memo[K comparable, V any] struct {
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

// New makes a memo that keeps results up to a total cost.
func New[K comparable, V any](limit int) *Memo[K, V] {
	m := &Memo[K, V]{limit: limit}
	// What bounds the number of entries is their cost, of which each has some. The only error is a size of 0.
	m.lru, _ = simplelru.NewLRU(limit, func(_ K, c *computed[V]) { m.cost -= c.cost })
	return m
}

// Get gives the result for a key that stands for the arguments; it is computed by the first who asks, and counts so much.
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
