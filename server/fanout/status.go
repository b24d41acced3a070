package fanout

import (
	"time"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Status summarizes a hub.
type Status struct {
	ServerName, ServerVersion string
	Started                   time.Time
	Draining                  bool
	// Streams counts the open streams by kind of client.
	Streams map[pb.ClientKind]int
	// Nodes counts the served nodes, including those behind relays.
	Nodes int
	// Servers is the list of servers that clients are sent.
	Servers []*pb.Server
	// Relay reports whether the hub has an upstream. Connected and Path are the results of its Path
	// method.
	Relay, Connected bool
	Path             []uint64
}

// Status returns the hub's status. It is cheap, however many streams there are.
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
