package fanout

import (
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

const (
	// coldShares is how many identities can hold all of the budget for whole shards: one alone gets that part of it at most.
	coldShares = 8
	// turnTime is how long a turn lasts at most. It ends before that when the client takes its bytes more slowly than would fill the time,
	// which is looked at every turnCheck.
	turnTime  = 30 * time.Second
	turnCheck = 2 * time.Second
	// turnMemory is how long an identity that has had a turn comes after those that have not had one. maxIdentities bounds how many
	// identities are remembered, for this and for what they ask.
	turnMemory    = 5 * time.Minute
	maxIdentities = 16 << 10
)

// identity is whom a share of what the server can do belongs to: an agent's node, as the agents of a
// cluster may all be the same user and one may have several credentials, or else a user.
type identity struct{ user, node string }

// turns divides a budget of bytes among clients that need whole shards. What holds, under mu:
//
//  1. The sizes of the turns that are held are budget - free, and for each identity held, which is at most share.
//  2. The queue has first the turns of identities that have not had one lately, each group in the order in which they came.
//  3. The first turn in the queue of an identity with room in its share is larger than free. So one that waits for its identity's own
//     share holds up nobody, and a large one is not overtaken by small ones for ever.
type turns struct {
	budget, share int64

	mu     sync.Mutex
	free   int64
	held   map[identity]int64
	queue  []*turn
	lately *simplelru.LRU[identity, time.Time]
}

// turn is one client's.
type turn struct {
	of *turns
	id identity
	// bytes are all that the client is to be sent; size is what of the budget the turn holds, which is a share at most.
	bytes, size int64
	// begun is closed when the turn begins.
	begun chan struct{}

	// of.mu guards what follows.
	again bool // the identity has had one lately
	held  bool
}

func newTurns(budget int64) *turns {
	t := &turns{budget: budget, share: max(1, budget/coldShares), free: budget, held: make(map[identity]int64)}
	t.lately, _ = simplelru.NewLRU[identity, time.Time](maxIdentities, nil) // an error is for sizes below 1
	return t
}

// ask queues for a turn of so many bytes, or of a share if that is less.
func (t *turns) ask(id identity, bytes int64) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := &turn{of: t, id: id, bytes: bytes, size: min(bytes, t.share), begun: make(chan struct{})}
	last, known := t.lately.Peek(id)
	n.again = known && time.Since(last) < turnMemory
	at := len(t.queue)
	if !n.again {
		if first := slices.IndexFunc(t.queue, func(q *turn) bool { return q.again }); first >= 0 {
			at = first
		}
	}
	t.queue = slices.Insert(t.queue, at, n)
	t.advanceLocked()
	return n
}

// advanceLocked begins the turns that may begin.
func (t *turns) advanceLocked() {
	for i := 0; i < len(t.queue); {
		n := t.queue[i]
		if t.held[n.id]+n.size > t.share {
			i++
			continue
		}
		if n.size > t.free {
			return
		}
		t.queue = slices.Delete(t.queue, i, i+1)
		t.free -= n.size
		t.held[n.id] += n.size
		t.lately.Add(n.id, time.Now())
		n.held = true
		close(n.begun)
	}
}

// end gives back what is held of the turn, or leaves the queue. It reports whether the turn was held until now.
func (n *turn) end() (held bool) {
	t := n.of
	t.mu.Lock()
	defer t.mu.Unlock()
	held, n.held = n.held, false
	if !held {
		t.queue = slices.DeleteFunc(t.queue, func(q *turn) bool { return q == n })
	} else {
		t.free += n.size
		if t.held[n.id] -= n.size; t.held[n.id] == 0 {
			delete(t.held, n.id)
		}
	}
	t.advanceLocked()
	return held
}

// watch ends a turn that has begun when the client takes too little, and then calls stalled; taken returns how many bytes the client
// has taken of all that it was ever sent. The caller calls stop when the turn's bytes are sent.
func (n *turn) watch(taken func() uint64, stalled func()) (stop func()) {
	began, before := time.Now(), taken()
	var mu sync.Mutex // guards timer, and stopped
	var timer *time.Timer
	stopped := false
	check := func() {
		mu.Lock()
		defer mu.Unlock()
		elapsed := min(time.Since(began), turnTime)
		switch needed := float64(n.bytes) * float64(elapsed) / float64(turnTime); {
		case stopped:
		case elapsed < turnTime && float64(taken()-before) >= needed:
			timer.Reset(turnCheck)
		case n.end():
			stalled()
		}
	}
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(turnCheck, check)
	return func() {
		mu.Lock()
		defer mu.Unlock()
		stopped = true
		timer.Stop()
	}
}
