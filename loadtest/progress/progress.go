// Package progress shows the progress of a load test. On a terminal it redraws a few lines in
// place; elsewhere it prints a line now and then.
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
	// redraw is the interval of redraws on a terminal: short enough to look alive, long enough to
	// cost nothing.
	redraw = 500 * time.Millisecond
	// line is the interval of lines on outputs that are not terminals.
	line = 3 * time.Second
	// minRateTime is the minimum time over which rates are computed.
	minRateTime = time.Second
	// defaultWidth is the width of a terminal whose width is unknown, in columns.
	defaultWidth = 80
	// barWidth is the width of a bar if there is room, in columns. If there is less room than
	// minBarWidth, no bar is drawn.
	barWidth, minBarWidth = 30, 5
	// up is the format of the sequence that moves up a number of lines on a terminal and erases
	// everything below.
	up = "\x1b[%dA\r\x1b[J"
)

// Status is the progress of a run. Values of 0 are unknown and not shown.
type Status struct {
	// Phase describes what is under way in a few words. If it is empty, nothing is shown.
	Phase string
	// NodesUp is the number of nodes in sync with a server, out of Nodes.
	NodesUp, Nodes int
	// Sent is the number of node-updates that were due since the start of the phase, out of
	// Planned. Received is the number that nodes have applied. The difference is the lag.
	Sent, Received, Planned int64
	// Bytes is the number of bytes that nodes have received since their start.
	Bytes int64
	// P50 and P99 are latencies of recent updates.
	P50, P99 time.Duration
}

// View shows progress. Its methods may be called by any goroutine.
type View struct {
	w       io.Writer
	columns func() int // nil if w is not a terminal
	start   time.Time

	// mu guards the fields below, and writes to w.
	mu     sync.Mutex
	status func() Status // nil if there is nothing to show
	phase  string
	drawn  int // number of lines that the view has drawn on the terminal
	// base is the status from which rates are computed.
	base     Status
	baseTime time.Time
	sent     float64
	received float64
	bytes    float64
}

// New returns a view that writes to w. If w is a terminal, the view redraws it in place, and all
// other output to it must go through Log.
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

// Set sets the function that returns the status from now on, or nil if there is nothing to show.
// The function is called from time to time, by one goroutine at a time, and must not call the view.
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

// Run shows the status until the context ends. It leaves the last status on the terminal.
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
			v.drawn = 0 // keep what is drawn
			v.mu.Unlock()
			return
		case now := <-t.C:
			v.mu.Lock()
			v.showLocked(now)
			v.mu.Unlock()
		}
	}
}

// Log returns a writer for the log. Its lines appear above what the view has drawn on a terminal.
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
		// A line that the terminal wraps would take more lines than are erased later.
		if r := []rune(l); len(r) >= width {
			l = string(r[:width-1])
		}
		out.WriteString(l + "\n")
	}
	v.drawn = len(lines)
	_, _ = v.w.Write(out.Bytes()) // there is no other place to report the error
}

// ratesLocked computes rates over the time since the last computation, if enough time has passed.
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

// field is one line of the view. done and all are the progress that its bar shows.
type field struct {
	name, text string
	done, all  int64
}

// fields returns everything that is known, except for the phase.
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

// bar returns a progress bar that leaves room for the text, or "" if there is too little room.
func (f field) bar(room int) string {
	width := min(barWidth, room-len("[] "))
	if f.all == 0 || width < minBarWidth {
		return ""
	}
	filled := int(min(f.done, f.all) * int64(width) / f.all)
	return "[" + strings.Repeat("#", filled) + strings.Repeat("-", width-filled) + "] "
}
