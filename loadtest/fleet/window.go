package fleet

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/loadtest/generate"
	"github.com/slicecast/slicecast/loadtest/report"
)

// stripes keeps nodes from waiting for each other to record a latency.
const stripes = 16

// shares of the nodes that convergence is told for, in percent.
var shares = [3]int{50, 99, 100}

// Window measures what nodes receive from the moment it is opened. With changes expected it knows what each node has to
// receive, and counts each change once on each node, at the first update that holds it or a later change of the same slice.
// Without any it counts what comes.
type Window struct {
	members []*Member
	made    time.Time
	due     []time.Time
	bySlice map[model.Key]*sliceChanges
	nodes   []nodeWindow
	// outstanding is how many changes have still to reach nodes; delivered is closed when it is 0.
	outstanding atomic.Int64
	delivered   chan struct{}
	latencies   [stripes]latencies
	// reached is how many nodes have a change, longest how long it took to any of them, in microseconds, and enough at how many of them it
	// has reached a share; reaching has the time that took, in microseconds, for each share and change. The goroutine that counts the last
	// node of a share writes it, which need not be the node that took longest.
	reached  []atomic.Int32
	longest  []atomic.Int64
	enough   [len(shares)]int32
	reaching [len(shares)][]int64
}

// sliceChanges are the changes of one slice, in their order.
type sliceChanges struct {
	triggers []int64 // ascending
	numbers  []int   // in Window.due
	removed  bool    // by the last of them
}

// nodeWindow is a node's part; its client's goroutine writes it.
type nodeWindow struct {
	mu sync.Mutex // finish may come from elsewhere
	// seen has a bit for each change.
	seen []uint64
	// changes received, all in all; objects that updates held.
	changes, objects atomic.Int64
}

// latencies are some nodes'.
type latencies struct {
	mu sync.Mutex
	// all of ordinary nodes, of slow ones, and of both since they were last taken.
	all, slow, recent *hdrhistogram.Histogram
}

// NewWindow makes a window for a group. All changes must be expected before the group opens it.
func (g *Group) NewWindow(changes []generate.Change) *Window {
	w := &Window{
		members: g.Members, made: time.Now(), bySlice: make(map[model.Key]*sliceChanges), nodes: make([]nodeWindow, len(g.Members)),
		delivered: make(chan struct{}), reached: make([]atomic.Int32, len(changes)), longest: make([]atomic.Int64, len(changes)),
	}
	for i, c := range changes {
		w.due = append(w.due, c.Due)
		s := w.bySlice[c.Key]
		if s == nil {
			s = &sliceChanges{}
			w.bySlice[c.Key] = s
		}
		s.triggers, s.numbers = append(s.triggers, c.TriggerMS), append(s.numbers, i)
		s.removed = c.Removed
	}
	for i := range w.nodes {
		w.nodes[i].seen = make([]uint64, (len(changes)+63)/64)
	}
	for i := range w.latencies {
		l := &w.latencies[i]
		l.all, l.slow, l.recent = report.NewHistogram(), report.NewHistogram(), report.NewHistogram()
	}
	for i, share := range shares {
		w.enough[i] = int32((len(g.Members)*share + 99) / 100)
		w.reaching[i] = make([]int64, len(changes))
	}
	w.outstanding.Store(int64(len(changes) * len(g.Members)))
	if len(changes) > 0 && len(g.Members) == 0 {
		close(w.delivered)
	}
	return w
}

// Delivered is closed when every node has received every change that is expected; if there is none, never.
func (w *Window) Delivered() <-chan struct{} { return w.delivered }

// Progress is how many changes have reached nodes, how many should have by now, and how many there will be (0: none is
// expected).
func (w *Window) Progress() (reached, owed, all int64) {
	nodes := int64(len(w.nodes))
	all = int64(len(w.due)) * nodes
	now := time.Now()
	due, _ := slices.BinarySearchFunc(w.due, now, time.Time.Compare)
	return all - w.outstanding.Load(), int64(due) * nodes, all
}

// Objects is how many Services and slices, changed or removed, nodes have received.
func (w *Window) Objects() (n int64) {
	for i := range w.nodes {
		n += w.nodes[i].objects.Load()
	}
	return n
}

// Behind lists the nodes that lack changes.
func (w *Window) Behind() (out []*Member) {
	for i := range w.nodes {
		if int(w.nodes[i].changes.Load()) < len(w.due) {
			out = append(out, w.members[i])
		}
	}
	return out
}

// Latencies gives the time from when each change was due to when it was applied on each node, in microseconds: of ordinary
// nodes and of slow ones. Where no changes are expected it is what the slices' last-change-trigger-times say, which are in
// milliseconds, at most, and by the clock of who set them.
func (w *Window) Latencies() (ordinary, slow *hdrhistogram.Histogram) {
	ordinary, slow = report.NewHistogram(), report.NewHistogram()
	for i := range w.latencies {
		l := &w.latencies[i]
		l.mu.Lock()
		ordinary.Merge(l.all)
		slow.Merge(l.slow)
		l.mu.Unlock()
	}
	return ordinary, slow
}

// TakeRecent gives the latencies of what was applied since it was called last.
func (w *Window) TakeRecent() *hdrhistogram.Histogram {
	out := report.NewHistogram()
	for i := range w.latencies {
		l := &w.latencies[i]
		l.mu.Lock()
		if l.recent.TotalCount() > 0 {
			out.Merge(l.recent)
			l.recent.Reset()
		}
		l.mu.Unlock()
	}
	return out
}

// Convergence gives, for each change, how long it took until half of the nodes, 99 % and all had it, in microseconds. All
// must have all.
func (w *Window) Convergence() [len(shares)][]int64 { return w.reaching }

// Received takes note of an update that a node has applied.
func (w *Window) Received(m *Member, u *model.Update, at time.Time) {
	n := &w.nodes[m.Index]
	n.mu.Lock()
	defer n.mu.Unlock()
	n.objects.Add(int64(u.Len()))
	for _, d := range u.Deltas {
		w.sliceLocked(m, d.Key(), d.LastChangeTriggerTimeMS, at)
	}
	for _, s := range u.Slices {
		w.sliceLocked(m, s.Key(), s.LastChangeTriggerTimeMS, at)
	}
	for _, key := range u.Removed {
		w.removedLocked(m, key, at)
	}
}

// Slice takes note that a node holds a slice as of a trigger time, and Removed that it holds it no more.
func (w *Window) Slice(m *Member, key model.Key, triggerMS int64, at time.Time) {
	n := &w.nodes[m.Index]
	n.mu.Lock()
	defer n.mu.Unlock()
	n.objects.Add(1)
	w.sliceLocked(m, key, triggerMS, at)
}

// Removed is beside Slice.
func (w *Window) Removed(m *Member, key model.Key, at time.Time) {
	n := &w.nodes[m.Index]
	n.mu.Lock()
	defer n.mu.Unlock()
	n.objects.Add(1)
	w.removedLocked(m, key, at)
}

// Finish takes note that a node was found to hold the state after all changes. Changes that it was never told of one by one,
// as later ones undid them before they were sent or a new stream brought whole shards, count as received only now.
func (w *Window) Finish(m *Member, at time.Time) {
	n := &w.nodes[m.Index]
	n.mu.Lock()
	defer n.mu.Unlock()
	for number := range w.due {
		w.markLocked(m, number, at)
	}
}

func (w *Window) sliceLocked(m *Member, key model.Key, triggerMS int64, at time.Time) {
	if len(w.due) == 0 {
		if triggerMS >= w.made.UnixMilli() {
			w.record(m, at.Sub(time.UnixMilli(triggerMS)))
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
	if c.removed {
		after = min(after, len(c.numbers)-1) // the slice is there
	}
	for i := after - 1; i >= 0 && w.markLocked(m, c.numbers[i], at); i-- {
	}
}

func (w *Window) removedLocked(m *Member, key model.Key, at time.Time) {
	if c := w.bySlice[key]; c != nil && c.removed {
		for i := len(c.numbers) - 1; i >= 0 && w.markLocked(m, c.numbers[i], at); i-- {
		}
	}
}

// markLocked counts a change on a node; false: it was counted, and so were those of the slice before.
func (w *Window) markLocked(m *Member, number int, at time.Time) bool {
	n := &w.nodes[m.Index]
	word, bit := number/64, uint64(1)<<(number%64)
	if n.seen[word]&bit != 0 {
		return false
	}
	n.seen[word] |= bit
	latency := max(0, at.Sub(w.due[number]))
	w.record(m, latency)
	longest := &w.longest[number]
	for l := longest.Load(); l < latency.Microseconds() && !longest.CompareAndSwap(l, latency.Microseconds()); l = longest.Load() {
	}
	reached := w.reached[number].Add(1)
	for i, enough := range w.enough {
		if reached == enough {
			w.reaching[i][number] = longest.Load()
		}
	}
	n.changes.Add(1)
	if w.outstanding.Add(-1) == 0 {
		close(w.delivered)
	}
	return true
}

func (w *Window) record(m *Member, latency time.Duration) {
	l := &w.latencies[m.Index%stripes]
	us := min(max(latency, 0), report.MaxDuration).Microseconds()
	l.mu.Lock()
	defer l.mu.Unlock()
	into := l.all
	if m.Delay > 0 {
		into = l.slow
	}
	// It is within the histogram's range, and that is the only error.
	_ = into.RecordValue(us)
	_ = l.recent.RecordValue(us)
}
