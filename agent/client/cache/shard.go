package cache

import (
	"slices"
	"strings"

	"github.com/slicecast/slicecast/internal/model"
)

// cacheShard is one shard of a Cache, whose mutex guards it.
//
// Invariants:
//
//  1. Each slice is in slices and in the cachedService of its Service. No cachedService is empty.
//  2. revision grows with every change of the content, of unreadable or of unverified.
//  3. The keys of changed are also in unreadable.
//  4. Objects are immutable, because readers of the cache share them.
//  5. An object counts in digests with the hash of its own content, unless it is in unreadable or
//     unverified. These hold claims of the present stream only; see Writer.Begin.
type cacheShard struct {
	sequence uint64
	// moved reports that the sequence has changed since the cache's reader last saw it.
	moved bool
	// revision grows with every change. digest is the digest at the revision digested; see
	// currentDigest.
	revision, digested uint64
	digest             model.Digest

	services map[model.ServiceKey]*cachedService
	slices   map[model.Key]*model.Slice
	// missing are the slices that the client has asked for again, because a delta did not fit or
	// did not decode. Until they arrive, the shard's content is behind its sequence.
	missing map[model.Key]struct{}
	// unreadable are the objects of the server that did not decode, with the server's versions of
	// them. An older object stays in the cache. In digests they count with the server's version, so
	// that the rest of the shard can still be compared.
	unreadable map[model.Key]model.Version
	// unverified are the objects that came with fields which this software does not know, with the
	// server's versions of them. In digests they count with these versions, so that the rest of the
	// shard can still be compared.
	unverified map[model.Key]model.Version
	// changed are the unreadable objects that a delta has changed since. They may be readable now.
	changed map[model.Key]struct{}
}

// cachedService is a Service and its slices. service is nil if only slices have arrived.
type cachedService struct {
	service *model.Service
	slices  []*model.Slice // ascending by name
}

// newShards returns n empty shards.
func newShards(n int) []cacheShard {
	shards := make([]cacheShard, n)
	for i := range shards {
		shards[i] = cacheShard{
			revision: 1, services: make(map[model.ServiceKey]*cachedService), slices: make(map[model.Key]*model.Slice),
		}
	}
	return shards
}

// len returns the number of Services and slices that the shard holds.
func (s *cacheShard) len() int {
	n := len(s.slices)
	for _, held := range s.services {
		if held.service != nil {
			n++
		}
	}
	return n
}

// object returns the Service or slice with this key, or nil if the shard does not hold it.
func (s *cacheShard) object(key model.Key) model.Object {
	if key.Kind == model.KindSlice {
		if slice := s.slices[key]; slice != nil {
			return slice
		}
		return nil
	}
	if h := s.services[model.ServiceKey{Namespace: key.Namespace, Name: key.Name}]; h != nil && h.service != nil {
		return h.service
	}
	return nil
}

// all iterates over the objects and the versions with which they count in digests.
func (s *cacheShard) all(yield func(key model.Key, version model.Version) bool) {
	held := func(o model.Object) bool {
		_, unreadable := s.unreadable[o.Key()]
		return unreadable || yield(o.Key(), s.versionOf(o))
	}
	for _, h := range s.services {
		if h.service != nil && !held(h.service) {
			return
		}
	}
	for _, slice := range s.slices {
		if !held(slice) {
			return
		}
	}
	for key, version := range s.unreadable {
		if !yield(key, version) {
			return
		}
	}
}

// versionOf returns the version that an object of the shard has at the server: the hash of its
// content, unless that is unverified.
func (s *cacheShard) versionOf(o model.Object) model.Version {
	if len(s.unverified) > 0 {
		if version, ok := s.unverified[o.Key()]; ok {
			return version
		}
	}
	return o.ContentVersion()
}

// bucketDigests returns the digests of the shard's buckets, by number.
func (s *cacheShard) bucketDigests() []model.Digest { return model.BucketDigests(s.all) }

// currentDigest returns the digest of the shard. It computes the digest lazily, because digests are
// needed far less often than the shard changes.
func (s *cacheShard) currentDigest() model.Digest {
	if s.digested != s.revision {
		s.digest, s.digested = model.ShardDigest(s.bucketDigests()), s.revision
	}
	return s.digest
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
	key := service.Key()
	s.arrived(key)
	delete(s.unverified, key)
	s.held(service.ServiceKey()).service = service
}

// setSlice adds or replaces a slice and returns the slice that it replaces, if any.
func (s *cacheShard) setSlice(slice *model.Slice) (old *model.Slice) {
	key := slice.Key()
	old = s.slices[key]
	s.arrived(key)
	delete(s.unverified, key)
	if old != nil && old.Service != slice.Service {
		s.unlink(old)
	}
	s.slices[key] = slice
	h := s.held(slice.ServiceKey())
	at, found := slices.BinarySearchFunc(h.slices, slice.Name, byName)
	if found {
		h.slices[at] = slice
	} else {
		h.slices = slices.Insert(h.slices, at, slice)
	}
	return old
}

// arrived notes that the shard holds what the server has under this key, or that the server has
// nothing.
func (s *cacheShard) arrived(key model.Key) {
	s.revision++
	delete(s.unreadable, key)
	delete(s.changed, key)
	delete(s.missing, key)
}

// setUnverified notes the server's version of an object that the shard holds, whose content does
// not show whether the version is right.
func (s *cacheShard) setUnverified(key model.Key, version model.Version) {
	s.revision++
	if s.unverified == nil {
		s.unverified = make(map[model.Key]model.Version)
	}
	s.unverified[key] = version
}

// unproved reports whether the shard's content is not the server's for certain: it lacks objects,
// or the server has claimed versions that the content does not prove.
func (s *cacheShard) unproved() bool { return len(s.missing)+len(s.unreadable)+len(s.unverified) > 0 }

// noteUnreadable notes the objects of an Update that did not decode. It returns the slices that
// must be asked for, because their delta did not decode.
func (s *cacheShard) noteUnreadable(objects []model.Unreadable) (undecoded []model.Key) {
	for _, o := range objects {
		switch _, known := s.unreadable[o.Key]; {
		case o.Version == (model.Version{}):
		case !o.Delta:
			s.setUnreadable(o.Key, o.Version)
		case known: // the whole object did not decode either
			s.setChanged(o.Key, o.Version)
		case s.setMissing(o.Key):
			undecoded = append(undecoded, o.Key)
		}
	}
	return undecoded
}

// setUnreadable notes the server's version of an object that did not decode.
func (s *cacheShard) setUnreadable(key model.Key, version model.Version) {
	s.revision++
	delete(s.changed, key)
	delete(s.missing, key)
	if s.unreadable == nil {
		s.unreadable = make(map[model.Key]model.Version)
	}
	s.unreadable[key] = version
}

// setChanged notes that a delta has changed an unreadable object to another version.
func (s *cacheShard) setChanged(key model.Key, version model.Version) {
	s.setUnreadable(key, version)
	if s.changed == nil {
		s.changed = make(map[model.Key]struct{})
	}
	s.changed[key] = struct{}{}
}

// setMissing notes that a slice must be asked for. It returns false if the slice is already
// missing: the answer to the earlier request will include all changes that the server has sent
// since.
func (s *cacheShard) setMissing(key model.Key) bool {
	if _, known := s.missing[key]; known {
		return false
	}
	if s.missing == nil {
		s.missing = make(map[model.Key]struct{})
	}
	s.missing[key] = struct{}{}
	return true
}

// others returns the keys that no longer exist according to an Update. These are the keys that
// the shard holds or misses in the part that the Update covers whole, and that the Update does not
// name. That part is the whole shard or some of its buckets.
func (s *cacheShard) others(u *model.Update) []model.Key {
	if !u.Full && len(u.FullBuckets) == 0 {
		return nil
	}
	var buckets [model.Buckets]bool
	for _, bucket := range u.FullBuckets {
		buckets[bucket] = true
	}
	named := make(map[model.Key]struct{}, u.Len())
	for _, o := range u.Services {
		named[o.Key()] = struct{}{}
	}
	for _, o := range u.Slices {
		named[o.Key()] = struct{}{}
	}
	for _, o := range u.Unreadable {
		named[o.Key] = struct{}{}
	}
	var others []model.Key
	look := func(key model.Key) {
		if _, ok := named[key]; !ok && (u.Full || buckets[key.Bucket()]) {
			others = append(others, key)
		}
	}
	for key := range s.all {
		look(key)
	}
	for key := range s.missing {
		look(key)
	}
	return others
}

// remove removes an object and returns what the shard held of it, if anything.
func (s *cacheShard) remove(key model.Key) model.Object {
	s.arrived(key)
	delete(s.unverified, key)
	o := s.object(key)
	switch o := o.(type) {
	case *model.Service:
		s.services[o.ServiceKey()].service = nil
		s.dropEmpty(o.ServiceKey())
	case *model.Slice:
		delete(s.slices, key)
		s.unlink(o)
	}
	return o
}

// unlink removes a slice from its cachedService.
func (s *cacheShard) unlink(slice *model.Slice) {
	h := s.held(slice.ServiceKey())
	if at, found := slices.BinarySearchFunc(h.slices, slice.Name, byName); found {
		h.slices = slices.Delete(h.slices, at, at+1)
	}
	s.dropEmpty(slice.ServiceKey())
}

func byName(s *model.Slice, name string) int { return strings.Compare(s.Name, name) }
