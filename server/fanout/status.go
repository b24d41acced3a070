package fanout

import (
	"cmp"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Status summarizes a hub.
type Status struct {
	ServerName, ServerVersion string
	Started                   time.Time
	Draining                  bool
	// Sessions counts the open sessions by kind of client.
	Sessions map[pb.ClientKind]int
	// Nodes counts the served nodes, including those behind relays.
	Nodes int
	// Servers is the list of servers that clients are sent.
	Servers []*pb.Server
	// Relay reports whether the hub has an upstream, Connected whether the upstream has a path, and
	// Path is that path.
	Relay, Connected bool
	Path             []uint64
}

// Status returns the hub's status. It is cheap, however many sessions there are.
func (h *Hub) Status() Status {
	servers, _ := h.announced()
	s := Status{
		ServerName: h.options.ServerName, ServerVersion: h.options.ServerVersion, Started: h.started,
		Draining: h.drainBegun.Err() != nil, Sessions: make(map[pb.ClientKind]int), Nodes: int(h.servedNodes.Load()),
		Servers: servers,
	}
	for _, session := range h.sessions.list() {
		s.Sessions[session.kind]++
	}
	if h.upward != nil {
		path, stream := h.upward.Path()
		s.Relay, s.Connected, s.Path = true, stream != nil, path
	}
	return s
}

// SessionStatus describes one client.
type SessionStatus struct {
	Node, Peer          string
	Kind                pb.ClientKind
	Version, Programmer string
	Since               time.Time
	// Synced reports whether the client has been sent its initial state, and Acked whether it has
	// acknowledged it.
	Synced, Acked bool
	// Nodes is how many nodes the client stands for: 1 for an agent, any number for a relay.
	Nodes int
	// LagSequences is how many sequences the client is behind, summed over all shards. Lag is how
	// long ago the oldest Update that it lacks was published.
	LagSequences uint64
	Lag          time.Duration
	SentBytes    uint64
	// Nacks are the open nacks, oldest first. LastNack may have been resolved since.
	Nacks    []Nack
	LastNack Nack
	// Lacks reports whether the client lacks the server's latest state of the requested Service, or
	// has an open nack that concerns it.
	Lacks bool
}

// Sessions returns all clients, sorted by node name. With a service, it sets Lacks for each of
// them.
func (h *Hub) Sessions(service *model.ServiceKey) []SessionStatus {
	var about *serviceQuestion
	if service != nil {
		snapshot := h.store.Snapshot(service.Shard(h.store.Shards()))
		about = &serviceQuestion{service: *service, snapshot: snapshot, changed: snapshot.ChangedAt(*service)}
	}
	now := time.Now()
	var out []SessionStatus
	for _, s := range h.sessions.list() {
		i := SessionStatus{
			Node: s.node, Peer: s.peer, Kind: s.kind, Version: s.version, Programmer: s.programmer, Since: s.since,
			Synced: s.synced.Load(), SentBytes: s.sentBytes.Load(),
		}
		s.reports.describe(&i, about, now)
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b SessionStatus) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), a.Since.Compare(b.Since))
	})
	return out
}

// Convergences returns how long nodes took to program the latest Updates, newest first.
func (h *Hub) Convergences() []Convergence { return h.convergence.latest() }
