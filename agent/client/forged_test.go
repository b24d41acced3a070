// These tests prove that nothing that a rogue server has sent outlives a client's stay with it,
// whatever versions, epoch and positions the server claimed.
package client

import (
	"context"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

// unknownFields are encoded fields that this software does not know.
var unknownFields = protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1)

// attackers is where a rogue server leads a node's connections.
var attackers = netip.MustParseAddr("192.0.2.66")

// forgeries are the ways to give a client another state under the versions of the true one. Each
// changes the update of a whole shard, and may return messages to send after it.
var forgeries = map[string]func(*pb.ShardUpdate) []any{
	"another endpoint": func(u *pb.ShardUpdate) []any {
		for _, s := range u.GetSlices() {
			s.Endpoints[0].Address = attackers.String()
			s.Endpoints = s.GetEndpoints()[:1]
		}
		return nil
	},
	"another endpoint and unknown fields": func(u *pb.ShardUpdate) []any {
		for _, s := range u.GetSlices() {
			s.Endpoints[0].Address = attackers.String()
			s.Endpoints = s.GetEndpoints()[:1]
			s.ProtoReflect().SetUnknown(unknownFields)
		}
		return nil
	},
	"another port and unknown fields": func(u *pb.ShardUpdate) []any {
		for _, s := range u.GetServices() {
			s.Ports = []*pb.ServicePort{{Port: 666, Protocol: pb.Protocol_PROTOCOL_TCP}}
			s.ProtoReflect().SetUnknown(unknownFields)
		}
		return nil
	},
	// The first version is honest about another state. The client keeps that state because the true
	// one does not decode.
	"another endpoint, and then what does not decode": func(u *pb.ShardUpdate) []any {
		after := &pb.ShardUpdate{Shard: u.GetShard(), FromSequence: u.GetSequence(), Sequence: u.GetSequence()}
		for _, s := range u.GetSlices() {
			after.Slices = append(after.Slices, &pb.Slice{Namespace: s.GetNamespace(), Name: s.GetName(), Version: s.GetVersion()})
			s.Endpoints[0].Address = attackers.String()
			s.Endpoints = s.GetEndpoints()[:1]
		}
		return []any{update(after)}
	},
	// The base cannot be verified, so neither can what a delta makes of it.
	"another endpoint, by a delta": func(u *pb.ShardUpdate) []any {
		after := &pb.ShardUpdate{Shard: u.GetShard(), FromSequence: u.GetSequence(), Sequence: u.GetSequence()}
		for _, s := range u.GetSlices() {
			after.SliceDeltas = append(after.SliceDeltas, &pb.SliceDelta{
				Namespace: s.GetNamespace(), Name: s.GetName(), Version: s.GetVersion(), Removed: []string{s.GetEndpoints()[0].GetAddress()},
				Endpoints: []*pb.Endpoint{{Address: attackers.String(), Ready: true, Serving: true}},
			})
			s.Version = make([]byte, model.HashSize)
			s.Version[0] = 1
			s.ProtoReflect().SetUnknown(unknownFields)
		}
		return []any{update(after)}
	},
	"nothing": func(u *pb.ShardUpdate) []any {
		u.Slices = nil
		return nil
	},
}

// forged returns what a rogue server sends that claims to have the store's state, at an epoch.
func forged(s *store.Store, epoch uint64, forge func(*pb.ShardUpdate) []any) []any {
	script := []any{welcome(&pb.Welcome{Epoch: epoch, ShardCount: s.Shards()})}
	_, sequences := s.Digest()
	for i := range s.Shards() {
		u := proto.CloneOf(wire.UpdateToProto(s.Snapshot(i).Since(0)))
		more := forge(u)
		script = append(append(script, update(u)), more...)
	}
	return append(script, inSync(sequences...))
}

// TestForgedContentIsMended checks that a client holds what an honest server has soon after it has
// left a rogue one. The rogue server may claim the honest one's epoch and positions.
func TestForgedContentIsMended(t *testing.T) {
	id := newIdentity(t)
	for name, forge := range forgeries {
		for claims, epoch := range map[string]func(*store.Store) uint64{
			"an epoch of its own": func(s *store.Store) uint64 { return s.Epoch() + 1 },
			"the same epoch":      (*store.Store).Epoch,
		} {
			t.Run(name+", "+claims, func(t *testing.T) {
				s := filled(t, 5)
				good := serveStore(t, id, s, 100*time.Millisecond)
				var left atomic.Bool
				bad := serve(t, id, &scripted{play: says(append(forged(s, epoch(s), forge), status.Error(codes.Unavailable, "gone"))...)},
					fanout.ServerOption())
				cache := NewCache()
				c, _ := run(t, cache, quiet(id, Options{NodeName: "node-1", Servers: func(context.Context) ([]Server, error) {
					if left.Swap(true) {
						return asServers(good.address), nil
					}
					return asServers(bad.address), nil
				}}))
				require.Eventually(t, func() bool { return c.Connection().Server.Address == good.address && holds(cache, s) }, 10*time.Second, tick)
			})
		}
	}
}
