package store

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tidwall/btree"

	"github.com/slicecast/slicecast/internal/model"
)

// entry is an object as of its last change, or a tombstone. It is immutable.
type entry struct {
	key    model.Key
	object model.Object // nil means that the entry is a tombstone
	// service is the Service that the object belongs to, or belonged to before it was removed.
	service model.ServiceKey
	// change orders entries by their last change. It is unique within the shard, because one Update
	// may hold many changes.
	change uint64
	// sequence is the sequence of the Update with the last change.
	sequence uint64
}

func (e *entry) live() bool { return e.object != nil }

// shard is one shard of a Store. Only Publish writes to it. Any number of goroutines read its
// snapshot.
//
// Invariants, whenever publish does not run:
//
//  1. Each tombstone of the snapshot is in tombstones. At most maxTombstones are.
//  2. Each entry of the snapshot has another change, at most lastChange, in the order in which the
//     objects changed.
type shard struct {
	maxTombstones int
	snapshot      atomic.Pointer[Snapshot]
	// lastChange is the highest entry.change in use.
	lastChange uint64
	// tombstones holds the tombstones, oldest first. Live entries may have replaced some of them
	// since.
	tombstones []*entry
}

// Snapshot is the state of a shard at one sequence. It is immutable and shares unchanged parts with
// the snapshots before and after it.
//
// Invariants:
//
//  1. byKey and byChange hold the same entries, live ones and tombstones. live of them are live.
//  2. Each object that was removed after floor has a tombstone, unless it is live again.
type Snapshot struct {
	shard            uint32
	sequence         uint64
	resourceVersions model.ResourceVersions
	live             int
	digests          *digests
	// floor is the highest sequence of a forgotten tombstone. What changed since an earlier
	// sequence is unknown.
	floor    uint64
	byKey    *btree.BTreeG[*entry] // in the order of keys
	byChange *btree.BTreeG[*entry] // in the order of their last change
}

// digests are the digests of a Snapshot. The first reader that asks for them computes them, because
// a shard may change a hundred times between two readers.
type digests struct {
	once    sync.Once
	buckets []model.Digest
	shard   model.Digest
}

func newShard(number uint32, maxTombstones int) *shard {
	s := &shard{maxTombstones: maxTombstones}
	o := btree.Options{NoLocks: true} // the trees of a published snapshot are never written
	s.snapshot.Store(&Snapshot{
		shard:    number,
		digests:  &digests{},
		byKey:    btree.NewBTreeGOptions(func(a, b *entry) bool { return a.key.Compare(b.key) < 0 }, o),
		byChange: btree.NewBTreeGOptions(func(a, b *entry) bool { return a.change < b.change }, o),
	})
	return s
}

// publish applies objects, where nil means removed, and returns the Update with the changes, or nil
// if nothing changed. It calls each function in hear before the new snapshot becomes visible.
func (s *shard) publish(objects map[model.Key]model.Object, seen model.ResourceVersions, hear []func(*model.Update)) *model.Update {
	old := s.snapshot.Load()
	next := *old
	next.sequence++
	next.resourceVersions = seen
	next.byKey, next.byChange = old.byKey.Copy(), old.byChange.Copy()
	next.digests = &digests{}
	u := &model.Update{Shard: old.shard, From: old.sequence, To: next.sequence}
	for key, object := range objects {
		s.set(&next, u, key, object)
	}
	if u.Len() == 0 {
		return nil
	}
	s.forget(&next)
	sortUpdate(u)
	for _, f := range hear {
		f(u)
	}
	s.snapshot.Store(&next)
	return u
}

// set replaces an object in the next snapshot, where nil means removed, and adds the change to the
// Update.
func (s *shard) set(next *Snapshot, u *model.Update, key model.Key, object model.Object) {
	before, known := next.byKey.Get(&entry{key: key})
	wasLive := known && before.live()
	if object == nil && !wasLive ||
		object != nil && wasLive && before.object.ContentVersion() == object.ContentVersion() {
		return
	}
	s.lastChange++
	e := &entry{key: key, object: object, change: s.lastChange, sequence: next.sequence}
	if object != nil {
		e.service = object.ServiceKey()
		next.live++
	} else {
		e.service = before.service
		s.tombstones = append(s.tombstones, e)
	}
	if known {
		next.byChange.Delete(before)
	}
	if wasLive {
		next.live--
	}
	next.byKey.Set(e)
	next.byChange.Set(e)
	record(u, before, e)
	// Only the version of the changed kind, because the other one would only lengthen the update.
	if key.Kind == model.KindService {
		u.ResourceVersions.Services = next.resourceVersions.Services
	} else {
		u.ResourceVersions.Slices = next.resourceVersions.Slices
	}
}

// record adds a change to an Update. before is nil if the object was never there.
func record(u *model.Update, before, now *entry) {
	if before != nil && before.live() && (!now.live() || now.service != before.service) {
		u.Left = append(u.Left, model.Departure{Key: now.key, Service: before.service})
	}
	switch o := now.object.(type) {
	case nil:
		u.Removed = append(u.Removed, now.key)
	case *model.Service:
		u.Services = append(u.Services, o)
	case *model.Slice:
		if before != nil && before.live() {
			if d := model.Diff(before.object.(*model.Slice), o); d != nil { // it is smaller than the slice
				u.Deltas = append(u.Deltas, d)
				return
			}
		}
		u.Slices = append(u.Slices, o)
	}
}

func (s *shard) forget(next *Snapshot) {
	for len(s.tombstones) > s.maxTombstones {
		t := s.tombstones[0]
		s.tombstones[0] = nil
		s.tombstones = s.tombstones[1:]
		if current, ok := next.byKey.Get(t); ok && current == t {
			next.byKey.Delete(t)
			next.byChange.Delete(t)
			next.floor = max(next.floor, t.sequence)
		}
	}
}

// sortUpdate sorts the lists of an Update, so that the same state always has the same encoding.
func sortUpdate(u *model.Update) {
	slices.SortFunc(u.Services, func(a, b *model.Service) int { return a.Key().Compare(b.Key()) })
	slices.SortFunc(u.Slices, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) })
	slices.SortFunc(u.Deltas, func(a, b *model.SliceDelta) int { return a.Key().Compare(b.Key()) })
	slices.SortFunc(u.Removed, model.Key.Compare)
}

// Shard returns the number of the shard.
func (s *Snapshot) Shard() uint32 { return s.shard }

// Sequence returns the sequence of the last Update in the snapshot; it is 0 before the first one.
func (s *Snapshot) Sequence() uint64 { return s.sequence }

// Digest returns the digest of all objects.
func (s *Snapshot) Digest() model.Digest { return s.computed().shard }

// Buckets returns the digest of each bucket. The caller must not change it.
func (s *Snapshot) Buckets() []model.Digest { return s.computed().buckets }

func (s *Snapshot) computed() *digests {
	d := s.digests
	d.once.Do(func() {
		d.buckets = model.BucketDigests(func(yield func(model.Key, model.Version) bool) {
			s.byKey.Scan(func(e *entry) bool {
				return !e.live() || yield(e.key, e.object.ContentVersion())
			})
		})
		d.shard = model.ShardDigest(d.buckets)
	})
	return d
}

// InBuckets returns all objects of the given buckets as an Update that a reader at any position may
// apply.
func (s *Snapshot) InBuckets(buckets []uint32) *model.Update {
	u := s.update(s.sequence)
	u.FullBuckets = buckets
	var wanted [model.Buckets]bool
	for _, b := range buckets {
		wanted[b] = true
	}
	s.putEach(u, func(o model.Object) bool { return wanted[o.Key().Bucket()] })
	return u
}

// Where returns the objects of the Services for which wanted is true, as a full Update.
func (s *Snapshot) Where(wanted func(model.ServiceKey) bool) *model.Update {
	u := s.update(0)
	u.Full = true
	s.putEach(u, func(o model.Object) bool { return wanted(o.ServiceKey()) })
	return u
}

func (s *Snapshot) putEach(u *model.Update, wanted func(model.Object) bool) {
	s.byKey.Scan(func(e *entry) bool {
		if e.live() && wanted(e.object) {
			put(u, e.object)
		}
		return true
	})
}

// ChangedAt returns the sequence of the last change to a Service or one of its slices, including
// removals whose tombstones are not forgotten. It returns 0 if no such change is known.
func (s *Snapshot) ChangedAt(service model.ServiceKey) (sequence uint64) {
	s.byChange.Reverse(func(e *entry) bool {
		if e.service == service {
			sequence = e.sequence
			return false
		}
		return true
	})
	return sequence
}

func (s *Snapshot) update(from uint64) *model.Update {
	return &model.Update{Shard: s.shard, From: from, To: s.sequence, ResourceVersions: s.resourceVersions}
}

func put(u *model.Update, o model.Object) {
	switch o := o.(type) {
	case *model.Service:
		u.Services = append(u.Services, o)
	case *model.Slice:
		u.Slices = append(u.Slices, o)
	}
}

// Len returns the number of objects.
func (s *Snapshot) Len() int { return s.live }

// ResourceVersions returns the resource versions of the source that the snapshot reflects.
func (s *Snapshot) ResourceVersions() model.ResourceVersions { return s.resourceVersions }

// Get returns the object with the key, or nil if the shard has none.
func (s *Snapshot) Get(key model.Key) model.Object {
	if e, ok := s.byKey.Get(&entry{key: key}); ok {
		return e.object
	}
	return nil
}

// Knows reports whether the changes after a sequence are known. If they are not, Since returns the
// whole shard.
func (s *Snapshot) Knows(sequence uint64) bool {
	return sequence != 0 && sequence >= s.floor && sequence <= s.sequence
}

// Oldest returns the lowest sequence for which Knows can return true.
func (s *Snapshot) Oldest() uint64 { return max(s.floor, 1) }

// Since returns the changes after a sequence, each object once and in its newest state. If the
// changes are no longer known, or if sequence is 0, it returns the whole shard as a full Update.
func (s *Snapshot) Since(sequence uint64) *model.Update {
	u := s.update(sequence)
	if !s.Knows(sequence) {
		u.From, u.Full = 0, true
	}
	s.byChange.Reverse(func(e *entry) bool {
		if !u.Full && e.sequence <= sequence {
			return false
		}
		if e.live() {
			put(u, e.object)
		} else if !u.Full {
			u.Removed = append(u.Removed, e.key)
		}
		return true
	})
	sortUpdate(u)
	return u
}

// Select returns the objects with the given keys, and lists those that do not exist as removed.
func (s *Snapshot) Select(keys []model.Key) *model.Update {
	u := s.update(s.sequence)
	for _, k := range keys {
		if o := s.Get(k); o != nil {
			put(u, o)
		} else {
			u.Removed = append(u.Removed, k)
		}
	}
	sortUpdate(u)
	return u
}
