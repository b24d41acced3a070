package fanout

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// pending is what a client has requested of a shard and has not been sent yet.
type pending struct {
	// whole is set if the client has asked for the whole shard.
	whole bool
	// buckets is the latest Resync with digests; nil if there is none.
	buckets *pb.Resync
	keys    []*pb.ObjectKey
}

// add merges a Resync into the requests.
func (r *pending) add(m *pb.Resync) {
	switch {
	case len(m.GetKeys()) > 0:
		r.keys = append(r.keys, m.GetKeys()...)
	case len(m.GetBucketDigests()) > 0:
		r.buckets = m
	default:
		r.whole = true
	}
}

// These are the limits on starts of streams by one identity: the rate per second, and the burst. A
// start costs more than a message, as it may scan for a subscription, send a relay all Nodes, or
// send catch-ups. A node needs a start each time its agent restarts or its network fails. All
// observers or relays that share an identity may start at once, and once more shortly after.
const (
	startsPerSecond, startsBurst             = 1, 16
	othersStartsPerSecond, othersStartsBurst = 16, 2 * maxOthers
	// startWait is about how long a client that starts too often is asked to stay away.
	startWait = 4 * time.Second
)

// allowance is what an identity may do on all of its streams, concurrent or consecutive.
type allowance struct {
	starts *rate.Limiter
	// What the identity's clients report is logged a few times a minute at most. Metrics count all
	// reports.
	nacksLogged, resyncsLogged rate.Sometimes

	// shared is set for an agent. Its new stream ends the previous one, so all of its streams use
	// the same limiters. Otherwise, clients may share the identity and must not use up each other's
	// limits, so each open stream has limiters of its own.
	shared bool
	mu     sync.Mutex // guards free
	// free has the limiters that no stream uses, or the one that all streams share.
	free []limiters
}

// limiters bound the messages and the resyncs of a stream, and of the streams that reuse them after
// it.
type limiters struct{ messages, resyncs *rate.Limiter }

func newLimiters() limiters {
	return limiters{rate.NewLimiter(messagesPerSecond, messagesBurst), rate.NewLimiter(resyncsPerSecond, resyncsBurst)}
}

func newAllowance(of identity) *allowance {
	a := &allowance{
		starts: rate.NewLimiter(othersStartsPerSecond, othersStartsBurst), shared: of.node != "",
		nacksLogged: rate.Sometimes{First: 5, Interval: time.Minute}, resyncsLogged: rate.Sometimes{First: 5, Interval: time.Minute},
	}
	if a.shared {
		a.starts = rate.NewLimiter(startsPerSecond, startsBurst)
	}
	return a
}

// take returns the limiters of a stream that has ended, if there are any, and new ones otherwise. A
// client therefore does not reset its limits with a new stream.
func (a *allowance) take() limiters {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.free) == 0 {
		a.free = append(a.free, newLimiters())
	}
	last := len(a.free) - 1
	l := a.free[last]
	if !a.shared {
		a.free = a.free[:last]
	}
	return l
}

// put returns the limiters of a stream that has ended, for the next one.
func (a *allowance) put(l limiters) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.shared {
		a.free = append(a.free, l)
	}
}

// begin counts a start. It returns nil if the start is within the limit, and the status of the
// stream otherwise.
func (a *allowance) begin() error {
	if a.starts.Allow() {
		return nil
	}
	return wire.RetryLater(status.Errorf(codes.ResourceExhausted, "more streams than %v a second were opened by this node, observer or relay",
		a.starts.Limit()), startWait/2+rand.N(startWait))
}

// allowances keeps the allowances of identities, so that they outlive their streams.
type allowances struct {
	mu  sync.Mutex // guards lru
	lru *simplelru.LRU[identity, *allowance]
}

func newAllowances() *allowances {
	a := &allowances{}
	// An error is returned only for sizes below 1.
	a.lru, _ = simplelru.NewLRU[identity, *allowance](maxIdentities, nil)
	return a
}

func (a *allowances) of(id identity) *allowance {
	a.mu.Lock()
	defer a.mu.Unlock()
	of, ok := a.lru.Get(id)
	if !ok {
		of = newAllowance(id)
		a.lru.Add(id, of)
	}
	return of
}
