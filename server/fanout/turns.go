package fanout

import (
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

const (
	// coldShares is the number of identities that can use up the budget for whole shards. One
	// identity gets at most this fraction of it.
	coldShares = 8
	// smallTurn is how many bytes a client may be sent without waiting. Most differences that a
	// client has after an absence, or requests in sync, have fewer.
	smallTurn = 64 << 10
	// turnTime is the longest duration of a turn. A turn ends early if the client accepts its bytes
	// more slowly than would fill turnTime. That is checked every turnCheck.
	turnTime  = 30 * time.Second
	turnCheck = 2 * time.Second
	// turnMemory is how long an identity that has had a turn comes after identities that have not.
	turnMemory = 5 * time.Minute
)

// turns divides a budget of bytes among clients that need much of the state. Its invariants, under
// mu:
//
//  1. The sizes of the current turns add up to budget - free. Those of one identity add up to held,
//     and to share at most.
//  2. In the queue, turns of identities that have not had one lately come first. Each of the two
//     groups is in the order of arrival.
//  3. The first turn in the queue whose identity has room in its share is larger than free. So a
//     turn that waits for its identity's own share blocks no other turn, and small turns cannot
//     overtake a large one for ever.
type turns struct {
	budget, share, small int64

	mu     sync.Mutex // guards the fields below
	free   int64
	held   map[identity]int64
	queue  []*turn
	lately *simplelru.LRU[identity, time.Time]
}

// turn is one client's permission to be sent what it is owed, or its place in the queue for it.
type turn struct {
	of *turns
	id identity
	// bytes is the total that the client is to be sent. size is the part of the budget that the
	// turn holds, which is a share at most.
	bytes, size int64
	// begun is closed when the turn begins.
	begun chan struct{}

	// of.mu guards the fields below.
	again bool // the identity has had a turn lately
	held  bool // the turn has begun and has not ended
}

func newTurns(budget int64) *turns {
	t := &turns{
		budget: budget, share: max(1, budget/coldShares), small: smallTurn, free: budget, held: make(map[identity]int64),
	}
	// An error is returned only for sizes below 1.
	t.lately, _ = simplelru.NewLRU[identity, time.Time](maxIdentities, nil)
	return t
}

// ask queues a turn for a client that is to be sent that many bytes. The turn's size is a share at
// most. A turn of up to small bytes begins at once, and takes nothing of the budget.
func (t *turns) ask(id identity, bytes int64) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := &turn{of: t, id: id, bytes: bytes, size: min(bytes, t.share), begun: make(chan struct{})}
	if bytes <= t.small {
		close(n.begun)
		return n
	}
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

// advanceLocked begins the turns that may begin now; see invariant 3.
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

// waiting returns the length of the queue.
func (t *turns) waiting() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.queue)
}

// end returns the turn's bytes to the budget, or removes the turn from the queue. It reports
// whether the turn was held until now.
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

// watch ends a turn that has begun if the client accepts bytes too slowly, and then calls stalled.
// taken returns how many bytes the client has ever accepted. The caller calls stop when the turn's
// bytes are sent.
func (n *turn) watch(taken func() uint64, stalled func()) (stop func()) {
	began, before := time.Now(), taken()
	var mu sync.Mutex // guards timer and stopped
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
