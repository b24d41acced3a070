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

// stripes is the number of separately locked histograms. It keeps nodes from waiting for each other
// when they record latencies.
const stripes = 16

// shares are the shares of the nodes for which convergence is measured, in percent.
var shares = [3]int{50, 99, 100}

// Window measures what nodes receive from the moment at which it is opened. If changes are
// expected, it knows what each node has to receive. It counts each change once on each node: at the
// first update with this change or with a later change of the same slice. If no changes are
// expected, it counts whatever arrives.
//
// Invariants, whenever no nodeWindow is locked:
//
//  1. If a node has seen a change of a slice, it has seen all earlier changes of the slice.
//  2. outstanding is the number of expected changes that nodes have not seen, summed over nodes.
//  3. delivered is closed if and only if changes are expected and outstanding is 0.
type Window struct {
	members []*Member
	made    time.Time
	due     []time.Time
	bySlice map[model.Key]*sliceChanges
	nodes   []nodeWindow
	// outstanding and delivered follow invariants 2 and 3.
	outstanding atomic.Int64
	delivered   chan struct{}
	latencies   [stripes]latencies
	// For each change, reached is the number of nodes that have it, and longest is the longest
	// latency of these nodes, in microseconds. enough is the number of nodes that make up each
	// share. reaching is the time until a change had reached each share, in microseconds. The
	// goroutine that counts the last node of a share writes it; another node may have taken
	// longest.
	reached  []atomic.Int32
	longest  []atomic.Int64
	enough   [len(shares)]int32
	reaching [len(shares)][]int64
}

// sliceChanges are the changes of one slice, in order.
type sliceChanges struct {
	triggers []int64 // ascending trigger times
	numbers  []int   // positions in Window.due
	removed  bool    // the last change removes the slice
}

// nodeWindow is the part of one node. Its client's goroutine writes it, and Finish may do so from
// other goroutines.
type nodeWindow struct {
	mu sync.Mutex // guards seen
	// seen has one bit for each change.
	seen []uint64
	// changes counts the changes received, and objects counts the objects in updates.
	changes, objects atomic.Int64
}

type latencies struct {
	mu sync.Mutex // guards the fields below
	// all has the latencies of ordinary nodes and slow those of slow nodes. recent has those of
	// both since TakeRecent.
	all, slow, recent *hdrhistogram.Histogram
}

// NewWindow returns a window that expects the given changes. It measures nothing before Open.
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

// Delivered returns a channel that is closed when every node has received every expected change. If
// no changes are expected, it is never closed.
func (w *Window) Delivered() <-chan struct{} { return w.delivered }

// Progress returns, summed over nodes, how many changes have been received, how many were due until
// now, and how many are expected. The last is 0 if no changes are expected.
func (w *Window) Progress() (reached, owed, all int64) {
	nodes := int64(len(w.nodes))
	all = int64(len(w.due)) * nodes
	now := time.Now()
	due, _ := slices.BinarySearchFunc(w.due, now, time.Time.Compare)
	return all - w.outstanding.Load(), int64(due) * nodes, all
}

// Objects returns the number of Services and slices, changed or removed, that nodes have received.
func (w *Window) Objects() (n int64) {
	for i := range w.nodes {
		n += w.nodes[i].objects.Load()
	}
	return n
}

// Behind returns the nodes that lack changes.
func (w *Window) Behind() (out []*Member) {
	for i := range w.nodes {
		if int(w.nodes[i].changes.Load()) < len(w.due) {
			out = append(out, w.members[i])
		}
	}
	return out
}

// Latencies returns the times from when each change was due until each node applied it, in
// microseconds, for ordinary nodes and for slow nodes. If no changes are expected, it uses the
// last-change-trigger-times of slices instead of due times. Those have at most millisecond
// precision and depend on the clock of the controller.
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

// TakeRecent returns the latencies of the updates applied since the last call.
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

// Convergence returns, for each change, how long it took until 50 %, 99 % and 100 % of the nodes
// had it, in microseconds. It must not be called before all nodes have all changes.
func (w *Window) Convergence() [len(shares)][]int64 { return w.reaching }

// Received records that a node has applied an update.
func (w *Window) Received(m *Member, u *model.Update, at time.Time) {
	n := &w.nodes[m.Index]
	n.mu.Lock()
	defer n.mu.Unlock()
	n.objects.Add(int64(u.Len()))
	for _, d := range u.Deltas {
		w.objectLocked(m, d.Key(), d.LastChangeTriggerTimeMS, false, at)
	}
	for _, s := range u.Slices {
		w.objectLocked(m, s.Key(), s.LastChangeTriggerTimeMS, false, at)
	}
	for _, key := range u.Removed {
		w.objectLocked(m, key, 0, true, at)
	}
}

// Object records that a node holds an object with the given trigger time, or that it no longer
// holds the object.
func (w *Window) Object(m *Member, key model.Key, triggerMS int64, removed bool, at time.Time) {
	n := &w.nodes[m.Index]
	n.mu.Lock()
	defer n.mu.Unlock()
	n.objects.Add(1)
	w.objectLocked(m, key, triggerMS, removed, at)
}

// Finish records that a node holds the state after all changes. A node may never receive some
// changes one by one: later changes may undo them before they are sent, or a new stream may bring
// whole shards. Such changes count as received at this time.
func (w *Window) Finish(m *Member, at time.Time) {
	n := &w.nodes[m.Index]
	n.mu.Lock()
	defer n.mu.Unlock()
	for number := range w.due {
		w.markLocked(m, number, at)
	}
}

func (w *Window) objectLocked(m *Member, key model.Key, triggerMS int64, removed bool, at time.Time) {
	if len(w.due) == 0 && !removed && triggerMS >= w.made.UnixMilli() {
		w.record(m, at.Sub(time.UnixMilli(triggerMS)))
	}
	c := w.bySlice[key]
	if c == nil || removed && !c.removed {
		return
	}
	after := len(c.numbers) // number of changes that the node has
	if !removed {
		var found bool
		if after, found = slices.BinarySearch(c.triggers, triggerMS); found {
			after++
		}
		if c.removed {
			after = min(after, len(c.numbers)-1) // the slice has not been removed yet
		}
	}
	for i := after - 1; i >= 0 && w.markLocked(m, c.numbers[i], at); i-- {
	}
}

// markLocked counts a change on a node. It returns false if the change has already been counted;
// earlier changes of the slice then have been, too (invariant 1).
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
	// RecordValue fails only for values outside of the histogram's range, and this one is inside.
	_ = into.RecordValue(us)
	_ = l.recent.RecordValue(us)
}
