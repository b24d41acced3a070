// Package fleet simulates the nodes of a cluster: each is the agent's own client with its own connection, credentials and
// cache, and programs nothing. What the nodes of one process hold in common is in memory once; everything else, from the
// bytes on the wire to the acks, is as it is with as many real agents.
package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	"github.com/slicecast/slicecast/loadtest/usage"
)

// readBuffer is small because there are thousands: TLS has a buffer of its own, and most messages are short.
const readBuffer = 4 << 10

// programmer is what nodes tell the server that they program.
const programmer = "none (load test)"

// Options set up a Fleet.
type Options struct {
	// Server is the address (host:port) that all nodes connect to.
	Server string
	// Names of the nodes.
	Names []string
	// Credentials gives the transport credentials of a node.
	Credentials func(node string) (credentials.TransportCredentials, error)
	// Connecting is how many nodes at most are on their way to their first state at the same time.
	Connecting int
	// Logger for what nodes have to say.
	Logger *slog.Logger
}

// Fleet is a number of nodes.
type Fleet struct {
	options Options
	shared  *shared
	nodes   []*node
	sync    atomic.Pointer[Sync]
	window  atomic.Pointer[Window]
}

// node is one simulated node. What has no other guard is written by its client's goroutine only.
type node struct {
	index   int
	name    string
	cache   *client.Cache
	client  *client.Client
	traffic usage.Traffic
	// messages is how many bytes of messages it has received, before HTTP/2 and TLS.
	messages atomic.Int64
	// welcomes counts the streams that were answered.
	welcomes atomic.Int64
	// connecting holds the node's place among those that connect, until its first state is there; then it is nil.
	connecting chan struct{}
	started    time.Time
	// synced is closed when the first state is there.
	synced chan struct{}
}

// New makes a fleet. Run starts it.
func New(o Options) (*Fleet, error) {
	f := &Fleet{options: o, shared: newShared()}
	for i, name := range o.Names {
		n, err := f.newNode(i, name, f.shared.decode)
		if err != nil {
			return nil, err
		}
		f.nodes = append(f.nodes, n)
	}
	f.AwaitSync()
	return f, nil
}

func (f *Fleet) newNode(index int, name string, decode func(wire.Frame) (*wire.Response, error)) (*node, error) {
	n := &node{index: index, name: name, cache: client.NewCache(), synced: make(chan struct{})}
	creds, err := f.options.Credentials(name)
	if err != nil {
		return nil, fmt.Errorf("credentials of node %s: %w", name, err)
	}
	n.client = client.New(client.Options{
		Servers: client.Static(f.options.Server), NodeName: name, Version: daemon.Version(), Programmer: programmer,
		DialOptions: []grpc.DialOption{
			grpc.WithTransportCredentials(creds), grpc.WithContextDialer(n.traffic.Dial), grpc.WithNoProxy(),
			grpc.WithReadBufferSize(readBuffer),
		},
		Cache: n.cache, Decode: decode, Apply: f.shared.apply,
		Observe: func(r *wire.Response, size int) {
			n.messages.Add(int64(size))
			f.observe(n, r)
		},
		Logger: f.options.Logger.With("node", name),
	})
	return n, nil
}

// Run connects all nodes and keeps them connected until the context ends.
func (f *Fleet) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	places := make(chan struct{}, f.options.Connecting)
	for _, n := range f.nodes {
		select {
		case <-ctx.Done():
			return
		case places <- struct{}{}:
		}
		n.connecting = places
		n.started = time.Now()
		running.Go(func() { _ = n.client.Run(ctx) }) // it returns nil when the context ends, and only then
	}
}

// observe sees every response that a node has applied.
func (f *Fleet) observe(n *node, r *wire.Response) {
	switch {
	case r.Welcome != nil:
		n.welcomes.Add(1)
	case r.InSync != nil:
		f.inSync(n)
	case r.Update != nil && !r.More:
		if w := f.window.Load(); w != nil && n.index >= 0 {
			w.received(n.index, r.Update, time.Now())
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
	if n.index >= 0 {
		f.sync.Load().reached(n)
	}
}

// Traffic is what all nodes together have received and sent, in bytes below TLS.
func (f *Fleet) Traffic() (received, sent int64) {
	for _, n := range f.nodes {
		received += n.traffic.Received.Load()
		sent += n.traffic.Sent.Load()
	}
	return received, sent
}

// Reconnects is how many streams were opened beyond the first of each node.
func (f *Fleet) Reconnects() int64 {
	var out int64
	for _, n := range f.nodes {
		out += max(0, n.welcomes.Load()-1)
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
