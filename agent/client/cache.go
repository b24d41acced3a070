package client

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

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
	// asked holds, per shard, the server's digest because of which the shard was last asked for again. If that did not help,
	// asking once more would not either: the shard holds an object that does not decode.
	asked map[uint32]uint64
	// applyDelta is set before the cache is used.
	applyDelta func(*model.SliceDelta, *model.Slice) (*model.Slice, error)

	// What Take will give.
	touched   map[model.ServiceKey]struct{}
	moved     map[uint32]struct{}
	nodeMoved bool
	dirty     chan struct{}
}

// cacheShard is one shard's part. Objects are shared with whoever reads them; they are immutable.
type cacheShard struct {
	sequence uint64
	digest   uint64
	services map[model.ServiceKey]*cachedService
	slices   map[model.Key]*model.Slice
	// missing are slices that were asked for again, as a delta did not fit what the cache holds of them. Until they have
	// come, the shard is behind its sequence.
	missing map[model.Key]struct{}
}

// cachedService is a Service and its slices; one of both may be missing.
type cachedService struct {
	service *model.Service
	slices  []*model.Slice // ascending by name
}

// maxShards is how many shards a state may have.
const maxShards = 4096

// NewCache makes an empty cache.
func NewCache() *Cache {
	return &Cache{
		touched: make(map[model.ServiceKey]struct{}),
		moved:   make(map[uint32]struct{}),
		partial: make(map[uint32]*model.Update),
		asked:   make(map[uint32]uint64),
		dirty:   make(chan struct{}, 1),

		applyDelta: (*model.SliceDelta).Apply,
	}
}

// Changes is what has changed in a cache between two Takes.
type Changes struct {
	// Services that were touched, themselves or by their slices.
	Services []model.ServiceKey
	// Positions of the shards that moved, in the epoch Epoch.
	Positions map[uint32]uint64
	Epoch     uint64
	// Node is set if the Node came, changed or went.
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
		Node:      c.nodeMoved,
	}
	for shard := range c.moved {
		if c.inSync && len(c.shards[shard].missing) == 0 {
			changes.Positions[shard] = c.shards[shard].sequence
			delete(c.moved, shard)
		}
	}
	// Not cleared: that would cost each later Take what the largest one took.
	c.touched = make(map[model.ServiceKey]struct{})
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

// Node gives the agent's own Node; nil: the cluster has none, or none has come yet.
func (c *Cache) Node() *model.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.node
}

// Digests gives position and digest of every shard.
func (c *Cache) Digests() (sequences, digests []uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.shards {
		sequences = append(sequences, c.shards[i].sequence)
		digests = append(digests, c.shards[i].digest)
	}
	return sequences, digests
}

func (c *Cache) currentEpoch() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.epoch
}

// position gives the shard of a Service and the cache's sequence in it; the shard count must be known.
func (c *Cache) position(key model.ServiceKey) (shard uint32, sequence uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	shard = key.Shard(uint32(len(c.shards)))
	return shard, c.shards[shard].sequence
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

// hello fills in what the cache holds. A shard that lacks something has no position, so that its digest decides.
func (c *Cache) hello(h *pb.Hello) {
	h.Sequences, h.Digests = c.Digests()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.shards {
		if len(c.shards[i].missing) > 0 {
			h.Sequences[i] = 0
		}
	}
	h.Epoch, h.ResourceVersions = c.epoch, wire.ResourceVersionsToProto(c.seen)
}

// welcome makes the cache ready for the server's epoch and number of shards. What it holds stays.
func (c *Cache) welcome(epoch uint64, shards uint32) error {
	if epoch == 0 || shards == 0 || shards&(shards-1) != 0 || shards > maxShards {
		return fmt.Errorf("%w: welcome with epoch %d and %d shards", errProtocol, epoch, shards)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.partial)
	clear(c.asked)
	if uint32(len(c.shards)) != shards {
		c.reshardLocked(shards)
	}
	if c.epoch != epoch {
		c.epoch = epoch
		for i := range c.shards {
			c.shards[i].sequence = 0
		}
		clear(c.moved)
	}
	return nil
}

// reshardLocked distributes what the cache holds over another number of shards, without positions.
func (c *Cache) reshardLocked(shards uint32) {
	old := c.shards
	c.shards = make([]cacheShard, shards)
	for i := range c.shards {
		c.shards[i].services = make(map[model.ServiceKey]*cachedService)
		c.shards[i].slices = make(map[model.Key]*model.Slice)
		c.shards[i].missing = make(map[model.Key]struct{})
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
	for i, sequence := range m.GetSequences() {
		c.shards[i].sequence = sequence
		c.moved[uint32(i)] = struct{}{}
	}
	c.seen = c.seen.Max(wire.ResourceVersionsFromProto(m.GetResourceVersions()))
	c.inSync, c.stale = true, false
	c.signalLocked()
	return nil
}

// diverged compares a heartbeat with the cache and gives the shards that hold something else at the same position, each
// once for a digest and stream.
func (c *Cache) diverged(m *pb.Heartbeat) []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(m.GetSequences()) != len(c.shards) || len(m.GetDigests()) != len(c.shards) {
		return nil
	}
	var out []uint32
	for i := range c.shards {
		digest := m.GetDigests()[i]
		if c.shards[i].sequence != m.GetSequences()[i] || c.shards[i].digest == digest {
			continue
		}
		if asked, ok := c.asked[uint32(i)]; !ok || asked != digest {
			c.asked[uint32(i)] = digest
			out = append(out, uint32(i))
		}
	}
	return out
}

// setNode takes the Node.
func (c *Cache) setNode(n *model.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.node.Equal(n) {
		c.node, c.nodeMoved = n, true
		c.signalLocked()
	}
}

// apply applies an Update, all of it under one lock. missing are the slices whose delta does not fit what the cache
// holds: they stay as they are, and must be asked for again. more tells that further parts of the same Update follow.
func (c *Cache) apply(u *model.Update, more bool) (missing []model.Key, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if u.Shard >= uint32(len(c.shards)) {
		return nil, fmt.Errorf("%w: update of shard %d of %d", errProtocol, u.Shard, len(c.shards))
	}
	if part := c.partial[u.Shard]; part != nil {
		if part.From != u.From || part.To != u.To || part.Full != u.Full {
			return nil, fmt.Errorf("%w: parts of different updates of shard %d", errProtocol, u.Shard)
		}
		u = join(part, u)
	}
	if more {
		c.partial[u.Shard] = u
		return nil, nil
	}
	delete(c.partial, u.Shard)

	s := &c.shards[u.Shard]
	if !u.Full && (s.sequence < u.From || s.sequence > u.To) {
		return nil, fmt.Errorf("%w: update of shard %d from %d to %d, but the position is %d",
			errProtocol, u.Shard, u.From, u.To, s.sequence)
	}
	for _, service := range u.Services {
		if err := c.inShardLocked(u.Shard, service); err != nil {
			return nil, err
		}
	}
	for _, slice := range u.Slices {
		if err := c.inShardLocked(u.Shard, slice); err != nil {
			return nil, err
		}
	}
	if u.Full {
		c.removeOthersLocked(s, u)
		clear(s.missing)
	}
	for _, key := range u.Removed {
		c.removeLocked(s, key)
	}
	for _, service := range u.Services {
		s.setService(service)
		c.touched[service.ServiceKey()] = struct{}{}
	}
	for _, slice := range u.Slices {
		c.setSliceLocked(s, slice)
	}
	for _, d := range u.Deltas {
		have := s.slices[d.Key()]
		if have != nil && have.ContentVersion() == d.Version {
			continue
		}
		if have == nil {
			missing = append(missing, d.Key())
			continue
		}
		slice, err := c.applyDelta(d, have)
		if err != nil {
			if !errors.Is(err, model.ErrBase) {
				return nil, err
			}
			missing = append(missing, d.Key())
			continue
		}
		c.setSliceLocked(s, slice)
	}
	for _, key := range missing {
		s.missing[key] = struct{}{}
	}
	s.sequence = u.To
	c.moved[u.Shard] = struct{}{}
	c.seen = c.seen.Max(u.ResourceVersions)
	c.signalLocked()
	return missing, nil
}

// inShardLocked checks that an object is where its Service's hash says; elsewhere it could never be removed.
func (c *Cache) inShardLocked(shard uint32, o model.Object) error {
	if want := o.ServiceKey().Shard(uint32(len(c.shards))); want != shard {
		return fmt.Errorf("%w: %v came in shard %d and belongs to shard %d", errProtocol, o.Key(), shard, want)
	}
	return nil
}

func join(a, b *model.Update) *model.Update {
	j := *b
	j.Services = append(slices.Clip(a.Services), b.Services...)
	j.Slices = append(slices.Clip(a.Slices), b.Slices...)
	j.Deltas = append(slices.Clip(a.Deltas), b.Deltas...)
	j.Removed = append(slices.Clip(a.Removed), b.Removed...)
	j.Unreadable = append(slices.Clip(a.Unreadable), b.Unreadable...)
	return &j
}

// removeOthersLocked removes from a shard what a full update does not name.
func (c *Cache) removeOthersLocked(s *cacheShard, u *model.Update) {
	keep := make(map[model.Key]struct{}, u.Len()+len(u.Unreadable))
	for _, o := range u.Services {
		keep[o.Key()] = struct{}{}
	}
	for _, o := range u.Slices {
		keep[o.Key()] = struct{}{}
	}
	for _, key := range u.Unreadable {
		keep[key] = struct{}{}
	}
	var gone []model.Key
	for _, held := range s.services {
		if held.service != nil {
			gone = append(gone, held.service.Key())
		}
		for _, slice := range held.slices {
			gone = append(gone, slice.Key())
		}
	}
	for _, key := range gone {
		if _, ok := keep[key]; !ok {
			c.removeLocked(s, key)
		}
	}
}

func (c *Cache) removeLocked(s *cacheShard, key model.Key) {
	delete(s.missing, key)
	if key.Kind == model.KindSlice {
		if slice := s.slices[key]; slice != nil {
			c.touched[slice.ServiceKey()] = struct{}{}
			s.dropSlice(slice)
		}
		return
	}
	service := model.ServiceKey{Namespace: key.Namespace, Name: key.Name}
	if held := s.services[service]; held != nil && held.service != nil {
		c.touched[service] = struct{}{}
		s.digest -= uint64(held.service.ContentVersion())
		held.service = nil
		s.dropEmpty(service)
	}
}

// setSliceLocked adds or changes a slice. One that comes with another Service than before touches both.
func (c *Cache) setSliceLocked(s *cacheShard, slice *model.Slice) {
	if old := s.slices[slice.Key()]; old != nil && old.Service != slice.Service {
		c.touched[old.ServiceKey()] = struct{}{}
	}
	s.setSlice(slice)
	c.touched[slice.ServiceKey()] = struct{}{}
}

func (s *cacheShard) held(key model.ServiceKey) *cachedService {
	h := s.services[key]
	if h == nil {
		h = &cachedService{}
		s.services[key] = h
	}
	return h
}

func (s *cacheShard) dropEmpty(key model.ServiceKey) {
	if h := s.services[key]; h != nil && h.service == nil && len(h.slices) == 0 {
		delete(s.services, key)
	}
}

func (s *cacheShard) setService(service *model.Service) {
	h := s.held(service.ServiceKey())
	if h.service != nil {
		s.digest -= uint64(h.service.ContentVersion())
	}
	h.service = service
	s.digest += uint64(service.ContentVersion())
}

func (s *cacheShard) setSlice(slice *model.Slice) {
	delete(s.missing, slice.Key())
	if old := s.slices[slice.Key()]; old != nil {
		if old.Service != slice.Service {
			s.dropSlice(old)
		} else {
			s.digest -= uint64(old.ContentVersion())
		}
	}
	s.slices[slice.Key()] = slice
	s.digest += uint64(slice.ContentVersion())
	h := s.held(slice.ServiceKey())
	at, found := slices.BinarySearchFunc(h.slices, slice.Name, byName)
	if found {
		h.slices[at] = slice
	} else {
		h.slices = slices.Insert(h.slices, at, slice)
	}
}

func (s *cacheShard) dropSlice(slice *model.Slice) {
	delete(s.slices, slice.Key())
	s.digest -= uint64(slice.ContentVersion())
	h := s.held(slice.ServiceKey())
	if at, found := slices.BinarySearchFunc(h.slices, slice.Name, byName); found {
		h.slices = slices.Delete(h.slices, at, at+1)
	}
	s.dropEmpty(slice.ServiceKey())
}

func byName(s *model.Slice, name string) int {
	switch {
	case s.Name < name:
		return -1
	case s.Name > name:
		return 1
	}
	return 0
}
