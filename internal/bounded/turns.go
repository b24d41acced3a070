package bounded

import (
	"container/list"
	"net/netip"
	"sync"
)

// Turns shares a number of places among those who compute. Each source has the same share: a source
// with many waiters has one turn while another one has its own.
//
// Invariants, under mu:
//
//  1. If a place is free, nobody waits.
//  2. order has exactly the sources with waiters, and sources finds them. No source has an empty
//     list.
type Turns struct {
	mu   sync.Mutex // guards the fields below
	free int
	// order and sources are those of Nodes first, then those of others. The two take turns, so
	// that Nodes need not wait for a turn of each of any number of others.
	order   [2]list.List
	sources [2]map[netip.Prefix]*list.Element
	next    int // which of the two has the next turn
}

// waiters are those of one source, the first one first. Each is a channel that is closed once the
// waiter has a place.
type waiters struct {
	source netip.Prefix
	list.List
}

// NewTurns returns a number of places.
func NewTurns(places int) *Turns {
	return &Turns{free: places, sources: [2]map[netip.Prefix]*list.Element{{}, {}}}
}

// Take waits for a place, which Leave returns. It reports whether there is one: it gives up when
// gone is closed. ofNode says whether the source is the address of a Node.
func (t *Turns) Take(source netip.Prefix, ofNode bool, gone <-chan struct{}) bool {
	class := 1
	if ofNode {
		class = 0
	}
	t.mu.Lock()
	if t.free > 0 {
		t.free--
		t.mu.Unlock()
		return true
	}
	at := t.sources[class][source]
	if at == nil {
		at = t.order[class].PushBack(&waiters{source: source})
		t.sources[class][source] = at
	}
	own := at.Value.(*waiters)
	granted := make(chan struct{})
	place := own.PushBack(granted)
	t.mu.Unlock()

	select {
	case <-granted:
		return true
	case <-gone:
	}
	t.mu.Lock()
	select {
	case <-granted: // meanwhile
		t.leaveLocked()
	default:
		if own.Remove(place); own.Len() == 0 {
			t.order[class].Remove(t.sources[class][source])
			delete(t.sources[class], source)
		}
	}
	t.mu.Unlock()
	return false
}

// Leave returns a place.
func (t *Turns) Leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leaveLocked()
}

func (t *Turns) leaveLocked() {
	class := t.next
	if t.order[class].Len() == 0 {
		class = 1 - class
	}
	first := t.order[class].Front()
	if first == nil {
		t.free++
		return
	}
	t.next = 1 - class
	own := first.Value.(*waiters)
	close(own.Remove(own.Front()).(chan struct{}))
	if own.Len() > 0 {
		t.order[class].MoveToBack(first)
		return
	}
	t.order[class].Remove(first)
	delete(t.sources[class], own.source)
}
