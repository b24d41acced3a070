package client

import (
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// cacheShard is one shard's part. Objects are shared with whoever reads them; they are immutable.
type cacheShard struct {
	sequence uint64
	// moved: the sequence is another one since the reader of the cache was given it.
	moved bool
	// revision grows with each change of what the shard holds. digest is that of the revision digested; see currentDigest.
	revision, digested uint64
	digest             model.Digest

	services map[model.ServiceKey]*cachedService
	slices   map[model.Key]*model.Slice
	// missing are slices that were asked for again, as a delta did not fit what the cache holds of them. Until they have
	// come, the shard is behind its sequence.
	missing map[model.Key]struct{}
	// unreadable are objects that the server has in these versions, and that did not decode. What was held of them before
	// stays; in digests they count as the server has them, so that the rest of the shard can still be compared.
	unreadable map[model.Key]model.Version
	// changed are those of them that deltas have changed since: they may be readable now.
	changed map[model.Key]struct{}
}

// cachedService is a Service and its slices; one of both may be missing.
type cachedService struct {
	service *model.Service
	slices  []*model.Slice // ascending by name
}

func newCacheShard() cacheShard {
	return cacheShard{revision: 1, services: make(map[model.ServiceKey]*cachedService), slices: make(map[model.Key]*model.Slice)}
}

// object gives the Service or Slice of that key; nil: there is none.
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

// all is a sequence of the objects that count, with the versions that they count as.
func (s *cacheShard) all(yield func(key model.Key, version model.Version) bool) {
	held := func(o model.Object) bool {
		_, unreadable := s.unreadable[o.Key()]
		return unreadable || yield(o.Key(), o.ContentVersion())
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

// bucketDigests returns the digests of the shard's buckets, by number.
func (s *cacheShard) bucketDigests() []model.Digest { return model.BucketDigests(s.all) }

// currentDigest returns the digest of the shard. It is computed when it is asked for, which is seldom, beside how often a shard
// changes.
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
	s.revision++
	delete(s.unreadable, key)
	s.held(service.ServiceKey()).service = service
}

// setSlice adds or changes a slice, and gives what was held of it.
func (s *cacheShard) setSlice(slice *model.Slice) (old *model.Slice) {
	key := slice.Key()
	old = s.slices[key]
	s.revision++
	delete(s.unreadable, key)
	delete(s.changed, key)
	delete(s.missing, key)
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

// setUnreadable notes what the server has and this software can't read.
func (s *cacheShard) setUnreadable(key model.Key, version model.Version) {
	s.revision++
	delete(s.changed, key)
	delete(s.missing, key)
	if s.unreadable == nil {
		s.unreadable = make(map[model.Key]model.Version)
	}
	s.unreadable[key] = version
}

// setChanged notes that a delta has changed what this software can't read, to another version.
func (s *cacheShard) setChanged(key model.Key, version model.Version) {
	s.setUnreadable(key, version)
	if s.changed == nil {
		s.changed = make(map[model.Key]struct{})
	}
	s.changed[key] = struct{}{}
}

// setMissing notes that a slice is to be asked for. It is false where that is known: what the server then sends has what it has sent of the
// slice meanwhile.
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

// useOwnVersions has objects count as what is held of them, where that is not what their versions say. It tells whether there were any.
func (s *cacheShard) useOwnVersions() (differs bool) {
	waits := func(key model.Key) bool {
		_, unreadable := s.unreadable[key]
		_, missing := s.missing[key]
		return unreadable || missing
	}
	for _, h := range s.services {
		if h.service != nil && !waits(h.service.Key()) {
			if own := h.service.WithOwnVersion(); own != h.service {
				s.setService(own)
				differs = true
			}
		}
	}
	for key, slice := range s.slices {
		if own := slice.WithOwnVersion(); own != slice && !waits(key) {
			s.setSlice(own)
			differs = true
		}
	}
	return differs
}

// remove removes an object, and gives what was held of it.
func (s *cacheShard) remove(key model.Key) model.Object {
	s.revision++
	delete(s.unreadable, key)
	delete(s.changed, key)
	delete(s.missing, key)
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

// unlink takes a slice from its Service.
func (s *cacheShard) unlink(slice *model.Slice) {
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
