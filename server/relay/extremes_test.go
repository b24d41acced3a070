// This test proves that a relay follows the next server, whatever extreme values the one before has
// sent. The relay and the next server are real.
package relay_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/proxytest"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// hasty is a cluster whose server waits only briefly for the versions that its clients have seen.
type hasty struct{ *cluster }

func (hasty) behindWait() time.Duration { return 10 * time.Millisecond }

// TestExtremesOfUpstreams checks that a relay follows the next server and serves that server's
// state, whatever the previous server has sent. The messages have the highest resource versions and
// sequences, endless paths, and invalid Node names.
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
	for name, script := range map[string][]*pb.StreamResponse{
		"versions":         {welcome(7), update, beat, inSync, beat},
		"versions at last": {welcome(7), inSync, beat, update},
		"path":             {welcome(make([]uint64, long/8)...), inSync},
		"name of a node":   {welcome(7), node(&pb.NodeUpdate{Name: text}), inSync},
		"node":             {welcome(7), node(&pb.NodeUpdate{Node: &pb.Node{Name: text}}), inSync},
		"labels":           {welcome(7), node(&pb.NodeUpdate{Node: &pb.Node{Name: "n", Labels: map[string]string{text: "x"}}}), inSync},
		"drain":            {welcome(7), {Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{ReconnectWithinMs: math.MaxUint32}}}},
		"drain at once":    {{Message: &pb.StreamResponse_Drain{Drain: &pb.Drain{ReconnectWithinMs: math.MaxUint32}}}},
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
			join(t, "node-1", nil, relay.address).has(19, 2)
		})
	}
}
