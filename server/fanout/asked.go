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

// pending is what a client has asked for of a shard and has not been sent yet.
type pending struct {
	whole bool
	// buckets is the latest Resync with digests; nil means none.
	buckets *pb.Resync
	keys    []*pb.ObjectKey
}

// add adds a Resync.
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

// Starts of an identity's streams, a second and at once. A start costs more than a message: the scan of
// a subscription, a relay's Nodes, catch-ups. A node needs one each time that its agent restarts or its
// network fails. As many observers or relays as may share an identity can all come at once, and come back.
const (
	startsPerSecond, startsBurst             = 1, 16
	othersStartsPerSecond, othersStartsBurst = 16, 2 * maxOthers
	// startWait is about how long a client that starts too often is asked to stay away.
	startWait = 4 * time.Second
)

// allowance is what an identity may do on all of its streams together, or one after the other.
type allowance struct {
	starts *rate.Limiter
	// What the identity's clients report is logged a few times a minute at most; metrics count all.
	nacksLogged, resyncsLogged rate.Sometimes

	// shared is set for an agent, whose new stream ends the one before: all have the same limiters.
	// Streams of others have limiters of their own while they are open, as clients may share an identity
	// and must not use up what each other may ask for.
	shared bool
	mu     sync.Mutex
	// free are the limiters that no stream has, or that all share; guarded by mu.
	free []limiters
}

// limiters bound what a client says on a stream, and on those that come after it.
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

// take returns limiters for a stream, if possible those of one that has ended, so that a new stream does
// not begin with new ones.
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

// put takes back the limiters of a stream that has ended.
func (a *allowance) put(l limiters) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.shared {
		a.free = append(a.free, l)
	}
}

// begin takes one start, or returns the status of a stream that comes too soon after others.
func (a *allowance) begin() error {
	if a.starts.Allow() {
		return nil
	}
	return wire.RetryLater(status.Errorf(codes.ResourceExhausted, "more streams than %v a second were opened by this node, observer or relay",
		a.starts.Limit()), startWait/2+rand.N(startWait))
}

// allowances remembers those of identities, so that they outlive their streams.
type allowances struct {
	mu  sync.Mutex
	lru *simplelru.LRU[identity, *allowance]
}

func newAllowances() *allowances {
	a := &allowances{}
	a.lru, _ = simplelru.NewLRU[identity, *allowance](maxIdentities, nil) // an error is for sizes below 1
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
