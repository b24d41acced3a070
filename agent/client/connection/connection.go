// Package connection is a client's side of its streams, one at a time: it resumes from the cache,
// applies what arrives to it, and tells the server what it needs and what is programmed.
//
// It gives the guarantees of package client for single streams. If the server breaks the protocol
// or is silent, the stream ends. What a server can make the client keep or ask for is bounded.
package connection

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// defaultHeartbeat is the heartbeat interval if Welcome has none. A server that is silent for
	// silentBeats intervals counts as dead, and so does a server that sends no Welcome within
	// defaultHeartbeat.
	defaultHeartbeat = 30 * time.Second
	silentBeats      = 3
	// If a server sends nothing for pingAfter, the client pings it. If no answer arrives within
	// pingTimeout, the server counts as dead, since a machine that is cut off closes no connection.
	// Servers ping after 20 s themselves, so the client seldom has to ping one that is alive.
	pingAfter   = 25 * time.Second
	pingTimeout = 15 * time.Second
	// window is the flow-control window in bytes, which fits a shard of a large cluster. A fixed
	// window also turns off gRPC's bandwidth estimator. The estimator's ping with each update would
	// cost the server more than the update itself.
	window = 1 << 20
)

// Options configure a client.
type Options struct {
	// Servers returns the servers to start with. It is required. The client calls it in each round
	// of attempts in which the first servers known from streams do not answer.
	Servers discovery.Finder
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
	Cache *cache.Cache
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

// Connection is what outlives a client's streams, except for the cache. There is at most one stream
// at a time.
//
// Invariants:
//
//  1. Only a stream's goroutines set prepared, and they have ended when Stream returns. Only the
//     goroutine that calls Stream reads it.
//  2. The limits apply to all streams together.
type Connection struct {
	// Outbox holds what waits to be sent to the server.
	Outbox *Outbox

	options  Options
	cache    *cache.Writer
	choice   *discovery.Choice
	log      *slog.Logger
	metrics  *metrics
	prepared *prepared
	// repairs limits how often the client asks the server for diverged shards. unreadableLogged
	// limits log lines about objects that do not decode. nodeLogged limits log lines about a
	// deleted Node.
	repairs                      *rate.Limiter
	unreadableLogged, nodeLogged rate.Sometimes

	mu     sync.Mutex // guards status
	status Status
}

// New returns a Connection without a stream. choice decides which server is preferred. The metrics
// are registered in subsystem.
func New(o Options, choice *discovery.Choice, subsystem string) *Connection {
	if o.Decode == nil {
		o.Decode = wire.Decode
	}
	m := newMetrics(o.Registerer, subsystem)
	w := &cache.Writer{Cache: o.Cache, ApplyDelta: o.Apply, Relay: o.Relay != nil}
	return &Connection{
		Outbox:  newOutbox(w, o.NodeName, m.nacks),
		options: o, cache: w, choice: choice, log: o.Logger, metrics: m,
		status:           Status{Since: time.Now()},
		repairs:          rate.NewLimiter(rate.Every(repairInterval), repairBurst),
		unreadableLogged: rate.Sometimes{First: 10, Interval: time.Minute},
		nodeLogged:       rate.Sometimes{First: 10, Interval: time.Minute},
	}
}

// Stream runs one stream with a server until it ends.
func (c *Connection) Stream(ctx context.Context, server discovery.Server) discovery.End {
	streaming, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := newStream(c, server, cancel)
	err := s.run(streaming)
	if s.welcomed && c.options.Relay != nil {
		c.options.Relay.Ended()
	}
	c.metrics.connected.Set(0)
	c.metrics.serverStale.Set(0)
	end := discovery.End{Err: err, Welcomed: s.welcomed, Drained: s.drained, Stale: errors.Is(err, errStale)}
	if end.Stale || errors.Is(err, errMove) {
		end.To = c.prepared.server
	}
	return end
}

// Close closes the connection that was prepared for another stream, if there is one.
func (c *Connection) Close() {
	if c.prepared != nil {
		_ = c.prepared.conn.Close()
		c.prepared = nil
	}
}

// open returns the prepared connection if it leads to this server, and a new one otherwise.
func (c *Connection) open(server discovery.Server) (*grpc.ClientConn, error) {
	if p := c.prepared; p != nil && p.server == server {
		c.prepared = nil
		return p.conn, nil
	}
	c.Close()
	return c.dial(server)
}

func (c *Connection) dial(server discovery.Server) (*grpc.ClientConn, error) {
	options := append([]grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(frameCodec{}), grpc.MaxCallRecvMsgSize(wire.MaxFrame)),
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

// hello begins a stream: it drops what was meant for the previous one and returns the Hello.
func (c *Connection) hello() *pb.Hello {
	c.Outbox.newStream()
	held := c.cache.Begin()
	h := &pb.Hello{
		NodeName: c.options.NodeName, Kind: c.options.Kind,
		ClientVersion: c.options.Version, Programmer: c.options.Programmer,
		Capabilities: []pb.Capability{pb.Capability_CAPABILITY_ZSTD, pb.Capability_CAPABILITY_BUCKETS},
		Epoch:        held.Epoch, Sequences: held.Sequences, Digest: held.Digest[:],
		ResourceVersions: wire.ResourceVersionsToProto(held.ResourceVersions), Cluster: held.Cluster,
	}
	if c.options.Relay != nil {
		digest := c.options.Relay.NodesDigest()
		h.NodesDigest = digest[:]
	}
	return h
}

// Relay holds the callbacks of a client that feeds a relay's store from another server. The client
// calls them one at a time, in the order of the stream, except for Check, which it may call during
// another callback. All are required.
type Relay struct {
	// NodesDigest returns the digest of all Nodes that the relay holds, for the Hello.
	NodesDigest func() model.Digest
	// Check returns an error if the relay must not follow the server of a Welcome with this path and
	// number of shards. It changes nothing. The client calls it at the start of every stream, before
	// the cache changes, and before it leaves a stream for another server. If Check returns an error,
	// the client ends the stream, or does not leave for that server.
	Check func(path []uint64, shards uint32) error
	// Applied is called with each Update after the cache has applied it.
	Applied func(cache.Applied)
	// Node is called with each Node that arrived or changed, or with nil if the Node no longer
	// exists, and with the resource version of Nodes that this reflects. A relay's cache keeps no
	// Nodes.
	Node func(name string, n *model.Node, resourceVersion uint64)
	// Ended is called when a welcomed stream has ended.
	Ended func()
	// Reached is called with the resource versions up to which all shards are complete.
	Reached func(model.ResourceVersions)
	// Seen is called with the resource versions that the relay's state reflects from now on, before
	// InSync. They may be lower than those that came before.
	Seen func(model.ResourceVersions)
	// InSync is called when all differences from the relay's state have arrived, with the
	// Welcome.path of the stream. nodes holds the names of all Nodes; the relay must drop all others.
	// nil means that the relay's digest of Nodes was right and that its Nodes stay.
	InSync func(path []uint64, nodes map[string]struct{})
}
