package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// maxReused bounds the memory, in bytes, that a stream keeps for the next frame. Most frames are
// short.
const maxReused = 4 << 10

// If a server sends nothing for pingAfter, the client pings it. If no answer arrives within
// pingTimeout, the server counts as dead, since a machine that is cut off closes no connection.
// Servers ping after 20 s themselves, so the client seldom has to ping one that is alive.
const (
	pingAfter   = 25 * time.Second
	pingTimeout = 15 * time.Second
)

var errSilent = errors.New("the server has been silent for too long")

// stream is one stream, from its Hello to its end. The goroutine that receives owns all fields,
// except that the sending goroutine also uses grpc, cancel and move.
type stream struct {
	*Client
	server Server
	grpc   pb.DistributionService_StreamClient
	cancel context.CancelCauseFunc
	// sending starts the sending goroutine.
	sending func()
	move    move
	// silence is how long the server may send nothing before it counts as dead.
	silence  time.Duration
	welcomed bool
	software string // the server's version
	// unfinished is the estimated memory, in bytes, of the received parts of updates whose last
	// part is still missing. asked limits the number of objects that updates make the client ask
	// for.
	unfinished int
	asked      *rate.Limiter
	// digestsAsked reports that the server has sent a DigestQuery. bucketsAsked holds the shards
	// that BucketQueries have named. A server may ask for each only once per stream.
	digestsAsked bool
	bucketsAsked map[uint32]struct{}
	synced       bool
	// serversChanged reports that the stream named other servers than those known before.
	serversChanged bool
	// drained is the time within which a draining server wants the client to reconnect. 0 means
	// that the server does not drain.
	drained time.Duration
	// nodes holds the names of all Nodes received before the stream is in sync. Only a relay uses
	// it; nil means that the stream is in sync.
	nodes map[string]struct{}
}

// stream runs one stream until it ends. It always returns an error.
func (c *Client) stream(ctx context.Context, server Server) (*stream, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &stream{
		Client: c, server: server, cancel: cancel, silence: silentBeats * defaultHeartbeat,
		asked: newAsked(), bucketsAsked: make(map[uint32]struct{}),
	}
	conn := c.takePrepared(server)
	if conn == nil {
		var err error
		if conn, err = c.connect(server); err != nil {
			return s, err
		}
	}
	defer func() { _ = conn.Close() }()
	defer s.ended()
	// A server that accepts the connection and then stays silent is no better than one that is
	// down.
	watchdog := time.AfterFunc(defaultHeartbeat, func() { cancel(errSilent) })
	defer watchdog.Stop()
	var err error
	if s.grpc, err = pb.NewDistributionServiceClient(conn).Stream(ctx); err != nil {
		return s, causeOf(ctx, err)
	}
	hello := c.hello(c.outbox.newStream())
	if err := s.grpc.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: hello}}); err != nil {
		return s, causeOf(ctx, endOf(s.grpc, err))
	}
	s.move.timer = time.NewTimer(time.Hour)
	s.move.timer.Stop()
	defer s.move.timer.Stop()
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel(nil)
	s.sending = func() {
		sending.Go(func() {
			if err := s.send(ctx, &sending); err != nil {
				cancel(err)
			}
		})
	}
	var f wire.Frame
	for {
		if cap(f) > maxReused {
			f = nil
		}
		if err := s.grpc.RecvMsg(&f); err != nil {
			return s, causeOf(ctx, err)
		}
		r, err := c.options.Decode(f)
		if err != nil {
			return s, fmt.Errorf("%w: %w", errProtocol, err)
		}
		if err := s.take(r, len(f)); err != nil {
			return s, err
		}
		if s.welcomed {
			watchdog.Reset(s.silence)
		}
	}
}

func (c *Client) connect(server Server) (*grpc.ClientConn, error) {
	options := append([]grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(frameCodec{}), grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window), grpc.WithNoProxy(),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingAfter, Timeout: pingTimeout}),
	}, c.options.DialOptions...)
	if name := cmp.Or(c.options.ServerName, server.Name); name != "" {
		options = append(options, grpc.WithAuthority(name))
	}
	conn, err := grpc.NewClient(server.Address, options...)
	if err != nil {
		return nil, fmt.Errorf("server address %q: %w", server.Address, err)
	}
	return conn, nil
}

// ended informs the relay, if any, that a welcomed stream has ended.
func (s *stream) ended() {
	if s.welcomed && s.options.Relay != nil {
		s.options.Relay.Ended()
	}
}

func (c *Client) hello(s *pb.Subscription) *pb.Hello {
	h := &pb.Hello{
		NodeName: c.options.NodeName, Kind: c.options.Kind, Subscription: s,
		ClientVersion: c.options.Version, Programmer: c.options.Programmer,
		Capabilities: []pb.Capability{pb.Capability_CAPABILITY_ZSTD, pb.Capability_CAPABILITY_BUCKETS},
	}
	if c.options.Relay != nil {
		digest := c.options.Relay.NodesDigest()
		h.NodesDigest = digest[:]
	}
	c.options.Cache.subscribe(s)
	c.options.Cache.hello(h)
	return h
}

// causeOf returns the cause for which the stream's context was canceled, if there is one, and err
// otherwise. It replaces io.EOF by a readable error.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	if errors.Is(err, io.EOF) {
		return errors.New("the server closed the stream")
	}
	return err
}

// endOf returns the stream's status if a Send failed because the stream has ended.
func endOf(g pb.DistributionService_StreamClient, err error) error {
	if errors.Is(err, io.EOF) {
		var f wire.Frame
		return g.RecvMsg(&f)
	}
	return err
}

// take applies a response and reports it to Options.Observe.
func (s *stream) take(r *wire.Response, size int) error {
	s.metrics.received.Inc()
	s.metrics.receivedBytes.Add(float64(size))
	for _, p := range r.Problems {
		s.unreadableLogged.Do(func() {
			s.log.Warn("An object does not decode and is left as it was", "object", p.Key, "err", p.Err)
		})
	}
	if err := s.apply(r); err != nil {
		return err
	}
	if s.options.Observe != nil {
		s.options.Observe(r, size)
	}
	return nil
}

func (s *stream) apply(r *wire.Response) error {
	switch {
	case r.Welcome != nil:
		return s.welcome(r.Welcome)
	case !s.welcomed && !unknown(r):
		return fmt.Errorf("%w: a message before welcome", errProtocol)
	case r.Update != nil:
		return s.update(r)
	case r.BucketQuery != nil:
		return s.answerBuckets(r.BucketQuery)
	case r.Node != nil:
		return s.node(r.Node)
	case r.InSync != nil:
		return s.inSync(r.InSync)
	case r.Heartbeat != nil:
		return s.heartbeat(r.Heartbeat)
	case r.Digests != nil:
		return s.digests(r.Digests)
	case r.DigestQuery != nil && s.digestsAsked:
		return fmt.Errorf("%w: a second digest_query", errProtocol)
	case r.DigestQuery != nil:
		s.digestsAsked = true
		_, digests := s.options.Cache.Digests()
		s.outbox.request(&pb.StreamRequest{Message: &pb.StreamRequest_Digests{Digests: &pb.Digests{Digests: model.JoinDigests(digests)}}})
	case r.Drain != nil:
		if s.drained == 0 {
			s.log.Info("The server drains", "server", s.server.Address)
		}
		s.drained = max(min(time.Duration(r.Drain.GetReconnectWithinMs())*time.Millisecond, maxRetryDelay), 1)
	case r.Servers != nil:
		s.learn(r.Servers)
	}
	return nil
}

func (s *stream) welcome(w *pb.Welcome) error {
	if s.welcomed {
		return fmt.Errorf("%w: a second welcome", errProtocol)
	}
	if n := len(w.GetPath()); n > maxPath {
		return fmt.Errorf("%w: a path of %d servers", errProtocol, n)
	}
	name, version := clip(w.GetServerName()), clip(w.GetServerVersion())
	cache := s.options.Cache
	if err := cache.welcome(w.GetEpoch(), w.GetShardCount()); err != nil {
		return err
	}
	if s.options.Relay != nil {
		if err := s.options.Relay.Path(w.GetPath()); err != nil {
			return err
		}
		s.nodes = make(map[string]struct{})
	}
	if w.GetHeartbeatIntervalMs() > 0 {
		s.silence = silentBeats * min(time.Duration(w.GetHeartbeatIntervalMs())*time.Millisecond, maxRetryDelay)
	}
	s.welcomed, s.software = true, version
	s.connection.welcome(Connection{Server: s.server, ServerName: name, ServerVersion: version})
	s.metrics.server.Reset()
	s.metrics.server.WithLabelValues(s.server.Address, name, version).Set(1)
	s.log.Info("Connected", "server", s.server.Address, "name", name, "version", version)
	s.sending()
	return nil
}

func (s *stream) update(r *wire.Response) error {
	if s.unfinished += unfinishedCost(r); s.unfinished > maxUnfinished {
		return fmt.Errorf("%w: unfinished updates of more than %d bytes", errProtocol, maxUnfinished)
	}
	out, err := s.options.Cache.apply(r.Update, r.More)
	if err != nil {
		return err
	}
	if !r.More && !out.unfinished {
		s.unfinished = 0
	}
	for i, o := range r.Update.Unreadable {
		if o.Version != (model.Version{}) && !o.Delta && s.outbox.failures() < maxUnfit {
			s.fail(subject{key: o.Key}, failure{reason: r.Problems[i].Err.Error(), unreadable: true, shard: r.Update.Shard})
		}
	}
	for _, key := range out.readable {
		s.outbox.resolve(subject{key: key})
	}
	if out.applied != nil {
		s.options.Relay.Applied(*out.applied)
	}
	if n := len(out.missing) + len(out.undecoded); n > 0 && !s.asked.AllowN(time.Now(), n) {
		return errNotReading
	}
	s.again(r.Update.Shard, out.missing, "base", model.ErrBase.Error())
	s.again(r.Update.Shard, out.undecoded, "delta", "a delta did not decode")
	return nil
}

// answerBuckets answers a BucketQuery. Each shard may be asked for once per stream, because an
// answer has all bucket digests of the shard.
func (s *stream) answerBuckets(q *pb.BucketQuery) error {
	for _, shard := range q.GetShards() {
		if _, again := s.bucketsAsked[shard]; again {
			return fmt.Errorf("%w: a second question for the buckets of shard %d", errProtocol, shard)
		}
		answer, err := s.resync(shard, "resume", "resuming with another digest")
		if err != nil {
			return err
		}
		s.bucketsAsked[shard] = struct{}{}
		s.outbox.request(&pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: answer}})
	}
	return nil
}

// unknown reports whether a response holds no message that this version knows.
func unknown(r *wire.Response) bool {
	return r.Welcome == nil && r.Update == nil && r.Node == nil && r.InSync == nil && r.Heartbeat == nil && r.Drain == nil &&
		r.Servers == nil && r.BucketQuery == nil && r.Digests == nil && r.DigestQuery == nil
}

// again asks the server for objects by their keys.
func (s *stream) again(shard uint32, keys []model.Key, label, reason string) {
	for some := range slices.Chunk(keys, maxKeys) {
		s.metrics.resyncs.WithLabelValues(label).Inc()
		s.outbox.resync(&pb.Resync{Shard: shard, Keys: keysToProto(some), Reason: reason})
	}
}

// resync returns a request for the differences in a shard, by its bucket digests.
func (s *stream) resync(shard uint32, label, reason string) (*pb.Resync, error) {
	digests, ok := s.options.Cache.bucketDigests(shard)
	if !ok {
		return nil, fmt.Errorf("%w: a question for the buckets of shard %d, which is not there", errProtocol, shard)
	}
	s.metrics.resyncs.WithLabelValues(label).Inc()
	return &pb.Resync{Shard: shard, BucketDigests: model.JoinDigests(digests), Reason: reason}, nil
}

// compare asks the server, unprompted, for the differences in a shard.
func (s *stream) compare(shard uint32, label, reason string) error {
	r, err := s.resync(shard, label, reason)
	if err == nil {
		s.outbox.resync(r)
	}
	return err
}

func (s *stream) heartbeat(m *pb.Heartbeat) error {
	if relay := s.options.Relay; relay != nil && m.GetResourceVersions() != nil {
		relay.Reached(wire.ResourceVersionsFromProto(m.GetResourceVersions()))
	}
	if !s.synced {
		return nil
	}
	if s.options.Cache.differs(m, s.repairs.Allow) {
		s.outbox.request(&pb.StreamRequest{Message: &pb.StreamRequest_DigestQuery{DigestQuery: &pb.DigestQuery{}}})
	}
	if s.outbox.asking() {
		return nil // The next heartbeat asks for them.
	}
	for shard, keys := range s.options.Cache.changedUnreadable() {
		s.again(shard, keys, "unreadable", "it did not decode, and has changed since")
	}
	return nil
}

func (s *stream) digests(m *pb.Digests) error {
	for _, shard := range s.options.Cache.diverged(m, s.repairs.Allow) {
		s.log.Warn("This node holds something else than the server; asking for what differs", "shard", shard)
		if err := s.compare(shard, "digest", "the digest differs"); err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) node(n *wire.NodeUpdate) error {
	switch relay := s.options.Relay; {
	case relay == nil && !n.Unreadable:
		if s.options.Cache.setNode(n.Node) {
			s.nodeLogged.Do(func() {
				s.log.Warn("The cluster has no Node object for this node any more; what it last said still holds", "node", n.Name)
			})
		}
	case relay != nil:
		switch exists := n.Node != nil || n.Unreadable; {
		case s.nodes == nil: // the stream is in sync
		case exists && len(s.nodes) == maxNodes:
			return fmt.Errorf("%w: more than %d Nodes", errProtocol, maxNodes)
		case exists:
			s.nodes[n.Name] = struct{}{}
		default:
			delete(s.nodes, n.Name)
		}
		if !n.Unreadable {
			relay.Node(n.Name, n.Node)
		}
	}
	return nil
}

func (s *stream) inSync(m *pb.InSync) error {
	if err := s.options.Cache.synced(m); err != nil {
		return err
	}
	if !s.synced {
		s.synced = true
		s.connection.inSync()
		s.metrics.connected.Set(1)
		s.considerMove()
		for _, shard := range s.options.Cache.cameFrom(s.software) {
			if err := s.compare(shard, "software", "another version of the server may have known less"); err != nil {
				return err
			}
		}
	}
	s.outbox.inSync()
	if s.options.Relay != nil {
		nodes := s.nodes
		if !m.GetAllNodes() {
			nodes = nil
		}
		s.nodes = nil
		s.options.Relay.InSync(nodes)
	}
	return nil
}

func keysToProto(keys []model.Key) []*pb.ObjectKey {
	var out []*pb.ObjectKey
	for _, k := range keys {
		out = append(out, wire.KeyToProto(k))
	}
	return out
}

// send sends what the outbox holds until the stream ends. It sends Acks at intervals and everything
// else at once. It also starts the goroutines that reach for a preferred server.
func (s *stream) send(ctx context.Context, running *sync.WaitGroup) error {
	// pause fires when an Ack must go even without a new change. nil means that one may go now.
	var pause <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.outbox.wake:
		case <-pause:
			pause = nil
		case <-s.move.timer.C:
			running.Go(func() { s.reach(ctx) })
		}
		requests, acked, err := s.outbox.take(pause == nil)
		if err != nil {
			return err
		}
		for _, r := range requests {
			if err := s.grpc.Send(r); err != nil {
				if errors.Is(err, io.EOF) {
					return nil // the receiving goroutine has the stream's status
				}
				return err
			}
		}
		if acked {
			pause = time.After(ackPatience)
		}
	}
}
