package fanout

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// A stream that catches up from a snapshot may be sent an Update, and its node program it, before the publisher comes to send it:
// it counts nevertheless.
func TestAnUpdateIsAcknowledgedAsSoonAsItCanBeSeen(t *testing.T) {
	const publishes = 1000
	s := filled(t, 1)
	h := start(t, s).Hub
	p := connect(t, h, &pb.Hello{NodeName: "a", Kind: pb.ClientKind_CLIENT_KIND_AGENT})
	defer p.cancel()
	eventually(t, p.session.s.synced.Load)
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

// BenchmarkAck is the cost of one node's ack of one position, also while another node acknowledges nothing.
func BenchmarkAck(b *testing.B) {
	for name, stuck := range map[string]int{"all follow": 0, "one is stuck": 1} {
		b.Run(name, func(b *testing.B) {
			const nodes = 100
			c := newConvergence(1, newMetrics(nil, &Hub{}))
			c.join(stuck)
			var members []*member
			for range nodes {
				members = append(members, c.join(1))
			}
			at := time.Now()
			sequence := uint64(0)
			round := func() {
				sequence++
				c.published(0, sequence, at)
				for _, m := range members {
					c.ack(m, 0, sequence, at)
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

// Nodes that come after a publish and go again do not take part in it: the numbers of it are those of the nodes that were there.
func TestNodesThatComeAndGoDoNotCountForWhatWasPublishedBefore(t *testing.T) {
	c := newConvergence(1, newMetrics(nil, &Hub{}))
	var members []*member
	for range 10 {
		members = append(members, c.join(1))
	}
	c.published(0, 1, time.Now())
	for range 20 { // agents that reconnect, while all ten wait for their kernels
		c.resize(c.join(1), 0)
	}
	open := c.latest()
	require.Len(t, open, 1)
	for _, m := range members {
		c.ack(m, 0, 1, time.Now())
	}
	results := c.latest()
	require.Equal(t, 10, open[0].Nodes)
	require.Equal(t, 0, open[0].Programmed)
	require.Len(t, results, 1)
	require.NotZero(t, results[0].Times[0])
}

// A relay whose stream broke stands for its nodes anew: that they come back does not mean that they have what was published before.
func TestARelayThatComesBackHasNotWhatWasPublishedBefore(t *testing.T) {
	c := newConvergence(1, newMetrics(nil, &Hub{}))
	direct := c.join(1)
	relay := c.join(100)
	c.published(0, 1, time.Now())
	c.resize(relay, 0) // its stream breaks
	relay = c.join(0)
	c.resize(relay, 100) // its first Ack, of nothing but its nodes
	open := c.latest()
	require.Len(t, open, 1)
	require.Zero(t, open[0].Programmed)
	require.Zero(t, open[0].Times[0])
	c.ack(direct, 0, 1, time.Now())
}
