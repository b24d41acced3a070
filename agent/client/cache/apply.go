package cache

import (
	"fmt"
	"maps"

	"github.com/slicecast/slicecast/internal/model"
)

// MaxUnfit bounds the number of objects that do not decode. It also bounds the number of slices
// that are missing.
const MaxUnfit = 1 << 16

// Outcome is the result of applying an Update.
type Outcome struct {
	// Missing are the slices whose delta does not fit the slice that the cache holds. They stay as
	// they are and must be asked for again.
	Missing []model.Key
	// Undecoded are the slices with a delta that did not decode. They stay as they are and must be
	// asked for again.
	Undecoded []model.Key
	// Readable are the objects that did not decode before and that now decode or no longer exist.
	Readable []model.Key
	// Applied is what the Update did. It is nil unless Writer.Relay is set.
	Applied *Applied
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

// Apply applies an Update, or returns an error and applies nothing of it.
func (w *Writer) Apply(u *model.Update) (out Outcome, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.checkLocked(u); err != nil {
		return out, err
	}
	s := &w.shards[u.Shard]
	unreadable, missing := maps.Clone(s.unreadable), len(s.missing)
	removed := append(s.others(u), u.Removed...)
	for _, key := range removed {
		if o := s.remove(key); o != nil {
			w.pending.services[o.ServiceKey()] = struct{}{}
			w.countLocked(key)
		}
	}
	for _, service := range u.Services {
		if old := s.object(service.Key()); old == nil || old.ContentVersion() != service.ContentVersion() {
			w.countLocked(service.Key())
		}
		s.setService(service)
		w.pending.services[service.ServiceKey()] = struct{}{}
	}
	for _, slice := range u.Slices {
		w.changeSliceLocked(s, slice)
	}
	for _, o := range u.Unverified {
		s.setUnverified(o.Key, o.Version)
	}
	out.Missing = w.applyDeltasLocked(s, u)
	out.Undecoded = s.noteUnreadable(u.Unreadable)
	w.missing += len(s.missing) - missing
	w.unreadable += len(s.unreadable) - len(unreadable)
	for key := range unreadable {
		if _, still := s.unreadable[key]; !still {
			out.Readable = append(out.Readable, key)
		}
	}
	s.sequence = u.To
	w.movedLocked(u.Shard)
	w.seen = w.seen.Max(u.ResourceVersions)
	if w.Relay {
		out.Applied = w.appliedLocked(s, u, removed)
	}
	w.signalLocked()
	return out, nil
}

// checkLocked returns an error if an Update does not fit.
func (w *Writer) checkLocked(u *model.Update) error {
	if u.Shard >= uint32(len(w.shards)) {
		return fmt.Errorf("%w: update of shard %d of %d", ErrProtocol, u.Shard, len(w.shards))
	}
	s := &w.shards[u.Shard]
	if !u.Full && len(u.FullBuckets) == 0 && (s.sequence < u.From || s.sequence > u.To) {
		return fmt.Errorf("%w: update of shard %d from %d to %d, but the position is %d",
			ErrProtocol, u.Shard, u.From, u.To, s.sequence)
	}
	for _, bucket := range u.FullBuckets {
		if bucket >= model.Buckets {
			return fmt.Errorf("%w: update of bucket %d of %d", ErrProtocol, bucket, model.Buckets)
		}
	}
	if err := w.checkUnfitLocked(u); err != nil {
		return err
	}
	return checkShards(u, uint32(len(w.shards)))
}

// checkUnfitLocked returns an error if an Update would make too many objects unreadable, or if too
// many slices are missing already.
func (w *Writer) checkUnfitLocked(u *model.Update) error {
	if w.missing > MaxUnfit {
		return fmt.Errorf("%w: deltas of %d slices that this client does not hold", ErrProtocol, w.missing)
	}
	n := w.unreadable
	for _, o := range u.Unreadable {
		if _, known := w.shards[u.Shard].unreadable[o.Key]; !known {
			n++
		}
	}
	if n > MaxUnfit {
		return fmt.Errorf("%w: %d objects that do not decode", ErrProtocol, n)
	}
	return nil
}

// checkShards returns an error if an object of the Update is not in the shard that its Service's
// key hashes to. In another shard, no Update could ever remove it.
func checkShards(u *model.Update, shards uint32) error {
	check := func(o model.Object) error {
		if want := o.ServiceKey().Shard(shards); want != u.Shard {
			return fmt.Errorf("%w: %v came in shard %d and belongs to shard %d", ErrProtocol, o.Key(), u.Shard, want)
		}
		return nil
	}
	for _, service := range u.Services {
		if err := check(service); err != nil {
			return err
		}
	}
	for _, slice := range u.Slices {
		if err := check(slice); err != nil {
			return err
		}
	}
	return nil
}

// countLocked counts a change of an object.
func (w *Writer) countLocked(key model.Key) {
	for _, c := range []*Counts{&w.counts, &w.pending.counts} {
		if key.Kind == model.KindSlice {
			c.Slices++
		} else {
			c.Services++
		}
	}
}

// changeSliceLocked is setSliceLocked for a slice that came with an Update. If the slice differs
// from the present one, that counts as a change, and a new last-change-trigger-time as a Trigger.
// What arrives before the cache is in sync for the first time is no change that just happened.
func (w *Writer) changeSliceLocked(s *cacheShard, slice *model.Slice) {
	old := s.slices[slice.Key()]
	if old == nil || old.ContentVersion() != slice.ContentVersion() {
		w.countLocked(slice.Key())
		at := slice.LastChangeTriggerTimeMS
		isNew := at != 0 && (old == nil || old.LastChangeTriggerTimeMS != at)
		if isNew && w.inSync && !w.Relay && len(w.pending.triggers) < MaxTriggers {
			w.pending.triggers = append(w.pending.triggers, Trigger{slice.ServiceKey(), slice.Family, at})
		}
	}
	w.setSliceLocked(s, slice)
}

// setSliceLocked adds or replaces a slice. It marks the slice's Service as changed, and also the
// previous Service if the slice has moved from one to the other.
func (w *Writer) setSliceLocked(s *cacheShard, slice *model.Slice) {
	if old := s.setSlice(slice); old != nil && old.Service != slice.Service {
		w.pending.services[old.ServiceKey()] = struct{}{}
	}
	w.pending.services[slice.ServiceKey()] = struct{}{}
}

// applyDeltasLocked applies an Update's deltas and returns the slices that must be asked for again
// because their delta does not fit. It leaves out slices that did not decode: asking for such a
// slice after each of its changes would cost the server a whole slice each time. The next heartbeat
// asks for them.
//
// A delta starts from the state at u.From. The shard may already be past u.From, and a missing or
// unreadable slice may be behind its shard. The version of the result shows whether the delta
// fitted, unless the slice is unverified. An unverified slice therefore gets a delta only if it is
// certainly in the state at u.From, and the result is unverified, too.
func (w *Writer) applyDeltasLocked(s *cacheShard, u *model.Update) (missing []model.Key) {
	apply := w.ApplyDelta
	if apply == nil {
		apply = (*model.SliceDelta).Apply
	}
	for _, d := range u.Deltas {
		have := s.slices[d.Key()]
		if have != nil && s.versionOf(have) == d.Version {
			s.arrived(d.Key()) // it may have been unreadable until now
			continue
		}
		_, unverified := s.unverified[d.Key()]
		_, unreadable := s.unreadable[d.Key()]
		_, waits := s.missing[d.Key()]
		if have != nil && (!unverified || s.sequence == u.From && !unreadable && !waits) {
			slice, err := apply(d, have)
			verified := err == nil && slice.ContentVersion() == d.Version
			if verified || err == nil && unverified {
				w.changeSliceLocked(s, slice)
				if !verified {
					s.setUnverified(d.Key(), d.Version)
				}
				continue
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
	return missing
}

// appliedLocked returns what an Update has done. A slice that moves between Services may for a
// moment be in two shards. It counts as removed only once no shard holds it.
func (w *Writer) appliedLocked(s *cacheShard, u *model.Update, removed []model.Key) *Applied {
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
		if o := w.findLocked(key); o != nil {
			a.Objects = append(a.Objects, o)
		} else {
			a.Removed = append(a.Removed, key)
		}
	}
	return a
}

func (w *Writer) findLocked(key model.Key) model.Object {
	for i := range w.shards {
		if o := w.shards[i].object(key); o != nil {
			return o
		}
	}
	return nil
}
