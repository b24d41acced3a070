package client

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Cache is what a node holds of the servers' state. A Client writes it. One reader learns what has
// changed from Take and reads the objects with Service. The cache outlives streams.
//
// Invariants, which hold whenever mu is free:
//
//  1. An object leaves the cache only when an Update says so.
//  2. All sequences belong to epoch and, unless resubscribing is set, to subscription. A sequence
//     of 0 means that the shard has no position.
//  3. A shard is in moved if and only if its moved flag is set.
//  4. Objects are immutable, so readers may keep them after mu is released.
type Cache struct {
	// mu guards all fields except applyDelta, collect and dirty.
	mu sync.Mutex
	// epoch is the epoch of the positions. 0 means that there is none yet.
	epoch  uint64
	shards []cacheShard
	seen   model.ResourceVersions
	node   *model.Node
	inSync bool // once true, always true
	// stale reports that restored content counts although no server has confirmed it; see
	// useRestored.
	stale   bool
	partial map[uint32]*model.Update
	// missing is the number of missing slices in all shards, as of the last Update.
	missing int
	// asked holds the server's digest of a shard for which the client last asked for that shard. If
	// that request did not help, repeating it would not help either. askedState is the same for the
	// digest of the whole state.
	asked      map[uint32]model.Digest
	askedState model.Digest
	// subscription is what the positions cover. nil means everything. While resubscribing is true,
	// the server is changing the subscription, so positions mean nothing to another stream.
	subscription  *pb.Subscription
	resubscribing bool
	// restored are the Services with UDP ports that a checkpoint restored, until TakeRestored
	// returns them.
	restored []*model.Service
	// servers are the servers that the last stream named.
	servers []Server
	// from is the version of the server that last brought the cache in sync. Empty means that none
	// has yet.
	from string

	// applyDelta and collect are set before the cache is used and never change afterwards.
	applyDelta func(*model.SliceDelta, *model.Slice) (*model.Slice, error)
	// collect makes apply return an Applied.
	collect bool

	// The fields below are what Take returns next.
	touched   map[model.ServiceKey]struct{}
	moved     []uint32 // the shards whose moved flag is set
	nodeMoved bool
	dirty     chan struct{}
}

// NewCache returns an empty cache.
func NewCache() *Cache {
	return &Cache{
		touched: make(map[model.ServiceKey]struct{}),
		partial: make(map[uint32]*model.Update),
		asked:   make(map[uint32]model.Digest),
		dirty:   make(chan struct{}, 1),

		applyDelta: (*model.SliceDelta).Apply,
	}
}

// fewTouched is the number of Services up to which Take reuses the memory of touched.
const fewTouched = 64

// Changes is what has changed in a cache between two calls of Take.
type Changes struct {
	// Services are the Services that changed, or whose slices changed.
	Services []model.ServiceKey
	// Positions are the sequences of the shards that moved. They belong to Epoch, in which there
	// are Shards shards.
	Positions map[uint32]uint64
	Epoch     uint64
	Shards    uint32
	// Node reports that the Node arrived or changed.
	Node bool
}

// Dirty returns the channel that receives a value when Take has something to return.
func (c *Cache) Dirty() <-chan struct{} { return c.dirty }

// Take returns what has changed since the last Take. ok is false until a server has brought the
// cache in sync or useRestored was called, because the content is incomplete until then. A stale
// cache returns no positions, because the caller would ack them.
func (c *Cache) Take() (changes Changes, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.inSync && !c.stale {
		return Changes{}, false
	}
	changes = Changes{
		Services:  slices.Collect(maps.Keys(c.touched)),
		Positions: make(map[uint32]uint64, len(c.moved)),
		Epoch:     c.epoch,
		Shards:    uint32(len(c.shards)),
		Node:      c.nodeMoved,
	}
	c.moved = slices.DeleteFunc(c.moved, func(shard uint32) bool {
		s := &c.shards[shard]
		if !c.inSync || len(s.missing) > 0 {
			return false
		}
		changes.Positions[shard], s.moved = s.sequence, false
		return true
	})
	if len(c.touched) <= fewTouched {
		clear(c.touched)
	} else { // clearing a large map would cost each later Take as much as this one
		c.touched = make(map[model.ServiceKey]struct{})
	}
	c.nodeMoved = false
	return changes, true
}

// Service returns a Service and its slices, ascending by name. The Service is nil if the cache
// holds only its slices.
func (c *Cache) Service(key model.ServiceKey) (*model.Service, []*model.Slice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.shards) == 0 {
		return nil, nil
	}
	s := c.shardOf(key).services[key]
	if s == nil {
		return nil, nil
	}
	return s.service, slices.Clone(s.slices)
}

// TakeRestored returns, at its first call, the Services with UDP ports that the cache was restored
// with. An earlier agent programmed these Services. If it was killed, its last changes may be
// absent.
func (c *Cache) TakeRestored() []*model.Service {
	c.mu.Lock()
	defer c.mu.Unlock()
	restored := c.restored
	c.restored = nil
	return restored
}

// Slice returns a slice by its key, or nil if the shard does not hold it.
func (c *Cache) Slice(shard uint32, key model.Key) *model.Slice {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return nil
	}
	return c.shards[shard].slices[key]
}

// Services returns the keys of all Services of which the cache holds the Service or a slice.
func (c *Cache) Services() []model.ServiceKey {
	c.mu.Lock()
	defer c.mu.Unlock()
	var keys []model.ServiceKey
	for i := range c.shards {
		keys = slices.AppendSeq(keys, maps.Keys(c.shards[i].services))
	}
	return keys
}

// Node returns the agent's own Node, or nil if none has arrived yet. A Node that the cluster has
// deleted is returned with Deleting set; see setNode.
func (c *Cache) Node() *model.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.node
}

// Digests returns the sequence and the digest of every shard.
func (c *Cache) Digests() (sequences []uint64, digests []model.Digest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.digestsLocked()
}

func (c *Cache) digestsLocked() (sequences []uint64, digests []model.Digest) {
	for i := range c.shards {
		sequences = append(sequences, c.shards[i].sequence)
		digests = append(digests, c.shards[i].currentDigest())
	}
	return sequences, digests
}

func (c *Cache) currentEpoch() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.epoch
}

// shardNumber returns the number of a Service's shard, or 0 while the number of shards is unknown.
func (c *Cache) shardNumber(key model.ServiceKey) uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.shards) == 0 {
		return 0
	}
	return key.Shard(uint32(len(c.shards)))
}

// sequence returns the sequence of a shard, or 0 if there is none.
func (c *Cache) sequence(shard uint32) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return 0
	}
	return c.shards[shard].sequence
}

func (c *Cache) shardOf(key model.ServiceKey) *cacheShard {
	return &c.shards[key.Shard(uint32(len(c.shards)))]
}

func (c *Cache) signalLocked() {
	if !c.inSync && !c.stale {
		return
	}
	select {
	case c.dirty <- struct{}{}:
	default:
	}
}

// hello sets the position and the digest of a Hello. A shard that lacks objects gets the sequence
// 0, which makes the server compare digests.
func (c *Cache) hello(h *pb.Hello) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sequences, digests := c.digestsLocked()
	digest := model.StateDigest(digests)
	h.Sequences, h.Digest = sequences, digest[:]
	for i := range c.shards {
		if len(c.shards[i].missing) > 0 {
			h.Sequences[i] = 0
		}
	}
	h.Epoch, h.ResourceVersions = c.epoch, wire.ResourceVersionsToProto(c.seen)
}

// maxShards bounds the number of shards that a server may have.
const maxShards = 4096

// welcome prepares the cache for a server's epoch and number of shards. The content stays. Slices
// that were missing no longer count as missing: the Hello had no position for their shards, so this
// stream brings whatever differs.
func (c *Cache) welcome(epoch uint64, shards uint32) error {
	if epoch == 0 || shards == 0 || shards&(shards-1) != 0 || shards > maxShards {
		return fmt.Errorf("%w: welcome with epoch %d and %d shards", errProtocol, epoch, shards)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.partial)
	c.missing = 0
	clear(c.asked)
	c.askedState = model.Digest{}
	if uint32(len(c.shards)) != shards {
		c.reshardLocked(shards)
	}
	for i := range c.shards {
		if s := &c.shards[i]; len(s.missing) > 0 {
			s.sequence, s.missing = 0, nil
			if s.moved {
				s.moved = false
				c.moved = slices.DeleteFunc(c.moved, func(shard uint32) bool { return shard == uint32(i) })
			}
		}
	}
	if c.epoch != epoch {
		c.epoch = epoch
		c.forgetPositionsLocked()
	}
	return nil
}

func (c *Cache) forgetPositionsLocked() {
	for i := range c.shards {
		c.shards[i].sequence, c.shards[i].moved = 0, false
	}
	c.moved = c.moved[:0]
}

// subscribe sets the subscription of the next stream. If it differs from the present one, the
// positions become invalid.
func (c *Cache) subscribe(s *pb.Subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resubscribing || !proto.Equal(c.subscription, s) {
		c.forgetPositionsLocked()
	}
	c.subscription, c.resubscribing = s, false
}

// resubscribe notes that the server changes the subscription to s, until the stream is in sync
// again.
func (c *Cache) resubscribe(s *pb.Subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subscription, c.resubscribing = s, true
}

// reshardLocked distributes the content over another number of shards. It drops positions and what
// is known of unreadable objects.
func (c *Cache) reshardLocked(shards uint32) {
	old := c.shards
	c.shards, c.moved = make([]cacheShard, shards), c.moved[:0]
	for i := range c.shards {
		c.shards[i] = newCacheShard()
	}
	for i := range old {
		for key, held := range old[i].services {
			if held.service != nil {
				c.shardOf(key).setService(held.service)
			}
			for _, slice := range held.slices {
				// A slice that moves between Services may for a moment be in two shards.
				c.setSliceLocked(c.shardOf(key), slice)
			}
		}
	}
}

// synced sets the positions of an InSync and makes the content count.
func (c *Cache) synced(m *pb.InSync) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(m.GetSequences()) != len(c.shards) {
		return fmt.Errorf("%w: in_sync for %d shards of %d", errProtocol, len(m.GetSequences()), len(c.shards))
	}
	if len(c.partial) > 0 {
		return fmt.Errorf("%w: in_sync before the last part of an update", errProtocol)
	}
	for i, sequence := range m.GetSequences() {
		c.shards[i].sequence = sequence
		c.movedLocked(uint32(i))
	}
	// The highest versions ever seen would be wrong here. A server that was behind them has already
	// let the client wait, and is still behind. A restored etcd may stay behind for hours, and an
	// untrusted server may have claimed any version.
	c.seen = wire.ResourceVersionsFromProto(m.GetResourceVersions())
	c.inSync, c.stale, c.resubscribing = true, false, false
	c.signalLocked()
	return nil
}

// cameFrom records the version of the server that has just brought the cache in sync. A server of
// another version may have left out fields of objects without changing the objects' versions. If
// the version has changed, each object counts in digests as what the cache holds of it. cameFrom
// returns the shards with objects for which that makes a difference. The caller must ask for the
// differences in these shards.
func (c *Cache) cameFrom(software string) (differ []uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.from
	c.from = software
	// A relay's store ignores an object whose version it already has.
	if before == "" || before == software || c.collect {
		return nil
	}
	for i := range c.shards {
		if c.shards[i].useOwnVersions() {
			differ = append(differ, uint32(i))
		}
	}
	return differ
}

// movedLocked makes the next Take return a shard's position.
func (c *Cache) movedLocked(shard uint32) {
	if s := &c.shards[shard]; !s.moved {
		s.moved = true
		c.moved = append(c.moved, shard)
	}
}

// knownServers returns the servers that the last stream named.
func (c *Cache) knownServers() []Server {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.servers
}

// setServers sets the servers that a stream names, and reports whether they have changed.
func (c *Cache) setServers(servers []Server) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	changed := !slices.Equal(c.servers, servers)
	c.servers = servers
	return changed
}

// bucketDigests returns the digests of a shard's buckets, by number. ok is false if there is no
// such shard.
func (c *Cache) bucketDigests(shard uint32) (digests []model.Digest, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return nil, false
	}
	return c.shards[shard].bucketDigests(), true
}

// isUnreadable reports whether the server has an object in this shard that did not decode.
func (c *Cache) isUnreadable(shard uint32, key model.Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return false
	}
	_, ok := c.shards[shard].unreadable[key]
	return ok
}

// changedUnreadable returns, by shard, the objects that did not decode and have changed since.
func (c *Cache) changedUnreadable() map[uint32][]model.Key {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make(map[uint32][]model.Key)
	for i := range c.shards {
		if len(c.shards[i].changed) > 0 {
			out[uint32(i)] = slices.Collect(maps.Keys(c.shards[i].changed))
		}
	}
	return out
}

// differs reports whether a heartbeat has the cache's position but another digest. It reports each
// digest once per stream, and only if allow returns true.
func (c *Cache) differs(m *pb.Heartbeat, allow func() bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	digests, err := model.SplitDigests(m.GetDigest())
	if err != nil || len(digests) != 1 {
		return false
	}
	var sum uint64
	for i := range c.shards {
		sum += c.shards[i].sequence
	}
	if sum != m.GetSequenceSum() || digests[0] == c.askedState {
		return false
	}
	if _, own := c.digestsLocked(); model.StateDigest(own) == digests[0] || !allow() {
		return false
	}
	c.askedState = digests[0]
	return true
}

// diverged returns the shards whose digest differs from the server's at the same sequence. It
// returns a shard once per digest and stream, and only while allow returns true.
func (c *Cache) diverged(m *pb.Digests, allow func() bool) []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	digests, err := model.SplitDigests(m.GetDigests())
	if err != nil || len(m.GetSequences()) != len(c.shards) || len(digests) != len(c.shards) {
		return nil
	}
	_, own := c.digestsLocked()
	var out []uint32
	for i := range c.shards {
		digest := digests[i]
		if c.shards[i].sequence != m.GetSequences()[i] {
			continue
		}
		if own[i] == digest {
			delete(c.asked, uint32(i)) // if the shard diverges again, asking may help again
			continue
		}
		if asked, ok := c.asked[uint32(i)]; (!ok || asked != digest) && allow() {
			c.asked[uint32(i)] = digest
			out = append(out, uint32(i))
		}
	}
	return out
}

// setNode sets the Node. It reports whether n is nil although the cache holds a Node.
//
// A deleted Node stays in the cache, and in the checkpoint, with Deleting set. The machine is still
// running, so the Node's zone, pod CIDRs and the cluster's ranges still hold. They hold until
// another Node replaces them. Deleting makes load balancers leave the node.
//
// A Node that is registered anew keeps the InternalIPs and pod CIDRs of the previous one until it
// has its own. That is done here, so that the view needs no memory and the checkpoint includes the
// result.
func (c *Cache) setNode(n *model.Node) (gone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.node == nil:
	case n == nil:
		deleted := *c.node
		deleted.Deleting = true
		n, gone = &deleted, true
	default:
		n = completed(n, c.node)
	}
	if !c.node.Equal(n) {
		c.node, c.nodeMoved = n, true
		c.signalLocked()
	}
	return gone
}

// completed returns n with the InternalIPs and pod CIDRs of before where n has none. Kubernetes
// never takes these away from a Node. A Node without them was deleted and registered again, and has
// not received them yet.
func completed(n, before *model.Node) *model.Node {
	out := *n
	if len(out.InternalIPs) == 0 {
		out.InternalIPs = before.InternalIPs
	}
	if len(out.PodCIDRs) == 0 {
		out.PodCIDRs = before.PodCIDRs
	}
	return &out
}
