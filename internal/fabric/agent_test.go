// This file runs real clients over TLS that count their bytes and acknowledge what their cache
// holds, and compares each cache with the cluster.
package fabric

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/agent/client/checkpoint"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/wire"
)

// agent is a node's client, which may connect through a proxy of its own. It acknowledges what its
// cache holds as programmed.
type agent struct {
	node       string
	cache      *client.Cache
	client     *client.Client
	checkpoint *checkpoint.Checkpoint // nil if there is none
	registry   *prometheus.Registry
	traffic    traffic
	stop       func()

	inSyncs atomic.Int64
	// updated receives a value after an update.
	updated chan struct{}
	// tamper, if set, is called with each update before it is applied, until it returns true.
	tamper atomic.Pointer[func(*model.Update) bool]

	mu sync.Mutex // guards the fields below
	// epoch and acked are the positions that the agent has acknowledged.
	epoch uint64
	acked map[uint32]uint64
	// updates counts how often each object was received, if it is not nil.
	updates map[model.Key]int
}

// agentOptions are the settings in which agents differ.
type agentOptions struct {
	// node is the name of the agent's Node. If it is empty, the client is an observer.
	node string
	// checkpoint is the path of the file to load and to save; empty if there is none.
	checkpoint string
	// servers has the addresses of servers or proxies. find, if set, finds the servers instead.
	servers []string
	find    func(context.Context) ([]client.Server, error)
	// before, if set, is called with each frame before it is decoded.
	before func(wire.Frame)
	logs   *logtest.Buffer
	// dial has options in addition to those of all agents.
	dial []grpc.DialOption
	// count makes the agent count the objects that it receives.
	count bool
}

// follow runs a client until the test ends or stop is called.
func follow(t proxytest.T, o agentOptions) *agent {
	t.Helper()
	a := &agent{node: o.node, cache: client.NewCache(), registry: prometheus.NewRegistry(), updated: make(chan struct{}, 1), acked: make(map[uint32]uint64)}
	if o.logs == nil {
		o.logs = &logtest.Buffer{}
	}
	if o.count {
		a.updates = make(map[model.Key]int)
	}
	logger := slog.New(slog.NewTextHandler(o.logs, nil))
	if o.checkpoint != "" {
		a.checkpoint = checkpoint.Open(checkpoint.Options{
			Path: o.checkpoint, NodeName: o.node, Cache: a.cache, Logger: logger,
		})
	}
	if o.find == nil {
		o.find = client.Static(o.servers...)
	}
	a.client = client.New(client.Options{
		Servers: o.find, NodeName: o.node, Cache: a.cache,
		DialOptions: append(a.traffic.dialOptions(cmp.Or(o.node, observer)), o.dial...), MaxBackoff: 20 * time.Millisecond, Logger: logger, Registerer: a.registry,
		Decode:  func(f wire.Frame) (*wire.Response, error) { return a.decode(f, o.before) },
		Observe: func(r *wire.Response, _ int) { a.observe(r) },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := a.client.Run(ctx); err != nil {
			panic(err)
		}
	})
	a.stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(a.stop)
	return a
}

func (a *agent) decode(f wire.Frame, before func(wire.Frame)) (*wire.Response, error) {
	if before != nil {
		before(f)
	}
	r, err := wire.Decode(f)
	if err != nil {
		return nil, err
	}
	if tamper := a.tamper.Load(); tamper != nil && r.Update != nil && (*tamper)(r.Update) {
		a.tamper.Store(nil)
	}
	return r, nil
}

// observe runs after each response, on the client's goroutine.
func (a *agent) observe(r *wire.Response) {
	changes, ok := a.cache.Take()
	if ok && len(changes.Positions) > 0 {
		a.client.Ack(changes.Epoch, changes.Positions)
	}
	if r.InSync != nil {
		a.inSyncs.Add(1)
	}
	if r.Update != nil {
		defer func() {
			select {
			case a.updated <- struct{}{}:
			default:
			}
		}()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if r.Update != nil && a.updates != nil {
		for key := range named(r.Update) {
			a.updates[key]++
		}
	}
	if changes.Epoch != a.epoch {
		a.epoch = changes.Epoch
		clear(a.acked)
	}
	maps.Copy(a.acked, changes.Positions)
}

// named returns the keys of the objects in an update.
func named(u *model.Update) map[model.Key]struct{} {
	out := make(map[model.Key]struct{})
	for _, s := range u.Services {
		out[s.Key()] = struct{}{}
	}
	for _, s := range u.Slices {
		out[s.Key()] = struct{}{}
	}
	for _, d := range u.Deltas {
		out[d.Key()] = struct{}{}
	}
	for _, key := range u.Removed {
		out[key] = struct{}{}
	}
	return out
}

// save writes the agent's checkpoint, unless it has never been in sync.
func (a *agent) save() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	a.checkpoint.Run(ctx) // it saves when it ends
}

// objects returns what the cache holds. It computes the versions anew, and they must be those in
// the cache.
func (a *agent) objects() (map[model.Key]model.Object, error) {
	held := make(map[model.Key]model.Object)
	for _, key := range a.cache.Services() {
		service, list := a.cache.Service(key)
		if service != nil {
			held[service.Key()] = service
		}
		for _, s := range list {
			if s.Service != key.Name {
				return nil, fmt.Errorf("%v is with %v", s.Key(), key)
			}
			held[s.Key()] = s
		}
	}
	for key, o := range held {
		again := rehashed(o)
		if again.ContentVersion() != o.ContentVersion() {
			return nil, fmt.Errorf("%v has version %v, and its content %v", key, o.ContentVersion(), again.ContentVersion())
		}
	}
	return held, nil
}

// rehashed returns the object with a newly computed version.
func rehashed(o model.Object) model.Object {
	switch o := o.(type) {
	case *model.Service:
		n := *o
		return model.NewService(n)
	case *model.Slice:
		n := *o
		n.Endpoints = slices.Clone(o.Endpoints)
		return model.NewSlice(n)
	}
	panic(fmt.Sprintf("%T", o))
}

// differs returns how the agent differs from its target, and nil if it does not. The target is the
// objects of the cluster with the same content and digests, and the agent's Node, all of them
// acknowledged.
func (a *agent) differs(want map[model.Key]model.Keyed) error {
	if err := a.unsettled(want); err != nil { // cheap, as it is polled
		return err
	}
	return a.contentDiffers(want)
}

func (a *agent) contentDiffers(want map[model.Key]model.Keyed) error {
	held, err := a.objects()
	if err != nil {
		return err
	}
	for key, o := range want {
		wanted, ok := o.(model.Object)
		if !ok {
			continue
		}
		have := held[key]
		if have == nil {
			return fmt.Errorf("%v is missing", key)
		}
		if have.ContentVersion() != wanted.ContentVersion() {
			return fmt.Errorf("%v is %+v, and should be %+v", key, have, wanted)
		}
		delete(held, key)
	}
	for key := range held {
		return fmt.Errorf("%v should not be there", key)
	}
	return nil
}

// unsettled returns an error if the Node or the digest of a shard differs, or if a shard is not
// acknowledged.
func (a *agent) unsettled(want map[model.Key]model.Keyed) error {
	node, _ := want[model.Key{Kind: model.KindNode, Name: a.node}].(*model.Node)
	// A deleted Node stays with agents that had it, and so do addresses and pod CIDRs that a new
	// one lacks.
	if have := a.cache.Node(); node != nil {
		if have != nil && len(node.Addresses) == 0 {
			completed := *node
			completed.Addresses, completed.PodCIDRs = have.Addresses, have.PodCIDRs
			node = &completed
		}
		if !have.Equal(node) {
			return fmt.Errorf("the Node is %+v, and should be %+v", have, node)
		}
	}
	sequences, digests := a.cache.Digests()
	if len(digests) == 0 {
		return errors.New("no server has said how many shards there are")
	}
	wanted := model.ShardDigests(uint32(len(digests)), func(yield func(model.Object, model.Version) bool) {
		for _, o := range want {
			if o, ok := o.(model.Object); ok && !yield(o, o.ContentVersion()) {
				return
			}
		}
	})
	if !slices.Equal(wanted, digests) {
		return fmt.Errorf("the digests are %v, and should be %v", digests, wanted)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for shard, sequence := range sequences {
		if a.acked[uint32(shard)] != sequence {
			return fmt.Errorf("shard %d is acknowledged up to %d of %d", shard, a.acked[uint32(shard)], sequence)
		}
	}
	return nil
}

// eventually polls a condition. It uses no goroutine per poll, as there are many.
func eventually(is func() bool) bool {
	deadline := time.After(patience)
	for pause := tick; !is(); pause = min(2*pause, 50*time.Millisecond) {
		select {
		case <-deadline:
			return false
		case <-time.After(pause):
		}
	}
	return true
}

// waitEquals waits until the agent holds what the cluster holds.
func (a *agent) waitEquals(t proxytest.T, c *cluster) {
	t.Helper()
	want := c.state()
	var err error
	if !eventually(func() bool { err = a.differs(want); return err == nil }) {
		require.NoError(t, errors.Join(err, a.contentDiffers(want)))
	}
}

// waitFollows waits until the agent is in sync with a server. A stream brings the state before it
// says that it is in sync, so an agent that holds what the cluster holds may still be on its way.
func (a *agent) waitFollows(t require.TestingT, s *server) {
	require.True(t, eventually(func() bool { return a.client.Connection().Server.Address == s.address() }), a.client.Connection().Server)
}

// traffic counts the bytes of a client's connections below TLS, after each handshake.
type traffic struct{ received, sent atomic.Int64 }

// bytes returns the count of both directions.
func (c *traffic) bytes() int64 { return c.received.Load() + c.sent.Load() }

func (c *traffic) reset() {
	c.received.Store(0)
	c.sent.Store(0)
}

// dialOptions returns options for a client whose traffic is counted.
func (c *traffic) dialOptions(name string) []grpc.DialOption {
	config := &tls.Config{
		RootCAs: identities.ca.Pool(), Certificates: []tls.Certificate{identities.client(name)}, MinVersion: tls.VersionTLS13,
		NextProtos: []string{wire.Protocol},
	}
	return []grpc.DialOption{
		grpc.WithTransportCredentials(countedCredentials{credentials.NewTLS(config), c}),
	}
}

// countedCredentials count what passes after the handshake.
type countedCredentials struct {
	credentials.TransportCredentials
	traffic *traffic
}

// ClientHandshake implements credentials.TransportCredentials.
func (c countedCredentials) ClientHandshake(
	ctx context.Context, authority string, raw net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	counted := &countedConn{Conn: raw, traffic: c.traffic}
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, counted)
	counted.counts.Store(true)
	return conn, info, err
}

// Clone implements credentials.TransportCredentials.
func (c countedCredentials) Clone() credentials.TransportCredentials { return c }

type countedConn struct {
	net.Conn
	counts  atomic.Bool
	traffic *traffic
}

// Read implements net.Conn.
func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.counts.Load() {
		c.traffic.received.Add(int64(n))
	}
	return n, err
}

// Write implements net.Conn.
func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if c.counts.Load() {
		c.traffic.sent.Add(int64(n))
	}
	return n, err
}
