// Package sourcetest provides a sink for the tests of sources.
package sourcetest

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source"
)

// Recorder is a sink that stores what it is given, and records the changes. It panics if the Sink's
// contract is broken.
type Recorder struct {
	calls [model.KindNode + 1]sync.Mutex // each is held during a call for the kind

	mu       sync.Mutex // guards the fields below
	objects  map[model.Key]model.Keyed
	replaced map[model.Kind]int
	synced   int
	changes  []string
	highest  uint64
}

var _ source.Sink = (*Recorder)(nil)

// New returns an empty Recorder.
func New() *Recorder {
	return &Recorder{objects: map[model.Key]model.Keyed{}, replaced: map[model.Kind]int{}}
}

// enter begins a call for a kind, and panics if another one is in progress.
func (r *Recorder) enter(kind model.Kind) (leave func()) {
	if !r.calls[kind].TryLock() {
		panic(fmt.Sprintf("two calls for %s at once", kind))
	}
	r.mu.Lock()
	return func() {
		r.mu.Unlock()
		r.calls[kind].Unlock()
	}
}

// Upsert implements source.Sink.
func (r *Recorder) Upsert(o model.Keyed, resourceVersion uint64) {
	defer r.enter(o.Key().Kind)()
	r.put(o)
	r.highest = max(r.highest, resourceVersion)
}

// Remove implements source.Sink.
func (r *Recorder) Remove(key model.Key, resourceVersion uint64) {
	defer r.enter(key.Kind)()
	r.drop(key)
	r.highest = max(r.highest, resourceVersion)
}

// Replace implements source.Sink.
func (r *Recorder) Replace(kind model.Kind, objects []model.Keyed, resourceVersion uint64) {
	defer r.enter(kind)()
	now := map[model.Key]bool{}
	for _, o := range objects {
		if o.Key().Kind != kind {
			panic(fmt.Sprintf("%s in a Replace of %s", o.Key(), kind))
		}
		now[o.Key()] = true
		r.put(o)
	}
	for key := range maps.Clone(r.objects) {
		if key.Kind == kind && !now[key] {
			r.drop(key)
		}
	}
	r.replaced[kind]++
	r.highest = max(r.highest, resourceVersion)
}

// Progress implements source.Sink.
func (r *Recorder) Progress(_ model.Kind, resourceVersion uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.highest = max(r.highest, resourceVersion)
}

// Synced implements source.Sink.
func (r *Recorder) Synced() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.replaced) != 3 {
		panic(fmt.Sprintf("Synced after Replace of %d kinds, want 3", len(r.replaced)))
	}
	if r.synced++; r.synced > 1 {
		panic("Synced twice")
	}
}

func (r *Recorder) put(o model.Keyed) {
	old := r.objects[o.Key()]
	r.objects[o.Key()] = o
	switch {
	case old == nil:
		r.changes = append(r.changes, "add "+o.Key().String())
	case !same(old, o):
		r.changes = append(r.changes, "change "+o.Key().String())
	}
}

func (r *Recorder) drop(key model.Key) {
	if r.objects[key] != nil {
		delete(r.objects, key)
		r.changes = append(r.changes, "remove "+key.String())
	}
}

func same(a, b model.Keyed) bool {
	if a, ok := a.(*model.Node); ok {
		return a.Equal(b.(*model.Node))
	}
	return a.(model.Object).ContentVersion() == b.(model.Object).ContentVersion()
}

// IsSynced reports whether Synced was called.
func (r *Recorder) IsSynced() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.synced > 0
}

// Changes returns the changes since its last call in order, such as "remove Service default/web".
func (r *Recorder) Changes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.changes
	r.changes = nil
	return c
}

// Get returns an object, or nil.
func (r *Recorder) Get(key model.Key) model.Keyed {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.objects[key]
}

// Keys returns the keys of the objects of these kinds, in order.
func (r *Recorder) Keys(kinds ...model.Kind) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	keys := []string{}
	for _, key := range slices.SortedFunc(maps.Keys(r.objects), model.Key.Compare) {
		if slices.Contains(kinds, key.Kind) {
			keys = append(keys, key.String())
		}
	}
	return keys
}

// Objects returns all objects that the sink holds.
func (r *Recorder) Objects() map[model.Key]model.Keyed {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.objects)
}

// Replaced returns how often Replace was called for a kind.
func (r *Recorder) Replaced(kind model.Kind) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.replaced[kind]
}

// Highest returns the highest resourceVersion that the sink was given.
func (r *Recorder) Highest() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.highest
}

// Difference describes how the objects of two sinks or clusters differ. It is empty if they are the
// same.
func Difference(have, want map[model.Key]model.Keyed) []string {
	var diff []string
	for key, w := range want {
		if h := have[key]; h == nil {
			diff = append(diff, "missing "+key.String())
		} else if !same(h, w) {
			diff = append(diff, "different "+key.String())
		}
	}
	for key := range have {
		if want[key] == nil {
			diff = append(diff, "unexpected "+key.String())
		}
	}
	slices.Sort(diff)
	return diff
}
