package store

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/tidwall/btree"

	"github.com/slicecast/slicecast/internal/model"
)

// entry is an object at its last change, or the tombstone of one. It is immutable.
type entry struct {
	key    model.Key
	object model.Object // nil: a tombstone
	// service that the object belongs to, or belonged to.
	service model.ServiceKey
	// change orders entries by their last change; unique within the shard, so that one Update may hold many.
	change uint64
	// sequence of the Update that brought it.
	sequence uint64
}

func (e *entry) live() bool { return e.object != nil }

// shard has one writer, Publish, and any number of readers of its snapshot.
type shard struct {
	maxTombstones int
	snapshot      atomic.Pointer[Snapshot]
	// lastChange is the highest entry.change given.
	lastChange uint64
	// tombstones in the order they came; some may be replaced by live entries since.
	tombstones []*entry
}

// Snapshot is the state of a shard at one sequence. It is immutable, and shares what it can with its neighbours.
type Snapshot struct {
	shard            uint32
	sequence         uint64
	resourceVersions model.ResourceVersions
	live             int
	digests          *digests
	// floor is the highest sequence of a forgotten tombstone: what changed since an earlier one is not known.
	floor uint64
	// byKey and byChange hold the same entries, live ones and tombstones.
	byKey    *btree.BTreeG[*entry]
	byChange *btree.BTreeG[*entry]
}

// digests are those of a Snapshot. They are computed when the first reader asks: a shard may change
// a hundred times between two of them.
type digests struct {
	once    sync.Once
	buckets []model.Digest
	shard   model.Digest
}

func newShard(number uint32, maxTombstones int) *shard {
	s := &shard{maxTombstones: maxTombstones}
	o := btree.Options{NoLocks: true} // a snapshot's trees are written by nobody
	s.snapshot.Store(&Snapshot{
		shard:    number,
		digests:  &digests{},
		byKey:    btree.NewBTreeGOptions(func(a, b *entry) bool { return a.key.Compare(b.key) < 0 }, o),
		byChange: btree.NewBTreeGOptions(func(a, b *entry) bool { return a.change < b.change }, o),
	})
	return s
}

// publish applies objects (nil: removed) and gives the Update that says the same, nil if nothing differs.
func (s *shard) publish(objects map[model.Key]model.Object, seen model.ResourceVersions, hear []func(*model.Update)) *model.Update {
	old := s.snapshot.Load()
	next := *old
	next.sequence++
	next.resourceVersions = seen
	next.byKey, next.byChange = old.byKey.Copy(), old.byChange.Copy()
	next.digests = &digests{}
	u := &model.Update{
		Shard: old.shard, From: old.sequence, To: next.sequence,
	}
	for key, object := range objects {
		before, known := next.byKey.Get(&entry{key: key})
		wasLive := known && before.live()
		switch {
		case object == nil && !wasLive:
			continue
		case object != nil && wasLive && before.object.ContentVersion() == object.ContentVersion():
			continue
		}
		if known {
			next.byChange.Delete(before)
		}
		if wasLive {
			next.live--
			if object == nil || object.ServiceKey() != before.object.ServiceKey() {
				u.Left = append(u.Left, model.Departure{Key: key, Service: before.object.ServiceKey()})
			}
		}
		// The other kind's version would only lengthen the update.
		if key.Kind == model.KindService {
			u.ResourceVersions.Services = next.resourceVersions.Services
		} else {
			u.ResourceVersions.Slices = next.resourceVersions.Slices
		}
		s.lastChange++
		var service model.ServiceKey
		if object != nil {
			service = object.ServiceKey()
		} else {
			service = before.service
		}
		e := &entry{key: key, object: object, service: service, change: s.lastChange, sequence: next.sequence}
		next.byKey.Set(e)
		next.byChange.Set(e)
		if e.live() {
			next.live++
		}
		switch o := object.(type) {
		case nil:
			s.tombstones = append(s.tombstones, e)
			u.Removed = append(u.Removed, key)
			continue
		case *model.Service:
			u.Services = append(u.Services, o)
		case *model.Slice:
			if d := delta(before, o); d != nil {
				u.Deltas = append(u.Deltas, d)
			} else {
				u.Slices = append(u.Slices, o)
			}
		}
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

func delta(before *entry, now *model.Slice) *model.SliceDelta {
	if before == nil || !before.live() {
		return nil
	}
	return model.Diff(before.object.(*model.Slice), now)
}

// forget drops the oldest tombstones beyond the bound.
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

// sortUpdate gives the same state the same bytes.
func sortUpdate(u *model.Update) {
	slices.SortFunc(u.Services, func(a, b *model.Service) int { return a.Key().Compare(b.Key()) })
	slices.SortFunc(u.Slices, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) })
	slices.SortFunc(u.Deltas, func(a, b *model.SliceDelta) int { return a.Key().Compare(b.Key()) })
	slices.SortFunc(u.Removed, model.Key.Compare)
}

// Shard is the number of the shard.
func (s *Snapshot) Shard() uint32 { return s.shard }

// Sequence of the last Update in the snapshot; 0 before the first.
func (s *Snapshot) Sequence() uint64 { return s.sequence }

// Digest returns the digest of all objects.
func (s *Snapshot) Digest() model.Digest {
	return s.computed().shard
}

// Buckets returns the digest of each bucket. It must not be changed.
func (s *Snapshot) Buckets() []model.Digest {
	return s.computed().buckets
}

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

// InBuckets gives all objects of these buckets, as an Update that a reader of any position may apply.
func (s *Snapshot) InBuckets(buckets []uint32) *model.Update {
	u := s.update(s.sequence)
	u.FullBuckets = buckets
	var wanted [model.Buckets]bool
	for _, b := range buckets {
		wanted[b] = true
	}
	s.byKey.Scan(func(e *entry) bool {
		if e.live() && wanted[e.key.Bucket()] {
			put(u, e.object)
		}
		return true
	})
	return u
}

// Where gives the objects of the Services that a reader wants, as a full Update.
func (s *Snapshot) Where(wanted func(model.ServiceKey) bool) *model.Update {
	u := s.update(0)
	u.Full = true
	s.byKey.Scan(func(e *entry) bool {
		if e.live() && wanted(e.object.ServiceKey()) {
			put(u, e.object)
		}
		return true
	})
	return u
}

// Has tells whether the shard has an object of a Service that a reader means.
func (s *Snapshot) Has(means func(model.ServiceKey) bool) (has bool) {
	s.byKey.Scan(func(e *entry) bool {
		has = e.live() && means(e.object.ServiceKey())
		return !has
	})
	return has
}

// ChangedAt is the sequence at which a Service or one of its slices last changed, came or went, as far as it is known.
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

// update gives an empty Update from a sequence to the snapshot.
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

// Len is the number of objects.
func (s *Snapshot) Len() int { return s.live }

// ResourceVersions are the source's that the snapshot reflects.
func (s *Snapshot) ResourceVersions() model.ResourceVersions { return s.resourceVersions }

// Get gives an object, nil if the shard does not have it.
func (s *Snapshot) Get(key model.Key) model.Object {
	if e, ok := s.byKey.Get(&entry{key: key}); ok {
		return e.object
	}
	return nil
}

// Knows tells whether it is known what changed after a sequence; if not, Since gives the whole shard.
func (s *Snapshot) Knows(sequence uint64) bool {
	return sequence != 0 && sequence >= s.floor && sequence <= s.sequence
}

// Oldest returns the earliest sequence that Knows knows.
func (s *Snapshot) Oldest() uint64 { return max(s.floor, 1) }

// Since gives what changed after a sequence, each key once and in its newest state. Where that is no longer known, and
// for sequence 0, it is the whole shard, as a full Update.
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

// Select gives the named objects as they are, and those that do not exist as removed.
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
