package client

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

const (
	// ackInterval is the time between two Acks, on average: one that follows a quiet time goes at once, and under churn acks cost the
	// server little. Either way it knows when each change was programmed. It differs by up to a quarter, so that nodes that have acked the same
	// change do not all ack at the same time from then on; and then an Ack waits for one more change, by which the agent is awake anyway, but
	// not longer than ackPatience from the Ack before.
	ackInterval = 2 * time.Second
	ackPatience = 4 * time.Second
	// maxPositions of one shard go with an Ack; of more the last ones count as one. So do those of all shards together beyond maxAck, with
	// which an Ack has 100 KiB at most: servers take 128.
	maxPositions = 8
	maxAck       = maxShards
	// maxLastNodes bounds the names of nodes in a relay's Ack, in bytes; further positions go without.
	maxLastNodes = 16 << 10
	// maxRequests bounds the requests that wait for a server that does not read, and the Resyncs that wait for their turn: more than it has shards.
	maxRequests = 2 * maxShards
	// newsPerSecond, and newsAtOnce after a quiet time, bound how much of what fails, or no longer does, is told: half of the messages that
	// servers take. Nothing that a relay's nodes say may cost the relay its stream.
	newsPerSecond = 100
	newsAtOnce    = 4096
	// resyncsPerSecond, and resyncsAtOnce after a quiet time, are half of the Resyncs that servers take of a client's own accord.
	resyncsPerSecond = 5
	resyncsAtOnce    = 128
	// maxKeys is how many objects a Resync may name.
	maxKeys = 1024
	// maxReason bounds the reason in a Nack, in bytes.
	maxReason = 1024
)

var errNotReading = errors.New("the server does not read what it is told, or makes this client ask for more than servers take")

// outbox is what waits to be sent. Requests and acks belong to a stream. What is not programmed is kept, and each stream's
// server hears of it once. What it says of its own accord is bounded over all streams together, as
// servers bound it. Its lock may be held when the cache's is taken.
type outbox struct {
	cache *Cache
	// wake gets a value when there is something to send.
	wake chan struct{}

	mu sync.Mutex
	// synced: the stream is in sync, so that positions mean something to the server.
	synced   bool
	requests []*pb.StreamRequest
	// resyncs are requests that nobody has asked for, and allowed how many may go; those that name objects are first. later wakes up for the rest.
	resyncs []*pb.Resync
	allowed *rate.Limiter
	later   *time.Timer
	// full: more requests have come than may wait.
	full  bool
	acks  map[uint32][]programmed
	epoch uint64 // of acks
	// rested is when the next Ack may go with what is programmed then; before, nobody is to wake up for it.
	rested time.Time
	// nodes is how many nodes a relay stands for; toldNodes what its server knows of that; leastNodes how many there have been at
	// the least since then.
	nodes, toldNodes, leastNodes uint32
	// failing is what is not programmed as the server has it; news that, by shard, of which the server does not know that it is
	// failing, or no longer failing.
	failing map[subject]failure
	news    map[subject]uint32
	// newsAllowed is how much of news may go, and newsLater wakes up for the rest.
	newsAllowed *rate.Limiter
	newsLater   *time.Timer
	// wanted is the subscription, nil: everything; told what the server knows of it. changing: an InSync is still to come that
	// ends the change to told.
	wanted, told *pb.Subscription
	changing     bool
}

// programmed is a position that the kernel holds, and since when. A relay's is what all of its nodes hold, and since when the last
// of them does.
type programmed struct {
	sequence uint64
	at       time.Time
	last     string // name of a relay's last node
}

// subject is an object, and where it is not programmed: empty, or one of a relay's nodes.
type subject struct {
	key  model.Key
	node string
}

// failure is why an object is not programmed.
type failure struct {
	reason string
	// unreadable: it did not decode, in this shard.
	unreadable bool
	shard      uint32
}

func newOutbox(cache *Cache, wanted *pb.Subscription) *outbox {
	return &outbox{
		cache: cache, wake: make(chan struct{}, 1), wanted: wanted,
		allowed: rate.NewLimiter(resyncsPerSecond, resyncsAtOnce), newsAllowed: rate.NewLimiter(newsPerSecond, newsAtOnce),
	}
}

func (o *outbox) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// report notes what one of a relay's nodes can't program, or can again. It is false where too much is failing already: what
// nodes say must not cost the relay its stream.
func (o *outbox) report(n *pb.Nack) bool {
	key, err := wire.NackedFromProto(n.GetKey())
	if err != nil {
		return false
	}
	s := subject{key, n.GetNodeName()}
	o.mu.Lock()
	defer o.mu.Unlock()
	_, known := o.failing[s]
	switch {
	case n.GetResolved():
		o.resolveLocked(s)
	case !known && len(o.failing) >= wire.MaxRelayedNacks:
		return false
	default:
		o.failLocked(s, failure{reason: n.GetReason()})
	}
	return true
}

// newStream forgets what was meant for the stream before, and gives the subscription for the new one's Hello.
func (o *outbox) newStream() *pb.Subscription {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.synced, o.requests, o.full, o.news, o.toldNodes, o.rested = false, nil, false, nil, 0, time.Time{}
	o.told, o.changing, o.leastNodes, o.resyncs = o.wanted, false, o.nodes, nil
	return o.told
}

// subscribe changes the subscription.
func (o *outbox) subscribe(s *pb.Subscription) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.wanted = s
	o.signal()
}

// inSync lets acks, nacks and changes of the subscription out, and tells the server all that fails. A later one ends a
// change of the subscription.
func (o *outbox) inSync() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.synced {
		o.changing = false
		o.signal()
		return
	}
	o.synced = true
	for s, f := range o.failing {
		if f.unreadable && !o.cache.isUnreadable(f.shard, s.key) {
			delete(o.failing, s) // it was, in another number of shards
			continue
		}
		o.tellLocked(s, f)
	}
	o.signal()
}

func (o *outbox) tellLocked(s subject, f failure) {
	if !o.synced {
		return
	}
	if !f.unreadable {
		f.shard = o.cache.shardNumber(model.ServiceKey{Namespace: s.key.Namespace, Name: s.key.Name})
	}
	if o.news == nil {
		o.news = make(map[subject]uint32)
	}
	o.news[s] = f.shard
	o.signal()
}

// resync queues a Resync that the server has not asked for. One that names objects may go with another of its shard.
func (o *outbox) resync(r *pb.Resync) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.signal()
	if len(r.GetKeys()) > 0 {
		for _, waiting := range o.resyncs {
			if n := len(waiting.GetKeys()); n > 0 && waiting.GetShard() == r.GetShard() && n+len(r.GetKeys()) <= maxKeys {
				waiting.Keys = append(waiting.Keys, r.GetKeys()...)
				return
			}
		}
	}
	switch {
	case len(o.resyncs) >= maxRequests:
		o.full = true
	case len(r.GetKeys()) > 0:
		o.resyncs = slices.Insert(o.resyncs, 0, r)
	default:
		o.resyncs = append(o.resyncs, r)
	}
}

// request queues a request of this stream, which may be sent at once.
func (o *outbox) request(r *pb.StreamRequest) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.requests) < maxRequests {
		o.requests = append(o.requests, r)
	} else {
		o.full = true
	}
	o.signal()
}

// ack notes positions that the kernel holds from now on.
func (o *outbox) ack(epoch uint64, positions map[uint32]uint64) {
	o.ackSince(epoch, positions, time.Now(), "")
}

// ackSince notes positions that all of a relay's nodes hold since a time.
func (o *outbox) ackSince(epoch uint64, positions map[uint32]uint64, at time.Time, last string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if epoch != o.epoch {
		clear(o.acks)
		o.epoch = epoch
	}
	if o.acks == nil {
		o.acks = make(map[uint32][]programmed)
	}
	for shard, sequence := range positions {
		// Each has its own time, so that the server knows it of each; but not of too many.
		had, next := o.acks[shard], programmed{sequence, at, last}
		// Positions that go as one have the time of the slowest.
		if n := len(had); n > 0 && had[n-1].at.After(at) {
			next.at, next.last = had[n-1].at, had[n-1].last
		}
		if len(had) == maxPositions {
			had = had[:maxPositions-1]
		}
		o.acks[shard] = append(had, next)
	}
	if !time.Now().Before(o.rested) {
		o.signal()
	}
}

// setNodes notes how many nodes a relay stands for.
func (o *outbox) setNodes(n uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.nodes, o.leastNodes = n, min(o.leastNodes, n)
	o.signal()
}

// fail notes that an object is not programmed as the server has it. It is false where that is no news.
func (o *outbox) fail(s subject, f failure) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.failLocked(s, f)
}

func (o *outbox) failLocked(s subject, f failure) bool {
	f.reason = strings.ToValidUTF8(f.reason[:min(len(f.reason), maxReason)], "")
	if had, ok := o.failing[s]; ok && had == f {
		return false
	}
	if o.failing == nil {
		o.failing = make(map[subject]failure)
	}
	o.failing[s] = f
	o.tellLocked(s, f)
	return true
}

// resolve notes that an object is programmed now.
func (o *outbox) resolve(s subject) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.resolveLocked(s)
}

func (o *outbox) resolveLocked(s subject) {
	if f, ok := o.failing[s]; ok {
		delete(o.failing, s)
		o.tellLocked(s, f)
	}
}

// take takes what may be sent now; an Ack only if it is due, or wanted, and acked tells whether there is one.
func (o *outbox) take(ack bool) (out []*pb.StreamRequest, acked bool, err error) {
	epoch := o.cache.currentEpoch()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.full {
		return nil, false, errNotReading
	}
	now := time.Now()
	out, o.requests = o.requests, nil
	for len(o.resyncs) > 0 && o.allowed.AllowN(now, 1) {
		out = append(out, &pb.StreamRequest{Message: &pb.StreamRequest_Resync{Resync: o.resyncs[0]}})
		o.resyncs = o.resyncs[1:]
	}
	if len(o.resyncs) > 0 {
		later(&o.later, resyncsWait, o.signal)
	}
	var nacks []*pb.StreamRequest
	for s, shard := range o.news {
		if !o.newsAllowed.AllowN(now, 1) {
			later(&o.newsLater, newsWait, o.signal)
			break
		}
		delete(o.news, s)
		f, failing := o.failing[s]
		nack := &pb.StreamRequest{Message: &pb.StreamRequest_Nack{Nack: &pb.Nack{
			Shard: shard, Sequence: o.cache.sequence(shard), Key: wire.KeyToProto(s.key), Reason: f.reason, NodeName: s.node,
			Resolved: !failing,
		}}}
		if failing {
			nacks = append(nacks, nack)
		} else { // first: it makes room
			out = append(out, nack)
		}
	}
	out = append(out, nacks...)
	if o.synced && !o.changing && !proto.Equal(o.wanted, o.told) {
		o.told, o.changing = o.wanted, true
		o.cache.resubscribe(o.told)
		subscribe := o.told
		if subscribe == nil {
			subscribe = &pb.Subscription{Everything: true}
		}
		out = append(out, &pb.StreamRequest{Message: &pb.StreamRequest_Subscribe{Subscribe: subscribe}})
	}
	if !ack && now.Before(o.rested) || !o.synced || len(o.acks) == 0 && o.nodes == o.toldNodes {
		return out, false, nil
	}
	defer clear(o.acks)
	if o.epoch != epoch {
		clear(o.acks)
	}
	if len(o.acks) == 0 && o.nodes == o.toldNodes {
		return out, false, nil
	}
	o.rested = now.Add(ackInterval*3/4 + rand.N(ackInterval/2))
	return append(out, &pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: o.ackLocked()}}), true, nil
}

// resyncsWait and newsWait are the times until more of what waits may go. Of news it is a second's worth.
const resyncsWait, newsWait = time.Second / resyncsPerSecond, time.Second

// later has a timer, which may be nil yet, call signal after a time.
func later(timer **time.Timer, wait time.Duration, signal func()) {
	if *timer == nil {
		*timer = time.AfterFunc(wait, signal)
		return
	}
	(*timer).Reset(wait)
}

func (o *outbox) ackLocked() *pb.Ack {
	now := time.Now()
	a := &pb.Ack{Nodes: o.nodes}
	if o.leastNodes < o.toldNodes {
		// Nodes that came in the place of others don't take part in what they were not there for; the next Ack has them.
		a.Nodes = o.leastNodes
	}
	o.toldNodes, o.leastNodes = a.GetNodes(), o.nodes
	names := maxLastNodes
	most := maxAck / max(1, len(o.acks))
	for shard, positions := range o.acks {
		if len(positions) > most {
			positions = append(positions[:most-1], positions[len(positions)-1])
		}
		for _, p := range positions {
			if names -= len(p.last) + 3; names < 0 {
				p.last = ""
			}
			a.Positions = append(a.Positions, &pb.ShardPosition{
				Shard: shard, Sequence: p.sequence, AgeMs: uint32(min(now.Sub(p.at).Milliseconds(), math.MaxUint32)), LastNode: p.last,
			})
		}
	}
	return a
}
