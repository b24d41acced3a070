// Package store holds the state that a server distributes: sharded, versioned, content-addressed.
//
// Sources write into it (it is a source.Sink); what they write is pending until Publish makes it visible, one step per
// shard. How often Publish is called decides how changes coalesce: everything that came since the last call becomes one
// Update per shard, and what came and went meanwhile becomes nothing. Urgent tells when it should not wait.
//
// # Guarantees
//
//   - A writer never waits for a reader. Readers follow immutable Snapshots at their own pace.
//   - A shard's sequence grows by one with each Update, and Updates of a shard lead from each sequence to the next.
//   - What changed since a sequence is answered from the objects themselves, ordered by their last change, and from a
//     bounded number of tombstones; no reader's slowness costs memory. Beyond the tombstones the answer is the shard.
//   - The same objects give the same digests, whatever their history.
//   - Nothing is published before the source has synced, so a source that is still listing removes nothing.
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
	// DefaultShards keeps a shard of a large cluster (10,000 Services) at some hundred objects, and 64 positions and
	// digests in a Hello below 2 KiB.
	DefaultShards = 64
	// DefaultTombstones is per shard: enough for every object of a large shard to be replaced while a client is away.
	DefaultTombstones = 1024
)

// Options set up a Store.
type Options struct {
	// Shards is their number, a power of two up to 4096; 0: DefaultShards.
	Shards uint32
	// Tombstones is how many removals each shard remembers; 0: DefaultTombstones.
	Tombstones int
	// Relayed: what the source gives comes shard by shard, and so not in the order of its versions, of which then only Progress
	// tells up to which everything has come.
	Relayed bool
}

// Store is the state. Its zero value is not usable; see New.
type Store struct {
	epoch   uint64
	shards  []*shard
	relayed bool

	// mu guards what is pending. It is held for map operations only.
	mu sync.Mutex
	// pending holds, per shard, the objects written since the last Publish; nil: removed.
	pending []map[model.Key]model.Object
	// held names every Service and Slice that is there or pending, with the Service whose shard it is in.
	held         map[model.Key]model.ServiceKey
	pendingNodes map[string]struct{}
	// progress is how far the source has come, and published the same as of the last Publish.
	progress   progress
	published  atomic.Pointer[progress]
	synced     chan struct{}
	first      chan struct{} // closed with the end of the first Publish
	dirty      chan struct{}
	urgent     chan struct{}
	publishing sync.Mutex // one Publish at a time; taken before mu
	nodesMu    sync.RWMutex
	nodes      map[string]*model.Node
	// addresses counts the Nodes that have each address, by the first maxAddresses of each. nodesMu guards it.
	addresses map[netip.Addr]int
}

// maxAddresses is how many InternalIPs of a Node count as its addresses. A node has two with both families, and writes its
// status itself.
const maxAddresses = 8

// progress is how far a source has come. It goes back when the source does, as after a restore of etcd.
type progress struct {
	// seen are the versions of what was given, reached those up to which everything was given: on a quiet cluster they are ahead,
	// as other kinds of objects count too.
	seen, reached model.ResourceVersions
}

// New makes an empty store with an epoch of its own.
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
	for {
		_, _ = rand.Read(b[:]) // never fails
		if e := binary.LittleEndian.Uint64(b[:]); e != 0 {
			return e
		}
	}
}

// Epoch names this life of the store; sequences of another epoch mean nothing in it. Never 0.
func (s *Store) Epoch() uint64 { return s.epoch }

// Shards is the number of shards.
func (s *Store) Shards() uint32 { return uint32(len(s.shards)) }

// Snapshot is the published state of a shard.
func (s *Store) Snapshot(shard uint32) *Snapshot { return s.shards[shard].snapshot.Load() }

// Node gives the Node of that name, nil if there is none.
func (s *Store) Node(name string) *model.Node {
	s.nodesMu.RLock()
	defer s.nodesMu.RUnlock()
	return s.nodes[name]
}

// Digest returns the digest of all Services and Slices, of which the shards have these positions.
func (s *Store) Digest() (digest model.Digest, sequences []uint64) {
	var shards []model.Digest
	for i := range s.Shards() {
		snapshot := s.Snapshot(i)
		sequences = append(sequences, snapshot.Sequence())
		shards = append(shards, snapshot.Digest())
	}
	return model.StateDigest(shards), sequences
}

// HasNodeAddress reports whether the address is an InternalIP of a Node, one of its first maxAddresses.
func (s *Store) HasNodeAddress(a netip.Addr) bool {
	s.nodesMu.RLock()
	defer s.nodesMu.RUnlock()
	return s.addresses[a] > 0
}

// WaitSynced is closed once the source has given its whole state: from then on Publish publishes.
func (s *Store) WaitSynced() <-chan struct{} { return s.synced }

// WaitPublished is closed once that is published. Before, snapshots are empty or hold a part, and nobody may be served.
func (s *Store) WaitPublished() <-chan struct{} { return s.first }

// Dirty gets a value when something may wait for Publish. It is for one receiver.
func (s *Store) Dirty() <-chan struct{} { return s.dirty }

// Urgent gets a value when something waits for Publish that takes traffic from an endpoint, or an object away. It is for
// one receiver.
func (s *Store) Urgent() <-chan struct{} { return s.urgent }

// Reached are the resource versions up to which everything is published. They may be above those in Snapshots and Updates,
// which are of objects.
func (s *Store) Reached() model.ResourceVersions { return s.published.Load().reached }

// Seen returns the highest resource versions of the objects that are published. Unlike those of Snapshots, they follow a source
// that goes back in time.
func (s *Store) Seen() model.ResourceVersions { return s.published.Load().seen }

// Nodes returns all Nodes, in no order.
func (s *Store) Nodes() []*model.Node {
	s.nodesMu.RLock()
	defer s.nodesMu.RUnlock()
	return slices.Collect(maps.Values(s.nodes))
}

// Synced implements source.Sink. More than one call is as good as one.
func (s *Store) Synced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.synced:
	default:
		close(s.synced)
	}
	s.signal()
}

func (s *Store) signal() { notify(s.dirty) }

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

// worse tells whether an object takes traffic from an endpoint that is published. Publish compares both again for the delta: to make
// that here would cost more than this does, and be in vain for each change that a later one overtakes before the publish.
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
	if s.relayed { // the server above says where it is, and that may be behind what another one has said
		p.reached = p.reached.With(kind, resourceVersion)
		p.seen = p.seen.Min(p.reached)
	} else {
		p.reached = p.reached.Max(model.ResourceVersionOf(kind, resourceVersion))
	}
	s.signal()
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
	if !s.relayed { // a list is all that there is, even if it is older than what came before
		s.progress.seen = s.progress.seen.With(kind, resourceVersion)
		s.progress.reached = s.progress.reached.With(kind, resourceVersion)
	}
	s.seenLocked(kind, resourceVersion)
}

// keysLocked names all objects of a kind that are there or pending.
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
	p.seen = p.seen.Max(model.ResourceVersionOf(kind, resourceVersion))
	if !s.relayed {
		p.reached = p.reached.Max(p.seen)
	}
	s.signal()
}

func (s *Store) upsertLocked(o model.Keyed) {
	if n, ok := o.(*model.Node); ok {
		s.setNodeLocked(n.Name, n)
		return
	}
	obj := o.(model.Object) // the only other kinds; anything else is a bug in a source
	key, service := obj.Key(), obj.ServiceKey()
	if old, ok := s.held[key]; ok && old.Shard(s.Shards()) != service.Shard(s.Shards()) {
		s.pendLocked(old, key, nil) // a slice handed to another Service
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

// countAddressesLocked adds to the count of each address of a Node, if there is one.
func (s *Store) countAddressesLocked(n *model.Node, difference int) {
	if n == nil {
		return
	}
	for _, a := range n.InternalIPs[:min(len(n.InternalIPs), maxAddresses)] {
		if s.addresses[a] += difference; s.addresses[a] == 0 {
			delete(s.addresses, a)
		}
	}
}

// Publication is what one Publish made visible.
type Publication struct {
	// Updates, one for each shard that changed.
	Updates []*model.Update
	// Nodes that changed, came or went.
	Nodes []string
}

// Publish makes visible what is pending. Before the source has synced it does nothing. Each of hear hears of each Update before
// anybody can see it.
func (s *Store) Publish(hear ...func(*model.Update)) Publication {
	select {
	case <-s.synced:
	default:
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
	// What was urgent goes out now.
	select {
	case <-s.urgent:
	default:
	}
	s.mu.Unlock()

	var p Publication
	for i, objects := range pending {
		if len(objects) == 0 {
			continue
		}
		if u := s.shards[i].publish(objects, progress.seen, hear); u != nil {
			p.Updates = append(p.Updates, u)
		}
	}
	for name := range nodes {
		p.Nodes = append(p.Nodes, name)
	}
	s.published.Store(&progress)
	select {
	case <-s.first:
	default:
		close(s.first)
	}
	return p
}
