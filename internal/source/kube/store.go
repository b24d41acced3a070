package kube

import (
	"fmt"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

var (
	_ cache.TransformingStore      = (*resource)(nil)
	_ cache.ReflectorBookmarkStore = (*resource)(nil)
)

// converted is an object as the reflector stores it while a streamed list is incomplete.
type converted struct {
	key    model.Key
	object model.Keyed // nil if it is left out
	skips  []source.Skip
	// version is the object's resourceVersion.
	version uint64
}

func (r *resource) convert(o any) converted {
	if c, ok := o.(converted); ok {
		return c
	}
	m := o.(metav1.Object)
	key, object, skips := r.converter.Convert(m)
	return converted{key, object, skips, source.ResourceVersion(m)}
}

// Transformer implements cache.TransformingStore.
func (r *resource) Transformer() cache.TransformFunc {
	return func(o any) (any, error) {
		r.contact.streamed(time.Now())
		return r.convert(o), nil
	}
}

// Add implements cache.ReflectorStore.
func (r *resource) Add(o any) error {
	r.objects++
	return r.Update(o)
}

// Update implements cache.ReflectorStore. An object that is left out is removed, as an earlier
// version may not have been left out.
func (r *resource) Update(o any) error {
	c := r.convert(o)
	r.saw(c.version)
	r.skips.Set(c.key, c.skips)
	if c.object == nil {
		r.sink.Remove(c.key, c.version)
	} else {
		r.sink.Upsert(c.object, c.version)
	}
	return nil
}

// Delete implements cache.ReflectorStore.
func (r *resource) Delete(o any) error {
	r.objects--
	m := o.(metav1.Object)
	key, rv := model.Key{Kind: r.kind, Namespace: m.GetNamespace(), Name: m.GetName()}, source.ResourceVersion(m)
	r.saw(rv)
	r.skips.Set(key, nil)
	r.sink.Remove(key, rv)
	return nil
}

// Bookmark implements cache.ReflectorBookmarkStore.
func (r *resource) Bookmark(resourceVersion string) error {
	rv, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err == nil {
		r.saw(rv)
		r.sink.Progress(r.kind, rv)
	}
	return nil
}

// Replace implements cache.ReflectorStore. The reflector only calls it with complete lists. Objects
// that are not in the list are removed from every node, so Replace refuses implausible lists.
func (r *resource) Replace(list []any, resourceVersion string) error {
	r.listEnd = time.Now()
	rv, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err != nil || rv == 0 {
		return r.refuse(fmt.Errorf(
			"list has the invalid resourceVersion %q: is there a proxy in front of the API server?", resourceVersion))
	}
	if rv < r.highest {
		// The API server answers with a list at least as new as what was last seen, unless that
		// state is lost: etcd was restored from a backup, or this is another cluster. run finds out.
		r.doubted, r.listEnd = true, time.Time{} // the next list need not wait
		return r.refuse(fmt.Errorf(
			"list at resourceVersion %d is older than resourceVersion %d, which was seen before", rv, r.highest))
	}
	objects := make([]model.Keyed, 0, len(list))
	skips := map[model.Key][]source.Skip{}
	missed := len(list) != r.objects
	for i, o := range list {
		c := r.convert(o)
		list[i] = nil // a paged list holds whole objects, so each is released after its conversion
		missed = missed || c.version > r.highest
		if c.object != nil {
			objects = append(objects, c.object)
		}
		if len(c.skips) > 0 {
			skips[c.key] = c.skips
		}
	}
	r.skips.Replace(skips, r.kind)
	r.sink.Replace(r.kind, objects, rv)
	missed = missed && r.plain.Load() && !r.contact.isStreaming() // the watch was open until now
	if r.contact.complete(time.Now(), missed) {
		r.metrics.errors.WithLabelValues(r.kind.String(), "watch").Inc()
		r.log.Warn("The API server's watch stands still, listing again and again until it goes on",
			"highest", r.highest, "listed", rv, "interval", stillTime)
	}
	r.highest, r.objects = rv, len(list)
	r.plain.Store(false)
	r.metrics.lists.WithLabelValues(r.kind.String()).Inc()
	r.touch()
	r.done()
	return nil
}

// Resync implements cache.ReflectorStore. It does nothing.
func (r *resource) Resync() error { return nil }

func (r *resource) saw(rv uint64) {
	if rv > r.highest { // a bookmark that repeats what is known is no news
		r.highest = rv
		r.contact.hear(time.Now())
		r.touch()
	}
}

// touch sets the time of the last event to now.
func (r *resource) touch() { r.metrics.lastEvent.WithLabelValues(r.kind.String()).SetToCurrentTime() }

// refuse reports a list that is not accepted, and returns err, which makes the reflector try again.
// It stops the watch of a streamed list, as the reflector would leave it open.
func (r *resource) refuse(err error) error {
	r.contact.refuse(time.Now(), err)
	r.metrics.errors.WithLabelValues(r.kind.String(), "replace").Inc()
	r.log.Warn("Refused a list from the API server, keeping the current state and trying again", "err", err)
	if r.watch != nil {
		r.watch.Stop()
	}
	return err
}
