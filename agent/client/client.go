// Package client is a node's side of the stream. It keeps a Cache equal to the state that the
// servers hold, whatever happens to servers, streams and the network.
//
// # Guarantees
//
//   - The cache changes only by whole Updates and loses an object only when an Update says so. A
//     server that is down, a broken stream or an update that does not fit removes nothing.
//   - After a reconnect, the server sends only the differences from the cache's content.
//   - The client never guesses the result of a delta that does not fit. It keeps the object as it
//     is and asks the server for it again.
//   - The client leaves out an object that does not decode and reports it to the server with a
//     Nack. It applies the rest of the update.
//   - Acks cover only what the caller has programmed, and are coalesced.
//
// # Status codes
//
// The status that a stream ends with decides what the client does next:
//
//   - By default, the client tries the next server. It backs off once it has tried all servers.
//   - If UNAVAILABLE or RESOURCE_EXHAUSTED comes with google.rpc.RetryInfo, the client does not try
//     this server again before the time in RetryInfo.
//   - On UNAUTHENTICATED or PERMISSION_DENIED, the client also logs an error each time, because an
//     operator has to act. But if the stream was open for some time, UNAUTHENTICATED means that it
//     has outlived its credentials, and the client reconnects at once with fresh ones.
//   - If the server breaks the protocol, the client closes the stream and resumes from its cache on
//     a new one.
//
// # Servers
//
// A client starts with the servers of Options.Servers and learns others from its streams.
// Rendezvous hashing gives each node its own order of the servers, and the client prefers the first
// one that it can reach. When servers join or leave, nodes move at a random time within 30 seconds.
// A node that is on another server after a failure returns to its first choice after 5 to 10
// minutes. A client leaves a stream for another server only once it is connected to that server.
//
// # Other programs
//
// Any program that needs to know the endpoints of Services can use this package. It sets
// Options.Subscription, waits for Cache.Dirty, and reads the Services that Cache.Take returns.
// examples/gateway is such a program.
package client

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// times holds the client's delays. Tests shorten them.
type times struct {
	// minBackoff and maxBackoff bound the pause after all servers have been tried. The pause is
	// chosen at random between half the back-off and all of it. The back-off doubles each round.
	minBackoff, maxBackoff time.Duration
	// settled is how long a stream must live to reset the back-off.
	settled time.Duration
	// moveWindow is the time within which nodes move after the set of servers has changed.
	moveWindow time.Duration
	// returnAfter is the minimum time that a node stays on a server that is not its first choice.
	// The maximum is twice as long.
	returnAfter time.Duration
}

var defaultTimes = times{
	minBackoff: 500 * time.Millisecond, maxBackoff: 30 * time.Second, settled: 10 * time.Second,
	moveWindow: 30 * time.Second, returnAfter: 5 * time.Minute,
}

const (
	// defaultHeartbeat is the heartbeat interval if Welcome has none. A server that is silent for
	// silentBeats intervals counts as dead, and so does a server that sends no Welcome within
	// defaultHeartbeat.
	defaultHeartbeat = 30 * time.Second
	silentBeats      = 3
	// The client asks for diverged shards at most once per repairInterval, after an initial burst
	// of repairBurst requests.
	repairInterval = 10 * time.Second
	repairBurst    = 8
)

// maxMessage bounds the size of a server's message in bytes. Servers split larger updates.
const maxMessage = wire.MaxFrame

// window is the flow-control window in bytes, which fits a shard of a large cluster. A fixed window
// also turns off gRPC's bandwidth estimator. The estimator's ping with each update would cost the
// server more than the update itself.
const window = 1 << 20

// These aliases name the content of a Cache for code outside this module, which cannot import
// internal/model.
type (
	// ServiceKey names a Service.
	ServiceKey = model.ServiceKey
	// Service is a Kubernetes Service, trimmed to what nodes need.
	Service = model.Service
	// Slice is a Kubernetes EndpointSlice, trimmed to what nodes need.
	Slice = model.Slice
	// Node is a Kubernetes Node, trimmed to what the node itself needs.
	Node = model.Node
)

var errProtocol = errors.New("the server broke the protocol")

// Options configure a Client.
type Options struct {
	// Servers returns the servers to start with. It is required. The client calls it in each round
	// of attempts in which the first servers known from streams do not answer.
	Servers func(context.Context) ([]Server, error)
	// ServerName is the name that every server's certificate must have, including servers learned
	// from a stream. Empty means that each Server's own Name applies.
	ServerName string
	// NodeName is the name of the Node that this client serves. Empty means that it serves none.
	NodeName string
	// Kind is the kind of client. It is ignored if Relay is set. If unspecified, it is agent with a
	// NodeName and observer without one.
	Kind pb.ClientKind
	// Version and Programmer are sent to the server, which shows them to its operators.
	Version, Programmer string
	// DialOptions must hold the transport credentials.
	DialOptions []grpc.DialOption
	// Cache is the cache to keep up to date. It is required.
	Cache *Cache
	// Subscription selects what the client follows, and so all that its cache holds. nil means
	// everything.
	Subscription *pb.Subscription
	// Relay, if set, receives the callbacks that a relay needs.
	Relay *Relay
	// Decode decodes a frame. It must not keep the frame's memory. nil means wire.Decode. A process
	// with many clients may share the results, which are immutable.
	Decode func(wire.Frame) (*wire.Response, error)
	// Apply applies a delta to a slice. nil means model.SliceDelta.Apply. A process with many
	// clients may share the results, which are immutable.
	Apply func(d *model.SliceDelta, to *model.Slice) (*model.Slice, error)
	// Observe, if set, is called with each response after it was applied, and with the response's
	// size in bytes before TLS and HTTP/2. It must return quickly.
	Observe func(r *wire.Response, size int)
	// MaxBackoff bounds the pause after all servers have been tried. 0 means 30 seconds.
	MaxBackoff time.Duration
	// Logger is the client's log. nil means slog.Default.
	Logger *slog.Logger
	// Registerer registers the client's metrics. nil means that they are not registered.
	Registerer prometheus.Registerer
}

// Client keeps a Cache up to date from one server at a time.
type Client struct {
	options Options
	log     *slog.Logger
	metrics *metrics
	outbox  *outbox
	// connection is the state that Connection and InSync report.
	connection connection
	times      times
	// choice and prepared belong to the goroutine of Run. A goroutine of a stream may set prepared
	// before the stream ends; Run reads it after that goroutine has ended.
	choice   choice
	prepared *prepared
	// repairs limits how often the client asks the server for diverged shards. unreadableLogged
	// limits log lines about objects that do not decode. nodeLogged limits log lines about a
	// deleted Node.
	repairs                      *rate.Limiter
	unreadableLogged, nodeLogged rate.Sometimes
}

// New returns a client. Run starts it.
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
	subsystem := "agent"
	if o.Relay != nil {
		subsystem = "upstream"
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
	times := defaultTimes
	if o.MaxBackoff > 0 {
		times.minBackoff, times.maxBackoff = min(times.minBackoff, o.MaxBackoff), o.MaxBackoff
	}
	return &Client{
		options: o, log: o.Logger, metrics: newMetrics(o.Registerer, subsystem), outbox: newOutbox(o.Cache, proto.CloneOf(o.Subscription)),
		connection: connection{now: Connection{Since: time.Now()}},
		times:      times, choice: choice{node: cmp.Or(o.NodeName, rand.Text())},
		repairs:          rate.NewLimiter(rate.Every(repairInterval), repairBurst),
		unreadableLogged: rate.Sometimes{First: 10, Interval: time.Minute},
		nodeLogged:       rate.Sometimes{First: 10, Interval: time.Minute},
	}
}

// Subscribe changes what the client follows and returns at once. Objects that leave the
// subscription leave the cache. Objects that enter it arrive on the current stream or on the next
// one. nil means everything.
func (c *Client) Subscribe(s *pb.Subscription) { c.outbox.subscribe(proto.CloneOf(s)) }

// Ack reports to the server that the kernel holds these positions of this epoch. It returns at
// once. Positions that are lost because a stream ended are reported on the next stream: after its
// InSync, Cache.Take returns the positions of all shards again.
func (c *Client) Ack(epoch uint64, positions map[uint32]uint64) { c.outbox.ack(epoch, positions) }

// AckSince reports to the server that all of a relay's nodes have programmed a shard up to a
// sequence. at is when the slowest node programmed it, and last is that node's name.
func (c *Client) AckSince(epoch uint64, shard uint32, sequence uint64, at time.Time, last string) {
	c.outbox.ackSince(epoch, map[uint32]uint64{shard: sequence}, at, last)
}

// Nack reports to the current server and to each later one that a Service is not fully programmed.
func (c *Client) Nack(service model.ServiceKey, reason string) {
	c.fail(subject{key: serviceKey(service)}, failure{reason: reason})
}

// Resolve withdraws the Nack of a Service, which is now fully programmed.
func (c *Client) Resolve(service model.ServiceKey) {
	c.outbox.resolve(subject{key: serviceKey(service)})
}

// NackNode reports to the current server and to each later one that nothing of one or both IP
// families is programmed.
func (c *Client) NackNode(reason string) { c.fail(c.itself(), failure{reason: reason}) }

// ResolveNode withdraws a NackNode.
func (c *Client) ResolveNode() { c.outbox.resolve(c.itself()) }

// itself returns the subject of a NackNode.
func (c *Client) itself() subject {
	return subject{key: model.Key{Kind: model.KindNode, Name: c.options.NodeName}}
}

func serviceKey(s model.ServiceKey) model.Key {
	return model.Key{Kind: model.KindService, Namespace: s.Namespace, Name: s.Name}
}

func (c *Client) fail(s subject, f failure) {
	if c.outbox.fail(s, f) {
		c.metrics.nacks.Inc()
	}
}

// SetNodes reports to the server how many nodes a relay represents. Acks apply to all of them.
func (c *Client) SetNodes(count uint32) { c.outbox.setNodes(count) }

// Report passes on the Nack of one of a relay's nodes, or the Nack's resolution, to the current
// server and to each later one while the failure lasts. It drops n and returns false if too many
// Nacks are open already or if n has no valid key.
func (c *Client) Report(n *pb.Nack) bool { return c.outbox.report(n) }
