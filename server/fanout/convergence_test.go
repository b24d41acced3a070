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
