// These tests prove what a relay hears of its client's stream.
package client

import (
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// heard records the callbacks of a Relay in order.
type heard struct {
	mu     sync.Mutex
	events []any
}

func (h *heard) add(event any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event)
}

func (h *heard) wait(t *testing.T, n int) []any {
	t.Helper()
	var out []any
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		out = append([]any(nil), h.events...)
		return len(out) >= n
	}, patience, tick)
	return out
}

var (
	errCircle = errors.New("epoch 7 is this relay's own")
	errShards = errors.New("this relay has one shard")
)

func (h *heard) relay() *Relay {
	return &Relay{
		NodesDigest: func() model.Digest { return model.Digest{99} },
		Check: func(path []uint64, shards uint32) error {
			h.add(path)
			switch {
			case path[0] == 7:
				return errCircle
			case shards != 1:
				return errShards
			}
			return nil
		},
		Applied: func(a Applied) { h.add(a) },
		Node:    func(name string, n *model.Node, _ uint64) { h.add([2]any{name, n}) },
		Reached: func(v model.ResourceVersions) { h.add(v) },
		Seen:    func(v model.ResourceVersions) { h.add([1]model.ResourceVersions{v}) },
		InSync:  func(path []uint64, nodes map[string]struct{}) { h.add([]any{path, nodes}) },
		Ended:   func() {},
	}
}

func nodeUpdate(name string, n *pb.Node) *pb.StreamResponse {
	return &pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: &pb.NodeUpdate{Name: name, Node: n}}}
}

func TestRelay(t *testing.T) {
	id := newIdentity(t)
	web, other := named("web", "web", 2), named("other", "web", 2)
	shardUpdate := func(u *model.Update) *pb.StreamResponse { return update(wire.UpdateToProto(u)) }
	all := inSync(1)
	all.GetInSync().AllNodes = true
	reached := &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{
		ResourceVersions: &pb.ResourceVersions{Services: 5},
	}}}
	server := &scripted{play: says(welcome(&pb.Welcome{Epoch: 5, ShardCount: 1, Path: []uint64{4, 5}}),
		nodeUpdate("a", &pb.Node{Name: "a"}), nodeUpdate("b", &pb.Node{Name: "b", Addresses: []string{"x"}}), nodeUpdate("c", nil),
		shardUpdate(&model.Update{To: 1, Full: true, Slices: []*model.Slice{web, other}}), reached, all,
		shardUpdate(&model.Update{From: 1, To: 2, Deltas: []*model.SliceDelta{model.Diff(web, named("web", "web", 3))},
			Removed: []model.Key{other.Key()}, ResourceVersions: model.ResourceVersions{Slices: 6}}),
		nodeUpdate("a", nil))}
	circle := &scripted{play: says(welcome(&pb.Welcome{Epoch: 9, ShardCount: 1, Path: []uint64{7, 9}}))}
	first, second := serve(t, id, circle, fanout.ServerOption()), serve(t, id, server, fanout.ServerOption())
	h := &heard{}
	p := proxytest.New(t, first.address)
	run(t, NewCache(), Options{Servers: Static(p.Address()), DialOptions: id.client, Relay: h.relay(), Logger: slog.New(slog.DiscardHandler)})
	require.Equal(t, []any{[]uint64{7, 9}, []uint64{7, 9}}, h.wait(t, 2)[:2], "it tries again")
	p.Lead(second.address)
	hellos, _ := circle.seen()
	require.Equal(t, pb.ClientKind_CLIENT_KIND_RELAY, hellos[0].GetKind())
	require.Equal(t, modeltest.Digests(99), hellos[0].GetNodesDigest())

	var events []any
	require.Eventually(t, func() bool {
		events = h.wait(t, 0)
		for len(events) > 0 && events[0].([]uint64)[0] == 7 {
			events = events[1:]
		}
		return len(events) == 9
	}, patience, tick)
	require.Equal(t, []any{
		[]uint64{4, 5},
		[2]any{"a", &model.Node{Name: "a"}},
		[2]any{"c", (*model.Node)(nil)},
		Applied{Objects: []model.Object{web, other}},
		model.ResourceVersions{Services: 5},
		[1]model.ResourceVersions{},
		[]any{[]uint64{4, 5}, map[string]struct{}{"a": {}, "b": {}}},
		Applied{Objects: []model.Object{named("web", "web", 3)}, Removed: []model.Key{other.Key()},
			ResourceVersions: model.ResourceVersions{Slices: 6}},
		[2]any{"a", (*model.Node)(nil)},
	}, events)
}

// TestARelayChecksProbes checks that a relay whose server is stale does not leave for a server that
// it must not follow, nor for one whose Welcome makes no sense: either would end its stream.
func TestARelayChecksProbes(t *testing.T) {
	for name, other := range map[string]*pb.Welcome{
		"fed by this relay": {Epoch: 9, ShardCount: 1, Path: []uint64{7, 9}},
		"other shards":      {Epoch: 9, ShardCount: 2, Path: []uint64{9}},
		"no epoch":          {ShardCount: 1, Path: []uint64{9}},
		"a path too long":   {Epoch: 9, ShardCount: 1, Path: make([]uint64, 65)},
	} {
		t.Run(name, func(t *testing.T) {
			id := newIdentity(t)
			servers, _, addresses := replicas(t, id, 2)
			servers[0].play = says(welcome(&pb.Welcome{Epoch: 5, ShardCount: 1, Path: []uint64{5}, StaleMs: 1}), inSync(1))
			servers[1].probed, servers[1].play = other, oneShard(9)
			h := &heard{}
			o := quiet(id, Options{Servers: Static(addresses...), Relay: h.relay()})
			run(t, NewCache(), o, hurried)
			require.Eventually(t, func() bool { return servers[1].probes.Load() >= 3 }, patience, tick)
			require.Equal(t, 1, servers[0].streams())
			require.Zero(t, servers[1].streams())
			require.Contains(t, h.wait(t, 0), []any{[]uint64{5}, map[string]struct{}(nil)}, "the path is that of the stream")
		})
	}
}
