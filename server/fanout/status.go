package fanout

import (
	"time"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Status is a hub at a glance.
type Status struct {
	ServerName, ServerVersion string
	Started                   time.Time
	Draining                  bool
	// Streams that are open, by kind of client.
	Streams map[pb.ClientKind]int
	// Nodes that are served, those of relays included.
	Nodes int
	// Servers that clients are told of.
	Servers []*pb.Server
	// Relay: the hub has an upstream. Connected and Path are what that says of itself.
	Relay, Connected bool
	Path             []uint64
}

// Status costs little, however many streams there are.
func (h *Hub) Status() Status {
	s := Status{
		ServerName: h.options.ServerName, ServerVersion: h.options.ServerVersion, Started: h.started,
		Draining: h.drainBegun.Err() != nil, Streams: make(map[pb.ClientKind]int), Nodes: int(h.nodes.Load()),
	}
	for _, stream := range h.list() {
		s.Streams[stream.kind]++
	}
	h.mu.Lock()
	s.Servers = h.replicas
	h.mu.Unlock()
	if up := h.options.Upstream; up != nil {
		s.Relay = true
		s.Path, s.Connected = up.Path()
	}
	return s
}
