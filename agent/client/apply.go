package client

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// outcome is the result of applying an Update.
type outcome struct {
	// missing are the slices whose delta does not fit the slice that the cache holds. They stay as
	// they are and must be asked for again.
	missing []model.Key
	// undecoded are the slices with a delta that did not decode. They stay as they are and must be
	// asked for again.
	undecoded []model.Key
	// readable are the objects that did not decode before and that now decode or no longer exist.
	readable []model.Key
	// unfinished reports that the last parts of other Updates are still to come.
	unfinished bool
	// applied is what the Update did. It is nil unless Cache.collect is set.
	applied *Applied
}

// Applied is what an Update did to a cache.
type Applied struct {
	// Objects are the Services and slices that the Update named, as the cache now holds them.
	Objects []model.Object
	// Removed are the objects that no longer exist.
	Removed []model.Key
	// ResourceVersions are the versions that the Update reflects, for the kinds that it changes.
	ResourceVersions model.ResourceVersions
}

// apply applies an Update. If more is set, further parts of the Update follow, and apply only keeps
// this part. With the last part, it applies all parts under one lock.
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
		case known: // the whole object did not decode either
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

// checkLocked returns an error if an Update does not fit. The caller then applies nothing of it.
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

// inShardLocked returns an error if the object is not in the shard that its Service's key hashes
// to. In another shard, no Update could ever remove it.
func (c *Cache) inShardLocked(shard uint32, o model.Object) error {
	if want := o.ServiceKey().Shard(uint32(len(c.shards))); want != shard {
		return fmt.Errorf("%w: %v came in shard %d and belongs to shard %d", errProtocol, o.Key(), shard, want)
	}
	return nil
}

// clipped returns a copy of an Update's first part, whose lists have no spare capacity. Other
// caches may share the part, so join must not write to the arrays of its lists.
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

// join returns two parts of an Update as one. It appends to the lists of a, which comes from
// clipped or join, so that joining many parts takes linear time.
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

// othersLocked returns the keys that no longer exist according to an Update. These are the keys
// that the cache holds or misses in the part of the shard that the Update covers whole, and that
// the Update does not name. That part is the whole shard or some of its buckets.
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

// setSliceLocked adds or replaces a slice. It marks the slice's Service as touched, and also the
// previous Service if the slice has moved from one to the other.
func (c *Cache) setSliceLocked(s *cacheShard, slice *model.Slice) {
	if old := s.setSlice(slice); old != nil && old.Service != slice.Service {
		c.touched[old.ServiceKey()] = struct{}{}
	}
	c.touched[slice.ServiceKey()] = struct{}{}
}

// applyDeltasLocked applies an Update's deltas and returns the slices that must be asked for again
// because their delta does not fit. It leaves out slices that did not decode: asking for such a
// slice after each of its changes would cost the server a whole slice each time. The next heartbeat
// asks for them.
//
// A delta starts from the state at u.From. The shard may already be past u.From, and a missing or
// unreadable slice may be behind its shard. The version of the result shows whether the delta
// fitted, but only if the slice is exact. A slice that is not exact therefore gets a delta only if
// it is certainly in the state at u.From.
func (c *Cache) applyDeltasLocked(s *cacheShard, u *model.Update) (missing []model.Key, err error) {
	for _, d := range u.Deltas {
		have := s.slices[d.Key()]
		if have != nil && have.ContentVersion() == d.Version {
			s.setSlice(have) // it may have been unreadable until now
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

// appliedLocked returns what an Update has done. A slice that moves between Services may for a
// moment be in two shards. It counts as removed only once no shard holds it.
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
