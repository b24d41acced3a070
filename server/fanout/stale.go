package fanout

import (
	"time"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// staleGrace is for how long the source may have missed changes until clients are told, so that
	// a restart of the API server, or of a relay's upstream, concerns nobody.
	staleGrace = 10 * time.Second
	// staleInterval is how often the hub asks its source.
	staleInterval = time.Second
)

// watchStale sends all clients a message if the hub has become stale, or is stale no longer.
func (h *Hub) watchStale() {
	since, why := h.options.Stale()
	if time.Since(since) < staleGrace {
		since = time.Time{}
	}
	h.mu.Lock()
	changed := h.staleSince.IsZero() != since.IsZero()
	h.staleSince = since
	h.mu.Unlock()
	switch {
	case !changed:
		return
	case since.IsZero():
		h.log.Info("The source answers again, telling clients")
	default:
		h.log.Warn("The source may have missed changes, telling clients to look for another server", "since", since, "err", why)
	}
	f := h.staleFrame()
	h.broadcast(f)
}

// staleMs returns for how many milliseconds the hub has been stale, and 0 if it is not.
func (h *Hub) staleMs() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.staleSince.IsZero() {
		return 0
	}
	return uint64(max(time.Since(h.staleSince).Milliseconds(), 1))
}

// staleFrame returns the frame that tells a client whether the hub is stale.
func (h *Hub) staleFrame() wire.Frame {
	ms := h.staleMs()
	return mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{StaleMs: &ms}}})
}
