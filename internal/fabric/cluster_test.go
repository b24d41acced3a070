// This file stands for the API server: it holds the true state, and servers watch it with events
// that a test can hold back.
package fabric

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// cluster is the true state, as an API server would hold it. Each change has its own
// resourceVersion.
type cluster struct {
	mu      sync.Mutex
	version uint64
	objects map[model.Key]model.Keyed
	watches map[*watch]struct{}
}

func newCluster(objects ...model.Keyed) *cluster {
	c := &cluster{version: 1, objects: make(map[model.Key]model.Keyed), watches: make(map[*watch]struct{})}
	for _, o := range objects {
		c.objects[o.Key()] = o
	}
	return c
}

func (c *cluster) upsert(o model.Keyed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	c.objects[o.Key()] = o
	version := c.version
	c.tellLocked(func(s source.Sink) { s.Upsert(o, version) })
}

func (c *cluster) remove(key model.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	delete(c.objects, key)
	version := c.version
	c.tellLocked(func(s source.Sink) { s.Remove(key, version) })
}

// replace changes all objects of a kind at once. The watches see a new list.
func (c *cluster) replace(kind model.Kind, change func(objects map[model.Key]model.Keyed)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	change(c.objects)
	list, version := c.listLocked(kind), c.version
	c.tellLocked(func(s source.Sink) { s.Replace(kind, list, version) })
}

func (c *cluster) listLocked(kind model.Kind) []model.Keyed {
	var list []model.Keyed
	for key, o := range c.objects {
		if key.Kind == kind {
			list = append(list, o)
		}
	}
	return list
}

func (c *cluster) tellLocked(event func(source.Sink)) {
	for w := range c.watches {
		if w.held {
			w.waiting = append(w.waiting, event)
		} else {
			event(w.sink)
		}
	}
}

// state returns all objects.
func (c *cluster) state() map[model.Key]model.Keyed {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.objects)
}

// watch is a server's source, which watches the cluster. Its events can be held back.
type watch struct {
	cluster *cluster
	// The cluster's lock guards the fields below.
	sink    source.Sink
	held    bool
	waiting []func(source.Sink)
	// since is since when the watch says that it may miss events; zero if it does not say so.
	since time.Time
}

var _ source.Source = (*watch)(nil)

// Run implements source.Source.
func (w *watch) Run(ctx context.Context, sink source.Sink) error {
	c := w.cluster
	c.mu.Lock()
	w.sink = sink
	for _, kind := range []model.Kind{model.KindNode, model.KindService, model.KindSlice} {
		sink.Replace(kind, c.listLocked(kind), c.version)
	}
	sink.Synced()
	c.watches[w] = struct{}{}
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.watches, w)
	return nil
}

// Stale returns since when the watch may miss events, and why.
func (w *watch) Stale() (time.Time, string) {
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	return w.since, "the API server does not answer"
}

// cutOff holds back what happens from now on. The watch knows that, unlike in hold, and has known
// it for long.
func (w *watch) cutOff() {
	w.hold()
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	w.since = time.Now().Add(-time.Minute)
}

// recover passes on everything that was held back.
func (w *watch) recover() {
	w.release()
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	w.since = time.Time{}
}

// hold holds back what happens from now on.
func (w *watch) hold() {
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	w.held = true
}

// release passes on everything that was held back.
func (w *watch) release() {
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	for len(w.waiting) > 0 {
		w.nextLocked()
	}
	w.held = false
}

// next passes on the first event that was held back.
func (w *watch) next() {
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	w.nextLocked()
}

func (w *watch) nextLocked() {
	w.waiting[0](w.sink)
	w.waiting = w.waiting[1:]
}

func (w *watch) isHeld() bool {
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	return w.held
}
