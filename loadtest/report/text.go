package report

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Text returns the report for people.
func (r *Report) Text() string {
	t := &text{}
	t.line("slicecast-loadtest %s, %s", r.Versions.Slicecast, r.Start.UTC().Format(time.RFC3339))
	t.line("peer            %s", r.PeerText())
	t.line("machine         %s", r.MachineText())
	t.line("scenario        %s", strings.TrimSuffix(r.Scenario.Name+": "+r.Scenario.Description, ": "))
	t.line("parameters      %s", r.ParametersText())
	t.line("nodes           %s", r.NodesText())
	if len(r.Repeats) > 0 {
		s := r.Repeats[0].State
		t.line("state           %d Services, %d slices, %d endpoints", s.Services, s.Slices, s.Endpoints)
	}
	for i := range r.Repeats {
		if len(r.Repeats) > 1 {
			t.line("repeat %d of %d", i+1, len(r.Repeats))
		}
		r.Repeats[i].writeText(t)
	}
	t.line("")
	if len(r.Repeats) > 1 {
		t.line("figures         median of %d repeats (least to most)", len(r.Repeats))
	}
	var rows [][]string
	for _, m := range Metrics {
		if s, ok := r.Summary[m.Name]; ok {
			rows = append(rows, []string{m.Name, s.Text(), m.Help})
		}
	}
	t.WriteString(Table(rows))
	t.line("")
	r.writeChecks(t)
	for _, n := range r.AllNotes() {
		t.line("note            %s", n)
	}
	return t.String()
}

func (r *Report) writeChecks(t *text) {
	for i := range r.Repeats {
		c := &r.Repeats[i].Check
		repeat := ""
		if len(r.Repeats) > 1 {
			repeat = fmt.Sprintf(", repeat %d", i+1)
		}
		switch {
		case !c.OK:
			t.line("check           FAILED%s: %s", repeat, c.Error)
		case c.Shards > 0:
			t.line("check           all %d shards of all %d nodes hold the true state%s", c.Shards, c.Nodes, repeat)
		default:
			t.line("check           all %d nodes hold the true state%s", c.Nodes, repeat)
		}
	}
}

func (r *Repeat) writeText(t *text) {
	for i := range r.Phases {
		p := &r.Phases[i]
		t.line("phase           %s (%s): %.1fs, %d updates, %s received%s", p.Name, p.Kind, p.Seconds, p.Updates,
			FormatValue(float64(p.ReceivedBytes), Bytes), cpuText("server", p.ServerCPU)+cpuText("API server", p.APIServerCPU))
		t.latency("latency", &p.Latency)
		if p.SlowLatency != nil {
			t.latency("of slow nodes", p.SlowLatency)
		}
	}
}

func (t *text) latency(what string, d *Distribution) {
	if d.Count > 0 {
		t.line("                %s p50 %s, p99 %s, max %s", what, FormatValue(d.P50, Millis), FormatValue(d.P99, Millis), FormatValue(d.Max, Millis))
	}
}

func cpuText(whose string, c *CPU) string {
	if c == nil {
		return ""
	}
	text := fmt.Sprintf(", %s CPU %s", whose, FormatValue(c.Total(), Seconds))
	if c.Undivided > 0 {
		return text
	}
	return fmt.Sprintf("%s (user %s, system %s)", text, FormatValue(c.User, Seconds), FormatValue(c.System, Seconds))
}

// PeerText returns the peer with its version and, if the run did not start it, its address.
func (r *Report) PeerText() string {
	out := string(r.Peer)
	if r.Peer == KubeAPIServer && r.Versions.KubeAPIServer != "" {
		out += " " + r.Versions.KubeAPIServer
		if r.Versions.Etcd != "" {
			out += " with etcd " + r.Versions.Etcd
		}
	}
	if r.Versions.Server != "" {
		out += " " + r.Versions.Server
	}
	if r.Server != "" {
		out += " at " + r.Server
	}
	return out
}

// MachineText describes the machine and the Go version of the load tester.
func (r *Report) MachineText() string {
	m := r.Machine
	return fmt.Sprintf("%d CPUs %s, %s, Linux %s, %s", m.CPUs, m.CPU, FormatValue(float64(m.Memory), Bytes), m.Kernel, r.Versions.Go)
}

// NodesText returns the number of nodes and, if there were several, the number of their processes.
func (r *Report) NodesText() string {
	if r.Processes > 1 {
		return fmt.Sprintf("%d in %d processes", r.Nodes, r.Processes)
	}
	return fmt.Sprint(r.Nodes)
}

// ParametersText returns the scenario's parameters as NAME=VALUE, separated by spaces.
func (r *Report) ParametersText() string {
	values := r.Scenario.flat()
	var out []string
	for _, name := range slices.Sorted(maps.Keys(values)) {
		out = append(out, name+"="+values[name])
	}
	return strings.Join(out, " ")
}

// flat returns the parameters by name, formatted for people. The name of a nested parameter follows
// its parent's name and a dot.
func (s Scenario) flat() map[string]string {
	out := make(map[string]string)
	var walk func(prefix string, m map[string]any)
	walk = func(prefix string, m map[string]any) {
		for name, v := range m {
			if inner, ok := v.(map[string]any); ok {
				walk(prefix+name+".", inner)
				continue
			}
			value, err := json.Marshal(v)
			if err != nil {
				value = fmt.Append(nil, v) // cannot happen: the value came from JSON or a scenario
			}
			out[prefix+name] = strings.Trim(string(value), `"`)
		}
	}
	walk("", s.Parameters)
	return out
}

// AllNotes returns the notes of the run and of its repeats, each once.
func (r *Report) AllNotes() []string {
	out := slices.Clone(r.Notes)
	for i := range r.Repeats {
		for _, n := range r.Repeats[i].Notes {
			if !slices.Contains(out, n) {
				out = append(out, n)
			}
		}
	}
	return out
}

type text struct{ strings.Builder }

func (t *text) line(format string, args ...any) { fmt.Fprintf(&t.Builder, format+"\n", args...) }

// Table returns a table whose columns are as wide as their widest cells.
func Table(rows [][]string) string {
	const padding = 2
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, padding, ' ', 0)
	for _, cells := range rows {
		_, _ = fmt.Fprintln(w, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
	}
	_ = w.Flush() // writes to memory do not fail
	return out.String()
}

// Text returns the median and, if the repeats differ, the range.
func (s Spread) Text() string {
	median := FormatValue(s.Median, s.Unit)
	if r := s.RangeText(); r != "" {
		return median + " (" + r + ")"
	}
	return median
}

// RangeText returns the range of the repeats. It is empty if both ends look the same once
// formatted.
func (s Spread) RangeText() string {
	low, high := FormatValue(s.Min, s.Unit), FormatValue(s.Max, s.Unit)
	if low == high {
		return ""
	}
	return low + " to " + high
}

// FormatValue formats a value with three significant digits and a unit of suitable size.
func FormatValue(v float64, unit Unit) string {
	type scale struct {
		from float64
		name string
	}
	pick := func(v float64, scales ...scale) string {
		for _, s := range scales {
			if math.Abs(v) >= s.from {
				return digits(v/s.from) + " " + s.name
			}
		}
		last := scales[len(scales)-1]
		return digits(v/last.from) + " " + last.name
	}
	switch unit {
	case Bytes:
		return pick(v, scale{1 << 40, "TiB"}, scale{1 << 30, "GiB"}, scale{1 << 20, "MiB"}, scale{1 << 10, "KiB"}, scale{1, "B"})
	case Seconds, Millis, Micros:
		seconds := v * map[Unit]float64{Seconds: 1, Millis: 1e-3, Micros: 1e-6}[unit]
		return pick(seconds, scale{1, "s"}, scale{1e-3, "ms"}, scale{1e-6, "µs"})
	case Number:
		if v == math.Trunc(v) {
			return fmt.Sprintf("%.0f", v)
		}
	}
	return digits(v)
}

// digits formats a value with three significant digits. It does not round digits before the decimal
// point.
func digits(v float64) string {
	switch a := math.Abs(v); {
	case a == 0 || a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3g", v)
}
