package connection

import (
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/agent/client/cache"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// maxRequests bounds the requests that wait for a server that does not read. It also bounds the
	// Resyncs that wait for the rate limit. It is larger than the number of shards.
	maxRequests = 2 * cache.MaxShards
	// resyncsPerSecond limits the rate of unprompted Resyncs, and resyncsAtOnce is the burst after
	// a quiet time. Both are half of what servers accept.
	resyncsPerSecond = 5
	resyncsAtOnce    = 128
	// resyncsWait is the time until another Resync may be sent.
	resyncsWait = time.Second / resyncsPerSecond
	// maxKeys is the maximum number of objects that a Resync may name.
	maxKeys = 1024
)

// requests wait to be sent on one stream. The Outbox's mutex guards them.
//
// Invariants:
//
//  1. resyncs are those that the server has not asked for. Those with keys come first.
//  2. full is set once more were added than may wait. It ends the stream.
type requests struct {
	others  []*pb.StreamRequest // sent without a rate limit
	resyncs []*pb.Resync
	full    bool
	// allowed is the rate limit of resyncs. later wakes up the sender for those over the limit.
	allowed *rate.Limiter
	later   *time.Timer
}

func (q *requests) add(r *pb.StreamRequest) {
	if len(q.others) < maxRequests {
		q.others = append(q.others, r)
	} else {
		q.full = true
	}
}

// addResync adds a Resync. If r has keys and a Resync of the same shard that is still waiting has
// room for them, addResync adds them to it.
func (q *requests) addResync(r *pb.Resync) {
	if len(r.GetKeys()) > 0 {
		for _, waiting := range q.resyncs {
			if n := len(waiting.GetKeys()); n > 0 && waiting.GetShard() == r.GetShard() && n+len(r.GetKeys()) <= maxKeys {
				waiting.Keys = append(waiting.Keys, r.GetKeys()...)
				return
			}
		}
	}
	switch {
	case len(q.resyncs) >= maxRequests:
		q.full = true
	case len(r.GetKeys()) > 0:
		q.resyncs = slices.Insert(q.resyncs, 0, r)
	default:
		q.resyncs = append(q.resyncs, r)
	}
}

// collect removes and returns what may be sent now. It has signal called when more may be sent.
func (q *requests) collect(now time.Time, signal func()) (out []*pb.StreamRequest) {
	out, q.others = q.others, nil
	for len(q.resyncs) > 0 && q.allowed.AllowN(now, 1) {
		out = append(out, &pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: q.resyncs[0]}})
		q.resyncs = q.resyncs[1:]
	}
	if len(q.resyncs) > 0 {
		later(&q.later, resyncsWait, signal)
	}
	return out
}

// later makes a timer call signal after wait. It creates the timer if *timer is nil.
func later(timer **time.Timer, wait time.Duration, signal func()) {
	if *timer == nil {
		*timer = time.AfterFunc(wait, signal)
		return
	}
	(*timer).Reset(wait)
}
