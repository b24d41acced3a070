// Package progress tells who waits for a load test how it goes: on a terminal in a few lines that are redrawn in place,
// elsewhere in a line now and then.
package progress

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/slicecast/slicecast/loadtest/report"
)

const (
	// redraw is often enough for a terminal to look alive, and rarely enough to cost nothing.
	redraw = 500 * time.Millisecond
	// line is how often others than terminals get a line.
	line = 3 * time.Second
	// minRateTime is the least time that rates are computed over.
	minRateTime = time.Second
	// defaultWidth is that of a terminal that does not tell.
	defaultWidth = 80
	// barWidth is how wide a bar is where there is room, minBarWidth how wide at least.
	barWidth, minBarWidth = 30, 5
	// up goes up so many lines on a terminal and erases all from there on.
	up = "\x1b[%dA\r\x1b[J"
)

// Status is how things stand. What is not known is 0 and not shown.
type Status struct {
	// Phase is what is under way, in a few words; empty: nothing that is worth a line.
	Phase string
	// NodesUp of Nodes are in sync with a server.
	NodesUp, Nodes int
	// Sent is how many node-updates the source has owed to nodes since the phase began, of Planned in all; Received is how many
	// of them nodes have applied. The difference is the lag.
	Sent, Received, Planned int64
	// Bytes that nodes have received since they were started.
	Bytes int64
	// P50 and P99 of what nodes applied lately.
	P50, P99 time.Duration
}

// View shows statuses. Its methods may be called by any goroutine.
type View struct {
	w       io.Writer
	columns func() int // nil: w is no terminal
	start   time.Time

	// mu guards what follows, and writes to w.
	mu     sync.Mutex
	status func() Status // nil: nothing to say
	phase  string
	drawn  int // lines on the terminal that are the view's
	// base is what rates are computed from.
	base     Status
	baseTime time.Time
	sent     float64
	received float64
	bytes    float64
}

// New makes a view. A terminal is redrawn in place; it must get no other output than what goes through Log.
func New(w io.Writer) *View {
	v := &View{w: w, start: time.Now()}
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return v
	}
	v.columns = func() int {
		width, _, err := term.GetSize(int(f.Fd()))
		if err != nil || width < 1 {
			return defaultWidth
		}
		return width
	}
	return v
}

// Start is when the view was made: the zero of the times that it shows.
func (v *View) Start() time.Time { return v.start }

// Set says what is under way from now on; nil: nothing. The function is called from time to time, by one goroutine at a time,
// and must not call the view.
func (v *View) Set(status func() Status) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.status = status
	if status == nil {
		v.eraseLocked()
		return
	}
	v.showLocked(time.Now())
}

// Run shows what is under way until the context ends, and leaves the last of it.
func (v *View) Run(ctx context.Context) {
	every := line
	if v.columns != nil {
		every = redraw
	}
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			v.mu.Lock()
			v.drawn = 0 // what is there stays
			v.mu.Unlock()
			return
		case now := <-t.C:
			v.mu.Lock()
			v.showLocked(now)
			v.mu.Unlock()
		}
	}
}

// Log gives a writer for the log: its lines come above what the terminal shows.
func (v *View) Log() io.Writer { return logWriter{v} }

type logWriter struct{ view *View }

// Write implements io.Writer.
func (l logWriter) Write(b []byte) (int, error) {
	v := l.view
	v.mu.Lock()
	defer v.mu.Unlock()
	v.eraseLocked()
	n, err := v.w.Write(b)
	if v.columns != nil && v.status != nil && bytes.HasSuffix(b, []byte("\n")) {
		v.showLocked(time.Now())
	}
	return n, err
}

// eraseLocked takes away what the view has drawn.
func (v *View) eraseLocked() {
	if v.drawn > 0 {
		fmt.Fprintf(v.w, up, v.drawn)
		v.drawn = 0
	}
}

func (v *View) showLocked(now time.Time) {
	if v.status == nil {
		return
	}
	s := v.status()
	if s.Phase == "" {
		return
	}
	v.ratesLocked(s, now)
	head, rest := fmt.Sprintf("%5.0fs  %s", now.Sub(v.start).Seconds(), s.Phase), v.fields(s)
	if v.columns == nil {
		for i, f := range rest {
			head += []string{": ", "; "}[min(i, 1)] + f.name + " " + f.text
		}
		fmt.Fprintln(v.w, head)
		return
	}
	width := v.columns()
	lines := []string{head}
	for _, f := range rest {
		name := fmt.Sprintf("        %-8s ", f.name)
		lines = append(lines, name+f.bar(width-1-len(name)-len(f.text))+f.text)
	}
	var out bytes.Buffer
	if v.drawn > 0 {
		fmt.Fprintf(&out, up, v.drawn)
	}
	for _, l := range lines {
		// A line that is broken by the terminal would be more than the one that is erased.
		if r := []rune(l); len(r) >= width {
			l = string(r[:width-1])
		}
		out.WriteString(l + "\n")
	}
	v.drawn = len(lines)
	_, _ = v.w.Write(out.Bytes()) // there is nobody to tell
}

// ratesLocked computes rates over the time since the last ones, if that is long enough.
func (v *View) ratesLocked(s Status, now time.Time) {
	if s.Phase != v.phase || s.Sent < v.base.Sent || s.Received < v.base.Received || s.Bytes < v.base.Bytes {
		v.phase, v.base, v.baseTime = s.Phase, s, now
		v.sent, v.received, v.bytes = 0, 0, 0
		return
	}
	passed := now.Sub(v.baseTime)
	if passed < minRateTime {
		return
	}
	rate := func(before, after int64) float64 { return float64(after-before) / passed.Seconds() }
	v.sent, v.received, v.bytes = rate(v.base.Sent, s.Sent), rate(v.base.Received, s.Received), rate(v.base.Bytes, s.Bytes)
	v.base, v.baseTime = s, now
}

// field is one thing that is known, and how much of all is done of it.
type field struct {
	name, text string
	done, all  int64
}

// fields says all that is known beside the phase.
func (v *View) fields(s Status) (out []field) {
	add := func(name, format string, args ...any) {
		out = append(out, field{name: name, text: fmt.Sprintf(format, args...)})
	}
	done := func(done, all int64) { out[len(out)-1].done, out[len(out)-1].all = done, all }
	if s.Nodes > 0 {
		add("nodes", "%d of %d in sync", s.NodesUp, s.Nodes)
		done(int64(s.NodesUp), int64(s.Nodes))
	}
	if s.Planned > 0 {
		add("updates", "%d sent, %d received of %d, lag %d", s.Sent, s.Received, s.Planned, s.Sent-s.Received)
		done(s.Received, s.Planned)
	} else if s.Received > 0 {
		add("updates", "%d received", s.Received)
	}
	if v.sent+v.received+v.bytes > 0 {
		add("rates", "%.0f/s sent, %.0f/s received, %s/s", v.sent, v.received, report.FormatValue(v.bytes, report.Bytes))
	}
	if s.P99 > 0 {
		millis := func(d time.Duration) string { return report.FormatValue(float64(d.Microseconds())/1000, report.Millis) }
		add("latency", "p50 %s, p99 %s", millis(s.P50), millis(s.P99))
	}
	return out
}

// bar is one for terminals, with room for so many columns: what it stands before counts for more.
func (f field) bar(room int) string {
	width := min(barWidth, room-len("[] "))
	if f.all == 0 || width < minBarWidth {
		return ""
	}
	filled := int(min(f.done, f.all) * int64(width) / f.all)
	return "[" + strings.Repeat("#", filled) + strings.Repeat("-", width-filled) + "] "
}
