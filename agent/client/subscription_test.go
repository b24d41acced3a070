// These tests prove that a client follows what it subscribes to, on one stream and on the next.
package client

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

func only(names ...string) *pb.Subscription {
	s := &pb.Subscription{}
	for _, name := range names {
		s.Services = append(s.Services, &pb.ServiceName{Namespace: "default", Name: name})
	}
	return s
}

func requireSubscription(t *testing.T, want, got *pb.Subscription) {
	t.Helper()
	require.Empty(t, cmp.Diff(want, got, protocmp.Transform()))
}

// TestSubscription checks that the Hello has the subscription, that it can be changed on the
// stream, and that updates skip other Services.
func TestSubscription(t *testing.T) {
	id := newIdentity(t)
	a, b := named("a", "a", 2), named("b", "b", 2)
	shard := func(u *model.Update) *pb.StreamResponse { return update(wire.UpdateToProto(u)) }
	beat := &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{SequenceSum: 1_000}}}
	server := &scripted{play: says(welcome(&pb.Welcome{Epoch: 5, ShardCount: 1}),
		shard(&model.Update{To: 7, Full: true, Slices: []*model.Slice{a}}), inSync(7), beat,
		shard(&model.Update{From: 7, To: 90, Deltas: []*model.SliceDelta{model.Diff(a, named("a", "a", 3))}}))}
	server.answer = func(g pb.DistributionService_StreamServer, r *pb.StreamRequest) error {
		if r.GetSubscribe() == nil {
			return nil
		}
		if len(r.GetSubscribe().GetServices()) == 3 {
			return nil // the stream ends before an answer
		}
		return says(shard(&model.Update{From: 90, To: 95, Slices: []*model.Slice{b}, Removed: []model.Key{a.Key()}}), inSync(95))(g)
	}
	i := serve(t, id, server, fanout.ServerOption())
	p := proxytest.New(t, i.address)
	cache := NewCache()
	wanted := only("a")
	c, _ := run(t, cache, quiet(id, Options{Servers: Static(p.Address()), Subscription: wanted}))
	wanted.Services[0].Name = "the caller's"
	require.Eventually(t, func() bool { return cacheHas(cache, named("a", "a", 3)) }, patience, tick)
	hellos, _ := server.seen()
	requireSubscription(t, only("a"), hellos[0].GetSubscription())

	c.Subscribe(only("b"))
	require.Eventually(t, func() bool { return cacheHas(cache, b) }, patience, tick)
	require.Equal(t, []model.ServiceKey{b.ServiceKey()}, cache.Services())
	c.Subscribe(only("b"))           // the subscription stays the same
	c.Subscribe(only("a", "b", "c")) // the server does not answer
	require.Eventually(t, func() bool {
		_, requests := server.seen()
		return slices.ContainsFunc(requests, func(r *pb.StreamRequest) bool { return len(r.GetSubscribe().GetServices()) == 3 })
	}, patience, tick)
	c.Subscribe(only("d")) // waits for that answer, and therefore for the next stream
	_, requests := server.seen()
	subscriptions := 0
	for _, r := range requests {
		require.Nil(t, r.GetResync(), "heartbeats of narrowed streams say nothing of the digests")
		if r.GetSubscribe() != nil {
			subscriptions++
		}
	}
	require.Equal(t, 2, subscriptions)

	p.Cut()
	server.waitStreams(t, 2)
	hellos, _ = server.seen()
	requireSubscription(t, only("d"), hellos[1].GetSubscription())
	require.EqualValues(t, 5, hellos[1].GetEpoch())
	require.Equal(t, []uint64{0}, hellos[1].GetSequences(), "positions of another subscription mean nothing")
	require.Equal(t, stateDigest(modeltest.ShardDigest(b)), hellos[1].GetDigest(), "but it does hold something")
}

// TestSubscribeToEverything checks that a stream can be narrowed and then widened to everything.
func TestSubscribeToEverything(t *testing.T) {
	id := newIdentity(t)
	s := filled(t, 20)
	server := serveStore(t, id, s, noHeartbeat)
	cache := NewCache()
	a := connect(t, id, cache, nil, server.address)
	a.waitInSync(t, 1)
	waitHolds(t, cache, s)
	a.Subscribe(only("service-1"))
	a.waitInSync(t, 2)
	require.Len(t, cache.Services(), 1)
	s.Upsert(named("slice-1", "service-1", 11), 0)
	s.Upsert(named("slice-2", "service-2", 11), 0)
	require.Eventually(t, func() bool { return cacheHas(cache, named("slice-1", "service-1", 11)) }, patience, tick)

	a.Subscribe(nil)
	a.waitInSync(t, 3)
	waitHolds(t, cache, s)
	for i := range 20 {
		s.Upsert(named(fmt.Sprint("slice-", i), fmt.Sprint("service-", i), 12), 0)
	}
	require.Eventually(t, func() bool {
		return holds(cache, s) && cacheHas(cache, named("slice-19", "service-19", 12)) && cacheHas(cache, named("slice-0", "service-0", 12))
	}, patience, tick)
	require.Zero(t, a.metric(t, "disconnects_total"), "all of it on one stream")
}
