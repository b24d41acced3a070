package connection

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxReused bounds the memory, in bytes, that a stream keeps for the next frame. Most frames are
// short.
const maxReused = 4 << 10

// The constants below bound what a server can make a client keep or do. Packages wire, cache and
// discovery have further bounds. A server that exceeds a bound breaks the protocol, and the client
// leaves it for another one.
const (
	// Once a stream has made the client ask for cache.MaxUnfit objects, it may cause askedPerSecond
	// more each second.
	askedPerSecond = 100
	// maxNodes bounds the number of Nodes that a relay accepts before it is in sync.
	maxNodes = 1 << 17
	// maxPath bounds the length of Welcome.path, which is the number of relays in a row.
	maxPath = 64
	// maxStale bounds the time for which a server may claim to have been stale. It keeps times
	// within what Go and protobuf can represent.
	maxStale = 10 * 365 * 24 * time.Hour
	// maxText bounds the length, in bytes, of a server's name and version.
	maxText = 256
	// maxHeaders bounds the size, in bytes, of a server's headers and trailers. The trailers hold
	// the status that a stream ends with.
	maxHeaders = 16 << 10
)

// These errors end a stream, as cache.ErrProtocol does.
var (
	// errNotReading arises when more requests wait for the server than may wait.
	errNotReading = errors.New("server does not read requests, or causes more requests than it accepts")
	// errSilent arises when the server has sent nothing for several heartbeat intervals.
	errSilent = errors.New("server has been silent for too long")
	// errMove arises once the client is connected to a server that it prefers.
	errMove = errors.New("another server is preferred")
	// errStale arises once the client is connected to another server because its own is stale.
	errStale = errors.New("the server may lack changes, and another one does not")
)

// stream is one stream, from its Hello to its end. Two goroutines use it. The receiving goroutine
// owns all fields except for cancel, move and stale, which both use.
//
// Invariants:
//
//  1. Nothing but a Welcome is accepted before welcomed is set. parts is nil until then.
//  2. synced implies welcomed.
//  3. nodes is not nil if and only if the client is a relay, welcomed is set and synced is not.
type stream struct {
	*Connection
	server discovery.Server
	cancel context.CancelCauseFunc
	move   move
	// stale is since when the server has been stale, as it says. nil means that it is not.
	stale atomic.Pointer[time.Time]
	// silence is how long the server may send nothing before it counts as dead.
	silence  time.Duration
	welcomed bool
	synced   bool
	// name and software are the server's name and version.
	name, software string
	// parts joins the parts of updates. asked limits the number of objects that updates make the
	// client ask for.
	parts     *cache.Parts
	asked     *rate.Limiter
	questions questions
	digests   comparison
	// serversChanged reports that the stream named other servers than those known before.
	serversChanged bool
	// drained is the time within which a draining server wants the client to reconnect. 0 means
	// that the server does not drain.
	drained time.Duration
	// path is Welcome.path. nodes holds the names of all Nodes received before the stream is in
	// sync. Only a relay uses them.
	path  []uint64
	nodes map[string]struct{}
}

func newStream(c *Connection, server discovery.Server, cancel context.CancelCauseFunc) *stream {
	return &stream{
		Connection: c, server: server, cancel: cancel,
		move:    move{timer: time.NewTimer(math.MaxInt64), search: time.NewTimer(math.MaxInt64)},
		silence: silentBeats * defaultHeartbeat, asked: rate.NewLimiter(askedPerSecond, cache.MaxUnfit),
		digests: newComparison(c.repairs), questions: questions{buckets: make(map[uint32]struct{})},
	}
}

// run opens the stream and receives until it ends. It always returns an error.
func (s *stream) run(ctx context.Context) error {
	conn, err := s.open(s.server)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	// A server that accepts the connection and then stays silent is no better than one that is
	// down.
	watchdog := time.AfterFunc(defaultHeartbeat, func() { s.cancel(errSilent) })
	defer watchdog.Stop()
	rpc, err := pb.NewDistributionServiceClient(conn).Stream(ctx)
	if err != nil {
		return causeOf(ctx, err)
	}
	if err := rpc.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: s.hello()}}); err != nil {
		return causeOf(ctx, endOf(rpc, err))
	}
	defer s.move.timer.Stop()
	defer s.move.search.Stop()
	var sending sync.WaitGroup
	defer sending.Wait()
	defer s.cancel(nil)
	var f wire.Frame
	for {
		if cap(f) > maxReused {
			f = nil
		}
		if err := rpc.RecvMsg(&f); err != nil {
			return causeOf(ctx, err)
		}
		first := !s.welcomed
		if err := s.receive(f); err != nil {
			return err
		}
		if !s.welcomed {
			continue
		}
		watchdog.Reset(s.silence)
		if first {
			sending.Go(func() { s.send(ctx, rpc, &sending) })
		}
	}
}

// causeOf returns the cause for which the stream's context was canceled, if there is one, and err
// otherwise. It replaces io.EOF by a readable error.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	if errors.Is(err, io.EOF) {
		return errors.New("server closed the stream")
	}
	return err
}

// endOf returns the stream's status if a Send failed because the stream has ended.
func endOf(rpc pb.DistributionService_StreamClient, err error) error {
	if errors.Is(err, io.EOF) {
		var f wire.Frame
		return rpc.RecvMsg(&f)
	}
	return err
}

// send sends what the outbox holds until the stream ends. It sends Acks at intervals and everything
// else at once. It also starts the goroutines that reach for other servers.
func (s *stream) send(ctx context.Context, rpc pb.DistributionService_StreamClient, running *sync.WaitGroup) {
	// pause fires when an Ack must go even without a new change. nil means that one may go now.
	var pause <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.Outbox.wake:
		case <-pause:
			pause = nil
		case <-s.move.timer.C:
			running.Go(func() { s.reachPreferred(ctx) })
		case <-s.move.search.C:
			running.Go(func() { s.reachFresh(ctx) })
		}
		requests, acked, err := s.Outbox.collect(pause == nil)
		if err != nil {
			s.cancel(err)
			return
		}
		for _, r := range requests {
			if err := rpc.Send(r); err != nil {
				if !errors.Is(err, io.EOF) { // the receiving goroutine has the stream's status
					s.cancel(err)
				}
				return
			}
		}
		if acked {
			pause = time.After(ackPatience)
		}
	}
}

// receive decodes a frame, handles the response, and reports it to Options.Observe.
func (s *stream) receive(f wire.Frame) error {
	r, err := s.options.Decode(f)
	if err != nil {
		return fmt.Errorf("%w: %w", cache.ErrProtocol, err)
	}
	s.metrics.received.Inc()
	s.metrics.receivedBytes.Add(float64(len(f)))
	for _, p := range r.Problems {
		s.unreadableLogged.Do(func() {
			s.log.Warn("Cannot decode an object, keeping its last state", "object", p.Key, "err", p.Err)
		})
	}
	if err := s.handle(r); err != nil {
		return err
	}
	if s.options.Observe != nil {
		s.options.Observe(r, len(f))
	}
	return nil
}

func (s *stream) handle(r *wire.Response) error {
	switch {
	case r.Welcome != nil:
		return s.welcome(r.Welcome)
	case !s.welcomed && !unknown(r):
		return fmt.Errorf("%w: a message before welcome", cache.ErrProtocol)
	case r.Update != nil:
		return s.update(r)
	case r.BucketQuery != nil:
		return s.answerBuckets(r.BucketQuery)
	case r.Node != nil:
		return s.node(r.Node)
	case r.InSync != nil:
		return s.inSync(r.InSync)
	case r.Heartbeat != nil:
		s.heartbeat(r.Heartbeat)
	case r.Digests != nil:
		return s.compareShards(r.Digests)
	case r.DigestQuery != nil:
		return s.answerDigests()
	case r.Drain != nil:
		s.drain(r.Drain)
	case r.Servers != nil:
		s.learn(r.Servers)
	}
	return nil
}

// unknown reports whether a response holds no message that this version knows.
func unknown(r *wire.Response) bool {
	return r.Welcome == nil && r.Update == nil && r.Node == nil && r.InSync == nil && r.Heartbeat == nil &&
		r.Drain == nil && r.Servers == nil && r.BucketQuery == nil && r.Digests == nil && r.DigestQuery == nil
}

func (s *stream) welcome(w *pb.Welcome) error {
	if s.welcomed {
		return fmt.Errorf("%w: a second welcome", cache.ErrProtocol)
	}
	if err := s.check(w); err != nil {
		return err
	}
	if s.cache.FromCluster(w.GetCluster()) {
		s.log.Warn("The checkpoint is of another cluster than the server, waiting for the server's state", "server", s.server.Address)
	}
	if err := s.cache.Welcome(w.GetEpoch(), w.GetShardCount()); err != nil {
		return err
	}
	if s.options.Relay != nil {
		s.path, s.nodes = w.GetPath(), make(map[string]struct{})
	}
	if w.GetHeartbeatIntervalMs() > 0 {
		s.silence = silentBeats * min(time.Duration(w.GetHeartbeatIntervalMs())*time.Millisecond, discovery.MaxRetryDelay)
	}
	s.welcomed, s.parts = true, cache.NewParts(w.GetShardCount())
	s.name, s.software = clip(w.GetServerName()), clip(w.GetServerVersion())
	s.metrics.server.Reset()
	s.metrics.server.WithLabelValues(s.server.Address, s.name, s.software).Set(1)
	s.log.Info("Connected", "server", s.server.Address, "name", s.name, "version", s.software)
	s.setStale(w.GetStaleMs())
	return nil
}

func (s *stream) update(r *wire.Response) error {
	u, err := s.parts.Join(r.Update, r.More)
	if err != nil {
		return err
	}
	var out cache.Outcome
	if u != nil {
		if out, err = s.cache.Apply(u); err != nil {
			return err
		}
	}
	for i, o := range r.Update.Unreadable {
		if o.Version != (model.Version{}) && !o.Delta && s.Outbox.failures() < cache.MaxUnfit {
			s.Outbox.fail(subject{key: o.Key}, failure{
				reason: r.Problems[i].Err.Error(), unreadable: true, shard: r.Update.Shard,
			})
		}
	}
	for _, key := range out.Readable {
		s.Outbox.resolve(subject{key: key})
	}
	if out.Applied != nil {
		s.options.Relay.Applied(*out.Applied)
	}
	if n := len(out.Missing) + len(out.Undecoded); n > 0 && !s.asked.AllowN(time.Now(), n) {
		return errNotReading
	}
	s.askAgain(r.Update.Shard, out.Missing, "base", model.ErrBase.Error())
	s.askAgain(r.Update.Shard, out.Undecoded, "delta", "a delta did not decode")
	return nil
}

// askAgain asks the server for objects by their keys.
func (s *stream) askAgain(shard uint32, keys []model.Key, label, reason string) {
	for some := range slices.Chunk(keys, maxKeys) {
		s.metrics.resyncs.WithLabelValues(label).Inc()
		named := make([]*pb.ObjectKey, 0, len(some))
		for _, key := range some {
			named = append(named, wire.KeyToProto(key))
		}
		s.Outbox.resync(&pb.Resync{Shard: shard, Keys: named, Reason: reason})
	}
}

func (s *stream) heartbeat(m *pb.Heartbeat) {
	if relay := s.options.Relay; relay != nil && m.GetResourceVersions() != nil {
		relay.Reached(wire.ResourceVersionsFromProto(m.GetResourceVersions()))
	}
	if m.GetSeenVersions() != nil {
		seen := wire.ResourceVersionsFromProto(m.GetSeenVersions())
		s.cache.SetSeen(seen)
		if relay := s.options.Relay; relay != nil {
			relay.Seen(seen)
		}
	}
	if m.StaleMs != nil {
		s.setStale(m.GetStaleMs())
	}
	if !s.synced {
		return
	}
	if s.digests.asks(m, s.cache.Cache) {
		s.Outbox.request(&pb.StreamRequest{Message: &pb.StreamRequest_DigestQuery{DigestQuery: &pb.DigestQuery{}}})
	}
	if s.Outbox.resyncsWait() {
		return // The next heartbeat asks for them.
	}
	for shard, keys := range s.cache.ChangedUnreadable() {
		s.askAgain(shard, keys, "unreadable", "it did not decode, and has changed since")
	}
}

func (s *stream) drain(m *pb.Drain) {
	if s.drained == 0 {
		s.log.Info("Server is draining", "server", s.server.Address)
	}
	s.drained = max(min(time.Duration(m.GetReconnectWithinMs())*time.Millisecond, discovery.MaxRetryDelay), 1)
}

func (s *stream) node(n *wire.NodeUpdate) error {
	if s.options.Relay != nil {
		return s.relayNode(n)
	}
	if n.Unreadable {
		return nil
	}
	if s.cache.SetNode(n.Node) {
		s.nodeLogged.Do(func() {
			s.log.Warn("Node object was deleted, keeping its last state", "node", n.Name)
		})
	}
	s.cache.Saw(model.ResourceVersions{Nodes: n.ResourceVersion})
	return nil
}

// relayNode passes on a Node to the relay, and notes its name until the stream is in sync.
func (s *stream) relayNode(n *wire.NodeUpdate) error {
	_, noted := s.nodes[n.Name]
	switch exists := n.Node != nil || n.Unreadable; {
	case s.synced:
	case exists && !noted && len(s.nodes) == maxNodes:
		return fmt.Errorf("%w: more than %d Nodes", cache.ErrProtocol, maxNodes)
	case exists:
		s.nodes[n.Name] = struct{}{}
	default:
		delete(s.nodes, n.Name)
	}
	if !n.Unreadable {
		s.options.Relay.Node(n.Name, n.Node, n.ResourceVersion)
		s.cache.Saw(model.ResourceVersions{Nodes: n.ResourceVersion})
	}
	return nil
}

func (s *stream) inSync(m *pb.InSync) error {
	switch {
	case s.synced:
		return fmt.Errorf("%w: a second in_sync", cache.ErrProtocol)
	case s.parts.Waiting():
		return fmt.Errorf("%w: in_sync before the last part of an update", cache.ErrProtocol)
	}
	seen := wire.ResourceVersionsFromProto(m.GetResourceVersions())
	if err := s.cache.InSync(m.GetSequences(), seen); err != nil {
		return err
	}
	s.synced = true
	s.recordSync()
	s.metrics.connected.Set(1)
	s.planMove()
	s.Outbox.inSync()
	if s.options.Relay != nil {
		nodes := s.nodes
		if !m.GetAllNodes() {
			nodes = nil
		}
		s.nodes = nil
		s.options.Relay.Seen(seen)
		s.options.Relay.InSync(s.path, nodes)
	}
	return nil
}

// clip returns the first maxText bytes of s, without keeping the memory of the rest.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(strings.Clone(s[:maxText]), "")
}
