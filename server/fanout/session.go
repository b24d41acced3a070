package fanout

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// helloTimeout is how long a new stream may be silent.
const helloTimeout = 10 * time.Second

// Session serves one client's stream. Three parties work on it: its own goroutine, which runs
// Serve; the receiving goroutine, which calls Message and CloseSend; and the fan-out. Its
// invariants:
//
//  1. While live is set, only the fan-out sends frames and changes cursor, and it holds mu.
//     Otherwise only the session's goroutine does.
//  2. Only park makes the session live, and only when its goroutine has nothing left to send but
//     what waits for a turn, and the client is no relay: a relay is also sent resource versions.
//  3. client and lent are set before admitted is. Until then, only a Hello is accepted.
//  4. Only the session's goroutine uses reached and turn.
type Session struct {
	// The fan-out uses the fields up to sentBytes for each change, so they are next to each other.
	hub       *Hub
	transport Transport
	mu        sync.Mutex // guards live, requests and queries, and cursor while live is set
	live      bool
	cursor
	sentBytes atomic.Uint64

	pokes   chan struct{}  // wakes the session's goroutine
	hello   chan *greeting // receives the client's Hello, once
	ending  chan error     // receives the status that ends the session
	index   int            // in the registry; guarded by its mu
	greeted bool           // whether a Hello has arrived; only the receiving goroutine uses it

	client
	since    time.Time              // when the Hello arrived
	reached  model.ResourceVersions // sent to a relay last
	lent     lent
	admitted atomic.Bool
	synced   atomic.Bool // set once the client has been sent InSync

	requests requests
	turn     *turn // which the session has asked for and still needs; nil if there is none
	queries  queries
	reports  reports
}

// Open begins a session. The caller must call Serve, and may call Message before or during it.
func (h *Hub) Open(t Transport) *Session {
	s := &Session{
		hub: h, transport: t, pokes: make(chan struct{}, 1), hello: make(chan *greeting, 1), ending: make(chan error, 1),
	}
	s.reports.hub, s.reports.client = h, &s.client
	return s
}

// Serve runs the session until the client leaves or breaks the protocol, or until the server
// drains. It returns the stream's status.
func (s *Session) Serve() error {
	h := s.hub
	if err := h.ready(); err != nil {
		return err
	}
	hello, err := s.awaitHello()
	if err != nil {
		return err
	}
	s.client, s.since = hello.client, time.Now()
	until, upstream, err := s.admit()
	if err != nil {
		return err
	}
	if !until.IsZero() {
		defer time.AfterFunc(until.Sub(h.options.Now()), func() {
			s.end(status.Error(codes.Unauthenticated, "the credentials of this stream have expired: open a new stream"))
		}).Stop()
	}
	if upstream != nil {
		defer context.AfterFunc(upstream, func() { s.end(errNoUpstream) })()
	}
	if hello.probe {
		return s.sendWelcome()
	}
	if err := s.register(); err != nil {
		return err
	}
	defer h.sessions.remove(s)
	defer s.reports.leave()
	s.lent = h.allowance(s.identity()).lend()
	defer s.lent.giveBack()
	s.admitted.Store(true)
	h.log.Debug("Stream opened", "node", s.node, "kind", s.kind, "programmer", s.programmer, "version", s.version)
	err = s.run(hello.state)
	if _, ok := status.FromError(err); !ok { // a failure to encode
		err = status.Error(codes.Internal, err.Error())
	}
	h.log.Debug("Stream closed", "node", s.node, "reason", err)
	return err
}

// Message processes an encoded StreamRequest. It does not wait and does not keep b. If it returns
// an error, the transport must end the stream with that status.
func (s *Session) Message(b []byte) error {
	var r pb.StreamRequest
	if err := proto.Unmarshal(b, &r); err != nil {
		return invalid("cannot decode a StreamRequest: %v", err)
	}
	return s.receive(&r)
}

// CloseSend reports that the client will send no more. The client may go on receiving. A client
// that has not sent its Hello by then cannot be served, so its session ends.
func (s *Session) CloseSend() {
	if !s.greeted {
		s.end(invalid("the client closed its side of the stream before it sent a Hello"))
	}
}

// end ends the session with a status. Any goroutine may call it, whatever the session waits for.
// Only the first status counts.
func (s *Session) end(err error) {
	select {
	case s.ending <- err:
	default:
	}
	s.transport.End(err)
}

// gone returns the status of a session whose stream's context is done.
func (s *Session) gone() error {
	select {
	case err := <-s.ending:
		return err
	default:
		return status.FromContextError(s.transport.Context().Err()).Err()
	}
}

// awaitHello waits for the client's Hello, for helloTimeout at most, so that a silent client cannot
// hold a stream or delay the server's shutdown.
func (s *Session) awaitHello() (*greeting, error) {
	timeout := time.NewTimer(helloTimeout)
	defer timeout.Stop()
	select {
	case hello := <-s.hello:
		return hello, nil
	case err := <-s.ending:
		return nil, err
	case <-timeout.C:
		return nil, invalid("no Hello within %v: send it first", helloTimeout)
	case <-s.transport.Context().Done():
		return nil, s.gone()
	case <-s.hub.drainBegun.Done():
		return nil, errDraining
	}
}

// admit authorizes the client for the kind and the Node that its Hello claims, and counts the
// start. The session may last until the client's credentials expire, if until is set. If upstream
// is set, the client is a relay behind this one, and the session may last as long as this server's
// own stream.
func (s *Session) admit() (until time.Time, upstream context.Context, err error) {
	h := s.hub
	if s.user, until, err = h.options.Authorize(s.transport.Context(), s.kind, s.node); err != nil {
		return until, nil, err
	}
	if h.upward != nil && s.isRelay() {
		if _, upstream = h.upward.Path(); upstream == nil {
			return until, nil, errNoUpstream
		}
	}
	if err := h.allowance(s.identity()).start(); err != nil {
		h.metrics.starts.WithLabelValues("too_often").Inc()
		h.logged.tooOften.Do(func() {
			h.log.Warn("Refused a client that opens streams too often; logged at most once per interval",
				"node", s.node, "user", s.user, "peer", s.peer, "interval", logInterval)
		})
		return until, nil, err
	}
	return until, upstream, nil
}

// register adds the session to the hub's. A Node's agent replaces the node's older session.
func (s *Session) register() error {
	h := s.hub
	older, ok := h.sessions.add(s)
	if !ok {
		h.metrics.starts.WithLabelValues("too_many").Inc()
		h.logged.tooMany.Do(func() {
			h.log.Warn("Refused a stream of an observer or relay that has too many; logged at most once per interval",
				"user", s.user, "peer", s.peer, "streams", maxOthers, "interval", logInterval)
		})
		return status.Errorf(codes.ResourceExhausted, "%q has %d open streams of observers and relays, the maximum: "+
			"close some of them", s.user, maxOthers)
	}
	if older != nil {
		h.metrics.replaced.Inc()
		h.logged.replaced.Do(func() {
			h.log.Info("Replaced a node's older stream", "node", s.node, "peer", s.peer, "older_peer", older.peer)
		})
		older.reports.leave()
		older.end(status.Errorf(codes.Aborted, "replaced by a newer stream of node %q, from %s: if another agent opened "+
			"it, two agents run with the same node name", s.node, s.peer))
	}
	return nil
}

func (s *Session) run(state clientState) error {
	// The position in the ring is read before any snapshot. Updates published between the two are
	// recognized by their sequences and skipped.
	next, _ := s.hub.ring.now()
	s.cursor = cursor{next: next, sequences: make([]uint64, s.hub.store.Shards())}
	defer s.endTurn()
	if err := s.start(state); err != nil {
		if errors.Is(err, errDraining) {
			_ = s.sendDrain() // the stream's status says it too
		}
		return err
	}
	return s.follow()
}

// follow sends what is published and what is requested, until the session ends.
func (s *Session) follow() error {
	ctx := s.transport.Context()
	draining := s.hub.drainBegun.Done()
	var end <-chan time.Time
	var b batch
	for {
		if err := s.sendDue(&b); err != nil {
			return err
		}
		if !s.park() {
			notify(s.pokes)
		}
		select {
		case <-s.pokes:
		case <-s.turnBegun():
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

// own makes the session's goroutine the owner of the cursor; see invariant 1.
func (s *Session) own() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live = false
}

// park returns true if the session's goroutine has nothing to do now. It then makes the session
// live, unless the client is a relay; see invariants 1 and 2.
func (s *Session) park() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &s.requests
	if s.next != s.hub.ring.head.Load() || len(r.nodes) > 0 || r.compare || r.back || len(r.resyncs) > 0 && s.turn == nil {
		return false
	}
	s.live = !s.isRelay()
	return true
}

// sendDue answers the client's requests and sends a batch of the ring's entries. It uses the memory
// of b.
func (s *Session) sendDue(b *batch) error {
	if err := s.answer(); err != nil {
		return err
	}
	if err := s.sendBatch(b); err != nil {
		return err
	}
	head, reached := s.hub.ring.now()
	if s.next != head {
		return nil
	}
	if err := s.sendReached(reached); err != nil {
		return err
	}
	return s.sendBack()
}

// sendBatch sends a batch of the ring's entries after the cursor. It uses the memory of b.
func (s *Session) sendBatch(b *batch) error {
	if s.next == s.hub.ring.head.Load() {
		return nil
	}
	*b = s.hub.ring.after(s.next, *b)
	defer b.drop() // an idle session must keep no frames alive
	s.next = b.to
	if b.lapped {
		s.hub.metrics.lapped.Inc()
		return s.catchUp()
	}
	return s.forward(*b)
}

// forward sends a batch. If a shard has several updates in the batch, or the batch does not follow
// the client's sequence in the shard, forward sends their combined effect from the snapshot. It
// skips updates that the client already has.
func (s *Session) forward(b batch) error {
	repeats := b.repeats()
	if len(repeats) == len(b.updates) && s.advance(b.updates) {
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
	return s.send(b.others...)
}

// sendReached sends a relay the resource versions that everything sent so far includes. A relay
// cannot derive them: an update describes one shard and says nothing about the others.
func (s *Session) sendReached(reached model.ResourceVersions) error {
	if !s.isRelay() || reached == s.reached {
		return nil
	}
	s.reached = reached
	return s.sendMessage(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{
		ResourceVersions: wire.ResourceVersionsToProto(reached),
	}}})
}

// sendBack sends the resource versions that the client has seen from now on, if they may be lower
// than before. It comes after what the client may lack of the state that has gone back to them.
func (s *Session) sendBack() error {
	s.mu.Lock()
	back := s.requests.back
	s.requests.back = false
	s.mu.Unlock()
	if !back {
		return nil
	}
	v := s.hub.store.Seen() // absent ones would say nothing, so it is sent even if it is zero
	return s.sendMessage(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{
		SeenVersions: &pb.ResourceVersions{Services: v.Services, Slices: v.Slices, Nodes: v.Nodes},
	}}})
}

// catchUp brings a session that the ring has lapped up to date from snapshots, with each changed
// object once.
func (s *Session) catchUp() error {
	for shard := range s.hub.store.Shards() {
		if err := s.bring(s.hub.store.Snapshot(shard)); err != nil {
			return err
		}
	}
	if err := s.sendServers(); err != nil || s.hub.options.Stale == nil {
		return err
	}
	return s.send(s.hub.staleFrame())
}

func (s *Session) bring(snapshot *store.Snapshot) error {
	if s.sequences[snapshot.Shard()] >= snapshot.Sequence() {
		return nil
	}
	return s.sendFrom(s.sequences[snapshot.Shard()], snapshot)
}

// sendFrom sends the changes of a shard from a sequence on; 0 means the whole shard.
func (s *Session) sendFrom(from uint64, snapshot *store.Snapshot) error {
	frames, err := s.hub.catchUp(snapshot, from, s.compressed)
	if err != nil {
		return err
	}
	s.sequences[snapshot.Shard()] = snapshot.Sequence()
	return s.send(frames...)
}

// send sends frames and counts them. If the session ends meanwhile, send returns the status that
// ended it instead of the error of the failed write.
func (s *Session) send(frames ...wire.Frame) error {
	s.sentBytes.Add(uint64(s.hub.metrics.countSent(frames)))
	err := s.transport.Send(frames...)
	if err != nil && s.transport.Context().Err() != nil {
		return s.gone()
	}
	return err
}

func (s *Session) sendMessage(m *pb.StreamResponse) error {
	f, err := wire.Encode(m)
	if err != nil {
		return err
	}
	return s.send(f)
}

func (s *Session) sendDrain() error {
	return s.sendMessage(&pb.StreamResponse{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{
		ReconnectWithinMs: uint32(s.hub.options.DrainWindow.Milliseconds()),
	}}})
}

func (s *Session) sendServers() error {
	if _, frame := s.hub.announced(); frame != nil {
		return s.send(frame)
	}
	return nil
}

// sendNode sends a Node, or that it does not exist.
func (s *Session) sendNode(name string) error {
	n, version := s.hub.store.NodeAsOf(name)
	f, err := wire.EncodeNode(name, n, version)
	if err != nil {
		return fmt.Errorf("node %s: %w", name, err)
	}
	return s.send(f)
}
