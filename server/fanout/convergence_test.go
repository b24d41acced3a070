// These tests prove which nodes count for which publish, also while they come, go, restart or are
// stuck, and which of them the status names. BenchmarkAck measures the cost of an ack.
package fanout

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// TestAnUpdateIsAcknowledgedAsSoonAsItCanBeSeen checks an Update that a stream gets from a
// snapshot. The node may program it before the publisher sends it, and its ack counts nevertheless.
func TestAnUpdateIsAcknowledgedAsSoonAsItCanBeSeen(t *testing.T) {
	const publishes = 1000
	s := filled(t, 1)
	h := start(t, s).Hub
	p := connect(t, h, &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	defer p.cancel()
	eventually(t, p.session.synced.Load)
	shard := slice(0, 1).ServiceKey().Shard(2)
	first := s.Snapshot(shard).Sequence()
	var acking sync.WaitGroup
	acking.Go(func() {
		for at := first; at < first+publishes; {
			if now := s.Snapshot(shard).Sequence(); now > at {
				at = now
				if err := p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{
					Positions: []*pb.ShardPosition{{Shard: shard, Sequence: at}},
				}}}); err != nil {
					panic(err)
				}
			}
		}
	})
	for n := range publishes {
		s.Upsert(slice(0, 1+n%50), 0)
		h.publish()
	}
	acking.Wait()
	require.Empty(t, h.convergence.shards[shard].open)
	for _, c := range h.Convergences() {
		require.Equal(t, 1, c.Programmed)
	}
}

// BenchmarkAck measures one node's ack of one position, with and without another node that
// acknowledges nothing.
func BenchmarkAck(b *testing.B) {
	for name, stuck := range map[string]int{"all follow": 0, "one is stuck": 1} {
		b.Run(name, func(b *testing.B) {
			const nodes = 100
			c := newConvergence(1, newMetrics(nil), nil)
			for range stuck {
				c.joinAgent("stuck")
			}
			var members []*member
			for range nodes {
				members = append(members, c.joinAgent(fmt.Sprint("node-", len(members))))
			}
			at := time.Now()
			sequence := uint64(0)
			round := func() {
				sequence++
				c.published(0, sequence, at, Changed{})
				for _, m := range members {
					c.ack(m, 0, sequence, at, "")
				}
			}
			for range maxOpen {
				round()
			}
			for b.Loop() {
				round()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/nodes, "ns/ack")
			require.Len(b, c.shards[0].open, stuck*maxOpen)
		})
	}
}

// TestNodesThatComeAndGoDoNotCountForWhatWasPublishedBefore checks that nodes that join after a
// publish and leave again do not change its numbers.
func TestNodesThatComeAndGoDoNotCountForWhatWasPublishedBefore(t *testing.T) {
	c := newConvergence(1, newMetrics(nil), nil)
	var members []*member
	for range 10 {
		members = append(members, c.joinAgent(fmt.Sprint("node-", len(members))))
	}
	c.published(0, 1, time.Now(), Changed{})
	for range 20 { // agents that reconnect, while all ten nodes wait for their kernels
		c.resize(c.joinAgent("passing"), 0)
	}
	open := c.latest()
	require.Len(t, open, 1)
	for _, m := range members {
		c.ack(m, 0, 1, time.Now(), "")
	}
	results := c.latest()
	require.Equal(t, 10, open[0].Nodes)
	require.Equal(t, 0, open[0].Programmed)
	require.Len(t, results, 1)
	require.NotZero(t, results[0].Times[0])
}

// TestARelayThatComesBackHasNotWhatWasPublishedBefore checks that nodes of a relay that reconnects
// do not count as having what was published before.
func TestARelayThatComesBackHasNotWhatWasPublishedBefore(t *testing.T) {
	c := newConvergence(1, newMetrics(nil), nil)
	direct := c.joinAgent("direct")
	relay := c.joinRelay("relay")
	c.resize(relay, 100)
	c.published(0, 1, time.Now(), Changed{})
	c.resize(relay, 0) // its stream breaks
	relay = c.joinRelay("relay")
	c.resize(relay, 100) // its first Ack, with its number of nodes only
	open := c.latest()
	require.Len(t, open, 1)
	require.Zero(t, open[0].Programmed)
	require.Zero(t, open[0].Times[0])
	c.ack(direct, 0, 1, time.Now(), "")
}

// TestTimesDoNotDependOnWhichAckIsTheLast checks coalesced acks: the ack that arrives last may
// carry the earliest time.
func TestTimesDoNotDependOnWhichAckIsTheLast(t *testing.T) {
	c := newConvergence(1, newMetrics(nil), nil)
	slow, quick := c.joinAgent("slow"), c.joinAgent("quick")
	at := func(us int) time.Time { return time.Time{}.Add(time.Duration(us) * time.Microsecond) }
	c.published(0, 1, at(0), Changed{})
	c.ack(slow, 0, 1, at(3300), "")
	require.Equal(t, [3]time.Duration{3300 * time.Microsecond}, c.latest()[0].Times, "half of the nodes had it then, or before")
	c.ack(quick, 0, 1, at(1500), "")
	done := c.latest()[0]
	requireClose(t, 1500*time.Microsecond, done.Times[0])
	require.Equal(t, 3300*time.Microsecond, done.Times[1])
	require.Equal(t, 3300*time.Microsecond, done.Times[2])
	require.Equal(t, []NodeTime{{"slow", 3300 * time.Microsecond}, {"quick", 1500 * time.Microsecond}}, done.Last)
}

// TestCurves checks the curve of an Update while some node lacks it, and after that.
func TestCurves(t *testing.T) {
	c := newConvergence(2, newMetrics(nil), nil)
	quick, relay, slow := c.joinAgent("quick"), c.joinRelay("relay"), c.joinAgent("slow")
	c.resize(relay, 5)
	at := func(us int) time.Time { return time.Time{}.Add(time.Duration(us) * time.Microsecond) }
	c.published(1, 1, at(0), Changed{})
	c.published(1, 2, at(1000), Changed{})
	require.Empty(t, c.steps(1, 2), "no node has it")
	c.ack(relay, 1, 2, at(5000), "")
	c.ack(quick, 1, 2, at(2000), "")
	open := c.steps(1, 2)
	require.Len(t, open, 2)
	require.Equal(t, 1, open[0].Nodes)
	requireClose(t, time.Millisecond, open[0].Time)
	require.Equal(t, Step{Time: 4 * time.Millisecond, Nodes: 6}, open[1])

	c.ack(slow, 1, 2, at(101000), "")
	require.Equal(t, Step{Time: 100 * time.Millisecond, Nodes: 7}, c.steps(1, 2)[2])
	require.Len(t, c.steps(1, 1), 3)
	for _, unknown := range []uint64{0, 3} {
		require.Empty(t, c.steps(1, unknown))
	}
	require.Empty(t, c.steps(0, 2))
}

// TestAStuckNode checks that the times of the other nodes are in the histograms while one node is
// stuck, and that the status names the stuck node.
func TestAStuckNode(t *testing.T) {
	registry := prometheus.NewRegistry()
	h := New(Options{Store: filled(t, 1), Registerer: registry})
	c := h.convergence
	observed := func() (counts []uint64) {
		families, err := registry.Gather()
		require.NoError(t, err)
		for _, f := range families {
			if f.GetName() == "slicecast_server_convergence_duration_seconds" {
				for _, m := range f.GetMetric() {
					counts = append(counts, m.GetHistogram().GetSampleCount())
				}
			}
		}
		return counts
	}
	var nodes []*member
	for i := range 200 {
		nodes = append(nodes, c.joinAgent(fmt.Sprintf("node-%03d", i)))
	}
	now := time.Now()
	c.published(0, 1, now, Changed{})
	c.published(0, 2, now.Add(lateAcks), Changed{})
	c.published(1, 1, now.Add(-lateAcks), Changed{})
	c.ack(nodes[0], 1, 1, now, "")
	for i, n := range nodes[:199] {
		c.ack(n, 0, 2, now.Add(lateAcks+time.Duration(i)*time.Millisecond), "")
	}
	c.observeOld(now.Add(lateAcks - 1))
	require.Equal(t, []uint64{0, 0, 0}, observed(), "others may have been faster, and say so later")
	for range 2 {
		c.observeOld(now.Add(lateAcks))
		require.Equal(t, []uint64{1, 1, 0}, observed())
	}
	for _, n := range nodes[1:100] {
		c.ack(n, 1, 1, now, "")
	}
	h.beat()
	require.Equal(t, []uint64{2, 1, 0}, observed(), "of the other shard")
	for _, n := range nodes[100:] {
		c.ack(n, 1, 1, now, "")
	}
	require.Equal(t, []uint64{2, 2, 1}, observed())
	open := c.latest()
	require.Equal(t, "node-199", open[0].Last[0].Node)
	require.Zero(t, open[0].Last[0].Time)
	require.Equal(t, []NodeTime{{"node-198", 198 * time.Millisecond}, {"node-197", 197 * time.Millisecond}}, open[0].Last[1:])
	for sequence := uint64(3); sequence <= maxOpen+1; sequence++ {
		c.published(0, sequence, now, Changed{})
		for _, n := range nodes[:3] {
			c.resize(n, 0) // they have what was published before
		}
	}
	require.Equal(t, []uint64{2, 2, 1}, observed())
	c.published(0, maxOpen+2, now, Changed{})
	c.published(0, maxOpen+3, now, Changed{})
	require.Equal(t, []uint64{3, 3, 1}, observed(), "what is given up on counts as far as it is known")
	c.ack(nodes[199], 0, maxOpen+3, now, "")
	require.Equal(t, []uint64{3, 3, 1}, observed(), "the others lack the rest")
}

// TestNodesThatWereLast checks which nodes are named: some of the nodes that lack an Update, a
// relay if some of its nodes lack it, and otherwise the relay's last node.
func TestNodesThatWereLast(t *testing.T) {
	c := newConvergence(2, newMetrics(nil), nil)
	var nodes []*member
	for _, name := range []string{"e", "d", "c", "b", "a"} {
		nodes = append(nodes, c.joinAgent(name))
	}
	relay := c.joinRelay("relay")
	at := time.Now()
	c.published(1, 1, at, Changed{}) // the relay has no nodes for it
	c.resize(relay, 10)
	c.published(1, 2, at, Changed{})
	latest := func(sequence uint64) Convergence {
		all := c.latest()
		return all[slices.IndexFunc(all, func(c Convergence) bool { return c.Sequence == sequence })]
	}
	names := func(sequence uint64) (names []string) {
		for _, n := range latest(sequence).Last {
			names = append(names, n.Node)
		}
		return names
	}
	require.Equal(t, []string{"a", "b", "c"}, names(1))
	for i, n := range nodes[:4] {
		c.ack(n, 1, 2, at.Add(time.Duration(i)*time.Second), "")
	}
	require.Equal(t, []string{"a", "b", "c"}, names(1), "who lacks it is before who was slow")
	require.Equal(t, []string{"a", "relay", "b"}, names(2))
	c.ack(relay, 1, 2, at.Add(time.Minute), "node-behind")
	require.Equal(t, []string{"a", "node-behind", "b"}, names(2))
	c.resize(nodes[4], 0)
	require.Equal(t, []string{"b", "c", "d"}, names(1))
	require.Equal(t, Convergence{
		Shard: 1, Sequence: 2, Published: at, Nodes: 14, Programmed: 14, Times: [3]time.Duration{time.Minute, time.Minute, time.Minute},
		Last: []NodeTime{{"node-behind", time.Minute}, {"b", 3 * time.Second}, {"c", 2 * time.Second}},
	}, latest(2))
}

// TestWhatARelaySaysOfItsNodesIsBounded checks the bounds on what a relay reports of its nodes.
func TestWhatARelaySaysOfItsNodesIsBounded(t *testing.T) {
	s := filled(t, 1)
	h := start(t, s).Hub
	p := connect(t, h, &pb.Hello{Kind: pb.ClientKind_CLIENT_KIND_RELAY})
	defer p.cancel()
	eventually(t, p.session.synced.Load)
	shard := slice(0, 1).ServiceKey().Shard(2)
	ack := func(nodes uint32, last string) error {
		return p.say(&pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: &pb.Ack{Nodes: nodes, Positions: []*pb.ShardPosition{
			{Shard: shard, Sequence: s.Snapshot(shard).Sequence(), LastNode: last},
		}}}})
	}
	require.NoError(t, ack(maxRelayNodes, ""))
	for endpoints, name := range []string{strings.Repeat("n", maxNodeName), strings.Repeat("n", maxNodeName+1)} {
		s.Upsert(slice(0, 10+endpoints), 0)
		h.publish()
		require.NoError(t, ack(maxRelayNodes, name))
	}
	results := h.Convergences()
	require.Len(t, results, 2)
	require.Equal(t, maxRelayNodes, results[0].Nodes)
	require.Equal(t, "relay "+p.session.peer, results[0].Last[0].Node, "it is too long for a name")
	require.Len(t, results[1].Last[0].Node, maxNodeName)
	require.Equal(t, codes.InvalidArgument, status.Code(ack(maxRelayNodes+1, "")))
}

// TestWhatAnUpdateChanges checks that convergences say which Services an Update concerns, whatever
// it changes of them, and how far it brings the shard.
func TestWhatAnUpdateChanges(t *testing.T) {
	of := func(name string) model.ServiceKey { return model.ServiceKey{Namespace: "default", Name: name} }
	u := &model.Update{
		Services:         []*model.Service{{Namespace: "default", Name: "a"}},
		Slices:           []*model.Slice{{Namespace: "default", Name: "a-1", Service: "a"}},
		Deltas:           []*model.SliceDelta{{Namespace: "default", Name: "b-1", Service: "b"}},
		Left:             []model.Departure{{Service: of("c")}},
		ResourceVersions: model.ResourceVersions{Services: 5, Slices: 7},
	}
	want := Changed{Services: []model.ServiceKey{of("a"), of("b"), of("c")}, ResourceVersions: u.ResourceVersions}
	require.Equal(t, want, changedBy(u))
	u.Left = append(u.Left, model.Departure{Service: of("d")})
	want.More = true
	require.Equal(t, want, changedBy(u))

	c := newConvergence(1, newMetrics(nil), nil)
	member := c.joinAgent("node")
	c.published(0, 1, time.Now(), want)
	require.Equal(t, want, c.latest()[0].Changed)
	c.ack(member, 0, 1, time.Now(), "")
	require.Equal(t, want, c.latest()[0].Changed, "also once all nodes have it")
}
