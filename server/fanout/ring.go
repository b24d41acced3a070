package fanout

import (
	"sync"
	"sync/atomic"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// What the ring holds at most; a stream that is further behind is caught up from snapshots.
const (
	ringEntries = 1024
	ringBytes   = 32 << 20
)

// endpointBytes is about what an endpoint takes in a slice that only the ring keeps alive.
const endpointBytes = 128

// batchBytes is how much of the ring a stream takes at a time, a single larger entry aside: what a stream that does not get
// on keeps alive.
const batchBytes = 64 << 10

// published is one shard's Update, encoded.
type published struct {
	shard    uint32
	from, to uint64
	frames   []wire.Frame
	update   *model.Update
	// parts are for streams that want some of it; made when the first of them asks.
	parts func() (*wire.Parts, error)
}

func newPublished(u *model.Update, frames []wire.Frame) published {
	return published{
		shard: u.Shard, from: u.From, to: u.To, frames: frames, update: u,
		parts: sync.OnceValues(func() (*wire.Parts, error) { return wire.PartsOf(u, frames) }),
	}
}

// entry is what all streams are sent at one time: a publish's Updates, or a single frame that is no Update.
type entry struct {
	updates []published
	// frames are those of the updates, or the single one.
	frames []wire.Frame
	// narrowed is what streams with a subscription get beside their part of the updates.
	narrowed []wire.Frame
	bytes    int
	// held are the bytes of the frames, and of the slices that deltas were made from.
	held int
}

// add adds an Update.
func (e *entry) add(u *model.Update, frames []wire.Frame) {
	e.updates = append(e.updates, newPublished(u, frames))
	e.frames = append(e.frames, frames...)
	size := wire.Bytes(frames)
	e.bytes += size
	e.held += size
	for _, d := range u.Deltas {
		e.held += endpointBytes * len(d.Before.Endpoints)
	}
}

// ring is the latest entries. It has one writer.
type ring struct {
	mu      sync.RWMutex
	entries [ringEntries]entry
	tail    uint64 // position of the oldest entry
	held    int
	// head is the position of the next entry.
	head atomic.Uint64
	// reached are the resource versions up to which everything is before the head.
	reached model.ResourceVersions
}

// reach notes what the entries so far come to.
func (r *ring) reach(v model.ResourceVersions) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reached = v
}

// now gives the head, and the resource versions that are reached there.
func (r *ring) now() (head uint64, reached model.ResourceVersions) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.head.Load(), r.reached
}

// add appends an entry, and drops the oldest ones beyond the bounds.
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

// batch is what follows a position in the ring.
type batch struct {
	from, to uint64 // positions
	lapped   bool   // entries are missing: to is the ring's head, and there are no updates
	updates  []published
	frames   []wire.Frame
	narrowed []wire.Frame
	bytes    int
}

// after gives what follows a position. It uses the memory of b.
func (r *ring) after(position uint64, b batch) batch {
	r.mu.RLock()
	defer r.mu.RUnlock()
	head := r.head.Load()
	next := batch{from: position, to: position, updates: b.updates[:0], frames: b.frames[:0], narrowed: b.narrowed[:0]}
	if position < r.tail {
		next.to, next.lapped = head, true
		return next
	}
	for next.to < head {
		e := &r.entries[next.to%ringEntries]
		if next.bytes > 0 && next.bytes+e.bytes > batchBytes {
			break
		}
		next.updates = append(next.updates, e.updates...)
		next.frames = append(next.frames, e.frames...)
		next.narrowed = append(next.narrowed, e.narrowed...)
		next.bytes += e.bytes
		next.to++
	}
	return next
}

// bases gives, of a shard, the slices as they were at a sequence, of those that have been there ever since and whose
// endpoints changed first. It gives none where the ring does not go back that far. A slice that has been away meanwhile may
// have been in another shard, so that a client has to be told that it is back.
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

// reaches reports whether the ring has all that was published of a shard since a sequence.
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

// repeats tells of shards whether the batch holds more than one Update of them.
func (b *batch) repeats() map[uint32]bool {
	seen := make(map[uint32]bool, len(b.updates))
	for _, u := range b.updates {
		_, again := seen[u.shard]
		seen[u.shard] = again
	}
	return seen
}

// drop lets go of what a batch refers to, but not of its memory.
func (b *batch) drop() {
	clear(b.updates[:cap(b.updates)])
	clear(b.frames[:cap(b.frames)])
	clear(b.narrowed[:cap(b.narrowed)])
	b.updates, b.frames, b.narrowed = b.updates[:0], b.frames[:0], b.narrowed[:0]
}
