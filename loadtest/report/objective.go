package report

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// ObjectiveGrammar explains objectives to who writes them.
const ObjectiveGrammar = `METRIC<VALUE or METRIC<=VALUE, where VALUE is a number and a unit that the metric can have:
µs (us), ms, s or m for times; B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024) for bytes; none for numbers`

// Bound is what values have to keep.
type Bound struct {
	// Equal: the bound itself is good.
	Equal bool
	// Value in the unit that it was read for.
	Value float64
	// Text as people write it.
	Text string
}

// Keeps tells whether a value is within the bound.
func (b Bound) Keeps(v float64) bool { return v < b.Value || b.Equal && v == b.Value }

// Objective is a bound for a metric that every repeat has to keep.
type Objective struct {
	// Text as it was written.
	Text   string
	Metric *Metric
	Bound
}

var (
	objectiveForm = regexp.MustCompile(`^\s*([a-z][a-z0-9-]*)\s*(<.*)$`)
	boundForm     = regexp.MustCompile(`^\s*(<=?)\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµμ]*)\s*$`)
)

// units are how many of the first unit of their kind, the second or the byte, a unit is.
var units = map[Unit]map[string]float64{
	Seconds: {"us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60}, // there are two Unicode characters for micro
	Bytes: {
		"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
		"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
	},
	Number: {"": 1},
}

// ParseObjective reads an objective; see ObjectiveGrammar.
func ParseObjective(s string) (*Objective, error) {
	m := objectiveForm.FindStringSubmatch(s)
	if m == nil || !boundForm.MatchString(m[2]) {
		return nil, fmt.Errorf("objective %q: write %s; for example p99<250ms", s, ObjectiveGrammar)
	}
	metric, err := MetricNamed(m[1])
	if err != nil {
		return nil, fmt.Errorf("objective %q: %w", s, err)
	}
	b, err := ParseBound(m[2], metric.Unit)
	if err != nil {
		return nil, fmt.Errorf("objective %q: %s: %w", s, metric.Name, err)
	}
	return &Objective{Text: s, Metric: metric, Bound: b}, nil
}

// ParseBound reads a bound for values in a unit: what is behind the metric in ObjectiveGrammar.
func ParseBound(s string, unit Unit) (b Bound, err error) {
	m := boundForm.FindStringSubmatch(s)
	if m == nil {
		return b, fmt.Errorf("bound %q: write it as in %s", s, ObjectiveGrammar)
	}
	kind, own := unit, 1.
	switch unit {
	case Millis:
		kind, own = Seconds, 1e-3
	case Micros:
		kind, own = Seconds, 1e-6
	case Seconds, Bytes, Number:
	}
	written, ok := units[kind][m[3]]
	if !ok {
		return b, fmt.Errorf("%q is no unit of it; write %s", m[3], ObjectiveGrammar)
	}
	value, err := strconv.ParseFloat(m[2], 64)
	if err != nil {
		return b, err
	}
	b = Bound{Equal: m[1] == "<=", Value: value * written / own, Text: "< "}
	if b.Equal {
		b.Text = "≤ "
	}
	b.Text = strings.TrimSpace(b.Text + m[2] + " " + strings.Replace(m[3], "us", "µs", 1))
	return b, nil
}

// Judge tells whether every repeat of a report keeps the objective. What was not measured is no success.
func (o *Objective) Judge(r *Report) (kept bool, why string) {
	s, ok := r.Summary[o.Metric.Name]
	if !ok || len(s.Values) < len(r.Repeats) {
		return false, fmt.Sprintf("%s: %s was not measured in all repeats", o.Text, o.Metric.Name)
	}
	kept = o.Keeps(s.Max)
	text := FormatValue(s.Max, s.Unit)
	if len(s.Values) > 1 {
		text = fmt.Sprintf("%s in the worst of %d repeats, %s in the median", text, len(s.Values), FormatValue(s.Median, s.Unit))
	}
	if kept {
		return true, fmt.Sprintf("%s: kept, %s", o.Text, text)
	}
	return false, fmt.Sprintf("%s: missed, %s", o.Text, text)
}
