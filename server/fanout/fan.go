package fanout

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// fanChunk is how many sessions a goroutine of the fan-out claims at a time.
const fanChunk = 16

// fan sends new entries of the ring to the sessions that keep up, and wakes the goroutines of the
// others. After each pass over the sessions it pauses for half as long as the pass took. Under
// load, the pauses let more entries share a pass, and leave CPU time to clients on the same
// machine.
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
			if h.pace.tryRest(took, func() bool { return h.ring.head.Load() == head }) {
				break
			}
		}
	}
}

// pass offers the ring's new entries to each session once.
func (h *Hub) pass() {
	sessions := h.sessions.list()
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), (len(sessions)+fanChunk-1)/fanChunk) {
		workers.Go(func() {
			var b batch
			for {
				end := int(next.Add(fanChunk))
				begin := end - fanChunk
				if begin >= len(sessions) {
					return
				}
				for _, s := range sessions[begin:min(end, len(sessions))] {
					b = s.offer(b)
				}
			}
		})
	}
	workers.Wait()
}

// offer sends a session what it lacks, if the session is live and its transport accepts the frames
// at once. Otherwise it hands the session to its own goroutine. Most sessions lack the same
// entries, so b may already hold them. offer returns the batch for the next session.
func (s *Session) offer(b batch) batch {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live {
		head := s.hub.ring.head.Load()
		if s.next == head {
			return b
		}
		if b.from != s.next || b.to != head {
			b = s.hub.ring.after(s.next, b)
		}
		if !b.lapped && b.to >= head && s.advance(b.updates) {
			sent, err := s.transport.TrySend(b.frames...)
			if sent {
				s.sentBytes.Add(uint64(s.hub.metrics.countSent(b.frames)))
				s.next = b.to
				return b
			}
			if err != nil {
				s.end(err)
			}
			s.retreat(b.updates)
		}
		s.live = false
	}
	notify(s.pokes)
	return b
}
