package fanout

import (
	"errors"
	"io"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxResyncs is how many requests of one stream may wait to be answered; a client that asks for more has lost its way.
const maxResyncs = 256

// stream is one client. Its handler's goroutine sends, one more receives.
type stream struct {
	hub  *Hub
	grpc pb.DistributionService_StreamServer
	node string
	// sequences is the client's position in each shard. Sender only.
	sequences []uint64

	// What one client reports is logged a few times a minute at most; metrics count all. Receiver only.
	nacksLogged, resyncsLogged rate.Sometimes

	// pokes wakes the sender for what mu guards.
	pokes       chan struct{}
	mu          sync.Mutex
	nodeChanged bool
	resyncs     []*pb.Resync
}

// poke sets a flag and wakes the sender.
func (s *stream) poke(flag *bool) {
	s.mu.Lock()
	*flag = true
	s.mu.Unlock()
	s.wake()
}

func (s *stream) wake() {
	select {
	case s.pokes <- struct{}{}:
	default:
	}
}

// serve runs the stream until the client leaves, breaks the protocol or the server drains.
func (s *stream) serve(hello *pb.Hello) error {
	// The position in the ring comes before the snapshots: what is published between is skipped by its sequence.
	now := s.hub.present()
	if err := s.start(hello); err != nil {
		return err
	}
	received := make(chan error, 1)
	go func() { received <- s.receive() }()

	draining := s.hub.draining
	var end <-chan time.Time
	for {
		select {
		case <-now.changed:
		case <-s.pokes:
			if err := s.answer(); err != nil {
				return err
			}
		case err := <-received:
			if err != nil {
				return err
			}
			received = nil // the client only listens from now on
		case <-draining:
			draining = nil
			if err := s.sendDrain(); err != nil {
				return err
			}
			t := time.NewTimer(s.hub.drainDelay())
			defer t.Stop()
			end = t.C
		case <-end:
			return errDraining
		case <-s.grpc.Context().Done():
			return status.FromContextError(s.grpc.Context().Err()).Err()
		}
		beats := now.beats
		now = s.hub.follow(now)
		if err := s.forward(now.frames, now.lapped); err != nil {
			return err
		}
		clear(now.frames) // an idle stream keeps no frames alive
		if now.beats != beats {
			if err := s.send(now.heartbeat); err != nil {
				return err
			}
		}
	}
}

// start sends the initial state: what differs from what the client holds.
func (s *stream) start(hello *pb.Hello) error {
	h := s.hub
	if err := s.grpc.SendMsg(&pb.StreamResponse{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{
		Epoch: h.store.Epoch(), ShardCount: h.store.Shards(),
		ServerName: h.options.ServerName, ServerVersion: h.options.ServerVersion,
		HeartbeatIntervalMs: uint32(h.options.Heartbeat.Milliseconds()),
	}}}); err != nil {
		return err
	}
	if s.node != "" {
		if err := s.sendNode(); err != nil {
			return err
		}
	}
	var seen model.ResourceVersions
	for shard := range h.store.Shards() {
		snapshot := h.store.Snapshot(shard)
		seen = seen.Max(snapshot.ResourceVersions())
		if err := s.resume(hello, snapshot); err != nil {
			return err
		}
	}
	return s.grpc.SendMsg(&pb.StreamResponse{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{
		Sequences: s.sequences, ResourceVersions: wire.ResourceVersionsToProto(seen),
	}}})
}

// resume brings a client from what its hello says to a snapshot.
func (s *stream) resume(hello *pb.Hello, snapshot *store.Snapshot) error {
	shard := snapshot.Shard()
	switch {
	case len(hello.GetSequences()) == 0: // it holds nothing
		if snapshot.Len() == 0 {
			s.sequences[shard] = snapshot.Sequence()
			return nil
		}
		return s.bring(snapshot)
	case uint32(len(hello.GetSequences())) != s.hub.store.Shards(): // it holds something, in other shards
	case hello.GetDigests()[shard] == snapshot.Digest():
		s.sequences[shard] = snapshot.Sequence()
		return nil
	case hello.GetEpoch() == s.hub.store.Epoch():
		// Position 0 is that of a client which was cut off before this epoch's state came: it may hold anything. And at the
		// snapshot's own position the digest should have been the same.
		if at := hello.GetSequences()[shard]; at > 0 && at < snapshot.Sequence() {
			return s.sendUpTo(snapshot, at)
		}
	}
	return s.sendUpTo(snapshot, 0) // the whole shard, empty or not
}

// bring sends what leads the client from its position to a snapshot.
func (s *stream) bring(snapshot *store.Snapshot) error {
	from := s.sequences[snapshot.Shard()]
	if from >= snapshot.Sequence() {
		return nil
	}
	return s.sendUpTo(snapshot, from)
}

func (s *stream) sendUpTo(snapshot *store.Snapshot, from uint64) error {
	f, err := s.hub.catchUp(snapshot, from)
	if err != nil {
		return status.Errorf(codes.Internal, "shard %d: %v", snapshot.Shard(), err)
	}
	s.sequences[snapshot.Shard()] = snapshot.Sequence()
	return s.send(f)
}

// forward sends the frames that are news to the client.
func (s *stream) forward(frames []published, lapped bool) error {
	if lapped {
		s.hub.metrics.lapped.Inc()
		for shard := range s.sequences {
			if err := s.bring(s.hub.store.Snapshot(uint32(shard))); err != nil {
				return err
			}
		}
		return nil
	}
	for _, f := range frames {
		switch have := s.sequences[f.shard]; {
		case have >= f.to:
		case have < f.from:
			if err := s.bring(s.hub.store.Snapshot(f.shard)); err != nil {
				return err
			}
		default:
			s.sequences[f.shard] = f.to
			if err := s.send(f.frame); err != nil {
				return err
			}
		}
	}
	return nil
}

// answer sends what the client asked for and its Node, if that changed.
func (s *stream) answer() error {
	s.mu.Lock()
	resyncs, nodeChanged := s.resyncs, s.nodeChanged
	s.resyncs, s.nodeChanged = nil, false
	s.mu.Unlock()
	if nodeChanged {
		if err := s.sendNode(); err != nil {
			return err
		}
	}
	for _, r := range resyncs {
		if r.GetShard() >= s.hub.store.Shards() {
			return status.Errorf(codes.InvalidArgument, "resync of shard %d: there are %d", r.GetShard(), s.hub.store.Shards())
		}
		// The answer is as of a snapshot, so the client comes to that snapshot first.
		snapshot := s.hub.store.Snapshot(r.GetShard())
		if err := s.bring(snapshot); err != nil {
			return err
		}
		f, err := s.hub.resync(snapshot, r)
		if err != nil {
			return err
		}
		if err := s.send(f); err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) send(f wire.Frame) error {
	s.hub.metrics.sentFrames.Inc()
	s.hub.metrics.sentBytes.Add(float64(len(f)))
	return s.grpc.SendMsg(f)
}

func (s *stream) sendNode() error {
	f, err := wire.EncodeNode(s.node, s.hub.store.Node(s.node))
	if err != nil {
		return status.Errorf(codes.Internal, "node %s: %v", s.node, err)
	}
	return s.send(f)
}

func (s *stream) sendDrain() error {
	return s.grpc.SendMsg(&pb.StreamResponse{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{
		ReconnectWithinMs: uint32(s.hub.options.DrainWindow.Milliseconds()),
	}}})
}

// receive takes the client's messages until it closes its side, which is no error.
func (s *stream) receive() error {
	for {
		r, err := s.grpc.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch m := r.GetMessage().(type) {
		case *pb.StreamRequest_Ack:
			if err := s.ack(m.Ack); err != nil {
				return err
			}
		case *pb.StreamRequest_Nack:
			s.hub.metrics.nacks.Inc()
			s.nacksLogged.Do(func() {
				s.hub.log.Warn("A node can't program an object", "node", s.node, "object", keyString(m.Nack.GetKey()),
					"reason", m.Nack.GetReason(), "shard", m.Nack.GetShard(), "sequence", m.Nack.GetSequence())
			})
		case *pb.StreamRequest_Resync:
			s.hub.metrics.resyncs.Inc()
			s.resyncsLogged.Do(func() {
				s.hub.log.Warn("A node asks for state again", "node", s.node, "shard", m.Resync.GetShard(),
					"keys", len(m.Resync.GetKeys()), "reason", m.Resync.GetReason())
			})
			if err := s.request(m.Resync); err != nil {
				return err
			}
		case *pb.StreamRequest_Hello:
			return status.Error(codes.InvalidArgument, "a second hello: open a new stream instead")
		}
	}
}

func (s *stream) request(r *pb.Resync) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.resyncs) == maxResyncs {
		return status.Errorf(codes.ResourceExhausted, "%d resyncs wait already", maxResyncs)
	}
	s.resyncs = append(s.resyncs, r)
	s.wake()
	return nil
}

func (s *stream) ack(a *pb.Ack) error {
	for _, p := range a.GetPositions() {
		if p.GetShard() >= s.hub.store.Shards() || p.GetSequence() > s.hub.store.Snapshot(p.GetShard()).Sequence() {
			return status.Errorf(codes.InvalidArgument, "ack of shard %d at %d, which was never sent", p.GetShard(), p.GetSequence())
		}
	}
	s.hub.metrics.acks.Inc()
	return nil
}

func keyString(k *pb.ObjectKey) string {
	key, err := wire.KeyFromProto(k)
	if err != nil {
		return err.Error()
	}
	return key.String()
}
