package fleet

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/loadtest/generate"
)

const (
	// maxLatency is the most that the histograms can tell; what took longer counts as this.
	maxLatency = 10 * time.Minute
	// stripes keeps nodes from waiting for each other to record a latency.
	stripes = 16
)

// Window measures what nodes receive from the moment it is opened. With a list of changes it knows what each node has to
// receive, and counts each change once on each node, at the first update that holds it or a later change of the same slice.
// Without one it counts what comes.
type Window struct {
	opened  time.Time
	due     []time.Time
	bySlice map[model.Key]*sliceChanges
	nodes   []nodeWindow
	// outstanding is how many changes have still to reach nodes; delivered is closed when it is 0.
	outstanding atomic.Int64
	delivered   chan struct{}
	latencies   [stripes]latencies
}

// sliceChanges are the changes of one slice, in their order.
type sliceChanges struct {
	triggers []int64 // ascending
	numbers  []int   // in Window.due
}

// nodeWindow is a node's part; its client's goroutine writes it.
type nodeWindow struct {
	// seen has a bit for each change.
	seen []uint64
	// changes received, all in all; objects that updates held.
	changes, objects atomic.Int64
}

type latencies struct {
	mu        sync.Mutex
	histogram *hdrhistogram.Histogram
}

// Open starts a window; the one before ends.
func (f *Fleet) Open(changes []generate.Change) *Window {
	w := &Window{
		opened: time.Now(), bySlice: make(map[model.Key]*sliceChanges), nodes: make([]nodeWindow, len(f.nodes)),
		delivered: make(chan struct{}),
	}
	for i, c := range changes {
		w.due = append(w.due, c.Due)
		s := w.bySlice[c.Slice]
		if s == nil {
			s = &sliceChanges{}
			w.bySlice[c.Slice] = s
		}
		s.triggers, s.numbers = append(s.triggers, c.TriggerMS), append(s.numbers, i)
	}
	for i := range w.nodes {
		w.nodes[i].seen = make([]uint64, (len(changes)+63)/64)
	}
	for i := range w.latencies {
		w.latencies[i].histogram = newHistogram()
	}
	w.outstanding.Store(int64(len(changes) * len(f.nodes)))
	f.window.Store(w)
	return w
}

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, maxLatency.Microseconds(), 3) // microseconds, to three digits
}

// Delivered is closed when every node has received every change of the list; without a list, never.
func (w *Window) Delivered() <-chan struct{} { return w.delivered }

// Progress is how many changes have reached nodes, of how many in all (0: there is no list).
func (w *Window) Progress() (reached, all int64) {
	all = int64(len(w.due) * len(w.nodes))
	return all - w.outstanding.Load(), all
}

// Objects is how many Services and slices, changed or removed, nodes have received.
func (w *Window) Objects() int64 {
	var out int64
	for i := range w.nodes {
		out += w.nodes[i].objects.Load()
	}
	return out
}

// Behind names the first node that lacks changes of a window's list, and how many it lacks; 0: there is none.
func (f *Fleet) Behind(w *Window) (name string, missing int) {
	for i, n := range f.nodes {
		if missing := len(w.due) - int(w.nodes[i].changes.Load()); missing > 0 {
			return n.name, missing
		}
	}
	return "", 0
}

// Latencies gives the time from when each change was due to when it was applied on each node, in microseconds. Without a
// list of changes it is what the slices' last-change-trigger-times say, which are in milliseconds, at most, and by the
// clock of who set them.
func (w *Window) Latencies() *hdrhistogram.Histogram {
	out := newHistogram()
	for i := range w.latencies {
		l := &w.latencies[i]
		l.mu.Lock()
		out.Merge(l.histogram)
		l.mu.Unlock()
	}
	return out
}

func (w *Window) received(node int, u *model.Update, at time.Time) {
	w.nodes[node].objects.Add(int64(u.Len()))
	for _, d := range u.Deltas {
		w.slice(node, d.Key(), d.LastChangeTriggerTimeMS, at)
	}
	for _, s := range u.Slices {
		w.slice(node, s.Key(), s.LastChangeTriggerTimeMS, at)
	}
}

// slice takes note that a node holds a slice as of a trigger time.
func (w *Window) slice(node int, key model.Key, triggerMS int64, at time.Time) {
	if len(w.due) == 0 {
		if triggerMS >= w.opened.UnixMilli() {
			w.record(node, at.Sub(time.UnixMilli(triggerMS)))
		}
		return
	}
	c := w.bySlice[key]
	if c == nil {
		return
	}
	after, found := slices.BinarySearch(c.triggers, triggerMS)
	if found {
		after++
	}
	seen := w.nodes[node].seen
	for i := after - 1; i >= 0; i-- {
		number := c.numbers[i]
		word, bit := number/64, uint64(1)<<(number%64)
		if seen[word]&bit != 0 {
			break // and so are those before
		}
		seen[word] |= bit
		w.record(node, at.Sub(w.due[number]))
		w.nodes[node].changes.Add(1)
		if w.outstanding.Add(-1) == 0 {
			close(w.delivered)
		}
	}
}

func (w *Window) record(node int, latency time.Duration) {
	l := &w.latencies[node%stripes]
	l.mu.Lock()
	defer l.mu.Unlock()
	// It is within the histogram's range, and that is the only error.
	_ = l.histogram.RecordValue(min(max(latency, 0), maxLatency).Microseconds())
}
