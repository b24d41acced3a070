// Package fanout serves the state of a store to any number of streams.
//
// # Guarantees
//
//   - No stream is served before the store's source has synced and its state is published.
//   - A client receives every Update of every shard in the order of the shard's sequences. A client
//     that is too slow for that receives each changed key once, in its newest state. A client is
//     never dropped for being slow.
//   - An Update is encoded once, and all streams send the same bytes.
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
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
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

// logInterval is how often trouble of one kind that clients cause is logged.
const logInterval = time.Minute

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
	// Now returns the time by which credentials expire. nil means time.Now.
	Now func() time.Time
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
	// Stale returns since when the source may have missed changes, and why; the zero time means that
	// it has not. It must return quickly. nil means that the source never misses changes.
	Stale func() (since time.Time, why string)
	// Warn is called with each warning of a node that is new or has another reason. A node that
	// connects again reports its warnings again. Warn must not wait; nil means that nobody is told.
	Warn func(node string, w pb.NodeWarning, reason string)
	// Logger is slog's default logger if nil.
	Logger *slog.Logger
	// Registerer registers the hub's metrics; nil means that they are not registered.
	Registerer prometheus.Registerer
}

// Hub publishes the store's changes and serves them to sessions.
type Hub struct {
	pb.UnimplementedDistributionServiceServer

	options     Options
	log         *slog.Logger
	store       *store.Store
	metrics     *metrics
	frames      *frameCache
	turns       *turns
	allowances  *lru.Cache[identity, *allowance]
	sessions    *registry
	convergence *convergence
	upward      *upward // nil unless the server is a relay
	servedNodes atomic.Int64
	// warnings are the numbers of nodes that have each of wire.WarningNames.
	warnings []atomic.Int64
	started  time.Time

	ring ring
	work chan struct{} // wakes the fan-out when the ring has grown
	pace *pacer

	mu sync.Mutex // guards the fields up to staleSince; nothing is encoded or sent while it is held
	// published is closed and replaced by each publish.
	published chan struct{}
	// servers is the list that clients are sent, and serversFrame the frame with it.
	servers      []*pb.Server
	serversFrame wire.Frame
	// staleSince is since when the source may have missed changes, as clients are told; zero if it
	// has not.
	staleSince time.Time

	// drainBegun is done once the hub begins to drain.
	drainBegun context.Context
	drain      context.CancelFunc

	// logged bounds the log lines that clients cause.
	logged struct{ replaced, behind, tooMany, tooOften, late rate.Sometimes }
}

// New returns a hub. It accepts streams while Run is running.
func New(o Options) *Hub {
	o.Heartbeat = cmp.Or(o.Heartbeat, DefaultHeartbeat)
	o.DrainWindow = cmp.Or(o.DrainWindow, DefaultDrainWindow)
	o.MaxBehindWait = cmp.Or(o.MaxBehindWait, DefaultMaxBehindWait)
	o.ColdBytes = cmp.Or(o.ColdBytes, DefaultColdBytes)
	o.Logger = cmp.Or(o.Logger, slog.Default())
	if o.Now == nil {
		o.Now = time.Now
	}
	h := &Hub{
		options: o, log: o.Logger, store: o.Store, started: time.Now(), metrics: newMetrics(o.Registerer),
		frames: newFrameCache(frameCacheBytes), turns: newTurns(o.ColdBytes),
		sessions: newRegistry(), upward: newUpward(o.Upstream, o.Store.Shards()),
		warnings: make([]atomic.Int64, len(wire.WarningNames)),
		work:     make(chan struct{}, 1), pace: newPacer(), published: make(chan struct{}),
	}
	// An error is returned only for sizes below 1.
	h.allowances, _ = lru.New[identity, *allowance](maxIdentities)
	for _, few := range []*rate.Sometimes{&h.logged.replaced, &h.logged.behind} {
		few.First, few.Interval = 5, logInterval
	}
	for _, one := range []*rate.Sometimes{&h.logged.tooMany, &h.logged.tooOften, &h.logged.late} {
		one.Interval = logInterval
	}
	h.drainBegun, h.drain = context.WithCancel(context.Background())
	var programmed func(shard uint32, c completed)
	if h.upward != nil {
		programmed = h.upward.programmed
	}
	h.convergence = newConvergence(o.Store.Shards(), h.metrics, programmed)
	h.registerGauges(o.Registerer)
	h.ring.reach(o.Store.Reached())
	h.announce(o.Servers)
	return h
}

// ready returns nil if the hub accepts streams, and the status to refuse a stream with otherwise.
func (h *Hub) ready() error {
	if h.drainBegun.Err() != nil {
		return status.Error(codes.Unavailable, "the server is draining: use another server, or try again later")
	}
	if !h.store.Published() {
		return status.Error(codes.Unavailable, "the server has not synced with its source yet: try again later")
	}
	return nil
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
	var look <-chan time.Time // nil if the source never misses changes
	if h.options.Stale != nil {
		t := time.NewTicker(staleInterval)
		defer t.Stop()
		look = t.C
	}
	digested := make(chan struct{})
	var digesting <-chan struct{} // nil means that no heartbeat is being computed
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.store.Urgent():
			h.publish()
		case <-h.store.Dirty():
			h.pace.wait(ctx, h.store.Urgent())
			h.publish()
		case <-look:
			h.watchStale()
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

func (h *Hub) publish() {
	start := time.Now()
	p := h.publishStore(start)
	if e := h.encode(p.Updates); len(e.updates) > 0 {
		h.add(e)
	}
	h.ring.reach(h.store.Reached())
	for _, s := range h.sessions.relays() {
		notify(s.pokes) // to be sent what is reached
	}
	if p.Back {
		h.frames.forget() // they name the versions of before
		for _, s := range h.sessions.list() {
			s.request(func() bool { s.requests.back = true; return true })
		}
	}
	h.announceReplicas(p.Updates)
	for _, name := range p.Nodes {
		for _, s := range h.sessions.followers(name) {
			s.request(func() bool { s.requests.addNode(name); return true })
		}
	}
	h.mu.Lock()
	// This comes last: whoever waits for the publish finds everything.
	close(h.published)
	h.published = make(chan struct{})
	h.mu.Unlock()
	h.metrics.publishSeconds.Observe(time.Since(start).Seconds())
}

// publishStore publishes the store's pending changes. Convergence, and on a relay the marks, must
// know an Update before a client can acknowledge it.
func (h *Hub) publishStore(start time.Time) store.Publication {
	if h.upward == nil {
		return h.store.Publish(func(u *model.Update) { h.convergence.published(u.Shard, u.To, start, changedBy(u)) })
	}
	positions := h.upward.before()
	defer h.upward.after(positions)
	return h.store.Publish(func(u *model.Update) {
		h.upward.updated(u.Shard, u.To, positions[u.Shard])
		h.convergence.published(u.Shard, u.To, start, changedBy(u))
	})
}

func (h *Hub) encode(updates []*model.Update) (e entry) {
	for _, u := range updates {
		frames, err := wire.EncodeParts(u)
		// Sources reject strings that are not UTF-8, so this is not expected.
		if err != nil {
			h.log.Error("Cannot encode an update; clients will receive it from snapshots", "shard", u.Shard, "err", err)
			h.metrics.encodeErrors.Inc()
			continue
		}
		e.add(u, frames)
		h.metrics.updates.Inc()
		h.metrics.updateBytes.Observe(float64(wire.Bytes(frames)))
	}
	return e
}

func (h *Hub) nextPublish() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.published
}

func (h *Hub) add(e entry) {
	h.ring.add(e)
	h.pace.begin()
	notify(h.work)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// beat sends a new heartbeat to all clients. In the ring, it follows the Updates that its digest
// includes.
func (h *Hub) beat() {
	h.tellNacksAgain()
	h.convergence.observeOld(time.Now())
	digest, sequences := h.store.Digest()
	m := &pb.Heartbeat{Digest: digest[:]}
	for _, sequence := range sequences {
		m.SequenceSum += sequence
	}
	h.broadcast(mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: m}}))
}

// broadcast sends f, which is not an Update, to all clients.
func (h *Hub) broadcast(f wire.Frame) {
	h.add(entry{frames: []wire.Frame{f}, bytes: len(f), held: len(f)})
}

// mustEncode encodes a message that contains no strings from outside. It panics on an error.
func mustEncode(r *pb.StreamResponse) wire.Frame {
	f, err := wire.Encode(r)
	if err != nil {
		panic(err)
	}
	return f
}

// Drain asks all clients to reconnect elsewhere and ends their streams, spread over the first half
// of the drain window. New streams are refused. Drain returns at once; the transports' graceful
// stop waits for the streams.
func (h *Hub) Drain() { h.drain() }

func (h *Hub) drainDelay() time.Duration { return rand.N(h.options.DrainWindow/2 + 1) }
