// Package fanout serves the state of a store to any number of streams.
//
// # Guarantees
//
//   - Nobody is served before the store's source has synced.
//   - A stream's client gets every Update of every shard in the order of its sequences, or, where it is too slow for that,
//     each changed key once in its newest state. It is never dropped for being slow.
//   - An Update is encoded once; the same bytes go to all streams.
//   - A stream costs a position in each shard and its buffers, however large the state is.
//   - The publisher never waits for a stream: streams follow a ring of the latest frames, and who is lapped is caught up
//     from the shards' snapshots.
package fanout

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
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
)

// frameCacheBytes is enough for the snapshot of a large cluster (250,000 endpoints) and its catch-ups.
const frameCacheBytes = 64 << 20

// ringSize is how many frames a stream may be behind before it is caught up from snapshots instead.
const ringSize = 1024

// helloTimeout is how long a new stream may be silent.
const helloTimeout = 10 * time.Second

// Options set up a Hub.
type Options struct {
	// Store is what is served.
	Store *store.Store
	// Authorize tells whether the caller behind the context may be such a client: the agent of this node, an observer (which
	// may follow a node's Node) or a relay. Its error goes to the client as it is, so it is a gRPC status. Required.
	Authorize func(ctx context.Context, kind pb.ClientKind, nodeName string) error
	// ServerName and ServerVersion are told to clients.
	ServerName, ServerVersion string
	// Heartbeat is the interval between heartbeats; 0: DefaultHeartbeat.
	Heartbeat time.Duration
	// DrainWindow is the time within which clients are asked to reconnect when the server stops; 0: DefaultDrainWindow.
	DrainWindow time.Duration
	// Logger; nil: slog's default.
	Logger *slog.Logger
	// Registerer for metrics; nil: none.
	Registerer prometheus.Registerer
}

// Hub publishes the store's changes and serves them to streams.
type Hub struct {
	pb.UnimplementedDistributionServiceServer

	options Options
	log     *slog.Logger
	store   *store.Store
	metrics *metrics
	frames  *frameCache

	// mu guards what follows. It is held for moments: no encoding, no sending.
	mu sync.RWMutex
	// ring holds the latest frames; the one at position p is ring[p%ringSize].
	ring [ringSize]published
	// head is the position of the next frame.
	head uint64
	// heartbeat is the latest heartbeat, beats their number.
	heartbeat wire.Frame
	beats     uint64
	// changed is closed, and made anew, when head or beats move.
	changed chan struct{}
	// streams by node name; observers under "".
	streams map[string]map[*stream]struct{}

	draining chan struct{}
	drain    sync.Once
}

// published is one shard's Update, encoded.
type published struct {
	shard    uint32
	from, to uint64
	frame    wire.Frame
}

// New makes a hub. Run must be running for streams to be served.
func New(o Options) *Hub {
	if o.Heartbeat == 0 {
		o.Heartbeat = DefaultHeartbeat
	}
	if o.DrainWindow == 0 {
		o.DrainWindow = DefaultDrainWindow
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return &Hub{
		options: o, log: o.Logger, store: o.Store,
		metrics:  newMetrics(o.Registerer),
		frames:   newFrameCache(frameCacheBytes),
		changed:  make(chan struct{}),
		streams:  make(map[string]map[*stream]struct{}),
		draining: make(chan struct{}),
	}
}

// Run publishes what the source writes, as it comes: changes that come while one publish is under way go out together
// in the next. It returns when the context ends.
func (h *Hub) Run(ctx context.Context) {
	select {
	case <-h.store.WaitSynced():
	case <-ctx.Done():
		return
	}
	beat := time.NewTicker(h.options.Heartbeat)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.store.Dirty():
			h.publish()
		case <-beat.C:
			h.beat()
		}
	}
}

// publish makes the store's pending changes visible to the streams.
func (h *Hub) publish() {
	start := time.Now()
	p := h.store.Publish()
	frames := make([]published, 0, len(p.Updates))
	for _, u := range p.Updates {
		f, err := wire.EncodeUpdate(u)
		if err != nil { // strings that are no UTF-8: the API server lets none through
			h.log.Error("An update can't be encoded; clients will be caught up from snapshots", "shard", u.Shard, "err", err)
			h.metrics.encodeErrors.Inc()
			continue
		}
		frames = append(frames, published{u.Shard, u.From, u.To, f})
		h.metrics.updates.Inc()
		h.metrics.updateBytes.Observe(float64(len(f)))
	}
	if len(frames) > 0 {
		h.mu.Lock()
		for _, f := range frames {
			h.ring[h.head%ringSize] = f
			h.head++
		}
		h.wakeLocked()
		h.mu.Unlock()
	}
	for _, name := range p.Nodes {
		for _, s := range h.streamsOf(name) {
			s.poke(&s.nodeChanged)
		}
	}
	h.metrics.publishSeconds.Observe(time.Since(start).Seconds())
}

// beat makes a new heartbeat for all streams.
func (h *Hub) beat() {
	m := &pb.Heartbeat{}
	for i := range h.store.Shards() {
		snapshot := h.store.Snapshot(i)
		m.Sequences = append(m.Sequences, snapshot.Sequence())
		m.Digests = append(m.Digests, snapshot.Digest())
	}
	f, err := wire.Encode(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: m}})
	if err != nil {
		panic(err) // numbers only
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.heartbeat = f
	h.beats++
	h.wakeLocked()
}

func (h *Hub) wakeLocked() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// news is what a stream has read of the hub.
type news struct {
	position  uint64      // in the ring, of the next frame
	frames    []published // since the position before
	lapped    bool        // the ring has overtaken the reader: frames are missing
	beats     uint64      // number of heartbeats
	heartbeat wire.Frame  // the latest
	changed   <-chan struct{}
}

// present gives where the hub is, without frames.
func (h *Hub) present() news {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return news{position: h.head, beats: h.beats, changed: h.changed}
}

// follow gives what has come since. It uses the memory of n's frames.
func (h *Hub) follow(n news) news {
	h.mu.RLock()
	defer h.mu.RUnlock()
	next := news{position: h.head, frames: n.frames[:0], beats: h.beats, heartbeat: h.heartbeat, changed: h.changed}
	if next.lapped = h.head-n.position > ringSize; !next.lapped {
		for p := n.position; p < h.head; p++ {
			next.frames = append(next.frames, h.ring[p%ringSize])
		}
	}
	return next
}

func (h *Hub) streamsOf(node string) []*stream {
	h.mu.RLock()
	defer h.mu.RUnlock()
	var out []*stream
	for s := range h.streams[node] {
		out = append(out, s)
	}
	return out
}

func (h *Hub) add(s *stream) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.streams[s.node] == nil {
		h.streams[s.node] = make(map[*stream]struct{})
	}
	h.streams[s.node][s] = struct{}{}
	h.metrics.streams.Inc()
}

func (h *Hub) remove(s *stream) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.streams[s.node], s)
	if len(h.streams[s.node]) == 0 {
		delete(h.streams, s.node)
	}
	h.metrics.streams.Dec()
}

// Drain tells all clients to go elsewhere and ends their streams, spread over the first half of the drain window. New
// streams are refused. It returns at once; the gRPC server's GracefulStop waits for the streams.
func (h *Hub) Drain() { h.drain.Do(func() { close(h.draining) }) }

// Stream implements the wire API.
func (h *Hub) Stream(g pb.DistributionService_StreamServer) error {
	select {
	case <-h.draining:
		return status.Error(codes.Unavailable, "the server is draining: use another one, or try again later")
	default:
	}
	select {
	case <-h.store.WaitSynced():
	default:
		return status.Error(codes.Unavailable, "the server has not synced with its source yet: try again in a moment")
	}
	hello, err := h.hello(g)
	if err != nil {
		return err
	}
	if err := h.options.Authorize(g.Context(), hello.GetKind(), hello.GetNodeName()); err != nil {
		return err
	}
	if err := h.checkHello(hello); err != nil {
		return err
	}
	s := &stream{
		hub: h, grpc: g, node: hello.GetNodeName(), pokes: make(chan struct{}, 1), sequences: make([]uint64, h.store.Shards()),
		nacksLogged: rate.Sometimes{First: 5, Interval: time.Minute}, resyncsLogged: rate.Sometimes{First: 5, Interval: time.Minute},
	}
	h.add(s)
	defer h.remove(s)
	h.log.Debug("Stream opened", "node", s.node, "programmer", hello.GetProgrammer(), "version", hello.GetClientVersion())
	err = s.serve(hello)
	h.log.Debug("Stream closed", "node", s.node, "reason", err)
	return err
}

// hello waits for the first message, for a while: a client that says nothing may not hold a stream, nor the server's end.
func (h *Hub) hello(g pb.DistributionService_StreamServer) (*pb.Hello, error) {
	type received struct {
		request *pb.StreamRequest
		err     error
	}
	first := make(chan received, 1)
	go func() { // ends with the stream at the latest
		r, err := g.Recv()
		first <- received{r, err}
	}()
	timeout := time.NewTimer(helloTimeout)
	defer timeout.Stop()
	select {
	case r := <-first:
		if r.err == nil && r.request.GetHello() == nil {
			return nil, status.Error(codes.InvalidArgument, "the first message must be hello")
		}
		return r.request.GetHello(), r.err
	case <-timeout.C:
		return nil, status.Errorf(codes.InvalidArgument, "no hello within %v", helloTimeout)
	case <-h.draining:
		return nil, errDraining
	}
}

func (h *Hub) checkHello(hello *pb.Hello) error {
	n := len(hello.GetSequences())
	if n != len(hello.GetDigests()) || n > 4096 {
		return status.Errorf(codes.InvalidArgument, "hello has %d sequences and %d digests: give one of each per shard",
			n, len(hello.GetDigests()))
	}
	node := hello.GetNodeName() != ""
	switch kind := hello.GetKind(); {
	case kind == pb.ClientKind_CLIENT_KIND_RELAY:
		return status.Error(codes.Unimplemented, "this server does not serve relays: it is older than the client")
	case kind == pb.ClientKind_CLIENT_KIND_AGENT && !node, kind == pb.ClientKind_CLIENT_KIND_OBSERVER && node:
		return status.Errorf(codes.InvalidArgument, "hello of kind %v with node name %q", kind, hello.GetNodeName())
	}
	return nil
}

// errDraining ends a stream when the server stops.
var errDraining = status.Error(codes.Unavailable, "the server is draining: resume on another one")

// drainDelay is a random part of the first half of the window.
func (h *Hub) drainDelay() time.Duration {
	return rand.N(h.options.DrainWindow/2 + 1)
}

// catchUp gives the frame that leads from a sequence to a snapshot; 0: the whole shard.
func (h *Hub) catchUp(snapshot *store.Snapshot, from uint64) (wire.Frame, error) {
	if !snapshot.Knows(from) {
		from = 0
	}
	return h.frames.get(frameKey{snapshot.Shard(), from, snapshot.Sequence()}, func() (wire.Frame, error) {
		h.metrics.catchUps.Inc()
		return wire.EncodeUpdate(snapshot.Since(from))
	})
}

// resync gives the frame that holds, as of a snapshot, the objects that a client asked for again.
func (h *Hub) resync(snapshot *store.Snapshot, r *pb.Resync) (wire.Frame, error) {
	if len(r.GetKeys()) == 0 {
		return h.catchUp(snapshot, 0)
	}
	keys := make([]model.Key, 0, len(r.GetKeys()))
	for _, k := range r.GetKeys() {
		key, err := wire.KeyFromProto(k)
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "resync: %v", err)
		}
		keys = append(keys, key)
	}
	return wire.EncodeUpdate(snapshot.Select(keys))
}
