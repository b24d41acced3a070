package client

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// filled returns a synced store with n Services that have one slice each, and with the Service of
// modeltest, whose slice has 100 endpoints.
func filled(t *testing.T, n int) *store.Store {
	t.Helper()
	s, err := store.New(store.Options{Shards: 8})
	require.NoError(t, err)
	for i := range n {
		name := fmt.Sprint("service-", i)
		s.Upsert(model.NewService(model.Service{Namespace: "default", Name: name, Type: model.ClusterIP}), 0)
		s.Upsert(named(fmt.Sprint("slice-", i), name, 10), 0)
	}
	s.Upsert(modeltest.Web(), 0)
	s.Upsert(web(func(*model.Slice) {}), 0)
	s.Synced()
	s.Publish()
	return s
}

func named(name, service string, endpoints int) *model.Slice {
	s := modeltest.WebSlice(endpoints)
	s.Name, s.Service = name, service
	return model.NewSlice(s)
}

// web returns a slice of 100 endpoints after a change.
func web(change func(*model.Slice)) *model.Slice {
	s := modeltest.WebSlice(100)
	change(&s)
	return model.NewSlice(s)
}

func unready(i int) func(*model.Slice) {
	return func(s *model.Slice) { s.Endpoints[i].Conditions.Ready = false }
}

// TestBytesOfAChange checks what a change of one of a hundred endpoints costs a node, on the stream
// and on the connection.
func TestBytesOfAChange(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 50)
	server := serveStore(t, id, s, noHeartbeat)
	counting := &counter{}
	id.client = append(id.client, grpc.WithContextDialer(counting.dial))
	cache := NewCache()
	a := connect(t, id, cache, nil, server.address)
	a.waitInSync(t, 1) // earlier messages are already counted
	// to changes the slice and waits until the agent has counted the change.
	to := func(slice *model.Slice) {
		if cacheHas(cache, slice) {
			return
		}
		before, _, _, _ := a.counts()
		s.Upsert(slice, 0)
		require.Eventually(t, func() bool {
			after, _, _, _ := a.counts()
			return after > before && cacheHas(cache, slice)
		}, patience, tick)
	}

	for name, change := range map[string]func(*model.Slice){
		"an endpoint's readiness flips": unready(40),
		"an endpoint is replaced":       func(s *model.Slice) { s.Endpoints[40] = modeltest.WebEndpoint(140) },
	} {
		to(web(func(*model.Slice) {}))
		updates, before, _, _ := a.counts()
		onTheConnection := counting.read.Load()
		to(web(change))
		onTheConnection = counting.read.Load() - onTheConnection
		after, bytes, _, _ := a.counts()
		t.Logf("%s: %d bytes on the stream; %d on the TCP connection", name, bytes-before, onTheConnection)
		require.Equal(t, updates+1, after)
		require.LessOrEqual(t, bytes-before, 200)
	}
}

// TestBytesOfAHello checks that a client which is in sync sends few bytes to resume.
func TestBytesOfAHello(t *testing.T) {
	c := welcomed(t, store.DefaultShards)
	for shard := range uint32(store.DefaultShards) {
		_, err := c.apply(&model.Update{Shard: shard, Full: true, To: 1 << 40}, false)
		require.NoError(t, err)
	}
	h := &pb.Hello{NodeName: strings.Repeat("n", 253), ClientVersion: "v1.2.3", Programmer: "nftables"}
	c.hello(h)
	require.Len(t, h.GetSequences(), store.DefaultShards)
	require.LessOrEqual(t, proto.Size(h), 1<<10)
}

// cacheHas reports whether a cache holds a slice in this version.
func cacheHas(c *Cache, s *model.Slice) bool {
	_, slices := c.Service(s.ServiceKey())
	for _, held := range slices {
		if held.Name == s.Name {
			return held.ContentVersion() == s.ContentVersion() && sameSlice(held, s)
		}
	}
	return false
}

func TestResumeCostsWhatChanged(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 200)
	server := serveStore(t, id, s, noHeartbeat)
	p := proxytest.New(t, server.address)
	cache := NewCache()
	a := connect(t, id, cache, nil, p.Address())
	waitHolds(t, cache, s)
	a.waitInSync(t, 1)
	_, cold, _, _ := a.counts()

	// The same server sends only what has changed meanwhile.
	updates, bytes, other, _ := a.counts()
	p.Lead(proxytest.Nowhere)
	p.Cut()
	s.Upsert(named("slice-7", "service-7", 11), 0)
	p.Lead(server.address)
	a.waitInSync(t, 2)
	waitHolds(t, cache, s)
	require.Eventually(t, func() bool { return cacheHas(cache, named("slice-7", "service-7", 11)) }, patience, tick)
	nowUpdates, nowBytes, nowOther, _ := a.counts()
	require.Equal(t, updates+1, nowUpdates)
	t.Logf("all: %d bytes of updates; resume by sequence: %d, and %d of other messages", cold, nowBytes-bytes, nowOther-other)
	require.Less(t, nowBytes-bytes, 1500, "one slice of 11 endpoints")

	// Another server with the same state sends only Welcome, Node and InSync.
	replica := filled(t, 200)
	replica.Upsert(named("slice-7", "service-7", 11), 0)
	replica.Publish()
	second := serveStore(t, id, replica, noHeartbeat)
	p.Lead(second.address)
	updates, _, other, _ = a.counts()
	p.Cut()
	a.waitInSync(t, 3)
	nowUpdates, _, nowOther, _ = a.counts()
	require.Equal(t, updates, nowUpdates)
	t.Logf("resume by digest: %d bytes", nowOther-other)
	require.Less(t, nowOther-other, 200)
	waitHolds(t, cache, replica)

	// Later changes on that server arrive.
	replica.Upsert(named("slice-8", "service-8", 11), 0)
	require.Eventually(t, func() bool { return cacheHas(cache, named("slice-8", "service-8", 11)) }, patience, tick)
}

// tamper replaces the object that a cache holds, as a bug or faulty memory would.
func tamper(c *Cache, s *model.Slice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shardOf(s.ServiceKey()).setSlice(s)
}

func TestDeltaWithoutItsBaseIsAskedForAgain(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 5)
	server := serveStore(t, id, s, noHeartbeat)
	cache := NewCache()
	a := connect(t, id, cache, nil, server.address)
	a.waitInSync(t, 1)
	tamper(cache, web(unready(1)))
	s.Upsert(web(unready(2)), 0)
	waitHolds(t, cache, s)
	require.Eventually(t, func() bool { return cacheHas(cache, web(unready(2))) }, patience, tick)
	require.EqualValues(t, 1, testutil.ToFloat64(a.metrics.resyncs.WithLabelValues("base")))
	_, _, _, inSyncs := a.counts()
	require.Equal(t, 1, inSyncs, "on the same stream")
}

func TestDivergenceIsFoundByHeartbeat(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 5)
	server := serveStore(t, id, s, time.Second/2)
	cache := NewCache()
	a := connect(t, id, cache, nil, server.address)
	a.waitInSync(t, 1)
	tamper(cache, web(unready(1)))
	waitHolds(t, cache, s)
	require.EqualValues(t, 1, testutil.ToFloat64(a.metrics.resyncs.WithLabelValues("digest")))
	_, _, _, inSyncs := a.counts()
	require.Equal(t, 1, inSyncs, "on the same stream")
}

func TestServerThatDrainsIsLeftForAnother(t *testing.T) {
	id := newIdentity(t)
	first, second := filled(t, 5), filled(t, 5)
	servers := map[string]*instance{}
	stores := map[string]*store.Store{}
	for _, s := range []*store.Store{first, second} {
		i := serveStore(t, id, s, noHeartbeat)
		servers[i.address], stores[i.address] = i, s
	}
	order := ordered(slices.Collect(maps.Keys(servers))...)
	cache := NewCache()
	a := connect(t, id, cache, nil, order...)
	a.waitInSync(t, 1)
	waitHolds(t, cache, stores[order[0]])
	servers[order[0]].hub.Drain()
	a.waitInSync(t, 2)
	waitHolds(t, cache, stores[order[1]])
}

func TestOnlyServerDrainsAndComesBack(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 5)
	server := serveStore(t, id, s, noHeartbeat)
	p := proxytest.New(t, server.address)
	cache := NewCache()
	a := connect(t, id, cache, nil, p.Address())
	a.waitInSync(t, 1)
	server.hub.Drain()
	successor := serveStore(t, id, s, noHeartbeat)
	p.Lead(successor.address)
	a.waitInSync(t, 2)
	waitHolds(t, cache, s)
}

// counter counts the bytes read from connections.
type counter struct{ read atomic.Int64 }

func (c *counter) dial(ctx context.Context, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return &countedConn{conn, c}, nil
}

type countedConn struct {
	net.Conn
	counter *counter
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.counter.read.Add(int64(n))
	return n, err
}

// BenchmarkApply measures applying a change of one endpoint to a cache of a large cluster.
func BenchmarkApply(b *testing.B) {
	const shards = 64
	c := NewCache()
	if err := c.welcome(1, shards); err != nil {
		b.Fatal(err)
	}
	key := web(func(*model.Slice) {}).ServiceKey()
	full := make([]*model.Update, shards)
	for i := range full {
		full[i] = &model.Update{Shard: uint32(i), To: 1, Full: true}
	}
	for i := range 5000 {
		s := named(fmt.Sprint("slice-", i), fmt.Sprint("service-", i), 10)
		u := full[s.ServiceKey().Shard(shards)]
		u.Slices = append(u.Slices, s)
	}
	states := [2]*model.Slice{web(func(*model.Slice) {}), web(unready(40))}
	shard := key.Shard(shards)
	full[shard].Slices = append(full[shard].Slices, states[0])
	for _, u := range full {
		if _, err := c.apply(u, false); err != nil {
			b.Fatal(err)
		}
	}
	var frames [2]wire.Frame
	for i := range frames {
		var err error
		frames[i], err = wire.EncodeUpdate(&model.Update{Shard: shard, From: 1, To: 1, Deltas: []*model.SliceDelta{model.Diff(states[i], states[1-i])}})
		if err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		r, err := wire.Decode(frames[i%2])
		if err != nil {
			b.Fatal(err)
		}
		if out, err := c.apply(r.Update, false); err != nil || len(out.missing) > 0 {
			b.Fatal(out.missing, err)
		}
	}
}
