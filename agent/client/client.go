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
// all have been tried. UNAVAILABLE and RESOURCE_EXHAUSTED with google.rpc.RetryInfo: the same, and this server not before
// that time. UNAUTHENTICATED, PERMISSION_DENIED: the same, and an error in the log each time, because an operator has to act; but a stream that
// has lasted and ends with UNAUTHENTICATED has outlived its credentials, and another one with fresh ones follows at once. A
// breach of the protocol by the server: the stream is closed and the cache resumes on a new one.
//
// # Servers
//
// A client begins with the servers that it is given and goes by those that its stream tells of. Rendezvous hashing gives each
// node an order of them. The client follows the first, as far as it can be reached: where servers come or go, nodes
// move at a random moment within half a minute; a node that is elsewhere after a failure goes back 5 to 10 minutes later. It
// leaves a stream for another server only when it is connected to that one.
//
// # Other programs
//
// Whatever has to know where Services lead can use this package: give Options.Subscription, wait for Cache.Dirty, and read the
// Services that Cache.Take names. examples/gateway is such a program.
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

// times are what a client goes by; tests are less patient.
type times struct {
	// minBackoff and maxBackoff bound the pause after all servers have been tried; the actual one is between half of it
	// and all of it, at random, and doubles each round.
	minBackoff, maxBackoff time.Duration
	// settled is how long a stream must have lived for the back-off to start over.
	settled time.Duration
	// moveWindow is the time within which nodes move to servers that have come.
	moveWindow time.Duration
	// returnAfter, and up to twice that, is how long a node stays with a server that is not its first choice.
	returnAfter time.Duration
}

var defaultTimes = times{
	minBackoff: 500 * time.Millisecond, maxBackoff: 30 * time.Second, settled: 10 * time.Second,
	moveWindow: 30 * time.Second, returnAfter: 5 * time.Minute,
}

const (
	// defaultHeartbeat is assumed where Welcome gives none; a server that is silent for silentBeats of them is taken for
	// dead, and so is one that gives no Welcome within a single default one.
	defaultHeartbeat = 30 * time.Second
	silentBeats      = 3
	// What diverges is asked for again at most once every repairInterval, but for the first repairBurst times.
	repairInterval = 10 * time.Second
	repairBurst    = 8
)

// maxMessage bounds a message of a server. What is larger comes in several.
const maxMessage = wire.MaxFrame

// window is what a server may send ahead: a shard of a large cluster. A fixed one also turns off the bandwidth estimator,
// whose ping with each update would cost the server more than the update.
const window = 1 << 20

// What a Cache holds, by names that can be used outside of this module.
type (
	// ServiceKey names a Service.
	ServiceKey = model.ServiceKey
	// Service is a Kubernetes Service, as far as nodes need it.
	Service = model.Service
	// Slice is a Kubernetes EndpointSlice, as far as nodes need it.
	Slice = model.Slice
	// Node is a Kubernetes Node, as far as the node itself needs it.
	Node = model.Node
)

var errProtocol = errors.New("the server broke the protocol")

// Options set up a Client.
type Options struct {
	// Servers gives the servers to begin with. It is called again in each round of attempts in which none of the first ones answers
	// that streams have told of. Required.
	Servers func(context.Context) ([]Server, error)
	// ServerName is what the certificate of every server must have, wherever the client has the
	// server from. Empty means each Server's own Name.
	ServerName string
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
	// Subscription is what the client follows, and all that its cache will hold; nil: everything.
	Subscription *pb.Subscription
	// Relay, if set, is told what a relay needs to know.
	Relay *Relay
	// Decode decodes frames, whose memory it must not keep; nil: wire.Decode. A process with many clients may share results, which are immutable.
	Decode func(wire.Frame) (*wire.Response, error)
	// Apply applies deltas, as model.SliceDelta.Apply does, which it is if nil; the same process may share results here too.
	Apply func(d *model.SliceDelta, to *model.Slice) (*model.Slice, error)
	// Observe, if set, sees each response after it was applied, with its size before TLS and HTTP/2. It must be fast.
	Observe func(r *wire.Response, size int)
	// MaxBackoff bounds the pause after all servers have been tried; 0: 30 seconds.
	MaxBackoff time.Duration
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
	// connection is for Connection.
	connection connection
	times      times
	// choice and prepared are for Run; prepared may be set by a stream's own goroutines.
	choice   choice
	prepared *prepared
	// repairs bounds how often the server is asked for what diverges, unreadableLogged how often
	// the log hears of objects that do not decode, nodeLogged how often that the Node is gone.
	repairs                      *rate.Limiter
	unreadableLogged, nodeLogged rate.Sometimes
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

// Subscribe changes what the client follows. It returns at once; what falls out of the subscription leaves the cache, and
// what is new to it comes, on the stream that is open or on the next one. nil is everything.
func (c *Client) Subscribe(s *pb.Subscription) { c.outbox.subscribe(proto.CloneOf(s)) }

// Ack tells the server that these positions, in this epoch, are programmed. It returns at once; what can't be sent
// because there is no stream is dropped, and told when the next stream is in sync.
func (c *Client) Ack(epoch uint64, positions map[uint32]uint64) { c.outbox.ack(epoch, positions) }

// AckSince tells the server that all of a relay's nodes have a shard of an epoch programmed up to a sequence, since when the last of
// them has it, and which one that was.
func (c *Client) AckSince(epoch uint64, shard uint32, sequence uint64, at time.Time, last string) {
	c.outbox.ackSince(epoch, map[uint32]uint64{shard: sequence}, at, last)
}

// Nack tells the server, and each one that comes after it, that something of a Service could not be programmed.
func (c *Client) Nack(service model.ServiceKey, reason string) {
	c.fail(subject{key: serviceKey(service)}, failure{reason: reason})
}

// Resolve takes a Nack back: all of the Service is programmed.
func (c *Client) Resolve(service model.ServiceKey) {
	c.outbox.resolve(subject{key: serviceKey(service)})
}

// NackNode tells the server, and each one that comes after it, that nothing of one or both IP families
// is programmed.
func (c *Client) NackNode(reason string) { c.fail(c.itself(), failure{reason: reason}) }

// ResolveNode takes a NackNode back.
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

// SetNodes tells the server how many nodes a relay stands for: an Ack is of all of them.
func (c *Client) SetNodes(count uint32) { c.outbox.setNodes(count) }

// Report tells the server, and each one that comes after it as long as it stands, what one of a relay's nodes can't program, or
// can again. It is false, and nothing is told, where too many stand already, or none is named.
func (c *Client) Report(n *pb.Nack) bool { return c.outbox.report(n) }
