package client

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// outcome is what became of an Update.
type outcome struct {
	// missing are slices whose delta does not fit what the cache holds: they stay as they are, and must be asked for again.
	missing []model.Key
	// undecoded are slices of which a delta did not decode: they stay as they are, too, and are to be asked for whole.
	undecoded []model.Key
	// readable are objects that did not decode before, and that now do or no longer exist.
	readable []model.Key
	// unfinished reports that parts of other Updates are still to come.
	unfinished bool
	// applied is set if Cache.collect is.
	applied *Applied
}

// Applied is what an Update did to a cache.
type Applied struct {
	// Objects are Services and Slices that were named, whole, as the cache now holds them.
	Objects []model.Object
	// Removed are objects that no longer exist.
	Removed []model.Key
	// ResourceVersions that the Update reflects, of the kinds that it changes.
	ResourceVersions model.ResourceVersions
}

// apply applies an Update, all of it under one lock. more tells that further parts of the same Update follow.
func (c *Cache) apply(u *model.Update, more bool) (out outcome, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if u.Shard >= uint32(len(c.shards)) {
		return out, fmt.Errorf("%w: update of shard %d of %d", errProtocol, u.Shard, len(c.shards))
	}
	if part := c.partial[u.Shard]; part != nil {
		if part.From != u.From || part.To != u.To || part.Full != u.Full {
			return out, fmt.Errorf("%w: parts of different updates of shard %d", errProtocol, u.Shard)
		}
		if n := len(part.FullBuckets) + len(u.FullBuckets); n > model.Buckets {
			return out, fmt.Errorf("%w: an update of %d buckets of %d", errProtocol, n, model.Buckets)
		}
		u = join(part, u)
	} else if more {
		u = clipped(u)
	}
	if more {
		c.partial[u.Shard] = u
		return out, nil
	}
	delete(c.partial, u.Shard)
	out.unfinished = len(c.partial) > 0
	if err := c.checkLocked(u); err != nil {
		return out, err
	}

	s := &c.shards[u.Shard]
	unreadable := maps.Clone(s.unreadable)
	removed := append(c.othersLocked(s, u), u.Removed...)
	for _, key := range removed {
		if o := s.remove(key); o != nil {
			c.touched[o.ServiceKey()] = struct{}{}
		}
	}
	for _, service := range u.Services {
		s.setService(service)
		c.touched[service.ServiceKey()] = struct{}{}
	}
	for _, slice := range u.Slices {
		c.setSliceLocked(s, slice)
	}
	if out.missing, err = c.applyDeltasLocked(s, u); err != nil {
		return out, err
	}
	for _, o := range u.Unreadable {
		switch _, known := s.unreadable[o.Key]; {
		case o.Version == (model.Version{}):
		case !o.Delta:
			s.setUnreadable(o.Key, o.Version)
		case known: // the whole did not decode either
			s.setChanged(o.Key, o.Version)
		case s.setMissing(o.Key):
			out.undecoded = append(out.undecoded, o.Key)
		}
	}
	if c.missing > 0 || len(out.missing)+len(out.undecoded) > 0 {
		c.countMissingLocked()
	}
	for key := range unreadable {
		if _, still := s.unreadable[key]; !still {
			out.readable = append(out.readable, key)
		}
	}
	s.sequence = u.To
	c.movedLocked(u.Shard)
	c.seen = c.seen.Max(u.ResourceVersions)
	if c.collect {
		out.applied = c.appliedLocked(s, u, removed)
	}
	c.signalLocked()
	return out, nil
}

// checkLocked tells whether an Update fits. Nothing of one that does not is applied.
func (c *Cache) checkLocked(u *model.Update) error {
	s := &c.shards[u.Shard]
	if !u.Full && len(u.FullBuckets) == 0 && (s.sequence < u.From || s.sequence > u.To) {
		return fmt.Errorf("%w: update of shard %d from %d to %d, but the position is %d",
			errProtocol, u.Shard, u.From, u.To, s.sequence)
	}
	for _, bucket := range u.FullBuckets {
		if bucket >= model.Buckets {
			return fmt.Errorf("%w: update of bucket %d of %d", errProtocol, bucket, model.Buckets)
		}
	}
	if err := c.checkUnfitLocked(u); err != nil {
		return err
	}
	for _, service := range u.Services {
		if err := c.inShardLocked(u.Shard, service); err != nil {
			return err
		}
	}
	for _, slice := range u.Slices {
		if err := c.inShardLocked(u.Shard, slice); err != nil {
			return err
		}
	}
	return nil
}

// inShardLocked checks that an object is where its Service's hash says; elsewhere it could never be removed.
func (c *Cache) inShardLocked(shard uint32, o model.Object) error {
	if want := o.ServiceKey().Shard(uint32(len(c.shards))); want != shard {
		return fmt.Errorf("%w: %v came in shard %d and belongs to shard %d", errProtocol, o.Key(), shard, want)
	}
	return nil
}

// clipped returns a copy of the first part of an Update, whose lists have no room: the part may be
// shared with other caches, so join must not append to its lists in place.
func clipped(u *model.Update) *model.Update {
	c := *u
	c.FullBuckets = slices.Clip(c.FullBuckets)
	c.Services = slices.Clip(c.Services)
	c.Slices = slices.Clip(c.Slices)
	c.Deltas = slices.Clip(c.Deltas)
	c.Removed = slices.Clip(c.Removed)
	c.Unreadable = slices.Clip(c.Unreadable)
	return &c
}

// join returns two parts of an Update as one. It appends to the lists of a, which is clipped or came
// from join, so that many parts cost no more than one.
func join(a, b *model.Update) *model.Update {
	j := *a
	j.ResourceVersions = j.ResourceVersions.Max(b.ResourceVersions)
	j.FullBuckets = append(j.FullBuckets, b.FullBuckets...)
	j.Services = append(j.Services, b.Services...)
	j.Slices = append(j.Slices, b.Slices...)
	j.Deltas = append(j.Deltas, b.Deltas...)
	j.Removed = append(j.Removed, b.Removed...)
	j.Unreadable = append(j.Unreadable, b.Unreadable...)
	return &j
}

// othersLocked gives what the cache has, or misses, in what an Update holds whole (the shard, or some of its buckets) and
// the Update does not name: it no longer exists.
func (c *Cache) othersLocked(s *cacheShard, u *model.Update) []model.Key {
	if !u.Full && len(u.FullBuckets) == 0 {
		return nil
	}
	var buckets [model.Buckets]bool
	for _, bucket := range u.FullBuckets {
		buckets[bucket] = true
	}
	named := make(map[model.Key]struct{}, u.Len()+len(u.Unreadable))
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

// setSliceLocked adds or changes a slice. One that comes with another Service than before touches both.
func (c *Cache) setSliceLocked(s *cacheShard, slice *model.Slice) {
	if old := s.setSlice(slice); old != nil && old.Service != slice.Service {
		c.touched[old.ServiceKey()] = struct{}{}
	}
	c.touched[slice.ServiceKey()] = struct{}{}
}

// applyDeltasLocked returns the slices that a delta does not fit, but for those that did not decode: to ask for such a one with each
// of its changes would cost the server a whole slice each time, so they wait for the next heartbeat.
//
// A delta leads from the state at u.From. The shard may be ahead of that, and a slice may be behind its shard, if it is missing
// or unreadable: the version that results tells, but only if the slice is exact. One that is not gets a delta only where there
// is no doubt.
func (c *Cache) applyDeltasLocked(s *cacheShard, u *model.Update) (missing []model.Key, err error) {
	for _, d := range u.Deltas {
		have := s.slices[d.Key()]
		if have != nil && have.ContentVersion() == d.Version {
			s.setSlice(have) // it may have been unreadable meanwhile
			continue
		}
		_, unreadable := s.unreadable[d.Key()]
		_, waits := s.missing[d.Key()]
		if have != nil && (have.Exact() || s.sequence == u.From && !unreadable && !waits) {
			slice, err := c.applyDelta(d, have)
			if err == nil {
				c.setSliceLocked(s, slice)
				continue
			}
			if !errors.Is(err, model.ErrBase) {
				return nil, err
			}
		}
		if unreadable {
			s.setChanged(d.Key(), d.Version)
			continue
		}
		if s.setMissing(d.Key()) {
			missing = append(missing, d.Key())
		}
	}
	return missing, nil
}

// appliedLocked tells what an Update has done. A slice that is handed from one Service to another may for a moment be in two
// shards: it exists as long as it is in one.
func (c *Cache) appliedLocked(s *cacheShard, u *model.Update, removed []model.Key) *Applied {
	a := &Applied{ResourceVersions: u.ResourceVersions}
	for _, service := range u.Services {
		a.Objects = append(a.Objects, service)
	}
	for _, slice := range u.Slices {
		a.Objects = append(a.Objects, slice)
	}
	for _, d := range u.Deltas {
		if slice := s.slices[d.Key()]; slice != nil {
			a.Objects = append(a.Objects, slice)
		}
	}
	for _, key := range removed {
		if o := c.findLocked(key); o != nil {
			a.Objects = append(a.Objects, o)
		} else {
			a.Removed = append(a.Removed, key)
		}
	}
	return a
}

func (c *Cache) findLocked(key model.Key) model.Object {
	for i := range c.shards {
		if o := c.shards[i].object(key); o != nil {
			return o
		}
	}
	return nil
}
