// These tests prove what a client tells servers, how often, and that no server or node can make it
// keep or send more than is bounded.
package connection

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// testOutbox returns the Outbox of a client with an empty cache.
func testOutbox() *Outbox { return testConnection(cache.New(), nil).Outbox }

// TestAnAckHasTheTimeOfEachPosition checks that positions programmed while an Ack waits go with
// that Ack, each with its own time. If there are very many, the last ones are sent as one.
func TestAnAckHasTheTimeOfEachPosition(t *testing.T) {
	o := testOutbox()
	o.newStream()
	o.inSync()
	for sequence := uint64(1); sequence <= 2*maxPositions; sequence++ {
		o.Ack(0, map[uint32]uint64{5: sequence})
		if sequence == 1 {
			o.acks.positions[5][0].at = time.Now().Add(-time.Minute)
		}
	}
	requests, acked, err := o.collect(true)
	require.NoError(t, err)
	require.True(t, acked)
	positions := requests[0].GetAck().GetPositions()
	require.Len(t, positions, maxPositions)
	require.GreaterOrEqual(t, positions[0].GetAgeMs(), uint32(60_000))
	for i, p := range positions {
		require.EqualValues(t, 5, p.GetShard())
		if i < maxPositions-1 {
			require.EqualValues(t, i+1, p.GetSequence())
		}
	}
	require.EqualValues(t, 2*maxPositions, positions[maxPositions-1].GetSequence())
	require.Less(t, positions[1].GetAgeMs(), uint32(50_000))
}

// TestAnAckOfARelaysNodes checks that the positions of a relay have the time and name of its
// slowest node. Positions that are sent as one have those of the slowest. The names have a bound.
func TestAnAckOfARelaysNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := testOutbox()
		o.newStream()
		o.inSync()
		ack := func() *pb.Ack {
			requests, acked, err := o.collect(true)
			require.NoError(t, err)
			require.True(t, acked)
			return requests[0].GetAck()
		}
		now := time.Now()
		ages := func(positions []*pb.ShardPosition) (ages []uint32, last string) {
			for _, p := range positions {
				ages = append(ages, p.GetAgeMs())
				last += p.GetLastNode()
			}
			return ages, last
		}
		for i, name := range []string{"a", "b", "c"} {
			o.AckSince(0, map[uint32]uint64{5: uint64(i)}, now.Add(-time.Duration([]int{7, 3, 5}[i])*time.Millisecond), name)
		}
		got, last := ages(ack().GetPositions())
		require.Equal(t, []uint32{7, 3, 3}, got)
		require.Equal(t, "abb", last, "who has something has what was before")
		for i := range maxPositions + 1 {
			o.AckSince(0, map[uint32]uint64{5: uint64(9 + i)}, now.Add(-time.Duration(20-i)*time.Millisecond), fmt.Sprint(i))
		}
		got, last = ages(ack().GetPositions())
		require.Equal(t, []uint32{20, 19, 18, 17, 16, 15, 14, 12}, got)
		require.Equal(t, "01234568", last)

		// Node names are left out before an Ack becomes too large.
		for shard := range uint32(cache.MaxShards) {
			o.AckSince(0, map[uint32]uint64{shard: math.MaxUint64}, now.Add(-math.MaxUint32*time.Millisecond), strings.Repeat("n", 253))
		}
		a := ack()
		require.Less(t, proto.Size(a), 128<<10)
		_, last = ages(a.GetPositions())
		require.Len(t, last, maxLastNodes/256*253)
	})
}

// TestAnAckHasTheSmallestNumberOfNodes checks that nodes which replace others of a relay do not
// count for positions from before they came.
func TestAnAckHasTheSmallestNumberOfNodes(t *testing.T) {
	o := testOutbox()
	o.SetNodes(3)
	o.newStream()
	o.inSync()
	nodes := func(numbers ...uint32) uint32 {
		for _, n := range numbers {
			o.SetNodes(n)
		}
		requests, acked, err := o.collect(true)
		require.NoError(t, err)
		if !acked {
			return math.MaxUint32
		}
		return requests[0].GetAck().GetNodes()
	}
	require.EqualValues(t, 3, nodes())
	require.EqualValues(t, 5, nodes(4, 5))
	require.EqualValues(t, 3, nodes(4, 3, 4, 6))
	require.EqualValues(t, 6, nodes(), "those that have come")
	require.EqualValues(t, 8, nodes(7, 8))
	require.EqualValues(t, uint32(math.MaxUint32), nodes(), "nothing is to be told")
	o.SetNodes(1)
	o.SetNodes(2)
	o.newStream()
	o.inSync()
	require.EqualValues(t, 2, nodes(), "another server knows of none")
}

// TestAcksThatWait checks that the first Ack after a quiet time wakes up the sender at once. Later
// Acks wait for the next change after their interval, or for ackPatience.
func TestAcksThatWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := testOutbox()
		o.newStream()
		o.inSync()
		sequence := uint64(0)
		ack := func() (wakes bool) {
			sequence++
			o.Ack(0, map[uint32]uint64{5: sequence})
			select {
			case <-o.wake:
				return true
			default:
				return false
			}
		}
		collect := func(wanted bool) bool {
			_, acked, err := o.collect(wanted)
			require.NoError(t, err)
			return acked
		}
		first := func() {
			require.True(t, ack())
			require.True(t, collect(false))
		}
		const least, most = ackInterval * 3 / 4, ackInterval * 5 / 4
		for range 2 {
			first()
			<-time.After(least - 1)
			require.False(t, ack())
			require.False(t, collect(false), "for something else")
			<-time.After(most - least + 1)
			require.True(t, ack(), "a change comes when the time has come")
			require.True(t, collect(false))
			require.False(t, ack())
			require.True(t, collect(true), "no change has come")
			require.False(t, collect(true), "nothing is to be told")
			<-time.After(most)
		}
		first()
		o.newStream()
		require.True(t, ack(), "another stream")
	})
}

// TestNacksOfARelaysNodes checks that the stream goes on and the relay's own requests are sent,
// however many Nacks the relay's nodes report. Each server receives the open ones.
func TestNacksOfARelaysNodes(t *testing.T) {
	o := testOutbox()
	nack := func(node int) *pb.Nack {
		return &pb.Nack{Key: wire.KeyToProto(modeltest.NamedSlice("web", "web", 1).Key()), NodeName: fmt.Sprint("node-", node), Reason: "no room"}
	}
	resolved := func(node int) *pb.Nack {
		n := nack(node)
		n.Reason, n.Resolved = "", true
		return n
	}
	collect := func() (nacks []*pb.Nack) {
		requests, _, err := o.collect(true)
		require.NoError(t, err)
		for _, r := range requests {
			if r.GetNack() != nil {
				nacks = append(nacks, r.GetNack())
			}
		}
		return nacks
	}
	o.newStream()
	for i := range wire.MaxRelayedNacks {
		require.True(t, o.Report(nack(i)))
	}
	require.False(t, o.Report(nack(wire.MaxRelayedNacks)))
	require.False(t, o.Report(&pb.Nack{}), "of what?")
	require.False(t, o.Report(&pb.Nack{Key: wire.KeyToProto(model.Key{Kind: model.KindNode, Name: "a"}), NodeName: "a"}), "there is no more room")
	require.True(t, o.Report(nack(0)), "it is known")
	for range maxRequests {
		o.request(&pb.StreamRequest{})
	}
	require.Empty(t, collect(), "not in sync yet")
	o.inSync()
	require.Len(t, collect(), wire.MaxRelayedNacks)
	require.True(t, o.Report(nack(1)))
	require.Empty(t, collect(), "it was told")
	for i := range wire.MaxRelayedNacks - 1 {
		require.True(t, o.Report(resolved(i)))
	}
	require.True(t, o.Report(nack(wire.MaxRelayedNacks)), "there is room again")
	got := collect()
	require.Len(t, got, wire.MaxRelayedNacks)
	require.False(t, got[len(got)-1].GetResolved(), "on the server too, by then")
	require.True(t, o.Report(resolved(wire.MaxRelayedNacks)))
	require.Len(t, collect(), 1)

	o.newStream()
	o.inSync()
	got = collect()
	require.Len(t, got, 1, "the others do not stand any more")
	require.True(t, proto.Equal(nack(wire.MaxRelayedNacks-1), got[0]), got[0])
	o.newStream()
	require.True(t, o.Report(resolved(wire.MaxRelayedNacks-1)))
	o.inSync()
	require.Empty(t, collect())
}

// TestManyNacks checks that Nacks are sent at a limited rate, because servers end streams that send
// too many at once.
func TestManyNacks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := testOutbox()
		o.newStream()
		o.inSync()
		const count = 2*nacksAtOnce + 1
		for i := range count {
			o.fail(subject{key: modeltest.NamedSlice(fmt.Sprint("web-", i), "web", 1).Key()}, failure{reason: "no"})
		}
		told := map[string]bool{}
		collect := func() (n int) {
			select {
			case <-o.wake:
			default:
			}
			requests, _, err := o.collect(false)
			require.NoError(t, err)
			for _, r := range requests {
				told[r.GetNack().GetKey().GetName()] = true
			}
			return len(requests)
		}
		require.Equal(t, nacksAtOnce, collect())
		require.Zero(t, collect(), "not yet")
		begin := time.Now()
		for len(told) < count {
			<-o.wake
			require.LessOrEqual(t, collect(), nacksPerSecond+1)
		}
		require.GreaterOrEqual(t, time.Since(begin), (nacksAtOnce+1)/nacksPerSecond*time.Second)

		// The next stream is sent all Nacks again. It may lead to the same server, whose limit
		// covers all streams of a node. A large burst is therefore possible only after a quiet
		// time.
		clear(told)
		o.newStream()
		o.inSync()
		require.LessOrEqual(t, collect(), nacksPerSecond)
		<-time.After((nacksAtOnce/nacksPerSecond + 1) * time.Second)
		require.Equal(t, nacksAtOnce, collect())
		for len(told) < count {
			<-o.wake
			require.LessOrEqual(t, collect(), nacksPerSecond+1)
		}

		// The rate limit also applies to a single object that changes often.
		o.newStream()
		o.inSync()
		clear(o.nacks.news)
		changes, sent, begin := 0, 0, time.Now()
		for time.Since(begin) < time.Minute {
			o.fail(subject{key: modeltest.NamedSlice("web-0", "web", 1).Key()}, failure{reason: fmt.Sprint(changes)})
			changes++
			sent += collect()
			time.Sleep(time.Millisecond) //nolint:forbidigo // of the bubble's clock
		}
		require.LessOrEqual(t, sent, nacksAtOnce+60*nacksPerSecond+1)
	})
}

// TestAcksOfManyShards checks that an Ack stays within what servers accept and has the latest
// position of each shard.
func TestAcksOfManyShards(t *testing.T) {
	o := testOutbox()
	o.newStream()
	o.inSync()
	const latest = math.MaxUint64
	for i := range uint64(maxPositions + 1) {
		positions := map[uint32]uint64{}
		for shard := range uint32(cache.MaxShards) {
			positions[shard] = latest - maxPositions + i
		}
		o.Ack(0, positions)
	}
	requests, acked, err := o.collect(true)
	require.NoError(t, err)
	require.True(t, acked)
	require.Less(t, proto.Size(requests[0]), 128<<10)
	positions := requests[0].GetAck().GetPositions()
	require.Len(t, positions, cache.MaxShards)
	for _, p := range positions {
		require.EqualValues(t, uint64(latest), p.GetSequence())
	}
	// If fewer shards have positions, each may have more of them.
	for i := range uint64(maxPositions) {
		o.Ack(0, map[uint32]uint64{3: 10 + i, 4: 20 + i})
	}
	requests, _, err = o.collect(true)
	require.NoError(t, err)
	require.Len(t, requests[0].GetAck().GetPositions(), 2*maxPositions)
}

// TestManyResyncs checks that a client sends no more unprompted Resyncs than servers accept, in a
// burst or one by one. Resyncs with keys go before those of whole shards, and those of one shard
// are merged.
func TestManyResyncs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := testOutbox()
		o.newStream()
		names := func(n int) (keys []*pb.ObjectKey) {
			for i := range n {
				keys = append(keys, &pb.ObjectKey{Name: fmt.Sprint(i)})
			}
			return keys
		}
		const shards = 2 * resyncsAtOnce
		begin, asked := time.Now(), map[uint32]bool{}
		collect := func() (n int) {
			requests, _, err := o.collect(false)
			require.NoError(t, err)
			for _, r := range requests {
				require.Empty(t, r.GetResync().GetKeys())
				asked[r.GetResync().GetShard()] = true
			}
			return len(requests)
		}
		for i := range uint32(shards) {
			o.resync(&pb.Resync{Shard: i, BucketDigests: []byte{1}})
			collect()
		}
		require.Len(t, asked, resyncsAtOnce)
		for range 3 {
			o.resync(&pb.Resync{Shard: 7, Keys: names(maxKeys / 3)})
		}
		o.resync(&pb.Resync{Shard: 7, Keys: names(2)})
		o.resync(&pb.Resync{Shard: 8, Keys: names(2)})
		var keys []int
		for len(asked) < shards {
			<-o.wake
			requests, _, err := o.collect(false)
			require.NoError(t, err)
			for _, r := range requests {
				if n := len(r.GetResync().GetKeys()); n > 0 {
					require.Len(t, asked, resyncsAtOnce, "first")
					keys = append(keys, n)
					continue
				}
				asked[r.GetResync().GetShard()] = true
			}
		}
		require.Equal(t, []int{2, 2, maxKeys / 3 * 3}, keys)
		const rest = shards - resyncsAtOnce + 3
		require.InDelta(t, (rest * time.Second / resyncsPerSecond).Seconds(), time.Since(begin).Seconds(), 1)

		// The limit covers all streams of a node, as servers' limits do.
		o.newStream()
		clear(asked)
		for i := range uint32(shards) {
			o.resync(&pb.Resync{Shard: i, BucketDigests: []byte{1}})
		}
		collect()
		require.LessOrEqual(t, len(asked), 1)
	})
}

// TestRequestsAreBounded checks that the client leaves a server that does not read, or that makes
// the client ask for ever more.
func TestRequestsAreBounded(t *testing.T) {
	o := testOutbox()
	o.newStream()
	for range maxRequests {
		o.request(&pb.StreamRequest{})
	}
	requests, _, err := o.collect(true)
	require.NoError(t, err)
	require.Len(t, requests, maxRequests)
	for range maxRequests + 1 {
		o.request(&pb.StreamRequest{})
	}
	_, _, err = o.collect(true)
	require.ErrorIs(t, err, errNotReading)
	o.newStream()
	requests, _, err = o.collect(true)
	require.NoError(t, err)
	require.Empty(t, requests)
	for i := range uint32(maxRequests) {
		o.resync(&pb.Resync{Shard: i})
	}
	o.resync(&pb.Resync{Shard: maxRequests})
	_, _, err = o.collect(true)
	require.ErrorIs(t, err, errNotReading)
}

// TestAFewNodesDoNotSilenceARelay checks that some of a relay's nodes cannot use up the room for
// Nacks, and that there is room again once theirs are resolved.
func TestAFewNodesDoNotSilenceARelay(t *testing.T) {
	o := testOutbox()
	nack := func(node string, i int, resolved bool) *pb.Nack {
		key := wire.KeyToProto(modeltest.NamedSlice(fmt.Sprint("slice-", i), "web", 1).Key())
		return &pb.Nack{Key: key, NodeName: node, Reason: "no room", Resolved: resolved}
	}
	for i := range 2 * wire.MaxRelayedNacks {
		o.Report(nack(fmt.Sprint("hostile-", i%4), i, false))
	}
	require.Equal(t, wire.MaxRelayedNacks/2, o.failures())
	for node := range wire.MaxRelayedNacks / 2 / maxNodeNacks {
		for i := range maxNodeNacks {
			require.True(t, o.Report(nack(fmt.Sprint("honest-", node), i, false)))
		}
		require.False(t, o.Report(nack(fmt.Sprint("honest-", node), maxNodeNacks, false)))
	}
	require.False(t, o.Report(nack("another", 0, false)))
	for i := range 2 * wire.MaxRelayedNacks {
		o.Report(nack(fmt.Sprint("hostile-", i%4), i, true))
	}
	require.True(t, o.Report(nack("another", 0, false)))
	require.Len(t, o.nacks.ofNode, wire.MaxRelayedNacks/2/maxNodeNacks+1)
}
