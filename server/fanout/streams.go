package fanout

import (
	"cmp"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Stream describes one client.
type Stream struct {
	Node, Peer          string
	Kind                pb.ClientKind
	Version, Programmer string
	Since               time.Time
	// Synced reports whether the client has been sent its initial state, and Reported whether it
	// has acknowledged it.
	Synced, Reported bool
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

// Streams returns all clients, sorted by node name. With a service, it sets Lacks for each of them.
func (h *Hub) Streams(service *model.ServiceKey) []Stream {
	var snapshot *store.Snapshot
	var changed uint64
	if service != nil {
		snapshot = h.store.Snapshot(service.Shard(h.store.Shards()))
		changed = snapshot.ChangedAt(*service)
	}
	now := time.Now()
	var out []Stream
	for _, s := range h.list() {
		i := Stream{
			Node: s.node, Peer: s.peer, Kind: s.kind, Version: s.version, Programmer: s.programmer, Since: s.since,
			Synced: s.synced.Load(), SentBytes: s.reports.sentBytes.Load(),
		}
		r := &s.reports
		r.mu.Lock()
		i.Reported, i.LastNack = r.reported, r.lastNack
		nacked := r.dropped // a dropped nack may concern this Service
		for _, n := range r.nacks {
			i.Nacks = append(i.Nacks, n.Nack)
			nacked = nacked || service != nil && n.of(*service, snapshot)
		}
		if r.member != nil {
			i.Nodes = r.member.nodes
			i.LagSequences, i.Lag = h.convergence.lag(r.member, now)
			i.Lacks = service != nil && (!r.reported || nacked || !h.convergence.has(r.member, snapshot.Shard(), changed))
		} else { // it has no initial state yet, or programs nothing
			i.Lacks = service != nil && s.kind != pb.ClientKind_CLIENT_KIND_OBSERVER
		}
		r.mu.Unlock()
		slices.SortFunc(i.Nacks, func(a, b Nack) int { return a.At.Compare(b.At) })
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b Stream) int { return cmp.Or(cmp.Compare(a.Node, b.Node), a.Since.Compare(b.Since)) })
	return out
}

// Convergences returns how long nodes took to program the latest Updates, newest first.
func (h *Hub) Convergences() []Convergence { return h.convergence.latest() }
