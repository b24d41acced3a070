// Package fanout serves the state of a store to any number of streams.
//
// # Guarantees
//
//   - No stream is served before the store's source has synced and its state is published.
//   - A client receives every Update of every shard in the order of the shard's sequences. A client
//     that is too slow for that receives each changed key once, in its newest state. A client is
//     never dropped for being slow.
//   - An Update is encoded once, and all streams send the same bytes. Only streams with a
//     subscription get a part of it.
//   - A stream costs one position per shard and its buffers, however large the state is and however
//     slow its client is.
//   - The publisher never waits for a stream, and no stream waits for another. A few goroutines
//     send to the streams that keep up; each of the others has a goroutine of its own.
//   - A client that has seen newer state than this server is not sent back in time (see
//     Options.MaxBehindWait).
//
// # Publishing
//
// An idle hub publishes a change at once. While streams still receive the previous publish, a
// change waits until they have it, and then for as long again as sending it took. The wait is at
// most maxCoalesce in all. Under load, changes therefore share sends, and half of the time is left
// for other work. Changes that take traffic away from an endpoint do not wait.
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

// These are the defaults of Options.
const (
	// DefaultHeartbeat is short enough for a diverged node to be found within a minute.
	DefaultHeartbeat = 30 * time.Second
	// DefaultDrainWindow spreads the reconnections of thousands of nodes.
	DefaultDrainWindow = 5 * time.Second
	// DefaultMaxBehindWait is longer than one watch lags behind another unless something is wrong.
	DefaultMaxBehindWait = 10 * time.Second
	// DefaultColdBytes is about a hundred snapshots of 55,000 endpoints, which a few cores can send
	// at a time.
	DefaultColdBytes = 32 << 20
)

// frameCacheBytes is enough for the snapshot of a large cluster (250,000 endpoints) and its
// catch-ups.
const frameCacheBytes = 64 << 20

// maxCoalesce bounds how long a change waits until earlier changes are sent.
const maxCoalesce = 50 * time.Millisecond

// Options configures a Hub.
type Options struct {
	// Store holds the state that the hub serves.
	Store *store.Store
	// Authorize checks whether the caller behind ctx may be a client of this kind, for this Node.
	// It returns the user that the caller's share of the server is counted for, unless the client
	// is an agent, and when the caller's credentials expire. The hub ends the stream then, so that
	// the client has to present new ones. A zero time means that the credentials never expire. The
	// client receives the error unchanged, so it must be a gRPC status. Authorize is required.
	Authorize func(ctx context.Context, kind pb.ClientKind, nodeName string) (user string, until time.Time, err error)
	// ServerName and ServerVersion are sent to clients in Welcome.
	ServerName, ServerVersion string
	// Heartbeat is the interval between heartbeats; 0 means DefaultHeartbeat.
	Heartbeat time.Duration
	// DrainWindow is the time within which clients are asked to reconnect when the server stops; 0
	// means DefaultDrainWindow.
	DrainWindow time.Duration
	// MaxBehindWait is how long a client that has seen newer resource versions than this server
	// waits for the server to catch up. After that the client is served nonetheless. 0 means
	// DefaultMaxBehindWait.
	MaxBehindWait time.Duration
	// ColdBytes bounds the bytes in flight to clients that need whole shards at their start; 0
	// means DefaultColdBytes.
	ColdBytes int64
	// Servers is the initial list of servers that clients are told they may connect to. With a
	// ServerService, that Service's ready endpoints in the store replace the list.
	Servers       []*pb.Server
	ServerService model.ServiceKey
	// Upstream is the stream that feeds this server; nil unless it is a relay.
	Upstream Upstream
	// Logger is slog's default logger if nil.
	Logger *slog.Logger
	// Registerer registers the hub's metrics; nil means that they are not registered.
	Registerer prometheus.Registerer
}

// Upstream is the stream that feeds a relay. Programmed, Nodes and Nack must not wait.
type Upstream interface {
	// Path returns the epochs in Welcome.path. ok is false while there is no stream or its initial
	// state is incomplete. Hub.UpstreamEnded must be called after ok has become false.
	Path() (path []uint64, ok bool)
	// Mark returns the position up to which one of upstream's shards is written to the store.
	Mark(shard uint32) model.Position
	// Programmed reports that all nodes have had a shard programmed up to a Mark since at, which is
	// when the last of them had it. last is the name of that node, or empty.
	Programmed(shard uint32, mark model.Position, at time.Time, last string)
	// Nodes reports how many of the relay's nodes hold what Programmed has reported.
	Nodes(count int)
	// Nack passes on that a node cannot program an object, or that an earlier nack is resolved. It
	// returns false if too many nacks are open already; the hub then tries again with each
	// heartbeat.
	Nack(*pb.Nack) bool
}

// Hub publishes the store's changes and serves them to streams. Its invariants, under mu:
//
//  1. streams holds every registered stream s at index s.index.
//  2. byNode holds the same streams by node name, which is empty for clients without a node.
//  3. agents holds each node's latest agent. An older stream of the node is about to end.
//  4. others counts the streams of each user that are not agents'; it is at most maxOthers.
type Hub struct {
	pb.UnimplementedDistributionServiceServer

	options     Options
	log         *slog.Logger
	store       *store.Store
	metrics     *metrics
	frames      *frameCache
	cold        *turns
	allowances  *allowances
	nodes       atomic.Int64 // served nodes, including those behind relays
	convergence *convergence
	started     time.Time

	// marks is nil unless the server is a relay.
	marks *marks
	// programmed.nodes is the number of nodes last reported to Upstream. Its mutex guards it.
	programmed struct {
		sync.Mutex
		nodes int
	}
	// untold is set when Upstream had no room for a nack; see retell.
	untold atomic.Bool

	ring ring
	// work wakes the fan-out when the ring has grown.
	work chan struct{}

	// mu guards the fields up to replicas. Nothing is encoded or sent while it is held.
	mu sync.Mutex
	// idle is closed while the streams that keep up have everything. rested is the end of the pause
	// after that: as long again as the sending took.
	idle   chan struct{}
	rested time.Time
	// streams are all streams. If listed is set, list has handed out the slice, so it must be
	// copied before a change.
	streams []*stream
	listed  bool
	byNode  map[string]map[*stream]struct{}
	agents  map[string]*stream
	// others is the number of streams that are not agents', by user.
	others map[string]int
	// reached is closed and replaced by each publish.
	reached chan struct{}
	// servers is the frame that names servers to clients, and replicas its decoded content.
	servers  wire.Frame
	replicas []*pb.Server

	// drainBegun is done once the hub begins to drain.
	drainBegun context.Context
	drain      context.CancelFunc

	replacedLogged, behindLogged, tooManyLogged, tooOftenLogged, lateLogged rate.Sometimes
}

// New returns a hub. It accepts streams while Run is running.
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
	var digesting <-chan struct{} // nil means that no heartbeat is being computed
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
			// In a large cluster, digests take milliseconds. Another goroutine computes them first,
			// so that the publisher only adds what changed in the meantime.
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

// coalesce waits until the previous publish is sent and the pause after it is over. It returns
// earlier after maxCoalesce, or if the store holds an urgent change.
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
	// Convergence must know the Update before a client can acknowledge it.
	p := h.store.Publish(func(u *model.Update) {
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
		// Sources reject strings that are not UTF-8, so this is not expected.
		if err != nil {
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
	// This comes last: whoever waits for reached finds everything that was published.
	close(h.reached)
	h.reached = make(chan struct{})
	h.mu.Unlock()
	h.metrics.publishSeconds.Observe(time.Since(start).Seconds())
}

// add appends an entry to the ring and wakes the fan-out.
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

// beat sends a new heartbeat to all streams. In the ring, it follows the Updates that its digest
// includes.
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

// broadcast sends f, which is not an Update, to all streams; streams with a subscription get
// narrowed.
func (h *Hub) broadcast(f, narrowed wire.Frame) {
	h.add(entry{frames: []wire.Frame{f}, narrowed: []wire.Frame{narrowed}, bytes: len(f), held: len(f)})
}

// mustEncode encodes a message that contains no strings from outside. It panics on an error.
func mustEncode(r *pb.StreamResponse) wire.Frame {
	f, err := wire.Encode(r)
	if err != nil {
		panic(err)
	}
	return f
}

// list returns all streams. The caller must not change the slice.
func (h *Hub) list() []*stream {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.listed = true
	return h.streams
}

// ownStreamsLocked copies the list of streams if list has handed it out, so that it may be changed.
func (h *Hub) ownStreamsLocked() {
	if h.listed {
		h.streams, h.listed = slices.Clone(h.streams), false
	}
}

// maxOthers bounds the open streams of one identity that are not agents': those of observers,
// operators and relays. A node has one agent.
const maxOthers = 256

// register adds a stream. A Node's agent replaces the node's older stream.
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
	// UpstreamEnded cannot have ended this stream between its admission and its registration.
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

// nodeChanged makes the streams that follow a Node send it again.
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

// Drain asks all clients to reconnect elsewhere and ends their streams, spread over the first half
// of the drain window. New streams are refused. Drain returns at once; the transports' graceful
// stop waits for the streams.
func (h *Hub) Drain() { h.drain() }

// drainDelay returns a random duration within the first half of the drain window.
func (h *Hub) drainDelay() time.Duration { return rand.N(h.options.DrainWindow/2 + 1) }
