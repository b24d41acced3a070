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

// Cache is what a node holds of the servers' state. A Client writes it; one reader takes what has changed with Take and
// reads the objects with Service. It outlives streams: nothing leaves it but by an Update.
type Cache struct {
	mu sync.Mutex
	// epoch that the positions belong to; 0: none.
	epoch   uint64
	shards  []cacheShard
	seen    model.ResourceVersions
	node    *model.Node
	inSync  bool // once true, always true
	stale   bool // what a checkpoint gave counts, as no server has brought the cache in sync; see useRestored
	partial map[uint32]*model.Update
	// missing is the number of slices that are missing in all shards, as of the last Update.
	missing int
	// asked holds, per shard, the server's digest because of which the shard was last asked for again. If that did not help,
	// asking once more would not either. askedState is the same for the digest of all shards.
	asked      map[uint32]model.Digest
	askedState model.Digest
	// subscription is what the positions are of; nil: of everything. While resubscribing they are of nothing, as the server
	// changes it.
	subscription  *pb.Subscription
	resubscribing bool
	// restored are the Services with UDP ports that a checkpoint gave, until TakeRestored.
	restored []*model.Service
	// servers are those that the last stream told of.
	servers []Server
	// from is the software of the server that the content came from last; "": none has brought the cache in sync yet.
	from string

	// applyDelta and collect are set before the cache is used.
	applyDelta func(*model.SliceDelta, *model.Slice) (*model.Slice, error)
	// collect: apply tells what it did.
	collect bool

	// What Take will give.
	touched   map[model.ServiceKey]struct{}
	moved     []uint32 // the shards that are marked so
	nodeMoved bool
	dirty     chan struct{}
}

// NewCache makes an empty cache.
func NewCache() *Cache {
	return &Cache{
		touched: make(map[model.ServiceKey]struct{}),
		partial: make(map[uint32]*model.Update),
		asked:   make(map[uint32]model.Digest),
		dirty:   make(chan struct{}, 1),

		applyDelta: (*model.SliceDelta).Apply,
	}
}

// fewTouched is up to how many Services a Take keeps the memory of.
const fewTouched = 64

// Changes is what has changed in a cache between two Takes.
type Changes struct {
	// Services that were touched, themselves or by their slices.
	Services []model.ServiceKey
	// Positions of the shards that moved, in the epoch Epoch, which has so many Shards.
	Positions map[uint32]uint64
	Epoch     uint64
	Shards    uint32
	// Node is set if the Node came or changed.
	Node bool
}

// Dirty gets a value when Take has something to give.
func (c *Cache) Dirty() <-chan struct{} { return c.dirty }

// Take gives what has changed since the last Take; ok is false as long as the cache has never been in sync, because what
// it holds until then is a part. A cache that is stale gives no positions: they are what a server is told.
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
	} else { // clearing it would cost each later Take what the largest one took
		c.touched = make(map[model.ServiceKey]struct{})
	}
	c.nodeMoved = false
	return changes, true
}

// Service gives a Service and its slices, ascending by name; nil, and none, where they are missing.
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

// TakeRestored returns, once, the Services with UDP ports that the cache was restored with: those that an
// earlier agent has programmed, but for what came in its last moments if it was killed.
func (c *Cache) TakeRestored() []*model.Service {
	c.mu.Lock()
	defer c.mu.Unlock()
	restored := c.restored
	c.restored = nil
	return restored
}

// Slice gives a slice by its key; nil: the shard has none.
func (c *Cache) Slice(shard uint32, key model.Key) *model.Slice {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return nil
	}
	return c.shards[shard].slices[key]
}

// Services names all Services that the cache holds something of.
func (c *Cache) Services() []model.ServiceKey {
	c.mu.Lock()
	defer c.mu.Unlock()
	var keys []model.ServiceKey
	for i := range c.shards {
		keys = slices.AppendSeq(keys, maps.Keys(c.shards[i].services))
	}
	return keys
}

// Node returns what is known of the agent's own Node, see setNode; nil means that none has come yet. One
// that the cluster has deleted is Deleting.
func (c *Cache) Node() *model.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.node
}

// Digests returns position and digest of every shard.
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

// shardNumber tells which shard a Service is in; 0 as long as no server has told how many there are.
func (c *Cache) shardNumber(key model.ServiceKey) uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.shards) == 0 {
		return 0
	}
	return key.Shard(uint32(len(c.shards)))
}

// sequence gives the position in a shard; 0 if there is none.
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

// hello fills in what the cache holds. A shard that lacks something has no position, so that digests decide.
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

// welcome makes the cache ready for the server's epoch and number of shards. What it holds stays. What was missing in the stream
// before is not any more: its shards had no position in the Hello, so that this stream brings what differs.
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

// subscribe tells what the next stream is about. Positions in streams about something else mean nothing there.
func (c *Cache) subscribe(s *pb.Subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resubscribing || !proto.Equal(c.subscription, s) {
		c.forgetPositionsLocked()
	}
	c.subscription, c.resubscribing = s, false
}

// resubscribe tells what the stream will be about when it is in sync again.
func (c *Cache) resubscribe(s *pb.Subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subscription, c.resubscribing = s, true
}

// reshardLocked distributes what the cache holds over another number of shards, without positions and what is unreadable.
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
				// One that is just being handed from one Service to another may be here twice.
				c.setSliceLocked(c.shardOf(key), slice)
			}
		}
	}
}

// synced takes the positions of an InSync.
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
	// Not the highest ones ever seen: a server that is behind has let the client wait, and was still behind. A restored etcd may
	// stay so for hours, and a server that is not to be trusted may have said anything.
	c.seen = wire.ResourceVersionsFromProto(m.GetResourceVersions())
	c.inSync, c.stale, c.resubscribing = true, false, false
	c.signalLocked()
	return nil
}

// cameFrom tells what software the server is of that has just brought the cache in sync. Where it is other software than the one before, that
// may have left out fields of objects that this one has, and kept their versions: these objects then count as what is held of them. It gives
// their shards, of which what differs is to be asked for.
func (c *Cache) cameFrom(software string) (differ []uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.from
	c.from = software
	if before == "" || before == software || c.collect { // a relay's store keeps what it has of a version
		return nil
	}
	for i := range c.shards {
		if c.shards[i].useOwnVersions() {
			differ = append(differ, uint32(i))
		}
	}
	return differ
}

// movedLocked has Take give a shard's position.
func (c *Cache) movedLocked(shard uint32) {
	if s := &c.shards[shard]; !s.moved {
		s.moved = true
		c.moved = append(c.moved, shard)
	}
}

// knownServers gives the servers that streams have told of.
func (c *Cache) knownServers() []Server {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.servers
}

// setServers takes the servers that a stream tells of, and tells whether they are others than before.
func (c *Cache) setServers(servers []Server) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	changed := !slices.Equal(c.servers, servers)
	c.servers = servers
	return changed
}

// bucketDigests returns the digests of a shard's buckets, by number. ok is false if there is no such shard.
func (c *Cache) bucketDigests(shard uint32) (digests []model.Digest, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return nil, false
	}
	return c.shards[shard].bucketDigests(), true
}

// isUnreadable tells whether the shard holds an object that did not decode.
func (c *Cache) isUnreadable(shard uint32, key model.Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return false
	}
	_, ok := c.shards[shard].unreadable[key]
	return ok
}

// changedUnreadable gives, by shard, objects that did not decode and that have changed since.
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

// differs compares a heartbeat with the cache and reports whether the cache, at the same position, holds something else: once for
// a digest and stream, and only if allow lets it.
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

// diverged compares the server's digests with the cache and returns the shards that hold something else at the same position, each
// once for a digest and stream, and only as long as allow lets it.
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
			delete(c.asked, uint32(i)) // asking helped, and would again
			continue
		}
		if asked, ok := c.asked[uint32(i)]; (!ok || asked != digest) && allow() {
			c.asked[uint32(i)] = digest
			out = append(out, uint32(i))
		}
	}
	return out
}

// setNode sets the Node, and reports whether nil was given in place of one that the cache holds. A
// deleted Node stays, also over a restart, as one that is being deleted: the machine goes on, and so
// does what the Node said of its zone, its pods and the cluster's ranges, until a Node says otherwise.
// But load balancers are to leave it.
//
// A Node that is registered anew keeps the InternalIPs and pod CIDRs of the one before until it has its
// own. The view needs no memory of that, and a checkpoint has it.
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

// completed returns a Node with what it lacks and the one before had. A Node without InternalIPs or
// without pod CIDRs has not been given them yet, as neither is ever taken away: it has been deleted and
// registered again.
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
