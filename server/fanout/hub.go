// Package fanout serves the state of a store to any number of streams.
//
// # Guarantees
//
//   - Nobody is served before the store's source has synced, and what it gave is published.
//   - A stream's client gets every Update of every shard in the order of its sequences, or, where it is too slow for that,
//     each changed key once in its newest state. It is never dropped for being slow.
//   - An Update is encoded once; the same bytes go to all streams.
//   - A stream costs a position in each shard and its buffers, however large the state is and however slow its client.
//   - The publisher never waits for a stream, nor does one stream for another: those that keep up are sent to from a few
//     goroutines, those that don't have their own.
//   - A client that knows more than this server is not sent back in time (see Options.MaxBehindWait).
//
// # Publishing
//
// What the source writes is published at once, as long as the streams have got what was published before. While that is
// under way changes wait for it to end, and for as long again as it took, maxCoalesce at most in all: under load, they share
// sends, and half of the time is left for other work. Changes that take traffic from an endpoint do not wait.
package fanout

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Defaults of Options.
const (
	// DefaultHeartbeat is short enough for a diverged node to be found within a minute.
	DefaultHeartbeat = 30 * time.Second
	// DefaultDrainWindow spreads the reconnections of thousands of nodes.
	DefaultDrainWindow = 5 * time.Second
	// DefaultMaxBehindWait is longer than a watch is behind another one unless something is wrong.
	DefaultMaxBehindWait = 10 * time.Second
	// DefaultColdBytes is a hundred snapshots of 55,000 endpoints at a time: as many as some cores can send.
	DefaultColdBytes = 32 << 20
)

// frameCacheBytes is enough for the snapshot of a large cluster (250,000 endpoints) and its catch-ups.
const frameCacheBytes = 64 << 20

// maxCoalesce bounds how long a change waits for those before it to be sent.
const maxCoalesce = 50 * time.Millisecond

// Options set up a Hub.
type Options struct {
	// Store is what is served.
	Store *store.Store
	// Authorize tells whether the caller behind the context may be a client of that kind, for that Node, as
	// whom it has its share of the server where it is no agent, and until when its credentials hold, zero
	// for ever: then its stream ends, so that it has to show others. Its error goes to the client as it is,
	// so it is a gRPC status. Required.
	Authorize func(ctx context.Context, kind pb.ClientKind, nodeName string) (user string, until time.Time, err error)
	// ServerName and ServerVersion are told to clients.
	ServerName, ServerVersion string
	// Heartbeat is the interval between heartbeats; 0: DefaultHeartbeat.
	Heartbeat time.Duration
	// DrainWindow is the time within which clients are asked to reconnect when the server stops; 0: DefaultDrainWindow.
	DrainWindow time.Duration
	// MaxBehindWait is how long a client that has seen newer resource versions than this server waits for it to catch up,
	// before it is served nonetheless; 0: DefaultMaxBehindWait.
	MaxBehindWait time.Duration
	// ColdBytes bounds the bytes that are on their way to clients that need whole shards to begin with; 0: DefaultColdBytes.
	ColdBytes int64
	// Servers are told to clients as where else to connect; with a ServerService they are that Service's ready endpoints, as
	// the store has them.
	Servers       []*pb.Server
	ServerService model.ServiceKey
	// Upstream is set on a relay.
	Upstream Upstream
	// Logger; nil: slog's default.
	Logger *slog.Logger
	// Registerer for metrics; nil: none.
	Registerer prometheus.Registerer
}

// Upstream is the stream that feeds a relay.
type Upstream interface {
	// Path is what Welcome.path said; ok is false while there is no stream, or not all has come on it. Hub.UpstreamEnded must
	// be called after it has become false.
	Path() (path []uint64, ok bool)
	// Mark gives how much of one of upstream's shards has been written to the store.
	Mark(shard uint32) model.Position
	// Programmed tells that all nodes have had a shard programmed up to a Mark since a time, which is that of the last of them;
	// its name may be empty. It must not wait.
	Programmed(shard uint32, mark model.Position, at time.Time, last string)
	// Nodes tells how many nodes the relay serves that hold what Programmed has told. It must not wait.
	Nodes(count int)
	// Nack passes on what a node can't program, or what it can again, or has taken with it. It is false where too much stands
	// already, and is tried again with each heartbeat. It must not wait.
	Nack(*pb.Nack) bool
}

// Hub publishes the store's changes and serves them to streams.
type Hub struct {
	pb.UnimplementedDistributionServiceServer

	options     Options
	log         *slog.Logger
	store       *store.Store
	metrics     *metrics
	frames      *frameCache
	cold        *turns
	allowances  *allowances
	nodes       atomic.Int64 // that are served, those of relays included
	convergence *convergence
	started     time.Time

	// marks is nil but on a relay.
	marks *marks
	// programmed is how many nodes Upstream knows of.
	programmed struct {
		sync.Mutex
		nodes int
	}
	// untold: Upstream had no room for some nack.
	untold atomic.Bool

	ring ring
	// work tells the fan-out that the ring has grown.
	work chan struct{}

	// mu guards what follows. It is held for moments: no encoding, no sending.
	mu sync.Mutex
	// idle is closed as long as the streams that keep up have got everything; rested is when as much time has passed since
	// then as that took.
	idle   chan struct{}
	rested time.Time
	// streams, all of them; replaced, not changed, when listed is set.
	streams []*stream
	listed  bool
	byNode  map[string]map[*stream]struct{}
	agents  map[string]*stream
	others  map[string]int // streams that are no agents', by who is on them
	// reached is closed, and made anew, with each publish.
	reached chan struct{}
	// servers are what clients are told, replicas what it says.
	servers  wire.Frame
	replicas []*pb.Server

	// drainBegun ends when the hub begins to drain.
	drainBegun context.Context
	drain      context.CancelFunc

	replacedLogged, behindLogged, tooManyLogged, tooOftenLogged, lateLogged rate.Sometimes
}

// New makes a hub. Run must be running for streams to be served.
func New(o Options) *Hub {
	setDefault(&o.Heartbeat, DefaultHeartbeat)
	setDefault(&o.DrainWindow, DefaultDrainWindow)
	setDefault(&o.MaxBehindWait, DefaultMaxBehindWait)
	setDefault(&o.ColdBytes, DefaultColdBytes)
	setDefault(&o.Logger, slog.Default())
	idle := make(chan struct{})
	close(idle)
	h := &Hub{
		options: o, log: o.Logger, store: o.Store, started: time.Now(),
		frames: newFrameCache(frameCacheBytes), cold: newTurns(o.ColdBytes), allowances: newAllowances(),
		work: make(chan struct{}, 1), idle: idle, reached: make(chan struct{}),
		byNode: make(map[string]map[*stream]struct{}), agents: make(map[string]*stream), others: make(map[string]int),
		replacedLogged: rate.Sometimes{First: 5, Interval: time.Minute}, behindLogged: rate.Sometimes{First: 5, Interval: time.Minute},
		tooManyLogged: rate.Sometimes{Interval: time.Minute}, tooOftenLogged: rate.Sometimes{Interval: time.Minute}, lateLogged: rate.Sometimes{Interval: time.Minute},
	}
	h.drainBegun, h.drain = context.WithCancel(context.Background())
	h.metrics = newMetrics(o.Registerer, h)
	h.convergence = newConvergence(o.Store.Shards(), h.metrics)
	if o.Upstream != nil {
		h.marks = &marks{upstream: o.Upstream, shards: make([]shardMarks, o.Store.Shards())}
		h.convergence.done = h.marks.programmed
	}
	h.ring.reach(o.Store.Reached())
	h.announce(o.Servers)
	return h
}

func setDefault[T comparable](v *T, to T) {
	var zero T
	if *v == zero {
		*v = to
	}
}

// Run publishes what the source writes until the context ends.
func (h *Hub) Run(ctx context.Context) {
	select {
	case <-h.store.WaitSynced():
	case <-ctx.Done():
		return
	}
	var fanning sync.WaitGroup
	defer fanning.Wait()
	fanning.Go(func() { h.fan(ctx) })
	beat := time.NewTicker(h.options.Heartbeat)
	defer beat.Stop()
	digested := make(chan struct{})
	var digesting <-chan struct{} // nil: no heartbeat is on its way
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.store.Urgent():
			h.publish()
		case <-h.store.Dirty():
			h.coalesce(ctx)
			h.publish()
		case <-beat.C:
			// In a large cluster digests take milliseconds. What changes meanwhile is all that the publisher computes itself.
			if digesting == nil {
				digesting = digested
				fanning.Go(func() {
					h.store.Digest()
					select {
					case digested <- struct{}{}:
					case <-ctx.Done():
					}
				})
			}
		case <-digesting:
			digesting = nil
			h.beat()
		}
	}
}

// coalesce waits for what was published before to be sent, but not for long, and not if it is urgent.
func (h *Hub) coalesce(ctx context.Context) {
	latest := time.Now().Add(maxCoalesce)
	wait := func(until time.Time, or <-chan struct{}) (goOn bool) {
		t := time.NewTimer(time.Until(until))
		defer t.Stop()
		select {
		case <-or:
			return true
		case <-t.C:
		case <-h.store.Urgent():
		case <-ctx.Done():
		}
		return false
	}
	h.mu.Lock()
	idle := h.idle
	h.mu.Unlock()
	if !wait(latest, idle) {
		return
	}
	h.mu.Lock()
	rested := h.rested
	h.mu.Unlock()
	if time.Now().Before(rested) {
		if rested.After(latest) {
			rested = latest
		}
		wait(rested, nil)
	}
}

// publish makes the store's pending changes visible to the streams.
func (h *Hub) publish() {
	start := time.Now()
	var positions []model.Position
	if h.marks != nil {
		positions = h.marks.before()
	}
	p := h.store.Publish(func(u *model.Update) { // before any client can acknowledge it
		if h.marks != nil {
			h.marks.updated(u.Shard, u.To, positions[u.Shard])
		}
		h.convergence.published(u.Shard, u.To, start)
	})
	if h.marks != nil {
		h.marks.after(positions)
	}
	e := entry{}
	for _, u := range p.Updates {
		frames, err := wire.EncodeParts(u)
		if err != nil { // strings that are no UTF-8: sources let none through
			h.log.Error("An update can't be encoded; clients will be caught up from snapshots", "shard", u.Shard, "err", err)
			h.metrics.encodeErrors.Inc()
			continue
		}
		e.add(u, frames)
		h.metrics.updates.Inc()
		h.metrics.updateBytes.Observe(float64(wire.Bytes(frames)))
	}
	if len(e.updates) > 0 {
		h.add(e)
	}
	h.ring.reach(h.store.Reached())
	h.mu.Lock()
	relays := h.relaysLocked()
	h.mu.Unlock()
	for _, s := range relays {
		notify(s.pokes)
	}
	h.announceReplicas(p.Updates)
	for _, name := range p.Nodes {
		h.nodeChanged(name)
	}
	h.mu.Lock()
	close(h.reached) // the last, so that who waits for it finds all of the publish
	h.reached = make(chan struct{})
	h.mu.Unlock()
	h.metrics.publishSeconds.Observe(time.Since(start).Seconds())
}

// add appends to the ring, and has the streams get it.
func (h *Hub) add(e entry) {
	h.ring.add(e)
	h.mu.Lock()
	select {
	case <-h.idle:
		h.idle = make(chan struct{})
	default:
	}
	h.mu.Unlock()
	notify(h.work)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// beat makes a new heartbeat for all streams. In the ring it comes after the Updates that its digest includes.
func (h *Hub) beat() {
	h.retell()
	h.convergence.observeOld(time.Now())
	digest, sequences := h.store.Digest()
	m := &pb.Heartbeat{Digest: digest[:]}
	for _, sequence := range sequences {
		m.SequenceSum += sequence
	}
	h.broadcast(mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: m}}), lifeSign)
}

// broadcast sends a frame that is no Update to all streams, and another one to those with a subscription.
func (h *Hub) broadcast(f, narrowed wire.Frame) {
	h.add(entry{frames: []wire.Frame{f}, narrowed: []wire.Frame{narrowed}, bytes: len(f), held: len(f)})
}

// mustEncode encodes what has no strings from outside.
func mustEncode(r *pb.StreamResponse) wire.Frame {
	f, err := wire.Encode(r)
	if err != nil {
		panic(err)
	}
	return f
}

// list gives all streams. The list must not be changed.
func (h *Hub) list() []*stream {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.listed = true
	return h.streams
}

// ownStreamsLocked makes the list one that may be changed.
func (h *Hub) ownStreamsLocked() {
	if h.listed {
		h.streams, h.listed = slices.Clone(h.streams), false
	}
}

// maxOthers bounds the streams of one identity that are no agents': observers', operators' and relays'. A node's agent has one.
const maxOthers = 256

// register adds a stream. If it is a Node's agent, it takes the place of an older one.
func (h *Hub) register(s *stream) error {
	h.mu.Lock()
	if s.kind != pb.ClientKind_CLIENT_KIND_AGENT && h.others[s.user] == maxOthers {
		h.mu.Unlock()
		h.metrics.starts.WithLabelValues("too_many").Inc()
		h.tooManyLogged.Do(func() {
			h.log.Warn("A stream of an observer or relay is refused, as it has as many as it may; more are only counted for a while",
				"user", s.user, "peer", s.peer, "streams", maxOthers)
		})
		return status.Errorf(codes.ResourceExhausted, "%d streams of observers and relays are open for %q, as many as one may have: close some",
			maxOthers, s.user)
	}
	h.ownStreamsLocked()
	s.index = len(h.streams)
	h.streams = append(h.streams, s)
	if h.byNode[s.node] == nil {
		h.byNode[s.node] = make(map[*stream]struct{})
	}
	h.byNode[s.node][s] = struct{}{}
	var old *stream
	if s.kind == pb.ClientKind_CLIENT_KIND_AGENT {
		old = h.agents[s.node]
		h.agents[s.node] = s
	} else {
		h.others[s.user]++
	}
	h.mu.Unlock()
	// Between the stream's admission and now UpstreamEnded did not find it.
	if up := h.options.Upstream; up != nil && s.kind == pb.ClientKind_CLIENT_KIND_RELAY {
		if _, ok := up.Path(); !ok {
			s.end(errNoUpstream)
		}
	}
	if old != nil {
		h.metrics.replaced.Inc()
		h.replacedLogged.Do(func() {
			h.log.Info("A newer stream of the same node ends an older one", "node", s.node, "from", s.peer, "older", old.peer)
		})
		old.leave()
		old.end(status.Errorf(codes.Aborted, "a newer stream of node %q, from %s, has taken this one's place: "+
			"if that was not this agent, two are running with the same node name", s.node, s.peer))
	}
	return nil
}

func (h *Hub) unregister(s *stream) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ownStreamsLocked()
	last := len(h.streams) - 1
	h.streams[s.index] = h.streams[last]
	h.streams[s.index].index = s.index
	h.streams[last] = nil
	h.streams = h.streams[:last]
	delete(h.byNode[s.node], s)
	if len(h.byNode[s.node]) == 0 {
		delete(h.byNode, s.node)
	}
	if s.kind != pb.ClientKind_CLIENT_KIND_AGENT {
		if h.others[s.user]--; h.others[s.user] == 0 {
			delete(h.others, s.user)
		}
	} else if h.agents[s.node] == s {
		delete(h.agents, s.node)
	}
}

// nodeChanged has those get a Node who follow it.
func (h *Hub) nodeChanged(name string) {
	h.mu.Lock()
	var to []*stream
	for s := range h.byNode[name] {
		to = append(to, s)
	}
	to = append(to, h.relaysLocked()...)
	h.mu.Unlock()
	for _, s := range to {
		s.ask(func() {
			if s.nodes == nil {
				s.nodes = make(map[string]struct{})
			}
			s.nodes[name] = struct{}{}
		})
	}
}

func (h *Hub) relaysLocked() (relays []*stream) {
	for s := range h.byNode[""] {
		if s.kind == pb.ClientKind_CLIENT_KIND_RELAY {
			relays = append(relays, s)
		}
	}
	return relays
}

// Drain tells all clients to go elsewhere and ends their streams, spread over the first half of the drain window. New
// streams are refused. It returns at once; the transports' graceful stop waits for the streams.
func (h *Hub) Drain() { h.drain() }

// drainDelay is a random part of the first half of the window.
func (h *Hub) drainDelay() time.Duration { return rand.N(h.options.DrainWindow/2 + 1) }
