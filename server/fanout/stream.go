package fanout

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxNodeName is the length of the longest valid name of a Node, in bytes.
const maxNodeName = 253

// helloTimeout is how long a new stream may be silent.
const helloTimeout = 10 * time.Second

const (
	// maxKeys bounds the objects that a Resync may name. A client that lacks more asks for buckets
	// or for the shard.
	maxKeys = 1024
	// maxWaiting bounds the bytes of a stream's unanswered requests, in addition to one request for
	// each shard.
	maxWaiting = 64 << 10
	// resyncBytes is about the size of a Resync of one shard with the digests of its buckets.
	resyncBytes = 2 * model.HashSize * model.Buckets
)

// stream serves one client. Its invariants:
//
//  1. While live is set, only the fan-out sends frames and changes position and sequences, and it
//     holds mu. Otherwise only the stream's own goroutine does.
//  2. Only rest makes the stream live, and only when its goroutine has nothing left to send. A
//     relay's stream and a stream with a subscription are never live.
//  3. sequences is the client's position in each shard once the client has applied everything sent.
type stream struct {
	hub       *Hub
	transport Transport
	pokes     chan struct{} // wakes the stream's goroutine
	hello     chan held     // receives what the client holds, once
	ending    chan error    // receives the status that ends the stream
	index     int           // in hub.streams; guarded by hub.mu

	// introduce sets these fields from the client's Hello.
	node, peer          string
	user                string // the user that the client was admitted as
	kind                pb.ClientKind
	version, programmer string
	since               time.Time
	compressed, buckets bool
	// admitted is set once the client is authorized. Until then, it may send nothing but its Hello.
	admitted atomic.Bool

	// mu guards live and the fields below that say so. While live is set, it also guards position
	// and sequences.
	mu sync.Mutex
	// live reports that the fan-out owns the stream; see invariant 1. Guarded by mu.
	live bool
	// position is the position of the ring's next entry to send, and sequences has the client's
	// position in each shard. They belong to the owner of the stream; see invariant 1.
	position  uint64
	sequences []uint64
	synced    atomic.Bool // set once the client has been sent InSync
	// wanted is the set of Services the client subscribed to; nil means all. Only the goroutine
	// uses it.
	wanted *subscription
	// passed is the sequence up to which a narrowed stream has processed each shard, whether or not
	// anything was sent for it. Only the goroutine uses it.
	passed []uint64
	// reached is the last value that a relay's client was sent; see tellReached. Only the goroutine
	// uses it.
	reached model.ResourceVersions

	// whole has the shards that the client gets whole before it is in sync. Only the goroutine uses
	// it.
	whole map[uint32]struct{}
	// beats ticks when a client that waits for its initial state is due a heartbeat. Only the
	// goroutine uses it.
	beats *time.Ticker

	// The fields below are requests to the goroutine; guarded by mu.
	nodes     map[string]struct{} // the names of Nodes that have changed
	resyncs   map[uint32]*pending // by shard
	waiting   int                 // bytes of resyncs
	subscribe *pb.Subscription
	compare   bool // whether the client asks for digests
	// digestsAsked is set while the server waits for the digests of the client's shards; digests is
	// the client's answer.
	digestsAsked bool
	digests      []model.Digest
	// asked has the shards of a BucketQuery that the client has not answered yet.
	asked map[uint32]struct{}

	reports reports
}

func (h *Hub) newStream(t Transport) *stream {
	return &stream{
		since: time.Now(), hub: h, transport: t, pokes: make(chan struct{}, 1), hello: make(chan held, 1), ending: make(chan error, 1),
		whole: make(map[uint32]struct{}),
	}
}

// identity returns the identity whose share of the server the stream uses.
func (s *stream) identity() identity {
	if s.kind == pb.ClientKind_CLIENT_KIND_AGENT {
		return identity{node: s.node}
	}
	return identity{user: s.user}
}

// end ends the stream with a status. Any goroutine may call it, whatever the stream waits for. Only
// the first status counts.
func (s *stream) end(err error) {
	select {
	case s.ending <- err:
	default:
	}
	s.transport.End(err)
}

// gone returns the status of a stream whose context is done.
func (s *stream) gone() error {
	select {
	case err := <-s.ending:
		return err
	default:
		return status.FromContextError(s.transport.Context().Err()).Err()
	}
}

// ask calls what under mu, to leave a request for the goroutine, and wakes the goroutine.
func (s *stream) ask(what func()) {
	s.mu.Lock()
	what()
	s.mu.Unlock()
	notify(s.pokes)
}

// serve runs the stream to its end and returns its status.
func (s *stream) serve() error {
	h := s.hub
	if err := h.ready(); err != nil {
		return err
	}
	client, err := s.greeted()
	if err != nil {
		return err
	}
	until, err := s.admit()
	if err != nil {
		return err
	}
	if !until.IsZero() {
		defer time.AfterFunc(time.Until(until), func() { s.end(errExpired) }).Stop()
	}
	if err := h.allowances.of(s.identity()).begin(); err != nil {
		h.metrics.starts.WithLabelValues("too_often").Inc()
		h.tooOftenLogged.Do(func() {
			h.log.Warn("A client opens streams too often and is asked to come back later; more are only counted for a while",
				"node", s.node, "user", s.user, "peer", s.peer)
		})
		return err
	}
	if err := h.register(s); err != nil {
		return err
	}
	defer h.unregister(s)
	defer s.leave()
	defer s.lend()()
	s.admitted.Store(true)
	h.log.Debug("Stream opened", "node", s.node, "kind", s.kind, "programmer", s.programmer, "version", s.version)
	err = s.run(client)
	h.log.Debug("Stream closed", "node", s.node, "reason", err)
	return err
}

// lend lends the stream its share of what its identity may do. The caller calls giveBack when the
// stream has ended.
func (s *stream) lend() (giveBack func()) {
	r := &s.reports
	r.allowance = s.hub.allowances.of(s.identity())
	r.limiters = r.allowance.take()
	return func() { r.allowance.put(r.limiters) }
}

// ready returns nil if the hub accepts streams, and the status to end the stream with otherwise.
func (h *Hub) ready() error {
	select {
	case <-h.drainBegun.Done():
		return status.Error(codes.Unavailable, "the server is draining: use another one, or try again later")
	default:
	}
	select {
	case <-h.store.WaitPublished():
		return nil
	default:
		return status.Error(codes.Unavailable, "the server has not synced with its source yet: try again in a moment")
	}
}

// greeted waits for the client's Hello, for helloTimeout at most, so that a silent client cannot
// hold a stream or delay the server's shutdown.
func (s *stream) greeted() (held, error) {
	timeout := time.NewTimer(helloTimeout)
	defer timeout.Stop()
	select {
	case client := <-s.hello:
		return client, nil
	case err := <-s.ending:
		return held{}, err
	case <-timeout.C:
		return held{}, status.Errorf(codes.InvalidArgument, "no hello within %v", helloTimeout)
	case <-s.transport.Context().Done():
		return held{}, s.gone()
	case <-s.hub.drainBegun.Done():
		return held{}, errDraining
	}
}

// errExpired ends a stream when the client's credentials expire.
var errExpired = status.Error(codes.Unauthenticated, "the credentials that this stream began with have expired: open another one with fresh ones")

// admit authorizes the client for the kind and the Node that its Hello claims, and returns when its
// credentials expire.
func (s *stream) admit() (until time.Time, err error) {
	o := s.hub.options
	if s.user, until, err = o.Authorize(s.transport.Context(), s.kind, s.node); err != nil {
		return until, err
	}
	if s.kind == pb.ClientKind_CLIENT_KIND_RELAY && o.Upstream != nil {
		if _, ok := o.Upstream.Path(); !ok {
			return until, errNoUpstream
		}
	}
	return until, nil
}

// introduce validates the Hello and stores what it says of the client.
func (s *stream) introduce(hello *pb.Hello) error {
	kind := hello.GetKind()
	node := hello.GetNodeName()
	if kind == pb.ClientKind_CLIENT_KIND_UNSPECIFIED {
		kind = pb.ClientKind_CLIENT_KIND_OBSERVER
	}
	switch {
	case kind == pb.ClientKind_CLIENT_KIND_AGENT && node == "", kind == pb.ClientKind_CLIENT_KIND_RELAY && node != "":
		return status.Errorf(codes.InvalidArgument, "hello of kind %v with node name %q", kind, node)
	case len(node) > maxNodeName:
		return status.Errorf(codes.InvalidArgument, "hello with a node name of %d bytes: Kubernetes allows %d", len(node), maxNodeName)
	case kind == pb.ClientKind_CLIENT_KIND_RELAY && hello.GetSubscription() != nil:
		return status.Error(codes.InvalidArgument, "a relay wants everything: leave out the subscription")
	}
	s.node, s.kind, s.since = node, kind, time.Now()
	s.version, s.programmer = clip(hello.GetClientVersion()), clip(hello.GetProgrammer())
	if p, ok := peer.FromContext(s.transport.Context()); ok {
		s.peer = p.Addr.String()
	}
	s.compressed = slices.Contains(hello.GetCapabilities(), pb.Capability_CAPABILITY_ZSTD)
	s.buckets = slices.Contains(hello.GetCapabilities(), pb.Capability_CAPABILITY_BUCKETS)
	var err error
	s.wanted, err = newSubscription(hello.GetSubscription())
	return err
}

// run serves the client after its admission, until the stream ends.
func (s *stream) run(client held) error {
	// The position in the ring is read before any snapshot. Updates published between the two are
	// recognized by their sequences and skipped.
	position, reached := s.hub.ring.now()
	s.position = position
	s.sequences = make([]uint64, s.hub.store.Shards())
	if err := s.start(client, reached); err != nil {
		if errors.Is(err, errDraining) {
			_ = s.sendDrain() // the stream's status says it too
		}
		return err
	}
	ctx := s.transport.Context()
	draining := s.hub.drainBegun.Done()
	var end <-chan time.Time
	var b batch
	for {
		err := s.answer()
		if err == nil {
			b, err = s.follow(b)
		}
		if err == nil {
			err = s.tellReached()
		}
		if err != nil {
			return err
		}
		wake := s.pokes
		if !s.rest() {
			wake = closed
		}
		select {
		case <-wake:
		case err := <-s.ending:
			return err
		case <-draining:
			draining = nil
			s.own()
			if err := s.sendDrain(); err != nil {
				return err
			}
			t := time.NewTimer(s.hub.drainDelay())
			defer t.Stop()
			end = t.C
		case <-end:
			return errDraining
		case <-ctx.Done():
			return s.gone()
		}
		s.own()
	}
}

func (s *stream) sendDrain() error {
	return s.send(mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{
		ReconnectWithinMs: uint32(s.hub.options.DrainWindow.Milliseconds()),
	}}}))
}

// closed is a closed channel: receiving from it never blocks.
var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// errDraining ends a stream when the server stops.
var errDraining = status.Error(codes.Unavailable, "the server is draining: resume on another one")

// own makes the goroutine the stream's owner; see invariant 1.
func (s *stream) own() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live = false
}

// rest makes the fan-out the stream's owner, if it may send to the stream; see invariants 1 and 2.
// It returns false if the goroutine has something left to do.
func (s *stream) rest() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.position != s.hub.ring.head.Load() || len(s.resyncs) > 0 || len(s.nodes) > 0 || s.subscribe != nil || s.compare {
		return false
	}
	s.live = s.wanted == nil && s.kind != pb.ClientKind_CLIENT_KIND_RELAY
	return true
}

// follow sends a batch of the ring's entries after the stream's position. It reuses the memory of b
// and returns it.
func (s *stream) follow(b batch) (batch, error) {
	if s.position == s.hub.ring.head.Load() {
		return b, nil
	}
	b = s.hub.ring.after(s.position, b)
	var err error
	switch {
	case b.lapped:
		s.hub.metrics.lapped.Inc()
		err = s.overtaken()
	case s.wanted != nil:
		err = s.forwardWanted(b)
	default:
		err = s.forward(b)
	}
	s.position = b.to
	b.drop() // an idle stream must keep no frames alive
	return b, err
}

// forward sends a batch. If a shard has several updates in the batch, or the batch does not follow
// the stream's sequence in the shard, forward sends their combined effect from the snapshot. It
// skips updates that the client already has.
func (s *stream) forward(b batch) error {
	repeats := b.repeats()
	if len(repeats) == len(b.updates) && s.inStep(b.updates) {
		return s.send(b.frames...)
	}
	for _, u := range b.updates {
		have := s.sequences[u.shard]
		var err error
		switch {
		case have >= u.to:
		case have != u.from || repeats[u.shard]:
			err = s.bring(s.hub.store.Snapshot(u.shard))
		default:
			s.sequences[u.shard] = u.to
			err = s.send(u.frames...)
		}
		if err != nil {
			return err
		}
	}
	return s.send(b.narrowed...) // these are not updates
}

// inStep advances the stream's sequences by the updates and returns true, if all updates follow
// them. Otherwise it changes nothing and returns false.
func (s *stream) inStep(updates []published) bool {
	for i, u := range updates {
		if s.sequences[u.shard] != u.from {
			s.outOfStep(updates[:i])
			return false
		}
		s.sequences[u.shard] = u.to
	}
	return true
}

// overtaken brings a stream that the ring has lapped up to date from snapshots, with each changed
// object once.
func (s *stream) overtaken() error {
	for shard := range s.hub.store.Shards() {
		if err := s.bring(s.hub.store.Snapshot(shard)); err != nil {
			return err
		}
	}
	return s.sendServers()
}

// bring sends the changes between the client's position and a snapshot.
func (s *stream) bring(snapshot *store.Snapshot) error {
	from := s.sequences[snapshot.Shard()]
	if from >= snapshot.Sequence() {
		return nil
	}
	if s.wanted != nil {
		return s.sendWanted(snapshot)
	}
	frames, err := s.hub.catchUp(snapshot, from, s.compressed)
	if err != nil {
		return err
	}
	s.sequences[snapshot.Shard()] = snapshot.Sequence()
	return s.send(frames...)
}

// send sends frames and counts them. If the stream ends meanwhile, send returns the status that
// ended it instead of the error of the failed write.
func (s *stream) send(frames ...wire.Frame) error {
	s.reports.sentBytes.Add(uint64(s.hub.metrics.sent(frames)))
	err := s.transport.Send(frames...)
	if err != nil && s.transport.Context().Err() != nil {
		return s.gone()
	}
	return err
}

// answer sends changed Nodes and answers the client's requests.
func (s *stream) answer() error {
	if err := s.sendNodes(); err != nil {
		return err
	}
	s.mu.Lock()
	resyncs, subscribe, compare := s.resyncs, s.subscribe, s.compare
	s.resyncs, s.waiting, s.subscribe, s.compare = nil, 0, nil, false
	s.mu.Unlock()
	if subscribe != nil {
		if err := s.resubscribe(subscribe); err != nil {
			return err
		}
	}
	if err := s.resyncAll(resyncs); err != nil || !compare {
		return err
	}
	return s.sendDigests()
}

// sendDigests sends the digests of all shards, after bringing the client to the positions that they
// describe. A narrowed stream has no digests to compare, so it gets none.
func (s *stream) sendDigests() error {
	if s.wanted != nil {
		return nil
	}
	var digests []model.Digest
	for shard := range s.hub.store.Shards() {
		snapshot := s.hub.store.Snapshot(shard)
		if err := s.bring(snapshot); err != nil {
			return err
		}
		digests = append(digests, snapshot.Digest())
	}
	return s.send(mustEncode(&pb.StreamResponse{Message: &pb.StreamResponse_Digests{Digests: &pb.Digests{
		Sequences: s.sequences, Digests: model.JoinDigests(digests),
	}}}))
}

// sendNodes sends the Nodes that have changed.
func (s *stream) sendNodes() error {
	s.mu.Lock()
	nodes := s.nodes
	s.nodes = nil
	s.mu.Unlock()
	for name := range nodes {
		if err := s.sendNode(name); err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) sendNode(name string) error {
	f, err := wire.EncodeNode(name, s.hub.store.Node(name))
	if err != nil {
		return status.Errorf(codes.Internal, "node %s: %v", name, err)
	}
	return s.send(f)
}

// take processes a message from the client. It does not wait.
func (s *stream) take(r *pb.StreamRequest) error {
	hello := r.GetHello()
	if !s.reports.greeted {
		if hello == nil {
			return status.Error(codes.InvalidArgument, "the first message must be hello")
		}
		s.reports.greeted = true
		if err := s.introduce(hello); err != nil {
			return err
		}
		client, err := heldBy(hello)
		if err != nil {
			return err
		}
		s.hello <- client
		return nil
	}
	if !s.admitted.Load() {
		return status.Error(codes.InvalidArgument, "a message before welcome: hello is all that the server takes until then")
	}
	if !s.reports.messages.AllowN(time.Now(), 1+len(r.GetAck().GetPositions())/positionsPerMessage) {
		return status.Errorf(codes.ResourceExhausted, "more than %d messages a second", messagesPerSecond)
	}
	switch m := r.GetMessage().(type) {
	case *pb.StreamRequest_Ack:
		if n := len(m.Ack.GetPositions()); n > maxPositions {
			return status.Errorf(codes.InvalidArgument, "ack of %d positions: give at most %d", n, maxPositions)
		}
		return s.ack(m.Ack)
	case *pb.StreamRequest_Nack:
		s.nack(m.Nack)
	case *pb.StreamRequest_Resync:
		return s.request(m.Resync)
	case *pb.StreamRequest_Subscribe:
		if s.kind == pb.ClientKind_CLIENT_KIND_RELAY {
			return status.Error(codes.InvalidArgument, "a relay wants everything: it can't subscribe")
		}
		if !s.reports.resyncs.Allow() {
			return status.Errorf(codes.ResourceExhausted, "more than %d resyncs and subscriptions a second: subscribe on a new stream instead",
				resyncsPerSecond)
		}
		s.ask(func() { s.subscribe = m.Subscribe })
	case *pb.StreamRequest_Digests:
		return s.takeDigests(m.Digests)
	case *pb.StreamRequest_DigestQuery:
		if !s.reports.resyncs.Allow() {
			return status.Errorf(codes.ResourceExhausted, "more than %d resyncs and questions for digests a second: resume on a new stream instead",
				resyncsPerSecond)
		}
		s.ask(func() { s.compare = true })
	case *pb.StreamRequest_Hello:
		return status.Error(codes.InvalidArgument, "a second hello: open a new stream instead")
	}
	return nil
}

// takeDigests accepts the answer to a DigestQuery. Each query has one answer.
func (s *stream) takeDigests(m *pb.Digests) error {
	digests, err := model.SplitDigests(m.GetDigests())
	if shards := s.hub.store.Shards(); err != nil || uint32(len(digests)) != shards {
		return status.Errorf(codes.InvalidArgument, "digests of %d bytes: give %d for each of %d shards", len(m.GetDigests()), model.HashSize, shards)
	}
	asked := false
	s.ask(func() {
		if asked, s.digestsAsked = s.digestsAsked, false; asked {
			s.digests = digests
		}
	})
	if !asked {
		return status.Error(codes.InvalidArgument, "digests that nobody has asked for: leave them out")
	}
	return nil
}

// closeSend records that the client will send no more. A stream that has not sent its Hello by then
// cannot be served, so it ends.
func (s *stream) closeSend() {
	if !s.reports.greeted {
		s.end(status.Error(codes.InvalidArgument, "the stream ended before its hello"))
	}
}

// request validates a Resync and leaves it for the goroutine.
func (s *stream) request(r *pb.Resync) error {
	shards := s.hub.store.Shards()
	switch n := len(r.GetBucketDigests()); {
	case r.GetShard() >= shards:
		return status.Errorf(codes.InvalidArgument, "resync of shard %d: there are %d", r.GetShard(), shards)
	case n != 0 && n != model.Buckets*model.HashSize:
		return status.Errorf(codes.InvalidArgument, "resync with %d bytes of bucket_digests: there are %d buckets, and digests of %d bytes",
			n, model.Buckets, model.HashSize)
	case len(r.GetKeys()) > maxKeys:
		return status.Errorf(codes.InvalidArgument, "resync of %d objects: name at most %d, or ask for the shard", len(r.GetKeys()), maxKeys)
	}
	// The answer to a BucketQuery is a Resync too. It is neither counted nor limited, as it is no
	// sign of trouble.
	if !s.answers(r) {
		if len(r.GetKeys()) == 0 && !s.synced.Load() {
			return status.Errorf(codes.InvalidArgument, "resync of shard %d before in_sync, which no bucket_query asks for: "+
				"answer one once for each of its shards", r.GetShard())
		}
		if !s.reports.resyncs.Allow() {
			return status.Errorf(codes.ResourceExhausted, "more than %d resyncs and subscriptions a second: resume on a new stream instead", resyncsPerSecond)
		}
		s.hub.metrics.resyncs.Inc()
		s.reports.allowance.resyncsLogged.Do(func() {
			s.hub.log.Warn("A client asks for state again", "node", s.node, "shard", r.GetShard(),
				"keys", len(r.GetKeys()), "reason", clip(r.GetReason()))
		})
	}
	r.Reason = ""
	size, full := proto.Size(r)+resyncBytes/4, false
	s.ask(func() {
		if full = s.waiting+size > maxWaiting+int(shards)*resyncBytes; !full {
			if s.resyncs == nil {
				s.resyncs = make(map[uint32]*pending)
			}
			if s.resyncs[r.GetShard()] == nil {
				s.resyncs[r.GetShard()] = &pending{}
			}
			s.resyncs[r.GetShard()].add(r)
			s.waiting += size
		}
	})
	if full {
		return status.Error(codes.ResourceExhausted, "too many resyncs wait already: read what comes first")
	}
	return nil
}

// answers reports whether a Resync is the first answer to a BucketQuery for its shard. Later ones
// for the shard are requests of the client's own.
func (s *stream) answers(r *pb.Resync) bool {
	if len(r.GetKeys()) > 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, asked := s.asked[r.GetShard()]
	delete(s.asked, r.GetShard())
	return asked
}

// wait waits for a channel while the stream starts. It returns false if the timeout comes first.
// Meanwhile it sends heartbeats, as a client that hears nothing connects to another server.
func (s *stream) wait(on <-chan struct{}, timeout <-chan time.Time) (bool, error) {
	ctx := s.transport.Context()
	for {
		select {
		case <-on:
			return true, nil
		case <-timeout:
			return false, nil
		case <-s.beats.C:
			if err := s.send(lifeSign); err != nil {
				return false, err
			}
		case err := <-s.ending:
			return false, err
		case <-s.hub.drainBegun.Done():
			return false, errDraining
		case <-ctx.Done():
			return false, s.gone()
		}
	}
}
