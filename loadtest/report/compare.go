package report

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"

	"golang.org/x/perf/benchmath"
)

// Verdict says how a metric moved from one report to another. Less is better for every metric.
type Verdict string

// The verdicts.
const (
	// Better and Worse: repeats of the two differ by more than chance explains (Mann-Whitney U test, at the 5 % level), and the
	// medians by more than the tolerance.
	Better Verdict = "better"
	Worse  Verdict = "worse"
	// Same: they do not.
	Same Verdict = "no difference seen"
	// Unknown: there are too few repeats for the test to find any difference.
	Unknown Verdict = "too few repeats to tell"
)

// Change is one metric in two reports.
type Change struct {
	Metric *Metric `json:"metric"`
	// From is in the first report, To in the second; both have it.
	From    Spread  `json:"from"`
	To      Spread  `json:"to"`
	Verdict Verdict `json:"verdict"`
	// P is the probability that repeats of the same thing differ as much.
	P float64 `json:"p"`
}

// ComparisonSchema names the form of a comparison's JSON. Fields may be added to it; anything else gets a new name.
const ComparisonSchema = "slicecast-loadtest-comparison/v1"

// ComparisonJSONSchema is the JSON Schema of comparisons, as it is published: made of the types in this package.
//
//go:embed comparison.schema.json
var ComparisonJSONSchema []byte

// Comparison is what came of the same scenario twice: with another peer, or another version.
type Comparison struct {
	Schema  string   `json:"schema"`
	From    *Report  `json:"from"`
	To      *Report  `json:"to"`
	Changes []Change `json:"changes"`
	// Notes say what makes the two hard to compare; each report has its own beside them.
	Notes []string `json:"notes"`
}

// DefaultTolerance is the share by which medians may differ without a verdict, unless somebody says otherwise.
const DefaultTolerance = 0.05

// Compare compares two reports metric by metric. The tolerance is a share, such as 0.05, by which medians may differ.
func Compare(from, to *Report, tolerance float64) *Comparison {
	c := &Comparison{Schema: ComparisonSchema, From: from, To: to, Changes: []Change{}, Notes: []string{}}
	for i := range Metrics {
		m := &Metrics[i]
		a, inFrom := from.Summary[m.Name]
		b, inTo := to.Summary[m.Name]
		if !inFrom || !inTo {
			continue
		}
		change := Change{Metric: m, From: a, To: b}
		change.Verdict, change.P = verdict(a, b, tolerance)
		c.Changes = append(c.Changes, change)
	}
	note := func(is bool, format string, args ...any) {
		if is {
			c.Notes = append(c.Notes, fmt.Sprintf(format, args...))
		}
	}
	note(from.Scenario.Name != to.Scenario.Name, "the scenarios differ: %s and %s", from.Scenario.Name, to.Scenario.Name)
	note(from.Nodes != to.Nodes, "the numbers of nodes differ: %d and %d", from.Nodes, to.Nodes)
	note(from.Source != to.Source && from.Source != "" && to.Source != "", "the states' sources differ: %s and %s", from.Source, to.Source)
	for _, d := range differences(from.Scenario, to.Scenario) {
		note(true, "%s", d)
	}
	note(from.MachineText() != to.MachineText(), "the machines differ: %s; and %s", from.MachineText(), to.MachineText())
	note(!from.OK() || !to.OK(), "a check failed: figures of a run that did not end with the true state mean nothing")
	return c
}

// differences lists the parameters that two scenarios do not have in common.
func differences(a, b Scenario) (out []string) {
	values := make(map[string][2]string)
	for i, s := range []Scenario{a, b} {
		for _, p := range s.List() {
			v := values[p.Name]
			v[i] = p.Value
			values[p.Name] = v
		}
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if v := values[name]; v[0] != v[1] {
			out = append(out, fmt.Sprintf("the parameter %s differs: %q and %q", name, v[0], v[1]))
		}
	}
	return out
}

// verdict judges whether b differs from a.
func verdict(a, b Spread, tolerance float64) (Verdict, float64) {
	thresholds := benchmath.DefaultThresholds
	test := benchmath.AssumeNothing.Compare(benchmath.NewSample(slices.Clone(a.Values), &thresholds),
		benchmath.NewSample(slices.Clone(b.Values), &thresholds))
	change := b.Median - a.Median
	switch {
	case min(len(a.Values), len(b.Values)) < minRepeats:
		return Unknown, test.P
	case test.P >= thresholds.CompareAlpha || change <= tolerance*a.Median && -change <= tolerance*a.Median:
		return Same, test.P
	case change < 0:
		return Better, test.P
	}
	return Worse, test.P
}

// minRepeats is from when on the test can find a difference at the 5 % level: of the 70 orders that four and four values
// can have, two put all of one side first.
const minRepeats = 4

// Regressed tells which metrics of the peer are worse.
func (c *Comparison) Regressed() (out []Change) {
	for i := range c.Changes {
		if c.Changes[i].Verdict == Worse && c.Changes[i].Metric.OfPeer() {
			out = append(out, c.Changes[i])
		}
	}
	return out
}

// ByPeer tells whether the two reports are of different peers: then the change is no regression.
func (c *Comparison) ByPeer() bool { return c.From.Peer != c.To.Peer }

// Names gives the two sides' names: what they differ in.
func (c *Comparison) Names() (from, to string) {
	names := Names(c.From, c.To)
	return names[0], names[1]
}

// Names gives reports that are shown beside each other their names: the peers if they differ, else the versions, else the places.
func Names(reports ...*Report) []string {
	for _, of := range []func(*Report) string{
		func(r *Report) string { return string(r.Peer) },
		func(r *Report) string { return r.Versions.Slicecast },
		func(r *Report) string { return string(r.Peer) + " " + r.Versions.Slicecast },
	} {
		names := make([]string, len(reports))
		for i, r := range reports {
			names[i] = of(r)
		}
		if len(slices.Compact(slices.Sorted(slices.Values(names)))) == len(reports) {
			return names
		}
	}
	if len(reports) == 2 {
		return []string{"before", "after"}
	}
	names := make([]string, len(reports))
	for i, r := range reports {
		names[i] = fmt.Sprintf("%d: %s %s", i+1, r.Peer, r.Versions.Slicecast)
	}
	return names
}

// Ratio says how much less or more the second has.
func (c *Change) Ratio() string {
	const times = 2
	from, to := c.From.Median, c.To.Median
	switch {
	case from == to:
		return "the same"
	case from <= 0 || to <= 0:
		return "–"
	case from >= times*to:
		return digits(from/to) + " × less"
	case to >= times*from:
		return digits(to/from) + " × more"
	}
	return fmt.Sprintf("%+.1f %%", 100*(to/from-1))
}

// WriteJSON writes the comparison for machines.
func (c *Comparison) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(c)
}

// WriteText writes the comparison as a table.
func (c *Comparison) WriteText(w io.Writer) error {
	t := &text{w: w}
	from, to := c.Names()
	sides := []struct {
		name   string
		report *Report
	}{{from, c.From}, {to, c.To}}
	for _, side := range sides {
		r := side.report
		t.line("%-16s %s, %d nodes, scenario %s, slicecast-loadtest %s, %d repeats, %s", side.name, r.PeerText(), r.Nodes, r.Scenario.Name,
			r.Versions.Slicecast, len(r.Repeats), r.MachineText())
	}
	t.line("")
	t.cells("median (range)", from, to, to+" has", "verdict")
	for i := range c.Changes {
		ch := &c.Changes[i]
		t.cells(ch.Metric.Name, ch.From.Text(), ch.To.Text(), ch.Ratio(), ch.verdictText())
	}
	t.flush()
	for _, n := range c.Notes {
		t.line("note             %s", n)
	}
	for _, side := range sides {
		for _, n := range side.report.AllNotes() {
			t.line("note             %s: %s", side.name, n)
		}
	}
	return t.err
}

func (c *Change) verdictText() string {
	if c.Verdict == Unknown {
		return string(c.Verdict)
	}
	return fmt.Sprintf("%s (p=%.3f)", c.Verdict, c.P)
}
