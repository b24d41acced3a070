package performance

import (
	_ "embed"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"text/template"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/chart"
)

// Files that are generated from the reports, relative to the module's root.
const (
	PageFile  = "docs/performance.md"
	ChartFile = "docs/performance.svg"
)

//go:embed page.md.tmpl
var pageSource string

// commandList has a line for each report: its name, a colon and the command. make bench runs the
// commands.
//
//go:embed commands.txt
var commandList string

// value is a figure in the page.
type value struct {
	report.Spread
	// share means that the value is a ratio of two figures.
	share bool
}

// String returns the figure, with the range of its repeats if they differ.
func (v value) String() string {
	switch {
	case !v.share:
		return v.Text()
	case shareText(v.Min) == shareText(v.Max):
		return shareText(v.Median)
	}
	return fmt.Sprintf("%s (%s to %s)", shareText(v.Median), shareText(v.Min), shareText(v.Max))
}

// shareText formats a ratio as a fraction or as a multiple.
func shareText(v float64) string {
	if v < 1 {
		return "1/" + report.FormatValue(1/v, report.Number)
	}
	return report.FormatValue(v, report.Number) + " times"
}

// bounded returns the table cells of a bound and of a figure. The second cell says so if the figure
// does not keep the bound in all repeats.
func bounded(v value, bound string) (string, error) {
	b, err := report.ParseBound(bound, v.Unit)
	if err != nil {
		return "", err
	}
	text := b.Text
	if v.share {
		text = strings.Replace(text, report.FormatValue(b.Value, report.Number), shareText(b.Value), 1)
	}
	missed := 0
	for _, run := range v.Values {
		if !b.Keeps(run) {
			missed++
		}
	}
	switch {
	case b.Keeps(v.Max):
		return fmt.Sprintf("%s | %s", text, v), nil
	case b.Keeps(v.Median) && missed > 0:
		return fmt.Sprintf("%s | %s, **missed in %d of %d runs**", text, v, missed, len(v.Values)), nil
	}
	return fmt.Sprintf("%s | %s, **missed**", text, v), nil
}

// functions returns the functions that the page's template may call. Each fails for a figure that
// was not measured, so that no figure is missing silently.
func (m *Measured) functions() template.FuncMap {
	return template.FuncMap{
		"fig": func(name, metric string) (value, error) {
			s, err := m.Figure(name, metric)
			return value{Spread: s}, err
		},
		"bound": bounded,
		"minus": func(a value, others ...value) (value, error) {
			for _, o := range others {
				if o.Unit != a.Unit {
					return value{}, fmt.Errorf("%q minus %q", a.Unit, o.Unit)
				}
				a = a.minus(o)
			}
			return a, nil
		},
		"watches": m.watches,
		"times": func(n float64, a value) value {
			return value{Spread: report.Spread{Unit: a.Unit, Median: n * a.Median, Min: n * a.Min, Max: n * a.Max}}
		},
		// share returns the ratio of the medians. Its range covers the ratios of any repeat of one
		// to any repeat of the other.
		"share": func(a, of value) (value, error) {
			if of.Min <= 0 {
				return value{}, fmt.Errorf("a ratio to %v, which may be 0", of)
			}
			return value{share: true, Spread: report.Spread{
				Unit: report.Number, Median: a.Median / of.Median, Min: a.Min / of.Max, Max: a.Max / of.Min,
			}}, nil
		},
		"bench": func(name, benchmark, unit string) (string, error) {
			v, err := m.Bench(name, benchmark, unit)
			return thousands(v), err
		},
		// each returns the time of one operation, from the number of operations per second of a
		// benchmark.
		"each": func(name, benchmark, unit string) (value, error) {
			v, err := m.Bench(name, benchmark, unit)
			return single(report.Micros, 1e6/v), err
		},
		"has": func(names ...string) bool {
			return !slices.ContainsFunc(names, func(name string) bool { return m.Reports[name] == nil })
		},
		"machine":   m.machine,
		"versions":  m.versions,
		"repeats":   m.repeats,
		"played":    m.played,
		"most":      m.most,
		"notes":     m.notes,
		"commands":  m.commands,
		"endpoints": endpoints,
		"directory": func() string { return Directory },
		"list":      func(items ...string) []string { return items },
	}
}

// minus returns the difference of the medians. Its range covers the differences of any repeat of
// one and any repeat of the other.
func (v value) minus(o value) value {
	return value{Spread: report.Spread{Unit: v.Unit, Median: v.Median - o.Median, Min: v.Min - o.Max, Max: v.Max - o.Min}}
}

// watches returns the server CPU in a report of an API server without the writes of the changes.
// The writes cost as much as all CPU time in the report of the same changes with one watcher. If
// the metric is per node-update, each node's share of the writes is subtracted.
func (m *Measured) watches(name, one, metric string) (value, error) {
	all, err := m.Figure(name, metric)
	if err != nil {
		return value{}, err
	}
	writes, err := m.Figure(one, metric)
	if err != nil {
		return value{}, err
	}
	if metric == perUpdate {
		nodes := float64(m.Reports[name].Nodes)
		writes.Median, writes.Min, writes.Max = writes.Median/nodes, writes.Min/nodes, writes.Max/nodes
	}
	return value{Spread: all}.minus(value{Spread: writes}), nil
}

// perUpdate is the metric of server CPU per node-update.
const perUpdate = "cpu-per-update"

// machine returns the description of the machine of all measurements.
func (m *Measured) machine() (string, error) {
	text, err := m.common("the machine", func(r *report.Report) string { return r.MachineText() })
	for name, results := range m.Benches {
		for _, r := range results {
			if cpu := r.GetConfig("cpu"); err == nil && !strings.Contains(text, cpu) {
				return "", fmt.Errorf("%s was measured on a machine with %s, but the reports on one with %s: run make bench for all of them", name, cpu, text)
			}
		}
	}
	return text, err
}

// common returns a text that must be equal in all reports. Figures of different machines, for
// example, cannot be compared.
func (m *Measured) common(what string, of func(*report.Report) string) (string, error) {
	var all []string
	for _, r := range m.Reports {
		if s := of(r); !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	if len(all) != 1 {
		slices.Sort(all)
		return "", fmt.Errorf("%s differs between reports, run make bench for all of them: %s", what, strings.Join(all, "; "))
	}
	return all[0], nil
}

// single returns a figure without a range.
func single(unit report.Unit, v float64) value {
	return value{Spread: report.Spread{Unit: unit, Median: v, Min: v, Max: v}}
}

// versions returns the version that was measured. If there are several, it says which reports have
// which.
func (m *Measured) versions() string {
	of := make(map[string][]string)
	for _, name := range slices.Sorted(maps.Keys(m.Reports)) {
		v := m.Reports[name].Versions.Slicecast
		of[v] = append(of[v], "`"+name+"`")
	}
	if len(of) == 1 {
		return "Slicecast " + slices.Collect(maps.Keys(of))[0]
	}
	var out []string
	for _, v := range slices.Sorted(maps.Keys(of)) {
		out = append(out, fmt.Sprintf("%s in %s", v, strings.Join(of[v], ", ")))
	}
	return "**Not all of the same** Slicecast: " + strings.Join(out, "; ")
}

// repeats says how often the load tests were run.
func (m *Measured) repeats() string {
	least, most := math.MaxInt, 0
	for _, r := range m.Reports {
		least, most = min(least, len(r.Repeats)), max(most, len(r.Repeats))
	}
	switch {
	case most <= 1:
		return "One run each, so there is no spread"
	case least == most:
		return fmt.Sprintf("%d runs each: the median and, in parentheses, the least and the most", most)
	}
	return fmt.Sprintf("%d to %d runs each: the median and, in parentheses, the least and the most", least, most)
}

// thousands formats a number with commas. Values of benchmarks have no unit that could be scaled
// instead.
func thousands(v float64) string {
	s := report.FormatValue(v, report.Number)
	whole, fraction, _ := strings.Cut(s, ".")
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return whole
}

// Command is a command that produces a report.
type Command struct{ Name, Command string }

// Bench reports whether the command is a Go benchmark rather than a load test.
func (c Command) Bench() bool { return strings.HasPrefix(c.Command, "go test ") }

// File returns the name of the report's file.
func (c Command) File() string {
	if c.Bench() {
		return c.Name + ".txt"
	}
	return c.Name + ".json"
}

// Commands returns the commands that make bench runs.
func Commands() (out []Command) {
	for line := range strings.Lines(commandList) {
		name, c, _ := strings.Cut(strings.TrimSpace(line), ": ")
		out = append(out, Command{name, c})
	}
	return out
}

// commands returns the commands whose reports exist.
func (m *Measured) commands() []Command {
	return slices.DeleteFunc(Commands(), func(c Command) bool { return m.Reports[c.Name] == nil && m.Benches[c.Name] == nil })
}

// row is a report in the page's table of all scenarios.
type row struct{ Name, Scenario, Peer, Nodes, Latency, Bytes, CPU, Time, Memory string }

// played returns the rows for all reports, by scenario, nodes and peer.
func (m *Measured) played() (out []row) {
	var names []string
	for name := range m.Reports {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		x, y := m.Reports[a], m.Reports[b]
		if c := strings.Compare(x.Scenario.Name, y.Scenario.Name); c != 0 {
			return c
		}
		if x.Nodes != y.Nodes {
			return x.Nodes - y.Nodes
		}
		return strings.Compare(string(y.Peer)+b, string(x.Peer)+a)
	})
	for _, name := range names {
		r := m.Reports[name]
		text := func(metrics ...string) string {
			var parts []string
			for _, metric := range metrics {
				if s, ok := r.Summary[metric]; ok {
					parts = append(parts, s.Text())
				}
			}
			return strings.Join(parts, " / ")
		}
		out = append(out, row{
			Name: name, Scenario: r.Scenario.Name, Peer: string(r.Peer), Nodes: fmt.Sprint(r.Nodes),
			Latency: text("p50", "p99"), Bytes: text("bytes-per-update"), CPU: text("cpu-per-update"),
			Time: text("changes-time", "resync-time"), Memory: text("server-peak"),
		})
	}
	return out
}

// note is a note for readers of figures, with the names of the reports that have it.
type note struct{ Text, Reports string }

// notes returns the notes of all reports, each once.
func (m *Measured) notes() (out []note) {
	of := make(map[string][]string)
	for _, name := range slices.Sorted(maps.Keys(m.Reports)) {
		for _, text := range m.Reports[name].AllNotes() {
			of[text] = append(of[text], "`"+name+"`")
		}
	}
	for _, text := range slices.Sorted(maps.Keys(of)) {
		out = append(out, note{text, strings.Join(of[text], ", ")})
	}
	return out
}

// Page returns the content of docs/performance.md.
func (m *Measured) Page() (string, error) {
	t, err := template.New("page").Option("missingkey=error").Funcs(m.functions()).Parse(pageSource)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	if err := t.Execute(&out, nil); err != nil {
		return "", err
	}
	return out.String(), nil
}

// pair names the reports that a chart compares, one of each peer, and what the chart shows.
type pair struct {
	heading              string
	apiServer, slicecast string
	// one is the API server's report of the same changes with one watcher.
	one string
	// metrics are the metrics of bytes and server CPU, and words are their descriptions.
	metrics, words [2]string
}

// pairs are the pairs that README.md's chart may show, the best first.
var pairs = []pair{
	headline(3000),
	headline(1000),
	{
		"An endpoint of a slice of 100 flips: what each of 3000 nodes costs", "apiserver-steady-3000", "steady-3000", "apiserver-steady-1",
		[2]string{"bytes-per-update", perUpdate}, [2]string{"bytes to a node", "server CPU for a node"},
	},
}

func headline(nodes int) pair {
	name := fmt.Sprintf("headline-%d", nodes)
	return pair{
		fmt.Sprintf("5000 pods behind one Service are replaced, %d nodes", nodes), "apiserver-" + name, name, "apiserver-headline-1",
		[2]string{"changes-bytes", "changes-cpu"}, [2]string{"bytes to all nodes", "server CPU"},
	}
}

// Chart returns the chart of README.md. It compares Slicecast with the API server's watches, for
// the headline if that was measured. Bars of bytes and bars of CPU time are scaled separately,
// relative to the largest of each.
func (m *Measured) Chart() (string, error) {
	p := pairs[len(pairs)-1]
	for _, better := range pairs {
		if m.Reports[better.apiServer] != nil && m.Reports[better.slicecast] != nil {
			p = better
			break
		}
	}
	c := chart.Bars{Head: chart.Head{ID: "headline", Title: p.heading}, Heading: p.heading}
	var words []string
	for i, metric := range p.metrics {
		ours, err := m.Figure(p.slicecast, metric)
		if err != nil {
			return "", err
		}
		theirs, whose, err := m.theirs(p, metric)
		if err != nil {
			return "", err
		}
		most := max(ours.Median, theirs.Median)
		for color, side := range []struct {
			name string
			report.Spread
		}{{"Slicecast", ours}, {whose, theirs}} {
			name, text := p.words[i]+", "+side.name, report.FormatValue(side.Median, side.Unit)
			c.Bars = append(c.Bars, chart.Bar{Name: name, Parts: []float64{side.Median / most}, Text: text, Color: color})
			words = append(words, name+": "+text)
		}
	}
	c.Text = strings.Join(words, "; ") + "."
	return chart.File(c.SVG()), nil
}

// theirs returns a figure of the API server in a pair, and a description of what it covers. Its CPU
// time includes the writes of the changes if these were not measured separately.
func (m *Measured) theirs(p pair, metric string) (report.Spread, string, error) {
	switch {
	case metric == p.metrics[0]:
		s, err := m.Figure(p.apiServer, metric)
		return s, "kube-apiserver", err
	case m.Reports[p.one] == nil:
		s, err := m.Figure(p.apiServer, metric)
		return s, "kube-apiserver's watches and the writes of the changes", err
	}
	v, err := m.watches(p.apiServer, p.one, metric)
	return v.Spread, "kube-apiserver's watches alone", err
}
