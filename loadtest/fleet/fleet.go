// Package fleet simulates the nodes of a cluster: each is the agent's own client with its own connection, credentials and
// cache, and programs nothing. What the nodes of one process hold in common is in memory once; everything else, from the
// bytes on the wire to the acks, is as it is with as many real agents. What is measured of nodes (Group) does not depend on
// what they are the clients of.
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

// readBuffer is small because there are thousands: TLS has a buffer of its own, and most messages are short.
const readBuffer = 4 << 10

// programmer is what nodes tell the server that they program.
const programmer = "none (load test)"

// Options set up a Fleet.
type Options struct {
	// Servers are the addresses (host:port) that all nodes begin with.
	Servers []string
	// Members are the nodes, by their Index.
	Members []*Member
	// Credentials gives the transport credentials of a node.
	Credentials func(node string) (credentials.TransportCredentials, error)
	// Connecting is how many nodes at most are on their way to their first state at the same time; 0: all.
	Connecting int
	// Logger for what nodes have to say.
	Logger *slog.Logger
}

// Fleet is a number of nodes.
type Fleet struct {
	Group
	options Options
	shared  *shared
	nodes   []*node
}

// node is one simulated node. What has no other guard is written by its client's goroutine only.
type node struct {
	*Member
	cache  *client.Cache
	client *client.Client
	// connecting holds the node's place among those that connect, until its first state is there; then it is nil.
	connecting chan struct{}
	// synced is closed when the first state is there.
	synced chan struct{}

	mu   sync.Mutex // guards what follows
	conn net.Conn   // made last
}

// New makes a fleet. Run starts it.
func New(o Options) (*Fleet, error) {
	f := &Fleet{Group: Group{Members: o.Members}, options: o, shared: newShared()}
	for _, m := range o.Members {
		n, err := f.newNode(m, f.shared.decode)
		if err != nil {
			return nil, err
		}
		f.nodes = append(f.nodes, n)
	}
	f.AwaitSync(nil)
	return f, nil
}

func (f *Fleet) newNode(m *Member, decode func(wire.Frame) (*wire.Response, error)) (*node, error) {
	n := &node{Member: m, cache: client.NewCache(), synced: make(chan struct{})}
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
	moves := n.client.InSync() // else there would be no reason to connect
	c, err := n.Dial(ctx, address)
	if err == nil && moves {
		n.Moves.Add(1)
	}
	if err == nil {
		n.mu.Lock()
		n.conn = c
		n.mu.Unlock()
	}
	return c, err
}

// Run connects all nodes and keeps them connected until the context ends.
func (f *Fleet) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	atATime := f.options.Connecting
	if atATime == 0 {
		atATime = len(f.nodes)
	}
	places := make(chan struct{}, atATime)
	for _, n := range f.nodes {
		select {
		case <-ctx.Done():
			return
		case places <- struct{}{}:
		}
		n.connecting = places
		f.start(ctx, n, &running)
	}
}

func (f *Fleet) start(ctx context.Context, n *node, running *sync.WaitGroup) {
	n.Started = time.Now()
	running.Go(func() { _ = n.client.Run(ctx) }) // it returns nil when the context ends, and only then
}

// Cut ends the connections of all nodes, as a network does that goes away.
func (f *Fleet) Cut() {
	for _, n := range f.nodes {
		n.mu.Lock()
		if n.conn != nil {
			n.conn.Close()
		}
		n.mu.Unlock()
	}
}

// Up tells whether a node is in sync, on a stream that has not broken.
func (f *Fleet) Up(m *Member) bool { return f.nodes[m.Index].client.InSync() }

// On tells whether a node is in sync with the server at this address.
func (f *Fleet) On(m *Member, server string) bool {
	return f.nodes[m.Index].client.Connection().Server.Address == server
}

// observe sees every response that a node has applied.
func (f *Fleet) observe(n *node, r *wire.Response) {
	switch {
	case r.Welcome != nil:
		n.Streams.Add(1)
	case r.InSync != nil:
		f.inSync(n)
	case r.Update != nil && !r.More:
		if w := f.Window(); w != nil && n.Index >= 0 {
			w.Received(n.Member, r.Update, time.Now())
		}
	}
	// A real agent acks what its kernel holds; here that is what the cache holds.
	if changes, ok := n.cache.Take(); ok && len(changes.Positions) > 0 {
		n.client.Ack(changes.Epoch, changes.Positions)
	}
}

func (f *Fleet) inSync(n *node) {
	select {
	case <-n.synced:
	default:
		close(n.synced)
	}
	if n.connecting != nil {
		<-n.connecting
		n.connecting = nil
	}
	if n.Index >= 0 {
		f.Reached(n.Member)
	}
}

// ServerVersions are what the servers that nodes are on tell of themselves.
func (f *Fleet) ServerVersions() (out []string) {
	for _, n := range f.nodes {
		if v := n.client.Connection().ServerVersion; v != "" && !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}

// Objects is how much the first node holds.
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
