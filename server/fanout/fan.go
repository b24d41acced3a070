package fanout

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// fanChunk is how many streams a goroutine of the fan-out claims at a time.
const fanChunk = 16

// fan sends new entries of the ring to the streams that keep up, and wakes the goroutines of the
// others. After each pass over the streams it pauses for half as long as the pass took. Under load,
// the pauses let more entries share a pass, and leave CPU time to clients on the same machine.
func (h *Hub) fan(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.work:
		}
		var took time.Duration
		for {
			select {
			case <-ctx.Done():
				return
			case <-pause.C:
			}
			head, begin := h.ring.head.Load(), time.Now()
			h.pass()
			pass := time.Since(begin)
			took += pass
			pause.Reset(min(pass/2, maxCoalesce/2))
			h.mu.Lock()
			done := h.ring.head.Load() == head
			if done {
				h.restLocked(took)
			}
			h.mu.Unlock()
			if done {
				break
			}
		}
	}
}

// restLocked records that the streams that keep up have everything. took is how long that lasted.
func (h *Hub) restLocked(took time.Duration) {
	h.rested = time.Now().Add(took)
	select {
	case <-h.idle: // it is noted already
	default:
		close(h.idle)
	}
}

// pass offers the ring's new entries to each stream once.
func (h *Hub) pass() {
	streams := h.list()
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), (len(streams)+fanChunk-1)/fanChunk) {
		workers.Go(func() {
			var b batch
			for {
				end := int(next.Add(fanChunk))
				begin := end - fanChunk
				if begin >= len(streams) {
					return
				}
				for _, s := range streams[begin:min(end, len(streams))] {
					b = s.offer(b)
				}
			}
		})
	}
	workers.Wait()
}

// offer sends the stream what it lacks, if the fan-out owns the stream (see invariant 1 of stream)
// and its transport accepts the frames at once. Otherwise it hands the stream to its own goroutine.
// Most streams lack the same entries, so b may already hold them. offer returns the batch for the
// next stream.
func (s *stream) offer(b batch) batch {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live {
		head := s.hub.ring.head.Load()
		if s.position == head {
			return b
		}
		if b.from != s.position || b.to != head {
			b = s.hub.ring.after(s.position, b)
		}
		if !b.lapped && b.to >= head && s.inStep(b.updates) {
			sent, err := s.transport.TrySend(b.frames...)
			if sent {
				s.reports.sentBytes.Add(uint64(s.hub.metrics.sent(b.frames)))
				s.position = b.to
				return b
			}
			if err != nil {
				s.end(err)
			}
			s.outOfStep(b.updates)
		}
		s.live = false
	}
	notify(s.pokes)
	return b
}

// outOfStep undoes inStep.
func (s *stream) outOfStep(updates []published) {
	for i := len(updates) - 1; i >= 0; i-- {
		s.sequences[updates[i].shard] = updates[i].from
	}
}
