// Package store holds the state that a server distributes. The state is sharded, versioned and
// content-addressed.
//
// Sources write into a Store, which is a source.Sink. What they write is pending until Publish
// makes it visible. The interval between calls of Publish decides how changes coalesce: all changes
// since the last call become one Update per shard, and changes that cancel each other out become
// nothing. Urgent signals that Publish should not wait.
//
// # Guarantees
//
//  1. A writer never waits for a reader. Readers follow immutable Snapshots at their own pace.
//  2. Each Update of a shard raises the shard's sequence by one and leads from the sequence before
//     to the new one.
//  3. The changes since a sequence come from the objects themselves, ordered by their last change,
//     and from a bounded number of tombstones. A slow reader costs no memory. For a sequence older
//     than the tombstones the answer is the whole shard.
//  4. The same objects have the same digests, whatever their history.
//  5. Nothing is published before the source has synced. A source that is still listing therefore
//     removes nothing.
package store

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/slicecast/slicecast/internal/model"
)

// Defaults of Options.
const (
	// DefaultShards is the default of Options.Shards. In a large cluster (10,000 Services) a shard
	// has some hundred objects, and 64 positions and digests take less than 2 KiB in a Hello.
	DefaultShards = 64
	// DefaultTombstones is the default of Options.Tombstones: enough for every object of a large
	// shard to be replaced while a client is away.
	DefaultTombstones = 1024
)

// Options configure a Store.
type Options struct {
	// Shards is the number of shards, a power of two up to 4096; 0 means DefaultShards.
	Shards uint32
	// Tombstones is the number of removals that each shard remembers; 0 means DefaultTombstones.
	Tombstones int
	// Relayed means that the source is another server, which sends changes shard by shard. Resource
	// versions then arrive out of order, so only Progress says up to which version nothing is
	// missing.
	Relayed bool
}

// Store is the state. Its zero value is not usable; use New.
//
// Invariants:
//
//  1. Locks are acquired in this order: publishing, mu, nodesMu.
//  2. held names exactly the Services and Slices that exist once pending is published, each with
//     the Service whose shard it is in.
//  3. addresses is what countAddressesLocked counts for the Nodes in nodes.
type Store struct {
	epoch   uint64
	shards  []*shard
	relayed bool

	// mu guards pending, held, pendingNodes and progress. It is held for map operations only.
	mu sync.Mutex
	// pending holds, for each shard, the objects written since the last Publish; a nil object means
	// that it was removed.
	pending      []map[model.Key]model.Object
	held         map[model.Key]model.ServiceKey
	pendingNodes map[string]struct{}
	// progress is how far the source has come; published is its value at the last Publish.
	progress   progress
	published  atomic.Pointer[progress]
	synced     chan struct{} // closed by the first call of Synced
	first      chan struct{} // closed at the end of the first Publish
	dirty      chan struct{}
	urgent     chan struct{}
	publishing sync.Mutex   // lets one Publish run at a time, so that snapshots have one writer
	nodesMu    sync.RWMutex // guards nodes and addresses
	nodes      map[string]*model.Node
	// addresses counts, for each address, the Nodes that have it among their first maxAddresses.
	addresses map[netip.Addr]int
}

// maxAddresses is how many addresses of a Node count. A node with both IP families has two. The
// number is bounded because a node writes its own status.
const maxAddresses = 8

// progress is how far a source has come. It goes back if the source does, for example after a
// restore of etcd.
type progress struct {
	// seen holds the versions of the objects that were received. reached holds the versions up to
	// which nothing is missing; on a quiet cluster they are higher, because changes to other kinds
	// of objects raise them, too.
	seen, reached model.ResourceVersions
}

// New returns an empty store with a random epoch.
func New(o Options) (*Store, error) {
	if o.Shards == 0 {
		o.Shards = DefaultShards
	}
	if o.Tombstones == 0 {
		o.Tombstones = DefaultTombstones
	}
	if bits.OnesCount32(o.Shards) != 1 || o.Shards > 4096 {
		return nil, fmt.Errorf("number of shards is %d: use a power of two, at most 4096", o.Shards)
	}
	s := &Store{
		epoch:        newEpoch(),
		relayed:      o.Relayed,
		pending:      make([]map[model.Key]model.Object, o.Shards),
		held:         make(map[model.Key]model.ServiceKey),
		pendingNodes: make(map[string]struct{}),
		nodes:        make(map[string]*model.Node),
		addresses:    make(map[netip.Addr]int),
		synced:       make(chan struct{}),
		first:        make(chan struct{}),
		dirty:        make(chan struct{}, 1),
		urgent:       make(chan struct{}, 1),
	}
	s.published.Store(&progress{})
	for i := range o.Shards {
		s.shards = append(s.shards, newShard(i, o.Tombstones))
	}
	return s, nil
}

func newEpoch() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return max(1, binary.LittleEndian.Uint64(b[:]))
}

// Epoch returns the random number of this Store. Sequences of another epoch have no meaning in it.
// It is never 0.
func (s *Store) Epoch() uint64 { return s.epoch }

// Shards returns the number of shards.
func (s *Store) Shards() uint32 { return uint32(len(s.shards)) }

// Snapshot returns the published state of a shard.
func (s *Store) Snapshot(shard uint32) *Snapshot { return s.shards[shard].snapshot.Load() }

// Node returns the Node with that name, or nil if there is none.
func (s *Store) Node(name string) *model.Node {
	s.nodesMu.RLock()
	defer s.nodesMu.RUnlock()
	return s.nodes[name]
}

// Cluster returns what identifies the cluster of the published state: the creation time of
// model.ClusterService in seconds since 1970. It is 0 if the state has no such Service, or the
// source does not know its creation time.
func (s *Store) Cluster() int64 {
	key := model.Key{Kind: model.KindService, Namespace: model.ClusterService.Namespace, Name: model.ClusterService.Name}
	if o, ok := s.Snapshot(model.ClusterService.Shard(s.Shards())).Get(key).(*model.Service); ok {
		return o.CreationTimeSeconds
	}
	return 0
}

// NodeAsOf returns the Node with that name, or nil if there is none, and the resource version of
// Nodes that this reflects at most.
func (s *Store) NodeAsOf(name string) (n *model.Node, version uint64) {
	n = s.Node(name)
	s.mu.Lock()
	defer s.mu.Unlock()
	return n, s.progress.seen.Nodes
}

// Digest returns the digest of all Services and Slices, with the sequences that the shards have in
// that state.
func (s *Store) Digest() (digest model.Digest, sequences []uint64) {
	var shards []model.Digest
	for i := range s.Shards() {
		snapshot := s.Snapshot(i)
		sequences = append(sequences, snapshot.Sequence())
		shards = append(shards, snapshot.Digest())
	}
	return model.StateDigest(shards), sequences
}

// Tombstones returns the number of tombstones of all shards.
func (s *Store) Tombstones() (n int) {
	for i := range s.shards {
		snapshot := s.Snapshot(uint32(i))
		n += snapshot.byKey.Len() - snapshot.live
	}
	return n
}

// HasNodeAddress reports whether the address is among the first maxAddresses of a Node.
func (s *Store) HasNodeAddress(a netip.Addr) bool {
	s.nodesMu.RLock()
	defer s.nodesMu.RUnlock()
	return s.addresses[a] > 0
}

// WaitSynced returns a channel that is closed once the source has delivered its whole state. From
// then on Publish publishes.
func (s *Store) WaitSynced() <-chan struct{} { return s.synced }

// WaitPublished returns a channel that is closed at the end of the first Publish after the source
// has synced. Until then snapshots are empty or incomplete, and no client may be served.
func (s *Store) WaitPublished() <-chan struct{} { return s.first }

// Published reports whether the channel that WaitPublished returns is closed.
func (s *Store) Published() bool { return closed(s.first) }

// Dirty returns a channel that receives a value when something may be waiting for Publish. It is
// for one receiver.
func (s *Store) Dirty() <-chan struct{} { return s.dirty }

// Urgent returns a channel that receives a value when a pending change should not wait: it removes
// an object, or takes traffic from an endpoint. It is for one receiver.
func (s *Store) Urgent() <-chan struct{} { return s.urgent }

// Reached returns the resource versions up to which everything is published. They may be higher
// than the versions in Snapshots and Updates, which are those of objects.
func (s *Store) Reached() model.ResourceVersions { return s.published.Load().reached }

// Seen returns the highest resource versions of the published objects. Unlike the versions in
// Snapshots, they follow a source that goes back in time. While Publish publishes one shard after
// the other, they are those of all of them, because a stream may already be sent any.
func (s *Store) Seen() model.ResourceVersions { return s.published.Load().seen }

// Nodes returns all Nodes in no particular order.
func (s *Store) Nodes() []*model.Node {
	s.nodesMu.RLock()
	defer s.nodesMu.RUnlock()
	return slices.Collect(maps.Values(s.nodes))
}

// Synced implements source.Sink. Calls after the first one have no effect.
func (s *Store) Synced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !closed(s.synced) {
		close(s.synced)
	}
	notify(s.dirty)
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Upsert implements source.Sink.
func (s *Store) Upsert(o model.Keyed, resourceVersion uint64) {
	if s.worse(o) {
		defer notify(s.urgent)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.upsertLocked(o)
	s.seenLocked(o.Key().Kind, resourceVersion)
}

// worse reports whether an object takes traffic from an endpoint of its published state. Publish
// compares the two states again to make the delta. Making the delta here would cost more, and would
// be wasted for each change that a later one replaces before Publish.
func (s *Store) worse(o model.Keyed) bool {
	now, ok := o.(*model.Slice)
	if !ok {
		return false
	}
	old, ok := s.Snapshot(now.ServiceKey().Shard(s.Shards())).Get(now.Key()).(*model.Slice)
	return ok && model.Worse(old, now)
}

// Progress implements source.Sink.
func (s *Store) Progress(kind model.Kind, resourceVersion uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.progress
	if s.relayed {
		p.reached = p.reached.With(kind, resourceVersion)
	} else {
		p.reached = p.reached.Max(model.ResourceVersions{}.With(kind, resourceVersion))
	}
	notify(s.dirty)
}

// SetSeen sets the resource versions that a relay's state reflects. They may be lower than those of
// the objects that were received: a server can claim any.
func (s *Store) SetSeen(seen model.ResourceVersions) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress.seen = seen
	notify(s.dirty)
}

// Remove implements source.Sink.
func (s *Store) Remove(key model.Key, resourceVersion uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removeLocked(key)
	s.seenLocked(key.Kind, resourceVersion)
}

// Replace implements source.Sink.
func (s *Store) Replace(kind model.Kind, objects []model.Keyed, resourceVersion uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	keep := make(map[model.Key]struct{}, len(objects))
	for _, o := range objects {
		keep[o.Key()] = struct{}{}
		s.upsertLocked(o)
	}
	for _, key := range s.keysLocked(kind) {
		if _, ok := keep[key]; !ok {
			s.removeLocked(key)
		}
	}
	if !s.relayed { // a list is complete, even if it is older than the changes before it
		s.progress.seen = s.progress.seen.With(kind, resourceVersion)
		s.progress.reached = s.progress.reached.With(kind, resourceVersion)
	}
	s.seenLocked(kind, resourceVersion)
}

// keysLocked returns the keys of all objects of a kind that are published or pending.
func (s *Store) keysLocked(kind model.Kind) []model.Key {
	var keys []model.Key
	if kind == model.KindNode {
		s.nodesMu.RLock()
		defer s.nodesMu.RUnlock()
		for name := range s.nodes {
			keys = append(keys, model.Key{Kind: kind, Name: name})
		}
		return keys
	}
	for key := range s.held {
		if key.Kind == kind {
			keys = append(keys, key)
		}
	}
	return keys
}

func (s *Store) seenLocked(kind model.Kind, resourceVersion uint64) {
	p := &s.progress
	p.seen = p.seen.Max(model.ResourceVersions{}.With(kind, resourceVersion))
	if !s.relayed {
		p.reached = p.reached.Max(p.seen)
	}
	notify(s.dirty)
}

func (s *Store) upsertLocked(o model.Keyed) {
	if n, ok := o.(*model.Node); ok {
		s.setNodeLocked(n.Name, n)
		return
	}
	// sources pass only Nodes and Objects; anything else is a bug in a source
	obj := o.(model.Object)
	key, service := obj.Key(), obj.ServiceKey()
	if old, ok := s.held[key]; ok && old.Shard(s.Shards()) != service.Shard(s.Shards()) {
		s.pendLocked(old, key, nil) // a slice that now belongs to another Service
	}
	s.held[key] = service
	s.pendLocked(service, key, obj)
}

func (s *Store) removeLocked(key model.Key) {
	if key.Kind == model.KindNode {
		s.setNodeLocked(key.Name, nil)
		return
	}
	if service, ok := s.held[key]; ok {
		delete(s.held, key)
		s.pendLocked(service, key, nil)
	}
}

// pendLocked makes an object of a Service pending; a nil object means that it was removed.
func (s *Store) pendLocked(service model.ServiceKey, key model.Key, o model.Object) {
	shard := service.Shard(s.Shards())
	if s.pending[shard] == nil {
		s.pending[shard] = make(map[model.Key]model.Object)
	}
	s.pending[shard][key] = o
	if o == nil {
		notify(s.urgent)
	}
}

// setNodeLocked replaces the Node with that name; nil removes it. Unlike other objects, Nodes are
// visible before Publish.
func (s *Store) setNodeLocked(name string, n *model.Node) {
	s.nodesMu.Lock()
	defer s.nodesMu.Unlock()
	old := s.nodes[name]
	if old.Equal(n) {
		return
	}
	s.countAddressesLocked(old, -1)
	s.countAddressesLocked(n, 1)
	if n == nil {
		delete(s.nodes, name)
	} else {
		s.nodes[name] = n
	}
	s.pendingNodes[name] = struct{}{}
}

// countAddressesLocked adds difference to the count of each address of a Node, which may be nil.
func (s *Store) countAddressesLocked(n *model.Node, difference int) {
	if n == nil {
		return
	}
	for _, a := range n.Addresses[:min(len(n.Addresses), maxAddresses)] {
		if s.addresses[a] += difference; s.addresses[a] == 0 {
			delete(s.addresses, a)
		}
	}
}

// Publication is the result of a Publish.
type Publication struct {
	// Updates has one entry for each shard that changed.
	Updates []*model.Update
	// Nodes names the Nodes that were added, changed or removed.
	Nodes []string
	// Back means that what Seen returns has become lower for some kind.
	Back bool
}

// Publish makes the pending changes visible. It does nothing before the source has synced. It calls
// each function in hear with each Update before the Update's snapshot becomes visible.
func (s *Store) Publish(hear ...func(*model.Update)) Publication {
	if !closed(s.synced) {
		return Publication{}
	}
	s.publishing.Lock()
	defer s.publishing.Unlock()

	s.mu.Lock()
	pending := s.pending
	s.pending = make([]map[model.Key]model.Object, len(s.shards))
	nodes := s.pendingNodes
	s.pendingNodes = make(map[string]struct{})
	progress := s.progress
	meanwhile := *s.published.Load()
	p := Publication{Back: meanwhile.seen.Min(progress.seen) != meanwhile.seen}
	meanwhile.seen = meanwhile.seen.Max(progress.seen)
	s.published.Store(&meanwhile)
	// Everything that was urgent is published now.
	select {
	case <-s.urgent:
	default:
	}
	s.mu.Unlock()

	for i, objects := range pending {
		if len(objects) == 0 {
			continue
		}
		if u := s.shards[i].publish(objects, progress.seen, hear); u != nil {
			p.Updates = append(p.Updates, u)
		}
	}
	p.Nodes = slices.Collect(maps.Keys(nodes))
	s.published.Store(&progress)
	if !s.Published() {
		close(s.first)
	}
	return p
}
