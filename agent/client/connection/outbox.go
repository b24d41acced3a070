package connection

import (
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Outbox holds what waits to be sent to the server. All methods return at once.
//
// Invariants:
//
//  1. What belongs to one stream is dropped when the next one begins; see newStream.
//  2. Rate limits apply to all streams together, as servers apply theirs.
//  3. No position or nack is sent before the stream is in sync.
//  4. mu may be held while the mutex of cache is acquired, never the other way round.
type Outbox struct {
	cache *cache.Writer
	// itself is the subject of NackNode and, with a warning, of Warn.
	itself subject
	// nacked counts failures.
	nacked prometheus.Counter
	// wake receives a value when there is something to send.
	wake chan struct{}

	// mu guards all fields below.
	mu sync.Mutex
	// synced reports that the stream is in sync, so that positions mean something to the server.
	synced   bool
	requests requests
	acks     acks
	nacks    nacks
}

func newOutbox(c *cache.Writer, node string, nacked prometheus.Counter) *Outbox {
	return &Outbox{
		cache: c, itself: subject{key: model.Key{Kind: model.KindNode, Name: node}}, nacked: nacked,
		wake:     make(chan struct{}, 1),
		requests: requests{allowed: rate.NewLimiter(resyncsPerSecond, resyncsAtOnce)},
		acks:     acks{positions: make(map[uint32][]programmed)},
		nacks: nacks{
			failing: make(map[subject]failure), ofNode: make(map[string]int), news: make(map[subject]uint32),
			allowed: rate.NewLimiter(nacksPerSecond, nacksAtOnce),
		},
	}
}

func (o *Outbox) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Ack reports to the server that the kernel holds these positions of this epoch. Positions that are
// lost because a stream ended are reported on the next stream: after its InSync, Cache.Take returns
// the positions of all shards again.
func (o *Outbox) Ack(epoch uint64, positions map[uint32]uint64) {
	o.AckSince(epoch, positions, time.Now(), "")
}

// AckSince reports to the server that all of a relay's nodes have programmed these positions. at is
// when the slowest node programmed them, and last is that node's name.
func (o *Outbox) AckSince(epoch uint64, positions map[uint32]uint64, at time.Time, last string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.acks.add(epoch, positions, at, last)
	if !time.Now().Before(o.acks.rested) {
		o.signal()
	}
}

// SetNodes reports to the server how many nodes a relay represents. Acks apply to all of them.
func (o *Outbox) SetNodes(count uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.acks.nodes, o.acks.leastNodes = count, min(o.acks.leastNodes, count)
	o.signal()
}

// Nack reports to the current server and to each later one that a Service is not fully programmed.
func (o *Outbox) Nack(service model.ServiceKey, reason string) {
	o.fail(subject{key: serviceKey(service)}, failure{reason: reason})
}

// Resolve withdraws the Nack of a Service, which is now fully programmed.
func (o *Outbox) Resolve(service model.ServiceKey) { o.resolve(subject{key: serviceKey(service)}) }

// NackNode reports to the current server and to each later one that nothing of one or both IP
// families is programmed.
func (o *Outbox) NackNode(reason string) { o.fail(o.itself, failure{reason: reason}) }

// ResolveNode withdraws a NackNode.
func (o *Outbox) ResolveNode() { o.resolve(o.itself) }

// Warn reports to the current server and to each later one that something should be mended on the
// node, although everything is programmed. An empty reason withdraws the warning.
func (o *Outbox) Warn(w pb.NodeWarning, reason string) {
	s := o.itself
	s.warning = w
	o.mu.Lock()
	defer o.mu.Unlock()
	if reason == "" {
		o.resolveLocked(s)
	} else {
		o.failLocked(s, failure{reason: reason})
	}
}

func serviceKey(s model.ServiceKey) model.Key {
	return model.Key{Kind: model.KindService, Namespace: s.Namespace, Name: s.Name}
}

// Report passes on the Nack of one of a relay's nodes, or the Nack's resolution, to the current
// server and to each later one while the failure lasts. It drops n and returns false if too many
// Nacks are open already, of all nodes or of this one, because what nodes report must not cost the
// relay its stream. It also drops n if n has no valid key.
func (o *Outbox) Report(n *pb.Nack) bool {
	key, err := wire.NackedFromProto(n.GetKey())
	if err != nil {
		return false
	}
	s := subject{key, n.GetNodeName(), n.GetWarning()}
	o.mu.Lock()
	defer o.mu.Unlock()
	_, known := o.nacks.failing[s]
	switch {
	case n.GetResolved():
		o.resolveLocked(s)
	case !known && !o.nacks.hasRoom(s.node):
		return false
	default:
		o.failLocked(s, failure{reason: n.GetReason()})
	}
	return true
}

// fail records that an object is not programmed as the server has it.
func (o *Outbox) fail(s subject, f failure) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failLocked(s, f) {
		o.nacked.Inc()
	}
}

// failLocked is fail for a failure that is not counted. It returns false if the failure is already
// known.
func (o *Outbox) failLocked(s subject, f failure) bool {
	// The copy does not keep the memory of the rest.
	f.reason = strings.ToValidUTF8(strings.Clone(f.reason[:min(len(f.reason), maxReason)]), "")
	if had, ok := o.nacks.failing[s]; ok && had == f {
		return false
	}
	o.nacks.set(s, f)
	o.tellLocked(s, f)
	return true
}

// resolve records that an object is programmed again.
func (o *Outbox) resolve(s subject) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.resolveLocked(s)
}

func (o *Outbox) resolveLocked(s subject) {
	if f, ok := o.nacks.failing[s]; ok {
		o.nacks.remove(s)
		o.tellLocked(s, f)
	}
}

// tellLocked makes the next messages tell the server whether s is failing.
func (o *Outbox) tellLocked(s subject, f failure) {
	if !o.synced { // invariant 3
		return
	}
	if !f.unreadable {
		f.shard = o.cache.ShardOf(model.ServiceKey{Namespace: s.key.Namespace, Name: s.key.Name})
	}
	o.nacks.news[s] = f.shard
	o.signal()
}

// failures returns the number of open failures.
func (o *Outbox) failures() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.nacks.failing)
}

// newStream drops what was meant for the previous stream.
func (o *Outbox) newStream() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.synced = false
	o.requests.others, o.requests.resyncs, o.requests.full = nil, nil, false
	o.acks.rested, o.acks.toldNodes, o.acks.leastNodes = time.Time{}, 0, o.acks.nodes
	o.nacks.news = make(map[subject]uint32)
}

// inSync permits acks and nacks to be sent, and queues a Nack for everything that is failing.
func (o *Outbox) inSync() {
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.signal()
	o.synced = true
	for s, f := range o.nacks.failing {
		if f.unreadable && !o.cache.IsUnreadable(f.shard, s.key) {
			o.nacks.remove(s) // it was unreadable on an earlier stream
			continue
		}
		o.tellLocked(s, f)
	}
}

// request queues a request of the current stream, which is sent without a rate limit.
func (o *Outbox) request(r *pb.StreamRequest) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.requests.add(r)
	o.signal()
}

// resync queues a Resync that the server has not asked for.
func (o *Outbox) resync(r *pb.Resync) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.requests.addResync(r)
	o.signal()
}

// resyncsWait reports whether unprompted Resyncs are waiting to be sent.
func (o *Outbox) resyncsWait() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.requests.resyncs) > 0
}

// collect removes from the outbox what may be sent now, and returns it. It includes an Ack only if
// ackNow is set or the interval since the last Ack is over. acked reports whether there is one.
func (o *Outbox) collect(ackNow bool) (out []*pb.StreamRequest, acked bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.requests.full {
		return nil, false, errNotReading
	}
	now := time.Now()
	out = o.requests.collect(now, o.signal)
	out = o.nacks.collect(out, now, o.cache.Cache, o.signal)
	if !o.synced {
		return out, false, nil
	}
	ack := o.acks.collect(now, ackNow, o.cache.Cache)
	if ack == nil {
		return out, false, nil
	}
	return append(out, &pb.StreamRequest{Message: &pb.StreamRequest_Ack{Ack: ack}}), true, nil
}
