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
	maxAck       = maxShards
	// maxLastNodes bounds the size, in bytes, of the node names in a relay's Ack. Positions beyond
	// it go without a name.
	maxLastNodes = 16 << 10
	// maxRequests bounds the requests that wait for a server that does not read. It also bounds the
	// Resyncs that wait for the rate limit. It is larger than the number of shards.
	maxRequests = 2 * maxShards
	// newsPerSecond limits the rate of Nacks, and newsAtOnce is the burst after a quiet time. Both
	// are half of what servers accept, so that nothing that a relay's nodes report can cost the
	// relay its stream.
	newsPerSecond = 100
	newsAtOnce    = 4096
	// resyncsPerSecond limits the rate of unprompted Resyncs, and resyncsAtOnce is the burst after
	// a quiet time. Both are half of what servers accept.
	resyncsPerSecond = 5
	resyncsAtOnce    = 128
	// maxKeys is the maximum number of objects that a Resync may name.
	maxKeys = 1024
	// maxReason bounds the length of a Nack's reason in bytes.
	maxReason = 1024
)

var errNotReading = errors.New("the server does not read what it is told, or makes this client ask for more than servers take")

// outbox holds what waits to be sent to the server.
//
// Invariants:
//
//  1. requests and resyncs belong to one stream. newStream drops them.
//  2. failing outlives streams. Each stream's server learns all of it once, after the first InSync.
//  3. The limits of resyncs and news apply to all streams together, as servers apply theirs.
//  4. No position, nack or change of the subscription is sent before the stream is in sync.
//  5. mu may be held while the mutex of cache is acquired, never the other way round.
type outbox struct {
	cache *Cache
	// wake receives a value when there is something to send.
	wake chan struct{}

	// mu guards all fields below.
	mu sync.Mutex
	// synced reports that the stream is in sync, so that positions mean something to the server.
	synced   bool
	requests []*pb.StreamRequest
	// resyncs are the Resyncs that the server has not asked for, those with keys first. allowed is
	// their rate limit. later wakes up the sender for those over the limit.
	resyncs []*pb.Resync
	allowed *rate.Limiter
	later   *time.Timer
	// full reports that more requests were queued than may wait. It ends the stream.
	full  bool
	acks  map[uint32][]programmed
	epoch uint64 // the epoch of acks
	// rested is when the next Ack may be sent. Before that time, new positions do not wake up the
	// sender.
	rested time.Time
	// nodes is the number of nodes that a relay represents, and toldNodes is the number in the last
	// Ack. leastNodes is the minimum of nodes since the last Ack.
	nodes, toldNodes, leastNodes uint32
	// failing holds what is not programmed as the server has it. news holds the subjects that have
	// started or stopped failing, or fail for another reason, since the stream's server last heard
	// of them. The values of news are the subjects' shards.
	failing map[subject]failure
	news    map[subject]uint32
	// newsAllowed is the rate limit of news. newsLater wakes up the sender for the rest.
	newsAllowed *rate.Limiter
	newsLater   *time.Timer
	// wanted is the subscription that the client wants, and told is the one that the server knows.
	// nil means everything. changing reports that the InSync that completes the change to told has
	// not arrived yet.
	wanted, told *pb.Subscription
	changing     bool
}

// programmed is a position that the kernel holds and since when. For a relay, it is a position that
// all of its nodes hold, and when the slowest of them programmed it.
type programmed struct {
	sequence uint64
	at       time.Time
	last     string // name of the relay's slowest node
}

// subject is an object that is not programmed. node is empty, or names the relay's node that the
// failure concerns.
type subject struct {
	key  model.Key
	node string
}

// failure is the reason why an object is not programmed.
type failure struct {
	reason string
	// unreadable reports that the object did not decode. Its shard is then shard.
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

// report records that one of a relay's nodes cannot program an object, or that it can again. It
// returns false if too many failures are open, because what nodes report must not cost the relay
// its stream. It also returns false if the key is not valid.
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

// newStream drops what was meant for the previous stream. It returns the subscription for the Hello
// of the new one.
func (o *outbox) newStream() *pb.Subscription {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.synced, o.requests, o.full, o.news, o.toldNodes, o.rested = false, nil, false, nil, 0, time.Time{}
	o.told, o.changing, o.leastNodes, o.resyncs = o.wanted, false, o.nodes, nil
	return o.told
}

// subscribe sets the subscription that the client wants.
func (o *outbox) subscribe(s *pb.Subscription) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.wanted = s
	o.signal()
}

// inSync permits acks, nacks and changes of the subscription to be sent, and queues a Nack for
// everything that is failing. A later InSync on the same stream completes a change of the
// subscription.
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
			delete(o.failing, s) // it was unreadable under another number of shards
			continue
		}
		o.tellLocked(s, f)
	}
	o.signal()
}

func (o *outbox) tellLocked(s subject, f failure) {
	if !o.synced { // invariant 4
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

// resync queues a Resync that the server has not asked for. If r has keys and a Resync of the same
// shard that is still waiting has room for them, resync adds them to it.
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

// request queues a request of the current stream, which is sent without a rate limit.
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

// ack records positions that the kernel holds from now on.
func (o *outbox) ack(epoch uint64, positions map[uint32]uint64) {
	o.ackSince(epoch, positions, time.Now(), "")
}

// ackSince records positions that all of a relay's nodes have held since at. last is the name of
// the slowest node.
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
		// Each position keeps its own time, so that the server learns the time of each. Their
		// number is bounded.
		had, next := o.acks[shard], programmed{sequence, at, last}
		// A later position covers the earlier ones, so it cannot have been programmed before them.
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

// setNodes sets the number of nodes that a relay represents.
func (o *outbox) setNodes(n uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.nodes, o.leastNodes = n, min(o.leastNodes, n)
	o.signal()
}

// fail records that an object is not programmed as the server has it. It returns false if that is
// already known.
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

// resolve records that an object is programmed again.
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

// take returns what may be sent now. It includes an Ack only if ack is set or the interval since
// the last Ack is over. acked reports whether there is one.
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
		} else { // resolved Nacks go first, as they make room at the server
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

// resyncsWait and newsWait are the times until more Resyncs and news may be sent. newsWait is long
// enough for newsPerSecond messages at once.
const resyncsWait, newsWait = time.Second / resyncsPerSecond, time.Second

// later makes a timer call signal after wait. It creates the timer if *timer is nil.
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
		// Nodes that replaced others have no part in positions from before they came. The next Ack
		// counts them.
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
