// Package client is a node's side of the stream: it keeps a Cache equal to what the servers hold, whatever happens to
// servers, streams and network meanwhile.
//
// # Guarantees
//
//   - The cache changes by whole Updates only, and loses an object only when an Update says so. A server that is away, a
//     stream that breaks, an update that does not fit: none of them removes anything.
//   - After a reconnect the server sends what differs from what the cache holds.
//   - A delta that does not fit is not guessed at: the object stays as it is and is asked for again.
//   - An object that does not decode is left out, reported to the server with a Nack, and the rest is applied.
//   - Acks cover what the caller has programmed, and are coalesced.
//
// Status codes and what the client does: UNAVAILABLE and all others not named here: the next server, with back-off once
// all have been tried. UNAUTHENTICATED, PERMISSION_DENIED: the same, and an error in the log each time, because an
// operator has to act. A breach of the protocol by the server: the stream is closed and the cache resumes on a new one.
package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Times of the client.
const (
	// minBackoff and maxBackoff bound the pause after all servers have been tried; the actual one is between half of it
	// and all of it, at random, and doubles each round.
	minBackoff = 500 * time.Millisecond
	maxBackoff = 30 * time.Second
	// settled is how long a stream must have lived for the back-off to start over.
	settled = 10 * time.Second
	// ackInterval is the least time between two Acks: one that follows a quiet second goes at once, so the server knows
	// exactly when a single change was programmed, and under churn an ack costs it little.
	ackInterval = time.Second
	// defaultHeartbeat is assumed where Welcome gives none; a server that is silent for silentBeats of them is taken for
	// dead, and so is one that gives no Welcome within a single default one.
	defaultHeartbeat = 30 * time.Second
	silentBeats      = 3
)

// maxMessage bounds what a client takes from a server: a shard with a Service of a million endpoints.
const maxMessage = 256 << 20

// window is what a server may send ahead: a shard of a large cluster. A fixed one also turns off the bandwidth estimator,
// whose ping with each update would cost the server more than the update.
const window = 1 << 20

var errProtocol = errors.New("the server broke the protocol")

// Options set up a Client.
type Options struct {
	// Servers gives the addresses (gRPC targets) to try. It is called before each round of attempts. Required.
	Servers func(context.Context) ([]string, error)
	// NodeName is the Node that this client serves; empty: an observer.
	NodeName string
	// Version and Programmer are told to the server, for its operators.
	Version, Programmer string
	// DialOptions must hold the transport credentials.
	DialOptions []grpc.DialOption
	// Cache is kept up to date. Required.
	Cache *Cache
	// Decode decodes frames; nil: wire.Decode. A process with many clients may share results, which are immutable.
	Decode func(wire.Frame) (*wire.Response, error)
	// Apply applies deltas, as model.SliceDelta.Apply does, which it is if nil; the same process may share results here too.
	Apply func(d *model.SliceDelta, to *model.Slice) (*model.Slice, error)
	// Observe, if set, sees each response after it was applied, with its size before TLS and HTTP/2. It must be fast.
	Observe func(r *wire.Response, size int)
	// Logger; nil: slog's default.
	Logger *slog.Logger
	// Registerer for metrics; nil: none.
	Registerer prometheus.Registerer
}

// Client keeps a Cache up to date.
type Client struct {
	options Options
	log     *slog.Logger
	metrics *metrics
	// minBackoff and maxBackoff are the constants but in tests.
	minBackoff, maxBackoff time.Duration

	// mu guards what waits to be sent.
	mu     sync.Mutex
	acks   map[uint32]uint64
	epoch  uint64 // of acks
	others []*pb.StreamRequest
	wake   chan struct{}
}

// New makes a client.
func New(o Options) *Client {
	if o.Decode == nil {
		o.Decode = wire.Decode
	}
	if o.Apply != nil {
		o.Cache.applyDelta = o.Apply
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return &Client{
		options: o, log: o.Logger, metrics: newMetrics(o.Registerer), minBackoff: minBackoff, maxBackoff: maxBackoff,
		acks: make(map[uint32]uint64), wake: make(chan struct{}, 1),
	}
}

// Run connects, and connects again, until the context ends.
func (c *Client) Run(ctx context.Context) error {
	backoff := c.minBackoff
	for {
		servers := c.servers(ctx)
		for _, server := range servers {
			start := time.Now()
			drained, err := c.stream(ctx, server)
			if ctx.Err() != nil {
				break
			}
			c.metrics.disconnects.Inc()
			c.metrics.connected.Set(0)
			wasSettled := time.Since(start) > settled
			if wasSettled || drained > 0 {
				backoff = c.minBackoff
			}
			c.logEnd(server, err)
			switch {
			case drained > 0 && len(servers) == 1:
				sleep(ctx, rand.N(drained))
			case wasSettled && drained == 0: // so did all other nodes of a server that died
				sleep(ctx, rand.N(2*c.minBackoff))
			}
		}
		if !sleep(ctx, backoff/2+rand.N(backoff/2)) {
			return nil
		}
		backoff = min(2*backoff, c.maxBackoff)
	}
}

// servers gives the servers in the order in which to try them.
func (c *Client) servers(ctx context.Context) []string {
	servers, err := c.options.Servers(ctx)
	if err != nil && ctx.Err() == nil {
		c.log.Error("Can't find a server; what was programmed stays", "err", err)
	}
	return preference(servers, c.options.NodeName)
}

func (c *Client) logEnd(server string, err error) {
	switch status.Code(err) {
	case codes.Unauthenticated, codes.PermissionDenied:
		c.log.Error("The server refuses this node; check its credentials. What was programmed stays", "server", server, "err", err)
	default:
		c.log.Warn("Lost the server; what was programmed stays", "server", server, "err", err)
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// stream runs one stream to its end, which always has an error. drained is the time within which a draining server asked
// the client to come back; 0: it did not drain.
func (c *Client) stream(ctx context.Context, server string) (drained time.Duration, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn, err := grpc.NewClient(server, append([]grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(frameCodec{}), grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window), grpc.WithNoProxy(),
	}, c.options.DialOptions...)...)
	if err != nil {
		return 0, fmt.Errorf("server address %q: %w", server, err)
	}
	defer func() { _ = conn.Close() }()
	// A server that accepts and then says nothing is no better than one that is down.
	watchdog := time.AfterFunc(defaultHeartbeat, func() { cancel(errSilent) })
	defer watchdog.Stop()
	g, err := pb.NewDistributionServiceClient(conn).Stream(ctx)
	if err != nil {
		return 0, causeOf(ctx, err)
	}
	hello := &pb.Hello{
		NodeName: c.options.NodeName, Kind: pb.ClientKind_CLIENT_KIND_AGENT,
		ClientVersion: c.options.Version, Programmer: c.options.Programmer,
		Capabilities: []pb.Capability{pb.Capability_CAPABILITY_ZSTD},
	}
	if hello.NodeName == "" {
		hello.Kind = pb.ClientKind_CLIENT_KIND_OBSERVER
	}
	c.options.Cache.hello(hello)
	if err := g.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Hello{Hello: hello}}); err != nil {
		return 0, causeOf(ctx, endOf(g, err))
	}
	c.mu.Lock()
	c.others = nil
	c.mu.Unlock()

	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel(nil)
	// Until the cache is in sync on this stream, its positions may be of another epoch than the server's.
	startSending := sync.OnceFunc(func() {
		sending.Go(func() {
			if err := c.send(ctx, g); err != nil {
				cancel(err)
			}
		})
	})

	silence := silentBeats * defaultHeartbeat
	welcomed := false
	for {
		var f wire.Frame
		if err := g.RecvMsg(&f); err != nil {
			return drained, causeOf(ctx, err)
		}
		r, err := c.options.Decode(f)
		if err != nil {
			return drained, fmt.Errorf("%w: %w", errProtocol, err)
		}
		if r.Welcome != nil && r.Welcome.GetHeartbeatIntervalMs() > 0 {
			silence = silentBeats * time.Duration(r.Welcome.GetHeartbeatIntervalMs()) * time.Millisecond
		}
		welcomed = welcomed || r.Welcome != nil
		if !welcomed && (r.Update != nil || r.InSync != nil) {
			return drained, fmt.Errorf("%w: state before welcome", errProtocol)
		}
		watchdog.Reset(silence)
		if r.Drain != nil {
			drained = max(time.Duration(r.Drain.GetReconnectWithinMs())*time.Millisecond, 1)
			c.log.Info("The server drains", "server", server)
		}
		if err := c.take(r, len(f), server); err != nil {
			return drained, err
		}
		if r.InSync != nil {
			startSending()
		}
	}
}

var errSilent = errors.New("the server has been silent for too long")

// causeOf gives the reason why the context of a stream ended, if that is why the stream ended.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	if errors.Is(err, io.EOF) {
		return errors.New("the server closed the stream")
	}
	return err
}

// endOf gives the status behind a failed Send.
func endOf(g pb.DistributionService_StreamClient, err error) error {
	if errors.Is(err, io.EOF) {
		var f wire.Frame
		return g.RecvMsg(&f)
	}
	return err
}

// take applies a response to the cache.
func (c *Client) take(r *wire.Response, size int, server string) error {
	cache := c.options.Cache
	c.metrics.received.Inc()
	c.metrics.receivedBytes.Add(float64(size))
	for _, p := range r.Problems {
		c.log.Warn("An object does not decode and is left as it was", "object", p.Key, "err", p.Err)
	}
	switch {
	case r.Welcome != nil:
		if err := cache.welcome(r.Welcome.GetEpoch(), r.Welcome.GetShardCount()); err != nil {
			return err
		}
		c.log.Info("Connected", "server", server, "name", r.Welcome.GetServerName(), "version", r.Welcome.GetServerVersion())
	case r.Update != nil:
		missing, err := cache.apply(r.Update, r.More)
		if err != nil {
			return err
		}
		for _, p := range r.Problems {
			c.nack(r.Update.Shard, r.Update.To, p.Key, p.Err.Error())
		}
		if len(missing) > 0 {
			c.metrics.resyncs.WithLabelValues("base").Inc()
			c.resync(&pb.Resync{Shard: r.Update.Shard, Keys: keysToProto(missing), Reason: model.ErrBase.Error()})
		}
	case r.Node != nil:
		if !r.Node.Unreadable {
			cache.setNode(r.Node.Node)
		}
	case r.InSync != nil:
		if err := cache.synced(r.InSync); err != nil {
			return err
		}
		c.metrics.connected.Set(1)
	case r.Heartbeat != nil:
		for _, shard := range cache.diverged(r.Heartbeat) {
			c.log.Warn("This node holds something else than the server; asking for the shard again", "shard", shard)
			c.metrics.resyncs.WithLabelValues("digest").Inc()
			c.resync(&pb.Resync{Shard: shard, Reason: "the digest differs"})
		}
	}
	if c.options.Observe != nil {
		c.options.Observe(r, size)
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

// Ack tells the server that these positions, in this epoch, are programmed. It returns at once; what can't be sent
// because there is no stream is dropped, and told when the next stream is in sync.
func (c *Client) Ack(epoch uint64, positions map[uint32]uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if epoch != c.epoch {
		clear(c.acks)
		c.epoch = epoch
	}
	for shard, sequence := range positions {
		c.acks[shard] = sequence
	}
	c.signal()
}

// Nack tells the server that an object of a Service could not be programmed.
func (c *Client) Nack(service model.ServiceKey, reason string) {
	shard, sequence := c.options.Cache.position(service)
	c.nack(shard, sequence, model.Key{Kind: model.KindService, Namespace: service.Namespace, Name: service.Name}, reason)
}

func (c *Client) nack(shard uint32, sequence uint64, key model.Key, reason string) {
	c.metrics.nacks.Inc()
	c.enqueue(&pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
		Shard: shard, Sequence: sequence, Key: wire.KeyToProto(key), Reason: reason,
	}}})
}

func (c *Client) resync(r *pb.Resync) {
	c.enqueue(&pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: r}})
}

// maxWaiting bounds what waits for a server that does not read.
const maxWaiting = 1024

func (c *Client) enqueue(r *pb.StreamRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.others) < maxWaiting {
		c.others = append(c.others, r)
	}
	c.signal()
}

func (c *Client) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// send sends what waits, until the stream ends: acks at intervals, everything else at once.
func (c *Client) send(ctx context.Context, g pb.DistributionService_StreamClient) error {
	var pause <-chan time.Time // until the next Ack may go; nil: it may
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.wake:
		case <-pause:
			pause = nil
		}
		others, ack := c.waiting(pause == nil)
		for _, r := range others {
			if err := g.Send(r); err != nil {
				return ignoreEOF(err)
			}
		}
		if ack == nil {
			continue
		}
		if err := g.Send(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: ack}}); err != nil {
			return ignoreEOF(err)
		}
		pause = time.After(ackInterval)
	}
}

// waiting takes what waits to be sent; acks only if they are wanted, and if they are of the server's epoch.
func (c *Client) waiting(acks bool) (others []*pb.StreamRequest, ack *pb.Ack) {
	epoch := c.options.Cache.currentEpoch()
	c.mu.Lock()
	defer c.mu.Unlock()
	others, c.others = c.others, nil
	if !acks || len(c.acks) == 0 {
		return others, nil
	}
	if c.epoch == epoch {
		ack = &pb.Ack{}
		for shard, sequence := range c.acks {
			ack.Positions = append(ack.Positions, &pb.ShardPosition{Shard: shard, Sequence: sequence})
		}
	}
	clear(c.acks)
	return others, ack
}

// ignoreEOF: the receiver knows why the stream ended.
func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
