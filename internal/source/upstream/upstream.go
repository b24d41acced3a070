// Package upstream is the source of a relay: a server that feeds from another server's stream, as an agent does, and serves
// agents of its own. It exists so that one cluster's state can reach more nodes, or farther ones, than one server should
// serve.
//
// # Guarantees
//
//   - Objects keep the versions that the upstream server gave them, so that a relay has the same digests as its root, and
//     agents move freely between both.
//   - The relay's store is synced when it holds all that the upstream server has; when the stream breaks it keeps what it
//     holds, and gets what differs with the next one.
//   - What is acknowledged upstream, all nodes behind the relay have programmed; each upstream server hears what they can't.
//   - A relay does not feed on itself, through however many others, but for a moment: it ends the streams of other relays when
//     its own one ends, so that they see where the next one comes from.
package upstream

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/store"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Options set up a Source. All but ServerName, Version and MaxBackoff are required.
type Options struct {
	// Servers gives the upstream servers to begin with; others are learned from the stream.
	Servers func(context.Context) ([]client.Server, error)
	// ServerName is client.Options'.
	ServerName string
	// DialOptions must hold the transport credentials of a relay.
	DialOptions []grpc.DialOption
	// Version is told to the upstream server.
	Version string
	// MaxBackoff is client.Options'.
	MaxBackoff time.Duration
	Logger     *slog.Logger
	Metrics    prometheus.Registerer
}

// Source feeds a store from another server, and tells that server how far the nodes behind the store have come.
type Source struct {
	store  *store.Store
	cache  *client.Cache
	client *client.Client
	// lost is called when Path has become false.
	lost    func()
	refused prometheus.Counter

	mu    sync.Mutex
	path  []uint64 // nil as long as there is no stream that is in sync
	next  []uint64 // of a stream that is not in sync yet
	marks []model.Position
	epoch uint64 // of the positions that came last
	// programmed is what Programmed told last, by shard.
	programmed []model.Position
}

var _ source.Source = (*Source)(nil)

// New gives the source of a relay whose store it is; it connects when it runs. Each time that a stream has ended it calls
// lost, which is fanout.Hub.UpstreamEnded of the hub whose Upstream the Source is.
func New(o Options, s *store.Store, lost func()) *Source {
	u := &Source{
		store: s, lost: lost, cache: client.NewCache(), marks: make([]model.Position, s.Shards()), programmed: make([]model.Position, s.Shards()),
		refused: promauto.With(o.Metrics).NewCounter(prometheus.CounterOpts{
			Namespace: "slicecast", Subsystem: "upstream", Name: "dropped_nacks_total",
			Help: "Times that a nack of this relay's nodes could not be passed on, as too many stood already; it is tried again with each heartbeat.",
		}),
	}
	u.client = client.New(client.Options{
		Servers: o.Servers, ServerName: o.ServerName, DialOptions: o.DialOptions, Version: o.Version, Cache: u.cache,
		MaxBackoff: o.MaxBackoff, Logger: o.Logger, Registerer: o.Metrics,
		Relay: &client.Relay{
			NodesDigest: u.nodesDigest, Path: u.begin, Applied: u.applied, Node: u.node, Reached: u.reached,
			InSync: u.inSync, Ended: u.ended,
		},
	})
	return u
}

// Run implements source.Source. The sink is the store.
func (u *Source) Run(ctx context.Context, _ source.Sink) error { return u.client.Run(ctx) }

// begin checks a new stream: it must not come from this relay, and must divide the state as this relay does.
func (u *Source) begin(path []uint64) error {
	if slices.Contains(path, u.store.Epoch()) {
		return fmt.Errorf("that server is fed by this relay, directly or through others (epoch %016x is in its path): "+
			"give this relay a server that is nearer to the API server", u.store.Epoch())
	}
	if sequences, _ := u.cache.Digests(); uint32(len(sequences)) != u.store.Shards() {
		return fmt.Errorf("that server has %d shards and this relay %d: start the relay with --shards=%d",
			len(sequences), u.store.Shards(), len(sequences))
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.next = path
	return nil
}

func (u *Source) ended() {
	u.mu.Lock()
	u.path = nil
	u.mu.Unlock()
	u.lost()
}

// applied writes to the store what an Update did to the cache. It holds the lock meanwhile, so that a publish which the writing
// causes sees the marks that go with it: there may be no other one.
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
	u.movedLocked()
}

// movedLocked notes the positions that the store has reached. The caller is the only one who moves the cache.
func (u *Source) movedLocked() {
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

// node takes a Node; nil: it is gone.
func (u *Source) node(name string, n *model.Node) {
	if n == nil {
		u.store.Remove(model.Key{Kind: model.KindNode, Name: name}, 0)
		return
	}
	u.store.Upsert(n, 0)
}

// reached takes how far everything has come. No single update tells that: those of other shards may be on their way.
func (u *Source) reached(v model.ResourceVersions) {
	u.store.Progress(model.KindService, v.Services)
	u.store.Progress(model.KindSlice, v.Slices)
}

// inSync completes the state that a stream begins with.
func (u *Source) inSync(names map[string]struct{}) {
	if names != nil {
		nodes := u.store.Nodes()
		for _, n := range nodes {
			if _, ok := names[n.Name]; !ok {
				u.node(n.Name, nil)
			}
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.movedLocked()
	u.path = u.next
	// A server that the relay comes back to does not know what its nodes had before.
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

// Connection tells how the relay stands with its servers.
func (u *Source) Connection() client.Connection { return u.client.Connection() }

// Path is for fanout.Upstream.
func (u *Source) Path() ([]uint64, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.path, u.path != nil
}

// Mark is for fanout.Upstream.
func (u *Source) Mark(shard uint32) model.Position {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.marks[shard]
}

// Programmed is for fanout.Upstream.
func (u *Source) Programmed(shard uint32, m model.Position, at time.Time, last string) {
	u.mu.Lock()
	current := u.marks[shard].Epoch == m.Epoch
	u.programmed[shard] = m
	u.mu.Unlock()
	if current {
		u.client.AckSince(m.Epoch, shard, m.Sequence, at, last)
	}
}

// Nodes is for fanout.Upstream.
func (u *Source) Nodes(count int) { u.client.SetNodes(uint32(count)) }

// Nack is for fanout.Upstream. Each upstream server hears of what stands.
func (u *Source) Nack(n *pb.Nack) bool {
	if u.client.Report(n) {
		return true
	}
	u.refused.Inc()
	return false
}
