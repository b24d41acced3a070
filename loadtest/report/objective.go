package report

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// ObjectiveGrammar describes the syntax of objectives to users.
const ObjectiveGrammar = `METRIC<VALUE or METRIC<=VALUE, where VALUE is a number and a unit that the metric can have:
µs (us), ms, s or m for times; B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024) for bytes; none for numbers`

// Bound is an upper bound on a value.
type Bound struct {
	// Equal means that the bound itself is allowed.
	Equal bool
	// Value is the bound, in the unit that was passed to ParseBound.
	Value float64
	// Text is the bound as people write it.
	Text string
}

// Keeps reports whether a value is within the bound.
func (b Bound) Keeps(v float64) bool { return v < b.Value || b.Equal && v == b.Value }

// Objective is a bound on a metric. It holds only if every repeat keeps it.
type Objective struct {
	// Text is the objective as the user wrote it.
	Text   string
	Metric *Metric
	Bound
}

var boundForm = regexp.MustCompile(`^\s*(<=?)\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµμ]*)\s*$`)

// units maps a unit of time to seconds, and a unit of size to bytes.
var units = map[Unit]map[string]float64{
	// Unicode has two characters for micro.
	Seconds: {"us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60},
	Bytes: {
		"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
		"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
	},
	Number: {"": 1},
}

// ParseObjective parses an objective; see ObjectiveGrammar.
func ParseObjective(s string) (*Objective, error) {
	i := strings.IndexByte(s, '<')
	if i < 0 || !boundForm.MatchString(s[i:]) {
		return nil, fmt.Errorf("objective %q: write %s; for example p99<250ms", s, ObjectiveGrammar)
	}
	metric, err := MetricNamed(strings.TrimSpace(s[:i]))
	if err != nil {
		return nil, fmt.Errorf("objective %q: %w", s, err)
	}
	b, err := ParseBound(s[i:], metric.Unit)
	if err != nil {
		return nil, fmt.Errorf("objective %q: %s: %w", s, metric.Name, err)
	}
	return &Objective{Text: s, Metric: metric, Bound: b}, nil
}

// ParseBound parses a bound on values of a unit: the part of ObjectiveGrammar after the metric.
func ParseBound(s string, unit Unit) (b Bound, err error) {
	m := boundForm.FindStringSubmatch(s)
	if m == nil {
		return b, fmt.Errorf("bound %q: write the part after METRIC of %s", s, ObjectiveGrammar)
	}
	kind, own := unit, 1.
	if inSeconds, ok := units[Seconds][string(unit)]; ok {
		kind, own = Seconds, inSeconds
	}
	written, ok := units[kind][m[3]]
	if !ok {
		return b, fmt.Errorf("%q is not one of its units: write %s", m[3], ObjectiveGrammar)
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

// Judge reports whether every repeat of a report keeps the objective, and explains the judgment. An
// objective on a metric that some repeat lacks is not kept.
func (o *Objective) Judge(r *Report) (kept bool, why string) {
	s, ok := r.Summary[o.Metric.Name]
	if !ok || len(s.Values) < len(r.Repeats) {
		return false, fmt.Sprintf("%s: %s was not measured in all repeats", o.Text, o.Metric.Name)
	}
	text := FormatValue(s.Max, s.Unit)
	if len(s.Values) > 1 {
		text = fmt.Sprintf("%s in the worst of %d repeats, %s in the median", text, len(s.Values), FormatValue(s.Median, s.Unit))
	}
	if o.Keeps(s.Max) {
		return true, fmt.Sprintf("%s: kept, %s", o.Text, text)
	}
	return false, fmt.Sprintf("%s: missed, %s", o.Text, text)
}
