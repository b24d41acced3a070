// This test proves that a relay follows the next server, whatever extreme values the one before has
// sent. The relay and the next server are real.
package relay_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// hasty is a cluster whose server waits only briefly for the versions that its clients have seen.
type hasty struct{ *cluster }

func (hasty) behindWait() time.Duration { return 10 * time.Millisecond }

// forgeries returns the state of a cluster with one endpoint fewer in each slice, under the
// versions of the true slices. change, if any, changes each slice further.
func forgeries(shards uint32, change func(*pb.Slice)) []*pb.StreamResponse {
	updates := make([]*model.Update, shards)
	for i := range updates {
		updates[i] = &model.Update{Shard: uint32(i), Full: true, To: 1}
	}
	for i := range 20 {
		s := sliceOf(i, 2)
		u := updates[s.ServiceKey().Shard(shards)]
		u.Slices = append(u.Slices, s)
		u.Services = append(u.Services, model.NewService(model.Service{Namespace: "default", Name: s.Service, Type: model.ClusterIP}))
	}
	script := []*pb.StreamResponse{{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{Epoch: 7, ShardCount: shards, Path: []uint64{7}}}}}
	for _, u := range updates {
		p := wire.UpdateToProto(u)
		for _, s := range p.GetSlices() {
			s.Endpoints = s.GetEndpoints()[:1]
			if change != nil {
				change(s)
			}
		}
		script = append(script, &pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: p}})
	}
	return script
}

// TestExtremesOfUpstreams checks that a relay follows the next server and serves that server's
// state, whatever the previous server has sent. The messages have the highest resource versions and
// sequences, endless paths, invalid Node names, and false content under true versions. What nodes
// have seen is not above what that server has, either.
func TestExtremesOfUpstreams(t *testing.T) {
	const shards, most, long = 64, math.MaxUint64, 1 << 20
	versions := &pb.ResourceVersions{Services: most, Slices: most}
	sequences := make([]uint64, shards)
	for i := range sequences {
		sequences[i] = most
	}
	text := strings.Repeat("n", long)
	welcome := func(path ...uint64) *pb.StreamResponse {
		return &pb.StreamResponse{Message: &pb.StreamResponse_Welcome{Welcome: &pb.Welcome{Epoch: 7, ShardCount: shards, Path: path}}}
	}
	inSync := &pb.StreamResponse{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: sequences, ResourceVersions: versions, AllNodes: true}}}
	beat := &pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: &pb.Heartbeat{SequenceSum: most, ResourceVersions: versions}}}
	update := &pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: &pb.ShardUpdate{
		Full: true, Sequence: most, ServicesResourceVersion: most, SlicesResourceVersion: most,
	}}}
	node := func(n *pb.NodeUpdate) *pb.StreamResponse {
		return &pb.StreamResponse{Message: &pb.StreamResponse_NodeUpdate{NodeUpdate: n}}
	}
	high := forgeries(shards, nil)
	for _, r := range high {
		if u := r.GetShardUpdate(); u != nil {
			u.ServicesResourceVersion, u.SlicesResourceVersion = most, most
		}
	}
	for name, script := range map[string][]*pb.StreamResponse{
		"versions":                  {welcome(7), update, beat, inSync, beat},
		"versions at last":          {welcome(7), inSync, beat, update},
		"versions of updates alone": append(high, &pb.StreamResponse{Message: &pb.StreamResponse_InSync{InSync: &pb.InSync{Sequences: sequences}}}),
		"path":                      {welcome(make([]uint64, long/8)...), inSync},
		"name of a node":            {welcome(7), node(&pb.NodeUpdate{Name: text}), inSync},
		"node":                      {welcome(7), node(&pb.NodeUpdate{Node: &pb.Node{Name: text}}), inSync},
		"labels":                    {welcome(7), node(&pb.NodeUpdate{Node: &pb.Node{Name: "n", Labels: map[string]string{text: "x"}}}), inSync},
		"drain":                     {welcome(7), {Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{ReconnectWithinMs: math.MaxUint32}}}},
		"forgeries":                 append(forgeries(shards, nil), inSync),
		"forgeries with unknown fields": append(forgeries(shards, func(s *pb.Slice) {
			s.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1))
		}), inSync),
		"drain at once": {{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{ReconnectWithinMs: math.MaxUint32}}}},
	} {
		t.Run(name, func(t *testing.T) {
			c := hasty{newCluster()}
			root := serve(t, "127.0.0.1:0", c)
			<-c.ready
			rogue := &speaker{says: make(chan *pb.StreamResponse, len(script))}
			for _, r := range script {
				rogue.says <- r
			}
			bad, good := proxytest.New(t, rogue.serve(t)), proxytest.New(t, proxytest.Nowhere)
			relay := serve(t, "127.0.0.1:0", nil, bad.Address(), good.Address())
			require.Eventually(t, func() bool { return len(rogue.says) == 0 }, patience, time.Millisecond)
			good.Lead(root.address)
			bad.Lead(proxytest.Nowhere)
			bad.Cut()
			a := join(t, "node-1", nil, relay.address)
			a.has(19, 2)
			require.Eventually(t, func() bool {
				v := a.cache.Status().ResourceVersions
				return v.Services < most && v.Slices < most
			}, patience, time.Millisecond, "the node would be behind with each server that it moves to")
		})
	}
}
