package fanout

import (
	"cmp"
	"slices"
	"time"

	"github.com/slicecast/slicecast/internal/model"
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
	// Lacks: it does not have the Service asked for as the server does.
	Lacks bool
}

// Streams gives all clients, by node name. With a service they say whether they lack its latest state.
func (h *Hub) Streams(service *model.ServiceKey) []Stream {
	var shard uint32
	var changed uint64
	if service != nil {
		shard = service.Shard(h.store.Shards())
		changed = h.store.Snapshot(shard).ChangedAt(*service)
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
		for _, n := range r.nacks {
			i.Nacks = append(i.Nacks, n.Nack)
		}
		if r.member != nil {
			i.Nodes = r.member.nodes
			i.LagSequences, i.Lag = h.convergence.lag(r.member, now)
			i.Lacks = service != nil && (!r.reported || !h.convergence.has(r.member, shard, changed))
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
