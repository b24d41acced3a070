package connection

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/slicecast/slicecast/agent/client/cache"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// ackInterval is the mean time between two Acks. Each interval differs from it by up to a
	// quarter at random. Without that, nodes that acked the same change would ack at the same times
	// from then on.
	//
	// The first Ack after a quiet time is sent at once. While there are many changes, the interval
	// keeps the server's cost low. In either case, the server learns when each change was
	// programmed. Once the interval is over, an Ack waits for the next change, which wakes up the
	// agent anyway. It is sent ackPatience after the previous Ack at the latest.
	ackInterval = 2 * time.Second
	ackPatience = 4 * time.Second
	// maxPositions bounds the positions of one shard in an Ack. If there are more, the newest
	// takes the place of the last one. maxAck bounds the positions of all shards in the same way.
	// An Ack then has at most 100 KiB, and servers accept 128 KiB.
	maxPositions = 8
	maxAck       = cache.MaxShards
	// maxLastNodes bounds the size, in bytes, of the node names in a relay's Ack. Positions beyond
	// it go without a name.
	maxLastNodes = 16 << 10
)

// programmed is a position that the kernel holds and since when. For a relay, it is a position that
// all of its nodes hold, and when the slowest of them programmed it.
type programmed struct {
	sequence uint64
	at       time.Time
	last     string // name of the relay's slowest node
}

// acks is what the next Ack says. The Outbox's mutex guards it.
//
// Invariants:
//
//  1. positions belong to epoch. Those of a shard ascend by time, and there are maxPositions at
//     most.
//  2. leastNodes is the minimum of nodes since the last Ack of the stream, which said toldNodes.
type acks struct {
	epoch     uint64
	positions map[uint32][]programmed
	// rested is when the next Ack may be sent. Before that time, new positions do not wake up the
	// sender.
	rested time.Time
	// nodes is the number of nodes that a relay represents.
	nodes, toldNodes, leastNodes uint32
}

// add adds positions that are programmed since at. last is the name of a relay's slowest node.
func (a *acks) add(epoch uint64, positions map[uint32]uint64, at time.Time, last string) {
	if epoch != a.epoch {
		clear(a.positions)
		a.epoch = epoch
	}
	for shard, sequence := range positions {
		// Each position keeps its own time, so that the server learns the time of each. Their
		// number is bounded.
		had, next := a.positions[shard], programmed{sequence, at, last}
		// A later position covers the earlier ones, so it cannot have been programmed before them.
		if n := len(had); n > 0 && had[n-1].at.After(at) {
			next.at, next.last = had[n-1].at, had[n-1].last
		}
		if len(had) == maxPositions {
			had = had[:maxPositions-1]
		}
		a.positions[shard] = append(had, next)
	}
}

// collect returns an Ack if one is due, and removes its positions. ackNow makes it due before the
// interval since the last one is over. nil means that none is due, or that there is nothing to say.
// Positions of another epoch than the cache's mean nothing to the server.
func (a *acks) collect(now time.Time, ackNow bool, held *cache.Cache) *pb.Ack {
	if !ackNow && now.Before(a.rested) || a.nothing() {
		return nil
	}
	if a.epoch != held.Epoch() {
		clear(a.positions)
	}
	if a.nothing() {
		return nil
	}
	a.rested = now.Add(ackInterval*3/4 + rand.N(ackInterval/2))
	ack := a.ack(now)
	a.toldNodes, a.leastNodes = ack.GetNodes(), a.nodes
	clear(a.positions)
	return ack
}

// nothing reports whether there is nothing to say.
func (a *acks) nothing() bool { return len(a.positions) == 0 && a.nodes == a.toldNodes }

// ack returns the Ack with all positions.
func (a *acks) ack(now time.Time) *pb.Ack {
	out := &pb.Ack{Nodes: a.nodes}
	if a.leastNodes < a.toldNodes {
		// Nodes that replaced others have no part in positions from before they came. The next Ack
		// counts them.
		out.Nodes = a.leastNodes
	}
	names := maxLastNodes
	most := maxAck / max(1, len(a.positions))
	for shard, positions := range a.positions {
		if len(positions) > most {
			positions = append(positions[:most-1], positions[len(positions)-1])
		}
		for _, p := range positions {
			if names -= len(p.last) + 3; names < 0 {
				p.last = ""
			}
			out.Positions = append(out.Positions, &pb.ShardPosition{
				Shard: shard, Sequence: p.sequence, LastNode: p.last,
				AgeMs: uint32(min(now.Sub(p.at).Milliseconds(), math.MaxUint32)),
			})
		}
	}
	return out
}
