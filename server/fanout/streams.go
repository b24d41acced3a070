package fanout

import (
	"cmp"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Stream is what is known of one client.
type Stream struct {
	Node, Peer          string
	Kind                pb.ClientKind
	Version, Programmer string
	Since               time.Time
	// Synced: the client has been sent everything. Reported: it has acknowledged what it was sent then.
	Synced, Reported bool
	// Nodes it stands for: 1 for an agent, any number for a relay.
	Nodes int
	// LagSequences and Lag are how far it is behind, over all shards, and since when something it lacks was published.
	LagSequences uint64
	Lag          time.Duration
	SentBytes    uint64
	// Nacks are open, oldest first; LastNack may be one that was resolved since.
	Nacks    []Nack
	LastNack Nack
	// Lacks: it does not have the Service asked for as the server does, or something of it is nacked.
	Lacks bool
}

// Streams gives all clients, by node name. With a service they say whether they lack its latest state.
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
		nacked := r.dropped // it may be of this Service
		for _, n := range r.nacks {
			i.Nacks = append(i.Nacks, n.Nack)
			nacked = nacked || service != nil && n.of(*service, snapshot)
		}
		if r.member != nil {
			i.Nodes = r.member.nodes
			i.LagSequences, i.Lag = h.convergence.lag(r.member, now)
			i.Lacks = service != nil && (!r.reported || nacked || !h.convergence.has(r.member, snapshot.Shard(), changed))
		} else { // it has not been sent everything yet, or programs nothing
			i.Lacks = service != nil && s.kind != pb.ClientKind_CLIENT_KIND_OBSERVER
		}
		r.mu.Unlock()
		slices.SortFunc(i.Nacks, func(a, b Nack) int { return a.At.Compare(b.At) })
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b Stream) int { return cmp.Or(cmp.Compare(a.Node, b.Node), a.Since.Compare(b.Since)) })
	return out
}

// Convergences gives how long nodes took for the latest Updates, newest first.
func (h *Hub) Convergences() []Convergence { return h.convergence.latest() }
