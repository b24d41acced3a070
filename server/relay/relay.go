// Package relay is the source of a relay. A relay is a server that follows another server's stream,
// as an agent does, and serves agents of its own. Relays let one cluster's state reach more
// nodes, or more distant ones, than one server should serve.
//
// # Guarantees
//
//   - A relay has the same digests as its root, and agents move freely between both. Only objects
//     with fields that the relay does not know have another version there: that of what it knows.
//   - The relay's store is synced once it holds everything that the upstream server has. When the
//     stream breaks, the store keeps its content, and the next stream brings the differences.
//   - The relay acks a position upstream only once all nodes behind it have programmed it. Each
//     upstream server receives the open Nacks of these nodes.
//   - While the relay follows no server, or one that is stale, it is stale itself, and its clients
//     are told so.
//   - A relay is not fed by itself through any number of other relays for longer than a moment.
//     When its own stream ends, fanout ends the streams of other relays, so that they check the
//     path of its next one.
package relay

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// Source feeds a store from another server. It reports to that server how far the nodes behind the
// store have come.
//
// Invariants:
//
//  1. path, stream and endStream are set while a stream is in sync, and only then. stream is done
//     once they are not.
//  2. A publish of the store sees the marks that belong to the published content, because both
//     change under mu.
type Source struct {
	store  *store.Store
	cache  *client.Cache
	client *client.Client
	// refused counts nacks that the client had no room for.
	refused prometheus.Counter

	mu        sync.Mutex // guards the fields below
	path      []uint64
	stream    context.Context
	endStream context.CancelFunc
	marks     []model.Position
	epoch     uint64 // epoch of the positions that arrived last
	// programmed holds the positions that Programmed was last called with, by shard.
	programmed []model.Position
	// staleSince is what Stale returned last.
	staleSince time.Time
}

var (
	_ source.Source   = (*Source)(nil)
	_ fanout.Upstream = (*Source)(nil)
)

// New returns the source that feeds the relay's store s. It connects when Run is called. The
// options must have Servers, DialOptions with a relay's transport credentials, and a Registerer.
// New sets their Cache and Relay.
func New(o client.Options, s *store.Store) *Source {
	u := &Source{
		store: s, cache: client.NewCache(),
		marks: make([]model.Position, s.Shards()), programmed: make([]model.Position, s.Shards()),
		refused: promauto.With(o.Registerer).NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "upstream", Name: "dropped_nacks_total",
			Help: "Number of times that a nack of this relay's nodes could not be passed on because too many nacks were " +
				"open. The relay tries again with each heartbeat.",
		}),
	}
	o.Cache = u.cache
	o.Relay = &client.Relay{
		NodesDigest: u.nodesDigest, Check: u.check, Applied: u.applied, Node: u.node, Reached: u.reached,
		Seen: s.SetSeen, InSync: u.inSync, Ended: u.ended,
	}
	u.client = client.New(o)
	return u
}

// Run implements source.Source. It ignores its sink, since the Source writes to its store.
func (u *Source) Run(ctx context.Context, _ source.Sink) error { return u.client.Run(ctx) }

// check returns an error if the relay cannot follow a server with this path and number of shards:
// the server must not be fed by this relay, and must have as many shards.
func (u *Source) check(path []uint64, shards uint32) error {
	if slices.Contains(path, u.store.Epoch()) {
		return fmt.Errorf("the server is fed by this relay, directly or through others (epoch %016x is in its path): "+
			"set --upstream-servers to servers that are nearer to the API server", u.store.Epoch())
	}
	if shards != u.store.Shards() {
		return fmt.Errorf("the server has %d shards and this relay %d: start the relay with --shards=%d",
			shards, u.store.Shards(), shards)
	}
	return nil
}

func (u *Source) ended() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.stream != nil {
		u.endStream()
	}
	u.path, u.stream, u.endStream = nil, nil, nil
}

// applied writes to the store what an Update did to the cache. It holds mu meanwhile, so that a
// publish which the write causes sees the marks that belong to it. There may be no later publish
// that could show them.
func (u *Source) applied(a client.Applied) {
	u.mu.Lock()
	defer u.mu.Unlock()
	rv := func(kind model.Kind) uint64 {
		if kind == model.KindService {
			return a.ResourceVersions.Services
		}
		return a.ResourceVersions.Slices
	}
	for _, key := range a.Removed {
		u.store.Remove(key, rv(key.Kind))
	}
	for _, o := range a.Objects {
		u.store.Upsert(o, rv(o.Key().Kind))
	}
	u.recordMarksLocked()
}

// recordMarksLocked records the positions that the store has reached. Only the caller's goroutine
// changes the cache.
func (u *Source) recordMarksLocked() {
	changes, ok := u.cache.Take()
	if !ok {
		return
	}
	u.epoch = changes.Epoch
	for shard, sequence := range changes.Positions {
		u.marks[shard] = model.Position{Epoch: changes.Epoch, Sequence: sequence}
	}
}

func (u *Source) nodesDigest() model.Digest {
	return model.NodesDigest(u.store.Nodes())
}

// node writes a Node to the store, or removes it if n is nil.
func (u *Source) node(name string, n *model.Node, resourceVersion uint64) {
	if n == nil {
		u.store.Remove(model.Key{Kind: model.KindNode, Name: name}, resourceVersion)
		return
	}
	u.store.Upsert(n, resourceVersion)
}

// reached records the resource versions that all shards have reached. A single update cannot show
// them, because updates of other shards may still be on their way.
func (u *Source) reached(v model.ResourceVersions) {
	u.store.Progress(model.KindService, v.Services)
	u.store.Progress(model.KindSlice, v.Slices)
	u.store.Progress(model.KindNode, v.Nodes)
}

// inSync completes the initial state of a stream with this path: it removes the Nodes that no
// longer exist and marks the store as synced.
func (u *Source) inSync(path []uint64, names map[string]struct{}) {
	if names != nil {
		for _, n := range u.store.Nodes() {
			if _, ok := names[n.Name]; !ok {
				u.node(n.Name, nil, 0)
			}
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.recordMarksLocked()
	if u.stream == nil {
		u.path = path
		u.stream, u.endStream = context.WithCancel(context.Background())
	}
	// A server that the relay returns to does not know what the relay's nodes programmed before.
	had := map[uint32]uint64{}
	for shard, m := range u.programmed {
		if m.Epoch == u.epoch {
			had[uint32(shard)] = m.Sequence
		}
	}
	if len(had) > 0 {
		u.client.Ack(u.epoch, had)
	}
	u.store.Synced()
}

// Connection returns the state of the relay's connection to its servers.
func (u *Source) Connection() client.Connection { return u.client.Connection() }

// Stale returns since when the relay may have missed changes, because it follows no server, or a
// server that is stale itself, and why. The time is zero if neither is the case. It stays that of
// the first of several reasons that follow each other.
func (u *Source) Stale() (since time.Time, why string) {
	since, why = u.stale()
	u.mu.Lock()
	defer u.mu.Unlock()
	if since.IsZero() || u.staleSince.IsZero() || since.Before(u.staleSince) {
		u.staleSince = since
	}
	return u.staleSince, why
}

func (u *Source) stale() (since time.Time, why string) {
	switch c := u.client.Connection(); {
	case c.Server.Address == "" && c.LastError != nil:
		return c.Since, "this relay follows no server: " + c.LastError.Error()
	case c.Server.Address == "":
		return c.Since, "this relay follows no server"
	case !c.StaleSince.IsZero():
		return c.StaleSince, "the server that this relay follows is stale: " + c.Server.Address
	}
	return time.Time{}, ""
}

// Path implements fanout.Upstream.
func (u *Source) Path() ([]uint64, context.Context) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.path, u.stream
}

// Mark implements fanout.Upstream.
func (u *Source) Mark(shard uint32) model.Position {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.marks[shard]
}

// Programmed implements fanout.Upstream.
func (u *Source) Programmed(shard uint32, m model.Position, at time.Time, last string) {
	u.mu.Lock()
	current := u.marks[shard].Epoch == m.Epoch
	u.programmed[shard] = m
	u.mu.Unlock()
	if current {
		u.client.AckSince(m.Epoch, map[uint32]uint64{shard: m.Sequence}, at, last)
	}
}

// Nodes implements fanout.Upstream.
func (u *Source) Nodes(count int) { u.client.SetNodes(uint32(count)) }

// Nack implements fanout.Upstream. Each upstream server receives the Nacks that are open.
func (u *Source) Nack(n *pb.Nack) bool {
	if u.client.Report(n) {
		return true
	}
	u.refused.Inc()
	return false
}
