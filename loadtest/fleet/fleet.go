// Package fleet simulates the nodes of a cluster. Each node is the agent's own client with its own
// connection, credentials and cache, but programs nothing. All nodes of a process share the objects
// that they have in common. Everything else, from the bytes on the wire to the acks, is the same as
// with real agents. The measurements of nodes (Group) do not depend on the kind of client.
package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
)

// readBuffer is the size of read buffers, in bytes. It is small because there are thousands of
// connections. TLS has a buffer of its own, and most messages are short.
const readBuffer = 4 << 10

// programmer is the programmer that nodes report to the server.
const programmer = "none (load test)"

// Options configure a Fleet.
type Options struct {
	// Servers are the addresses (host:port) of the servers that nodes know at the start.
	Servers []string
	// Members are the nodes. The Index of each is its position.
	Members []*Member
	// Credentials returns the transport credentials of a node.
	Credentials func(node string) (credentials.TransportCredentials, error)
	// Connecting is the maximum number of nodes that are between connecting and their first state.
	// 0 means no limit.
	Connecting int
	// Logger is the logger for the clients of the nodes.
	Logger *slog.Logger
}

// Fleet is a set of simulated nodes.
type Fleet struct {
	Group
	options Options
	shared  *shared
	nodes   []*node
}

// node is one simulated node. Fields without another guard are written only by its client's
// goroutine.
type node struct {
	*Member
	cache  *client.Cache
	client *client.Client
	// inSync is called whenever the node has the server's state on a new stream.
	inSync func()
}

// New returns a fleet whose nodes do not connect before Run.
func New(o Options) (*Fleet, error) {
	f := &Fleet{Group: Group{Members: o.Members}, options: o, shared: newShared()}
	for _, m := range o.Members {
		n, err := f.newNode(m, f.shared.decode, func() { f.Reached(m) })
		if err != nil {
			return nil, err
		}
		f.nodes = append(f.nodes, n)
	}
	f.AwaitSync(nil)
	return f, nil
}

func (f *Fleet) newNode(m *Member, decode func(wire.Frame) (*wire.Response, error), inSync func()) (*node, error) {
	n := &node{Member: m, cache: client.NewCache(), inSync: inSync}
	creds, err := f.options.Credentials(m.Name)
	if err != nil {
		return nil, fmt.Errorf("credentials of node %s: %w", m.Name, err)
	}
	n.client = client.New(client.Options{
		Servers: client.Static(f.options.Servers...), NodeName: m.Name, Version: daemon.Version(), Programmer: programmer,
		DialOptions: []grpc.DialOption{
			grpc.WithTransportCredentials(creds), grpc.WithContextDialer(n.dial), grpc.WithNoProxy(),
			grpc.WithReadBufferSize(readBuffer),
		},
		Cache: n.cache, Decode: decode, Apply: f.shared.apply,
		Observe: func(r *wire.Response, size int) {
			n.Messages.Add(int64(size))
			f.observe(n, r)
		},
		Logger: f.options.Logger.With("node", m.Name),
	})
	return n, nil
}

func (n *node) dial(ctx context.Context, address string) (net.Conn, error) {
	moves := n.client.InSync() // a node in sync connects only to move to another server
	c, err := n.Dial(ctx, address)
	if err == nil && moves {
		n.Moves.Add(1)
	}
	return c, err
}

// Run connects all nodes and keeps them connected until the context ends.
func (f *Fleet) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	f.Connect(ctx, f.options.Connecting, func(m *Member) { f.nodes[m.Index].start(ctx, &running) })
}

func (n *node) start(ctx context.Context, running *sync.WaitGroup) {
	// Run returns only when the context ends, without an error.
	running.Go(func() { _ = n.client.Run(ctx) })
}

// Up reports whether a node is in sync on a stream that has not broken.
func (f *Fleet) Up(m *Member) bool { return f.nodes[m.Index].client.InSync() }

// On reports whether a node is connected to the server with this address.
func (f *Fleet) On(m *Member, server string) bool {
	return f.nodes[m.Index].client.Connection().Server.Address == server
}

// ComputeDigests computes the digests of all nodes' caches. A node computes the digest of a shard
// at the first heartbeat after a change of the shard. The first heartbeat after a cold sync is
// therefore the most expensive one, and comes to all nodes at the same time. Real nodes have a
// machine each; those of a fleet would wait for each other, during the changes.
func (f *Fleet) ComputeDigests() {
	for _, n := range f.nodes {
		n.cache.Digests()
	}
}

// observe is called for every response that a node has applied.
func (f *Fleet) observe(n *node, r *wire.Response) {
	switch {
	case r.Welcome != nil:
		n.Streams.Add(1)
	case r.InSync != nil:
		n.inSync()
	case r.Update != nil && !r.More:
		if w := f.Window(); w != nil && n.Index >= 0 {
			w.Received(n.Member, r.Update, time.Now())
		}
	}
	// A real agent acks a position once its kernel is programmed. A simulated node acks once its
	// cache has the position.
	if changes, ok := n.cache.Take(); ok && len(changes.Positions) > 0 {
		n.client.Ack(changes.Epoch, changes.Positions)
	}
}

// ServerVersions returns the versions that the nodes' servers report.
func (f *Fleet) ServerVersions() (out []string) {
	for _, n := range f.nodes {
		if v := n.client.Connection().ServerVersion; v != "" && !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}

// Objects returns the numbers of objects on the first node.
func (f *Fleet) Objects() (services, endpointSlices, endpoints int) {
	for o := range objects(f.nodes[0].cache) {
		switch o := o.(type) {
		case *model.Service:
			services++
		case *model.Slice:
			endpointSlices++
			endpoints += len(o.Endpoints)
		}
	}
	return services, endpointSlices, endpoints
}
