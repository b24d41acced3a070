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
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
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
	// defaultHeartbeat is assumed where Welcome gives none; a server that is silent for silentBeats of them is taken for
	// dead, and so is one that gives no Welcome within a single default one.
	defaultHeartbeat = 30 * time.Second
	silentBeats      = 3
	// What diverges is asked for again at most once every repairInterval, but for the first repairBurst times.
	repairInterval = 10 * time.Second
	repairBurst    = 8
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
	// NodeName is the Node that this client serves; empty: none.
	NodeName string
	// Kind is what the client is; if not given, an agent if it has a NodeName, else an observer. With Relay it is a relay.
	Kind pb.ClientKind
	// Version and Programmer are told to the server, for its operators.
	Version, Programmer string
	// DialOptions must hold the transport credentials.
	DialOptions []grpc.DialOption
	// Cache is kept up to date. Required.
	Cache *Cache
	// Relay, if set, is told what a relay needs to know.
	Relay *Relay
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
	outbox  *outbox
	// minBackoff and maxBackoff are the constants but in tests.
	minBackoff, maxBackoff time.Duration
	// repairs bounds how often the server is asked for what diverges, unreadableLogged how often the log hears of objects
	// that do not decode.
	repairs          *rate.Limiter
	unreadableLogged rate.Sometimes
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
	switch {
	case o.Relay != nil:
		o.Kind = pb.ClientKind_CLIENT_KIND_RELAY
		o.Cache.collect = true
	case o.Kind != pb.ClientKind_CLIENT_KIND_UNSPECIFIED:
	case o.NodeName != "":
		o.Kind = pb.ClientKind_CLIENT_KIND_AGENT
	default:
		o.Kind = pb.ClientKind_CLIENT_KIND_OBSERVER
	}
	return &Client{
		options: o, log: o.Logger, metrics: newMetrics(o.Registerer), outbox: newOutbox(o.Cache),
		minBackoff: minBackoff, maxBackoff: maxBackoff,
		repairs:          rate.NewLimiter(rate.Every(repairInterval), repairBurst),
		unreadableLogged: rate.Sometimes{First: 10, Interval: time.Minute},
	}
}

// Ack tells the server that these positions, in this epoch, are programmed. It returns at once; what can't be sent
// because there is no stream is dropped, and told when the next stream is in sync.
func (c *Client) Ack(epoch uint64, positions map[uint32]uint64) { c.outbox.ack(epoch, positions) }

// Nack tells the server, and each one that comes after it, that something of a Service could not be programmed.
func (c *Client) Nack(service model.ServiceKey, reason string) {
	c.fail(serviceKey(service), failure{reason: reason})
}

// Resolve takes a Nack back: all of the Service is programmed.
func (c *Client) Resolve(service model.ServiceKey) { c.outbox.resolve(serviceKey(service)) }

func serviceKey(s model.ServiceKey) model.Key {
	return model.Key{Kind: model.KindService, Namespace: s.Namespace, Name: s.Name}
}

func (c *Client) fail(key model.Key, f failure) {
	if c.outbox.fail(key, f) {
		c.metrics.nacks.Inc()
	}
}

// Report sends what a relay has to tell of its agents: an Ack or a Nack. It is false, and nothing is sent, where the stream
// is not in sync or of another epoch.
func (c *Client) Report(epoch uint64, r *pb.StreamRequest) bool { return c.outbox.report(epoch, r) }

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
