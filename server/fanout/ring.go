package fanout

import (
	"sync"
	"sync/atomic"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// These constants bound the ring. A stream that is further behind is caught up from snapshots.
const (
	ringEntries = 1024
	ringBytes   = 32 << 20
)

// updateBytes and objectBytes are about the memory, in bytes, that an Update and each of its
// objects take in an entry besides their own.
const updateBytes, objectBytes = 512, 64

// batchBytes bounds the bytes of the ring that a stream sends at a time. batchHeld bounds the
// memory of their entries, and thus what a stalled stream keeps alive. A single entry may be
// larger.
const batchBytes, batchHeld = 64 << 10, 1 << 20

// encodedUpdate is the Update of one shard and its frames.
type encodedUpdate struct {
	shard    uint32
	from, to uint64
	frames   []wire.Frame
	update   *model.Update
}

// entry is what all streams are sent together: the Updates of one publish, or a single frame that
// is not an Update.
type entry struct {
	updates []encodedUpdate
	// frames are the frames of the updates, or the single frame.
	frames []wire.Frame
	bytes  int
	// held counts the bytes that the entry keeps alive: the frames and the objects, with the slices
	// that deltas were computed from.
	held int
}

func (e *entry) add(u *model.Update, frames []wire.Frame) {
	e.updates = append(e.updates, encodedUpdate{shard: u.Shard, from: u.From, to: u.To, frames: frames, update: u})
	e.frames = append(e.frames, frames...)
	size := wire.Bytes(frames)
	e.bytes += size
	e.held += size + u.Memory() + updateBytes + objectBytes*u.Len()
}

// ring holds the latest entries. It has one writer, the publisher, and any number of readers. Its
// invariants, under mu:
//
//  1. The entries at the positions from tail to head, without head, are held; all others are zero.
//  2. held is the sum of these entries' held. There are at most ringEntries of them, and unless
//     there is just one, at most ringBytes.
//  3. Positions never repeat, and head - tail never exceeds ringEntries.
type ring struct {
	mu      sync.RWMutex
	entries [ringEntries]entry
	tail    uint64 // position of the oldest entry
	held    int
	// head is the position of the next entry. It only changes under mu; reads need no lock.
	head atomic.Uint64
	// reached has the resource versions that the entries before head include.
	reached model.ResourceVersions
}

func (r *ring) reach(v model.ResourceVersions) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reached = v
}

func (r *ring) now() (head uint64, reached model.ResourceVersions) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.head.Load(), r.reached
}

// add appends an entry, and drops the oldest entries while a bound is exceeded.
func (r *ring) add(e entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	head := r.head.Load()
	r.held += e.held
	for r.tail < head && (head-r.tail == ringEntries || r.held > ringBytes) {
		old := &r.entries[r.tail%ringEntries]
		r.held -= old.held
		*old = entry{}
		r.tail++
	}
	r.entries[head%ringEntries] = e
	r.head.Store(head + 1)
}

// size returns the number of entries and their held bytes.
func (r *ring) size() (entries, held int) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return int(r.head.Load() - r.tail), r.held
}

// batch is a run of entries that follows a position in the ring.
type batch struct {
	from, to uint64 // positions
	// lapped reports that the ring has dropped entries after from. Then to is the ring's head, and
	// there are no updates.
	lapped  bool
	updates []encodedUpdate
	frames  []wire.Frame // of the updates, and others
	others  []wire.Frame // those that are not of an update
	bytes   int
	held    int
}

// after returns the entries that follow a position. It reuses the memory of b.
func (r *ring) after(position uint64, b batch) batch {
	r.mu.RLock()
	defer r.mu.RUnlock()
	head := r.head.Load()
	next := batch{from: position, to: position, updates: b.updates[:0], frames: b.frames[:0], others: b.others[:0]}
	if position < r.tail {
		next.to, next.lapped = head, true
		return next
	}
	for next.to < head {
		e := &r.entries[next.to%ringEntries]
		if next.bytes > 0 && (next.bytes+e.bytes > batchBytes || next.held+e.held > batchHeld) {
			break
		}
		next.updates = append(next.updates, e.updates...)
		next.frames = append(next.frames, e.frames...)
		if len(e.updates) == 0 {
			next.others = append(next.others, e.frames...)
		}
		next.bytes += e.bytes
		next.held += e.held
		next.to++
	}
	return next
}

// bases returns slices of a shard as they were at a sequence. It includes slices that have existed
// ever since and whose first change was a delta. It returns nil if the ring does not go back that
// far. A slice that was removed meanwhile is left out: it may have been in another shard, and the
// client has to receive it whole.
func (r *ring) bases(shard uint32, from uint64) map[model.Key]*model.Slice {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var bases map[model.Key]*model.Slice
	note := func(key model.Key, s *model.Slice) {
		if _, known := bases[key]; !known {
			bases[key] = s
		}
	}
	for p := r.tail; p < r.head.Load(); p++ {
		for _, u := range r.entries[p%ringEntries].updates {
			switch {
			case u.shard != shard || u.from < from:
				continue
			case bases == nil && u.from > from:
				return nil
			case bases == nil:
				bases = make(map[model.Key]*model.Slice)
			}
			for _, key := range u.update.Removed {
				bases[key] = nil
			}
			for _, s := range u.update.Slices {
				note(s.Key(), nil)
			}
			for _, d := range u.update.Deltas {
				note(d.Key(), d.Before)
			}
		}
	}
	return bases
}

// reaches reports whether the ring has every Update of a shard since a sequence.
func (r *ring) reaches(shard uint32, from uint64) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for p := r.tail; p < r.head.Load(); p++ {
		for _, u := range r.entries[p%ringEntries].updates {
			if u.shard == shard {
				return u.from <= from
			}
		}
	}
	return false
}

// repeats returns the batch's shards, and for each whether the batch holds several Updates of it.
func (b *batch) repeats() map[uint32]bool {
	seen := make(map[uint32]bool, len(b.updates))
	for _, u := range b.updates {
		_, again := seen[u.shard]
		seen[u.shard] = again
	}
	return seen
}

// cursor is how far a session has sent the state. Its invariants:
//
//  1. sequences has the client's position in each shard once the client has applied everything
//     sent.
//  2. An Update at a position of the ring before next leads to no sequence beyond sequences.
type cursor struct {
	next      uint64 // position in the ring
	sequences []uint64
}

// advance moves the sequences over the updates and returns true, if all updates follow them.
// Otherwise it changes nothing and returns false.
func (c *cursor) advance(updates []encodedUpdate) bool {
	for i, u := range updates {
		if c.sequences[u.shard] != u.from {
			c.retreat(updates[:i])
			return false
		}
		c.sequences[u.shard] = u.to
	}
	return true
}

func (c *cursor) retreat(updates []encodedUpdate) {
	for i := len(updates) - 1; i >= 0; i-- {
		c.sequences[updates[i].shard] = updates[i].from
	}
}

// drop clears the batch's references, so that they can be collected, and keeps its memory.
func (b *batch) drop() {
	clear(b.updates[:cap(b.updates)])
	clear(b.frames[:cap(b.frames)])
	clear(b.others[:cap(b.others)])
	b.updates, b.frames, b.others = b.updates[:0], b.frames[:0], b.others[:0]
}
