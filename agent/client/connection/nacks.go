package connection

import (
	"time"

	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// nacksPerSecond limits the rate of Nacks, and nacksAtOnce is the burst after a quiet time.
	// Both are half of what servers accept, so that nothing that a relay's nodes report can cost
	// the relay its stream.
	nacksPerSecond = 100
	nacksAtOnce    = 4096
	// nacksWait is the time until more Nacks may be sent. It is long enough for nacksPerSecond
	// messages at once.
	nacksWait = time.Second
	// maxReason bounds the length of a Nack's reason in bytes.
	maxReason = 1024
)

// subject is an object that is not programmed. node is empty, or names the relay's node that the
// failure concerns. If warning is set, the failure is that warning, and everything is programmed.
type subject struct {
	key     model.Key
	node    string
	warning pb.NodeWarning
}

// failure is the reason why an object is not programmed.
type failure struct {
	reason string
	// unreadable reports that the object did not decode. Its shard is then shard.
	unreadable bool
	shard      uint32
}

// nacks is what is not programmed as the server has it. The Outbox's mutex guards it.
//
// Invariants:
//
//  1. failing outlives streams. Each stream's server learns all of it once, after InSync.
//  2. news holds the subjects that have started or stopped failing, or fail for another reason,
//     since the stream's server last heard of them. Its values are the subjects' shards.
//  3. ofNode counts the subjects in failing by node, and has no zeros.
type nacks struct {
	failing map[subject]failure
	ofNode  map[string]int
	news    map[subject]uint32
	// allowed is the rate limit of news. later wakes up the sender for the rest.
	allowed *rate.Limiter
	later   *time.Timer
}

// maxNodeNacks bounds the open Nacks of each of a relay's nodes, once half of wire.MaxRelayedNacks
// is in use. So a few nodes cannot keep a relay from reporting those of others.
const maxNodeNacks = 16

// hasRoom reports whether another failure of a relay's node may be added.
func (n *nacks) hasRoom(node string) bool {
	open := len(n.failing)
	return open < wire.MaxRelayedNacks/2 || open < wire.MaxRelayedNacks && n.ofNode[node] < maxNodeNacks
}

func (n *nacks) set(s subject, f failure) {
	if _, known := n.failing[s]; !known {
		n.ofNode[s.node]++
	}
	n.failing[s] = f
}

func (n *nacks) remove(s subject) {
	delete(n.failing, s)
	if n.ofNode[s.node]--; n.ofNode[s.node] == 0 {
		delete(n.ofNode, s.node)
	}
}

// collect removes the news that may be sent now, and appends them to out as Nacks. It has signal
// called when more may be sent.
func (n *nacks) collect(out []*pb.StreamRequest, now time.Time, held *cache.Cache, signal func()) []*pb.StreamRequest {
	var open []*pb.StreamRequest
	for s, shard := range n.news {
		if !n.allowed.AllowN(now, 1) {
			later(&n.later, nacksWait, signal)
			break
		}
		delete(n.news, s)
		f, failing := n.failing[s]
		nack := &pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Shard: shard, Sequence: held.Sequence(shard), Key: wire.KeyToProto(s.key), Reason: f.reason, NodeName: s.node,
			Resolved: !failing, Warning: s.warning,
		}}}
		if failing {
			open = append(open, nack)
		} else { // resolved Nacks go first, as they make room at the server
			out = append(out, nack)
		}
	}
	return append(out, open...)
}
