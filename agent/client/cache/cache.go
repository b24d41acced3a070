// Package cache holds a node's copy of the servers' state. It is pure: Updates go in, and the
// Services that have changed come out. It has no goroutine, no I/O and no clock.
//
// # Guarantees
//
//   - The cache changes only by whole Updates and loses an object only when an Update says so.
//   - An Update that does not fit is refused as a whole.
//   - The cache never guesses the result of a delta that does not fit. It keeps the slice as it is,
//     reports it, and has no position to acknowledge in this shard until the slice has arrived.
//   - An object that does not decode leaves the cache as it was. It counts in digests as the server
//     has it, so it hides no other difference. The same holds for an object with fields that this
//     software does not know.
//   - Apart from these, and from one stream to the next, an object counts in digests with the hash
//     of its own content. No server can make other content pass for it.
//
// # Roles
//
// One Writer changes a Cache, as servers say. One reader gets from Take what has changed, and reads
// it with Service and Node. Anyone may ask the other questions. A checkpoint uses Contents, Restore
// and UseRestored.
package cache

import (
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/slicecast/slicecast/internal/model"
)

// ErrProtocol arises when a server breaks the protocol: what it sent does not fit the cache, or
// exceeds a bound. The cache is as it was before. The client leaves the server for another one.
var ErrProtocol = errors.New("server broke the protocol")

// Server is a server that a client can connect to.
type Server struct {
	// Address is a gRPC target: host:port or unix:///path.
	Address string
	// Name is the name that the server's certificate must have, unless one is configured for all
	// servers. Empty means that the credentials' name applies, or else the host of Address.
	Name string
}

// Cache is what a node holds of the servers' state. It outlives streams.
//
// Invariants, which hold whenever mu is free:
//
//  1. An object leaves the cache only when an Update says so.
//  2. All sequences belong to epoch. A sequence of 0 means that the shard has no position.
//  3. A shard is in pending.shards if and only if its moved flag is set.
//  4. Objects are immutable, so readers may keep them after mu is released.
//  5. missing and unreadable are the sums of what the shards have of either.
//  6. Take returns nothing unless the content counts; see countsLocked.
type Cache struct {
	// mu guards all fields except dirty.
	mu sync.Mutex
	// epoch is the epoch of the positions. 0 means that there is none yet.
	epoch  uint64
	shards []cacheShard
	seen   model.ResourceVersions
	node   *model.Node
	inSync bool // once true, always true
	// stale reports that restored content counts although no server has confirmed it; see
	// UseRestored.
	stale bool
	// foreign reports that the restored content is of another cluster than a server that has answered.
	// It may be set after stale.
	foreign bool
	// missing and unreadable are the numbers of missing slices and of unreadable objects in all
	// shards.
	missing, unreadable int
	// restored are the Services with UDP ports that a checkpoint restored, until TakeRestored
	// returns them.
	restored []*model.Service
	// servers are the servers that the last stream named.
	servers []Server
	pending pending
	// counts are the numbers of changes since New.
	counts Counts
	dirty  chan struct{}
}

// pending is what Take returns next.
type pending struct {
	services map[model.ServiceKey]struct{}
	shards   []uint32 // the shards whose moved flag is set
	node     bool
	triggers []Trigger
	counts   Counts // of what Take has not returned yet
}

// Counts are numbers of changes that Updates brought: of Services, and of slices. Two changes of
// one object count as two.
type Counts struct{ Services, Slices uint64 }

// Trigger is the last-change-trigger-time of a slice, which came with a change of the slice.
type Trigger struct {
	Service model.ServiceKey
	Family  model.Family
	// TimeMS is the time in milliseconds since 1970, by the clock of the cluster's controllers.
	TimeMS int64
}

// MaxTriggers bounds the triggers that wait to be returned. Further ones are left out.
const MaxTriggers = 1 << 16

// New returns an empty cache.
func New() *Cache {
	return &Cache{pending: pending{services: make(map[model.ServiceKey]struct{})}, dirty: make(chan struct{}, 1)}
}

// fewServices is the number of Services up to which Take reuses the memory of pending.services.
const fewServices = 64

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
	// Stale reports that no server has confirmed the content; see UseRestored.
	Stale bool
	// Triggers are the last-change-trigger-times that came with the changes of slices.
	Triggers []Trigger
}

// Counts returns the numbers of changes since New, and of those that Take has not returned yet.
func (c *Cache) Counts() (all, pending Counts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts, c.pending.counts
}

// Dirty returns the channel that receives a value when Take has something to return.
func (c *Cache) Dirty() <-chan struct{} { return c.dirty }

// Take returns what has changed since the last Take. ok is false until a server has brought the
// cache in sync or UseRestored was called, because the content is incomplete until then. Once a
// server of another cluster has answered, Take returns no changes until that cluster's state is
// complete, because the two must not be mixed. A stale cache returns no positions, because the
// caller would ack them.
func (c *Cache) Take() (changes Changes, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.countsLocked() {
		return Changes{Epoch: c.epoch, Shards: uint32(len(c.shards)), Stale: c.stale}, c.stale
	}
	changes = Changes{
		Services:  slices.Collect(maps.Keys(c.pending.services)),
		Positions: make(map[uint32]uint64, len(c.pending.shards)),
		Epoch:     c.epoch,
		Shards:    uint32(len(c.shards)),
		Node:      c.pending.node,
		Stale:     c.stale,
		Triggers:  c.pending.triggers,
	}
	c.pending.shards = slices.DeleteFunc(c.pending.shards, func(shard uint32) bool {
		s := &c.shards[shard]
		if !c.inSync || len(s.missing) > 0 {
			return false
		}
		changes.Positions[shard], s.moved = s.sequence, false
		return true
	})
	if len(c.pending.services) <= fewServices {
		clear(c.pending.services)
	} else { // clearing a large map would cost each later Take as much as this one
		c.pending.services = make(map[model.ServiceKey]struct{})
	}
	c.pending.node, c.pending.triggers, c.pending.counts = false, nil, Counts{}
	return changes, true
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

// Slice returns a slice by its key, or nil if the shard does not hold it.
func (c *Cache) Slice(shard uint32, key model.Key) *model.Slice {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return nil
	}
	return c.shards[shard].slices[key]
}

// Node returns the agent's own Node, or nil if none has arrived yet. A Node that the cluster has
// deleted is returned with Deleting set; see Writer.SetNode.
func (c *Cache) Node() *model.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.node
}

// Servers returns the servers that the last stream named.
func (c *Cache) Servers() []Server {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.servers
}

// ShardOf returns the number of a Service's shard, or 0 while the number of shards is unknown.
func (c *Cache) ShardOf(key model.ServiceKey) uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.shards) == 0 {
		return 0
	}
	return key.Shard(uint32(len(c.shards)))
}

// IsUnreadable reports whether the server has an object in this shard that did not decode.
func (c *Cache) IsUnreadable(shard uint32, key model.Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shard >= uint32(len(c.shards)) {
		return false
	}
	_, ok := c.shards[shard].unreadable[key]
	return ok
}

// ChangedUnreadable returns, by shard, the objects that did not decode and have changed since.
func (c *Cache) ChangedUnreadable() map[uint32][]model.Key {
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

func (c *Cache) shardOf(key model.ServiceKey) *cacheShard {
	return &c.shards[key.Shard(uint32(len(c.shards)))]
}

// clusterLocked returns what identifies the cluster of the content; see model.ClusterService.
func (c *Cache) clusterLocked() int64 {
	if len(c.shards) == 0 {
		return 0
	}
	if held := c.shardOf(model.ClusterService).services[model.ClusterService]; held != nil && held.service != nil {
		return held.service.CreationTimeSeconds
	}
	return 0
}

// countsLocked reports whether the content is what the node should follow.
func (c *Cache) countsLocked() bool { return c.inSync || c.stale && !c.foreign }

func (c *Cache) signalLocked() {
	if !c.countsLocked() {
		return
	}
	select {
	case c.dirty <- struct{}{}:
	default:
	}
}
