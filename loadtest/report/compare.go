package report

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/perf/benchmath"
)

// Verdict is the judgment on how a metric changed between two reports. For every metric, less is
// better.
type Verdict string

// Verdicts on a metric.
const (
	// Better and Worse mean that the repeats of the two reports differ by more than chance
	// explains, and that the medians differ by more than the tolerance. The test is a Mann-Whitney
	// U test at the 5 % level.
	Better Verdict = "better"
	Worse  Verdict = "worse"
	// Same means that at least one of these two conditions does not hold.
	Same Verdict = "no difference seen"
	// Unknown means that there are too few repeats for the test to find any difference.
	Unknown Verdict = "too few repeats to tell"
)

// Change compares one metric in two reports.
type Change struct {
	Metric *Metric `json:"metric"`
	// From is the metric in the first report, To in the second. Both reports have it.
	From    Spread  `json:"from"`
	To      Spread  `json:"to"`
	Verdict Verdict `json:"verdict"`
	// P is the probability that two measurements of the same thing differ at least this much.
	P float64 `json:"p"`
}

// ComparisonSchema names the JSON schema of comparisons. Fields may be added under this name; any
// other change needs a new name.
const ComparisonSchema = "slicecast-loadtest-comparison/v1"

// ComparisonJSONSchema is the published JSON Schema of comparisons. It is generated from the types
// of this package.
//
//go:embed comparison.schema.json
var ComparisonJSONSchema []byte

// Comparison compares two reports of the same scenario, with different peers or different versions.
type Comparison struct {
	Schema  string   `json:"schema"`
	From    *Report  `json:"from"`
	To      *Report  `json:"to"`
	Changes []Change `json:"changes"`
	// Notes say what makes the two reports hard to compare. Each report has its own notes as well.
	Notes []string `json:"notes"`
}

// DefaultTolerance is the default for the share by which medians may differ without a verdict.
const DefaultTolerance = 0.05

// Compare compares two reports metric by metric. The tolerance is the share by which medians may
// differ without a verdict, such as 0.05.
func Compare(from, to *Report, tolerance float64) *Comparison {
	c := &Comparison{Schema: ComparisonSchema, From: from, To: to, Changes: []Change{}, Notes: []string{}}
	for i := range Metrics {
		m := &Metrics[i]
		a, inFrom := from.Summary[m.Name]
		b, inTo := to.Summary[m.Name]
		if inFrom && inTo {
			v, p := verdict(a, b, tolerance)
			c.Changes = append(c.Changes, Change{Metric: m, From: a, To: b, Verdict: v, P: p})
		}
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

func differences(a, b Scenario) (out []string) {
	before, after := a.flat(), b.flat()
	names := slices.AppendSeq(slices.Collect(maps.Keys(before)), maps.Keys(after))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if before[name] != after[name] {
			out = append(out, fmt.Sprintf("the parameter %s differs: %q and %q", name, before[name], after[name]))
		}
	}
	return out
}

// verdict judges whether b differs from a, and returns the probability of Change.P.
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

// minRepeats is the smallest number of repeats on each side with which the test can find a
// difference at the 5 % level. Four and four values have 70 orders, and two of them put all values
// of one side first.
const minRepeats = 4

// Regressed returns the metrics of the peer that are worse.
func (c *Comparison) Regressed() (out []Change) {
	for i := range c.Changes {
		if c.Changes[i].Verdict == Worse && c.Changes[i].Metric.OfPeer() {
			out = append(out, c.Changes[i])
		}
	}
	return out
}

// Names returns distinct names for reports that are shown together. They are the peers if these
// differ, else the versions, else both. Otherwise they are positions.
func Names(reports ...*Report) []string {
	for _, of := range []func(*Report) string{
		func(r *Report) string { return string(r.Peer) },
		func(r *Report) string { return r.Versions.Slicecast },
		func(r *Report) string { return string(r.Peer) + " " + r.Versions.Slicecast },
	} {
		var names []string
		for _, r := range reports {
			names = append(names, of(r))
		}
		if len(slices.Compact(slices.Sorted(slices.Values(names)))) == len(reports) {
			return names
		}
	}
	if len(reports) == 2 {
		return []string{"before", "after"}
	}
	var names []string
	for i, r := range reports {
		names = append(names, fmt.Sprintf("%d: %s %s", i+1, r.Peer, r.Versions.Slicecast))
	}
	return names
}

// Ratio describes how much less or more the second report has.
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

// Text returns the comparison for people.
func (c *Comparison) Text() string {
	t := &text{}
	reports := []*Report{c.From, c.To}
	names := Names(reports...)
	for i, r := range reports {
		t.line("%-16s %s, %d nodes, scenario %s, slicecast-loadtest %s, %d repeats, %s", names[i], r.PeerText(), r.Nodes, r.Scenario.Name,
			r.Versions.Slicecast, len(r.Repeats), r.MachineText())
	}
	t.line("")
	rows := [][]string{{"median (range)", names[0], names[1], names[1] + " has", "verdict"}}
	for i := range c.Changes {
		ch := &c.Changes[i]
		rows = append(rows, []string{ch.Metric.Name, ch.From.Text(), ch.To.Text(), ch.Ratio(), ch.verdictText()})
	}
	t.WriteString(Table(rows))
	for _, n := range c.Notes {
		t.line("note             %s", n)
	}
	for i, r := range reports {
		for _, n := range r.AllNotes() {
			t.line("note             %s: %s", names[i], n)
		}
	}
	return t.String()
}

func (c *Change) verdictText() string {
	if c.Verdict == Unknown {
		return string(c.Verdict)
	}
	return fmt.Sprintf("%s (p=%.3f)", c.Verdict, c.P)
}
