// These tests prove what streams cost, and that a client finds and repairs what differs.
package client

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/store"
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

func TestDeltaWithoutItsBaseIsAskedForAgain(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 5)
	server := serveStore(t, id, s, noHeartbeat)
	cache := NewCache()
	a := connect(t, id, cache, nil, server.address)
	a.waitInSync(t, 1)
	tamper(t, cache, web(unready(1)))
	s.Upsert(web(unready(2)), 0)
	waitHolds(t, cache, s)
	require.Eventually(t, func() bool { return cacheHas(cache, web(unready(2))) }, patience, tick)
	require.EqualValues(t, 1, a.resyncs(t, "base"))
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
	tamper(t, cache, web(unready(1)))
	waitHolds(t, cache, s)
	require.EqualValues(t, 1, a.resyncs(t, "digest"))
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
