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
// minutes. If a server says that it is stale, because its source may have missed changes, its
// clients look for another server after 15 to 30 seconds. A client leaves a stream for another
// server only once that server has welcomed a probe and is not stale.
//
// # Parts
//
//   - Package cache holds the state.
//   - Package connection runs one stream at a time.
//   - Package discovery decides which server is next.
//   - Package checkpoint keeps a cache in a file.
//
// # Other programs
//
// Any program that needs to know the endpoints of Services can use this package. It waits for
// Cache.Dirty, and reads the Services that Cache.Take returns. The cache holds the Services of the
// whole cluster, as an agent's does; a program that needs only some skips the others.
// examples/gateway is such a program.
package client

import (
	"context"
	"log/slog"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/agent/client/connection"
	"github.com/slicecast/slicecast/agent/client/discovery"
	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// These aliases name what users of a Client need, so that they need not import its parts.
type (
	// Cache is what a node holds of the servers' state.
	Cache = cache.Cache
	// Trigger is the last-change-trigger-time of a slice in a Cache.
	Trigger = cache.Trigger
	// Applied is what an Update did to a relay's cache.
	Applied = cache.Applied
	// Server is a server that a client can connect to.
	Server = discovery.Server
	// Options configure a Client.
	Options = connection.Options
	// Connection is the state of a client's connection to its servers.
	Connection = connection.Status
	// Relay holds the callbacks of a client that feeds a relay's store.
	Relay = connection.Relay
)

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

// NewCache returns an empty cache.
func NewCache() *Cache { return cache.New() }

// Static returns a function for Options.Servers that always returns the servers at these addresses.
func Static(addresses ...string) discovery.Finder {
	var servers []Server
	for _, address := range addresses {
		servers = append(servers, Server{Address: address})
	}
	return func(context.Context) ([]Server, error) { return servers, nil }
}

// Client keeps a Cache up to date from one server at a time. Its Outbox has the methods that report
// to the servers, Ack and Nack among them.
type Client struct {
	*connection.Outbox

	choice     *discovery.Choice
	connection *connection.Connection
}

// New returns a client. Run starts it.
func New(o Options) *Client {
	times := discovery.DefaultTimes
	if o.MaxBackoff > 0 {
		times.MinBackoff, times.MaxBackoff = min(times.MinBackoff, o.MaxBackoff), o.MaxBackoff
	}
	return newClient(o, times)
}

func newClient(o Options, times discovery.Times) *Client {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	subsystem := "agent"
	switch {
	case o.Relay != nil:
		o.Kind, subsystem = pb.ClientKind_CLIENT_KIND_RELAY, "upstream"
	case o.Kind != pb.ClientKind_CLIENT_KIND_UNSPECIFIED:
	case o.NodeName != "":
		o.Kind = pb.ClientKind_CLIENT_KIND_AGENT
	default:
		o.Kind = pb.ClientKind_CLIENT_KIND_OBSERVER
	}
	choice := discovery.New(discovery.Options{
		Find: o.Servers, ServerName: o.ServerName, NodeName: o.NodeName, Cache: o.Cache, Times: times,
		Logger: o.Logger, Registerer: o.Registerer, Subsystem: subsystem,
	})
	c := connection.New(o, choice, subsystem)
	return &Client{Outbox: c.Outbox, choice: choice, connection: c}
}

// Run keeps the client connected until the context ends. It then returns nil.
func (c *Client) Run(ctx context.Context) error {
	defer c.connection.Close()
	c.choice.Run(ctx, c.connection)
	return nil
}

// Connection returns the state of the client's connection to its servers.
func (c *Client) Connection() Connection {
	out := c.connection.Status()
	out.Servers = c.choice.Servers()
	return out
}

// InSync reports whether the client has a stream that is in sync. It is much cheaper than
// Connection, for processes that poll thousands of clients.
func (c *Client) InSync() bool { return c.connection.Status().Server.Address != "" }
