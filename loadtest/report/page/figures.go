package page

import (
	"fmt"
	"math"
	"strings"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/chart"
)

// These functions format values for charts and tables.

func millis(v float64) string  { return report.FormatValue(v, report.Millis) }
func seconds(v float64) string { return report.FormatValue(v, report.Seconds) }
func bytes(v float64) string   { return report.FormatValue(v, report.Bytes) }
func plain(v float64) string   { return fmt.Sprintf("%g", v) }

func figures(sides []side) (out []figure) {
	for _, draw := range []func([]side) (figure, bool){
		latencyDistribution, latencyOverTime, bytesPerUpdate, cpuPerUpdate, updatesOverTime, cpuOverTime, memoryOverTime, convergence,
	} {
		if f, ok := draw(sides); ok {
			out = append(out, f)
		}
	}
	return out
}

// percentiles are the ticks of the latency axis, as shares. On the axis, each further nine is one
// unit further.
var percentiles = []struct {
	share float64
	text  string
}{{0.5, "50 %"}, {0.9, "90 %"}, {0.99, "99 %"}, {0.999, "99.9 %"}, {0.9999, "99.99 %"}, {0.99999, "99.999 %"}}

// latencyOf merges the latencies of the changes phases of all repeats. If there are none, it merges
// those of resyncs, else those of cold syncs. If slow is set, it uses the latencies of the nodes
// that the scenario slows down.
func latencyOf(r *report.Report, slow bool) (report.Distribution, bool) {
	for _, kind := range []report.PhaseKind{report.Changes, report.Resync, report.ColdSync} {
		var all []report.Distribution
		for i := range r.Repeats {
			for _, p := range r.Repeats[i].Phases {
				d := &p.Latency
				if slow {
					d = p.SlowLatency
				}
				if p.Kind == kind && d != nil && d.Count > 0 {
					all = append(all, *d)
				}
			}
		}
		if d, err := report.Merge(all...); len(all) > 0 && err == nil {
			return d, true
		}
	}
	return report.Distribution{}, false
}

func latencyDistribution(sides []side) (figure, bool) {
	c := chart.Lines{
		Head: chart.Head{ID: "distribution"},
		X:    chart.Axis{Title: "share of the node-updates that took no longer"},
		Y:    chart.Axis{Title: "latency, logarithmic", Log: true, Format: millis},
	}
	t := table{Head: []string{"", "count", "min", "50 %", "90 %", "99 %", "99.9 %", "max"}}
	var words []string
	most := int64(0)
	add := func(name string, d report.Distribution) {
		h, err := d.Decode()
		if err != nil {
			return
		}
		l := chart.Line{Name: name}
		most = max(most, d.Count)
		// One point for each tenth of a nine, up to the share that one value of the distribution
		// makes up.
		for x := 0.; x <= math.Log10(float64(d.Count)); x += 0.1 {
			l.Points = append(l.Points, chart.Point{X: x, Y: float64(h.ValueAtQuantile(100*(1-math.Pow(10, -x)))) / 1000})
		}
		c.Lines = append(c.Lines, l)
		t.Rows = append(t.Rows, []string{
			name, fmt.Sprint(d.Count), millis(d.Min), millis(d.P50), millis(d.P90), millis(d.P99), millis(d.P999), millis(d.Max),
		})
		words = append(words, fmt.Sprintf("%s: 50 %% within %s, 99 %% within %s, the longest %s", name, millis(d.P50), millis(d.P99), millis(d.Max)))
	}
	for _, s := range sides {
		if d, ok := latencyOf(s.Report, false); ok {
			add(s.Name, d)
		}
		if d, ok := latencyOf(s.Report, true); ok {
			add(s.Name+", slow nodes", d)
		}
	}
	if len(c.Lines) == 0 {
		return figure{}, false
	}
	for i, p := range percentiles {
		if at := -math.Log10(1 - p.share); i == 0 || at <= math.Log10(float64(most)) {
			c.X.Ticks = append(c.X.Ticks, chart.Tick{At: at, Text: p.text})
		}
	}
	c.Title, c.Text = "Latency distribution", strings.Join(words, "; ")+"."
	return figure{
		Title: c.Title, Text: "How long node-updates took, by share, over all repeats.", Chart: c.SVG(), Table: t,
	}, true
}

// overTime is a chart of the seconds of the first repeat, with marks where phases begin.
type overTime struct {
	id, title, text, axis string
	format                func(float64) string
	log, binary           bool
	// lines are the lines of each side, in order.
	lines []line
}

type line struct {
	name string
	of   func(before, s *report.Second) float64
}

// maxRows is the maximum number of rows in the table of a chart over time. The table shows values
// at equal intervals.
const maxRows = 60

func (o overTime) draw(sides []side) (figure, bool) {
	c := chart.Lines{
		Head: chart.Head{ID: o.id, Title: o.title}, X: chart.Axis{Title: "seconds", Format: plain},
		Y: chart.Axis{Title: o.axis, Log: o.log, Binary: o.binary, Format: o.format},
	}
	var longest []report.Second // the chart has the marks of its phases
	var words []string
	for _, s := range sides {
		if len(s.Report.Repeats) == 0 || len(s.Report.Repeats[0].Series) == 0 {
			continue
		}
		first := &s.Report.Repeats[0]
		if len(first.Series) > len(longest) {
			longest = first.Series
			c.Marks = nil
			for _, p := range first.Phases {
				c.Marks = append(c.Marks, chart.Tick{At: p.StartSeconds, Text: p.Name})
			}
		}
		for _, l := range o.lines {
			name := l.name
			if len(sides) > 1 {
				name = strings.TrimSuffix(s.Name+", "+l.name, ", ")
			}
			drawn, most := chart.Line{Name: name}, 0.
			before := &report.Second{}
			for i := range first.Series {
				s := &first.Series[i]
				drawn.Points = append(drawn.Points, chart.Point{X: s.At, Y: l.of(before, s)})
				most, before = max(most, drawn.Points[i].Y), s
			}
			if most > 0 {
				c.Lines = append(c.Lines, drawn)
				words = append(words, fmt.Sprintf("%s: at most %s", name, o.format(most)))
			}
		}
	}
	if len(c.Lines) == 0 {
		return figure{}, false
	}
	c.Text = strings.Join(words, "; ") + ". Dotted lines mark the beginnings of phases."
	return figure{Title: o.title, Text: o.text, Chart: c.SVG(), Table: o.table(longest, c.Lines)}, true
}

// table returns the figures of lines at equal intervals.
func (o overTime) table(longest []report.Second, lines []chart.Line) table {
	t := table{Head: []string{"second"}, Long: true}
	for _, l := range lines {
		t.Head = append(t.Head, l.Name)
	}
	step := (len(longest) + maxRows - 1) / maxRows
	for i := 0; i < len(longest); i += step {
		row := []string{fmt.Sprintf("%.0f", longest[i].At)}
		for _, l := range lines {
			cell := ""
			if i < len(l.Points) {
				cell = o.format(l.Points[i].Y)
			}
			row = append(row, cell)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

func latencyOverTime(sides []side) (figure, bool) {
	o := overTime{
		id: "latency", title: "Latency over time", text: "Latency of the updates that nodes applied in each second of the first repeat.",
		axis: "latency, logarithmic", format: millis, log: true,
		lines: []line{
			{"p50", func(_, s *report.Second) float64 { return s.P50 }},
			{"p99", func(_, s *report.Second) float64 { return s.P99 }},
			{"max", func(_, s *report.Second) float64 { return s.Max }},
		},
	}
	if len(sides) > 1 {
		o.lines = o.lines[1:2] // only p99, so that each side has one line
	}
	return o.draw(sides)
}

func updatesOverTime(sides []side) (figure, bool) {
	rate := func(of func(*report.Second) int64) func(before, s *report.Second) float64 {
		return func(before, s *report.Second) float64 { return float64(of(s)) / (s.At - before.At) }
	}
	return overTime{
		id: "updates", title: "Node-updates over time", text: "Node-updates due because of the source's changes, " +
			"and node-updates applied, in the first repeat.",
		axis: "node-updates per second", format: func(v float64) string { return report.FormatValue(v, report.Number) },
		lines: []line{
			{"owed", rate(func(s *report.Second) int64 { return s.Sent })},
			{"applied", rate(func(s *report.Second) int64 { return s.Applied })},
		},
	}.draw(sides)
}

func cpuOverTime(sides []side) (figure, bool) {
	cores := func(of func(report.CPU) float64) func(before, s *report.Second) float64 {
		return func(before, s *report.Second) float64 { return of(s.ServerCPU) / (s.At - before.At) }
	}
	return overTime{
		id: "cpu", title: "Server CPU over time", text: "CPU cores in use in the first repeat.", axis: "cores",
		format: func(v float64) string { return fmt.Sprintf("%.2g", v) },
		lines: []line{
			{"user", cores(func(c report.CPU) float64 { return c.User })},
			{"system", cores(func(c report.CPU) float64 { return c.System })},
		},
	}.draw(sides)
}

func memoryOverTime(sides []side) (figure, bool) {
	return overTime{
		id: "memory", title: "Memory over time", text: "Resident memory of the processes in the first repeat.",
		axis: "bytes in RAM", format: bytes, binary: true,
		lines: []line{
			{"server", func(_, s *report.Second) float64 { return float64(s.ServerMemory) }},
			{"load tester", func(_, s *report.Second) float64 { return float64(s.ClientMemory) }},
		},
	}.draw(sides)
}

// bars returns a chart with one bar for each side, made of the metrics in of. ranged names the
// metric whose range is drawn, which is the sum of those metrics; if it is empty, no range is
// drawn.
func bars(sides []side, id, title, about, ranged string, names []string, of ...string) (figure, bool) {
	c := chart.Bars{Head: chart.Head{ID: id, Title: title}, Parts: names}
	t := table{Head: append([]string{""}, names...)}
	if len(of) > 1 {
		t.Head = append(t.Head, "together")
	}
	var words []string
	for _, s := range sides {
		bar := chart.Bar{Name: s.Name}
		row := []string{s.Name}
		together := 0.
		var unit report.Unit
		for _, name := range of {
			v, ok := s.Report.Summary[name]
			if !ok {
				break
			}
			bar.Parts = append(bar.Parts, v.Median)
			together += v.Median
			unit = v.Unit
			row = append(row, v.Text())
		}
		if len(bar.Parts) < len(of) {
			continue
		}
		bar.Text = report.FormatValue(together, unit)
		if r, ok := s.Report.Summary[ranged]; ok {
			bar.Low, bar.High = r.Min, r.Max
		}
		if len(of) > 1 {
			row = append(row, bar.Text)
		}
		c.Bars = append(c.Bars, bar)
		t.Rows = append(t.Rows, row)
		words = append(words, s.Name+": "+bar.Text)
	}
	if len(c.Bars) == 0 {
		return figure{}, false
	}
	c.Text = strings.Join(words, "; ") + "."
	return figure{Title: title, Text: about, Chart: c.SVG(), Table: t}, true
}

func bytesPerUpdate(sides []side) (figure, bool) {
	return bars(sides, "bytes", "Bytes per node-update", "All bytes below TLS that the connections carry while "+
		"changes are measured. The time in which nodes come back from an event is left out.", "",
		[]string{"received", "sent"}, "bytes-per-update", "sent-bytes-per-update")
}

// cpuPerUpdate returns a chart without parts if a side does not report user and system time
// separately, as an API server in an existing cluster does not.
func cpuPerUpdate(sides []side) (figure, bool) {
	const title, whole = "Server CPU per node-update", "cpu-per-update"
	for _, s := range sides {
		_, told := s.Report.Summary[whole]
		if _, divided := s.Report.Summary["cpu-user-per-update"]; told && !divided {
			return bars(sides, "cpu-each", title, "CPU time of the processes that distribute, in user mode and in the kernel together.",
				whole, []string{"user and system"}, whole)
		}
	}
	return bars(sides, "cpu-each", title,
		"CPU time of the processes that distribute, as the kernel accounts for it.", whole, []string{"user", "system"},
		"cpu-user-per-update", "cpu-system-per-update")
}

// convergence returns a chart of how long it took until a share of the nodes had a change. It shows
// the median over the changes of the first repeat.
func convergence(sides []side) (figure, bool) {
	c := chart.Bars{Head: chart.Head{ID: "convergence", Title: "Convergence"}}
	t := table{Head: []string{"nodes that have it", "median of the changes", "p99", "longest"}}
	var words []string
	for _, s := range sides {
		for i := range s.Report.Repeats[:min(1, len(s.Report.Repeats))] {
			for _, p := range s.Report.Repeats[i].Phases {
				if p.Convergence == nil || p.Kind != report.Changes {
					continue
				}
				for _, part := range []struct {
					name string
					of   report.Distribution
				}{{"50 %", p.Convergence.Nodes50}, {"99 %", p.Convergence.Nodes99}, {"all", p.Convergence.Nodes100}} {
					name := fmt.Sprintf("%s, %s: %s", s.Name, p.Name, part.name)
					c.Bars = append(c.Bars, chart.Bar{
						Name: name, Parts: []float64{part.of.P50}, Low: part.of.P50, High: part.of.Max,
						Text: millis(part.of.P50) + " to " + millis(part.of.Max),
					})
					t.Rows = append(t.Rows, []string{name, millis(part.of.P50), millis(part.of.P99), millis(part.of.Max)})
					words = append(words, name+" "+millis(part.of.P50))
				}
			}
		}
	}
	if len(c.Bars) == 0 {
		return figure{}, false
	}
	c.Text = "Median over the changes. " + strings.Join(words, "; ") + "."
	return figure{
		Title: c.Title, Text: "Time from when a change was due until a share of the nodes had it: the median over " +
			"the changes of the first repeat, up to the longest.",
		Chart: c.SVG(), Table: t,
	}, true
}
