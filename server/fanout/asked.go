package fanout

import (
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/time/rate"

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

// limiters bound what an agent says, on however many streams.
type limiters struct{ messages, resyncs *rate.Limiter }

func newLimiters() limiters {
	return limiters{rate.NewLimiter(messagesPerSecond, messagesBurst), rate.NewLimiter(resyncsPerSecond, resyncsBurst)}
}

// agentLimiters remembers the limiters of agents, so that a new stream does not begin with new ones.
type agentLimiters struct {
	mu  sync.Mutex
	lru *simplelru.LRU[identity, limiters]
}

func newAgentLimiters() *agentLimiters {
	a := &agentLimiters{}
	a.lru, _ = simplelru.NewLRU[identity, limiters](maxIdentities, nil) // an error is for sizes below 1
	return a
}

func (a *agentLimiters) of(id identity) limiters {
	a.mu.Lock()
	defer a.mu.Unlock()
	l, ok := a.lru.Get(id)
	if !ok {
		l = newLimiters()
		a.lru.Add(id, l)
	}
	return l
}
