// Package performance holds the measurements of Slicecast and its peers: the reports from which
// docs/performance.md, the pages in docs/performance and their chart are generated, and from which
// estimates take their coefficients. The reports are checked in, so that every figure can be traced
// to a report and the page can be generated again.
package performance

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/perf/benchfmt"

	"github.com/slicecast/slicecast/loadtest/report"
)

// Directory is the directory of the reports, relative to the module's root.
const Directory = "loadtest/performance/reports"

//go:embed reports
var embedded embed.FS

// Measured holds measurements by the names of their files, without extensions.
type Measured struct {
	// Reports are reports of load tests.
	Reports map[string]*report.Report
	// Benches are results of Go benchmarks.
	Benches map[string][]*benchfmt.Result
}

// CheckedIn returns the measurements that are checked in.
func CheckedIn() (*Measured, error) {
	reports, err := fs.Sub(embedded, "reports")
	if err != nil {
		return nil, err
	}
	return Read(reports)
}

// Read reads NAME.json, which are reports of load tests, and NAME.txt, which are outputs of
// benchmarks.
func Read(reports fs.FS) (*Measured, error) {
	files, err := fs.ReadDir(reports, ".")
	if err != nil {
		return nil, err
	}
	m := &Measured{Reports: make(map[string]*report.Report), Benches: make(map[string][]*benchfmt.Result)}
	for _, f := range files {
		content, err := fs.ReadFile(reports, f.Name())
		if err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(f.Name(), path.Ext(f.Name()))
		switch path.Ext(f.Name()) {
		case ".json":
			m.Reports[name], err = report.Read(bytes.NewReader(content))
		case ".txt":
			m.Benches[name], err = benches(content, f.Name())
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
	}
	return m, nil
}

// benches reads the output of benchmarks. Those that run in the virtual machine are in the log of a
// test, where each line is indented and may have a prefix.
func benches(content []byte, name string) (out []*benchfmt.Result, err error) {
	content = logged.ReplaceAll(content, nil)
	lines := benchfmt.NewReader(bytes.NewReader(content), name)
	for lines.Scan() {
		switch line := lines.Result().(type) {
		case *benchfmt.Result:
			out = append(out, line.Clone())
		case *benchfmt.SyntaxError:
			return nil, line
		}
	}
	if len(out) == 0 && lines.Err() == nil {
		return nil, errors.New("the file has no benchmark result")
	}
	return out, lines.Err()
}

// logged matches what the log of a test adds before a line.
var logged = regexp.MustCompile(`(?m)^ +(\w+\.go:\d+: )?`)

// Figure returns a metric of a report. Its error lists the reports or metrics that exist.
func (m *Measured) Figure(name, metric string) (report.Spread, error) {
	r, ok := m.Reports[name]
	if !ok {
		return report.Spread{}, fmt.Errorf("there is no report %s: use one of %s", name, strings.Join(slices.Sorted(maps.Keys(m.Reports)), ", "))
	}
	s, ok := r.Summary[metric]
	if !ok {
		return report.Spread{}, fmt.Errorf(
			"report %s has no metric %s: use one of %s", name, metric, strings.Join(slices.Sorted(maps.Keys(r.Summary)), ", "))
	}
	return s, nil
}

// errNoValue means that a report of benchmarks does not have a figure.
var errNoValue = errors.New("no such figure")

// Bench returns a figure of a benchmark, over all runs in the report. benchmark is its name without
// "Benchmark" and the number of CPUs, and unit is the unit as it is printed.
func (m *Measured) Bench(name, benchmark, unit string) (report.Spread, error) {
	if m.Benches[name] == nil {
		return report.Spread{}, fmt.Errorf("there is no report %s: use one of %s", name, strings.Join(slices.Sorted(maps.Keys(m.Benches)), ", "))
	}
	of, factor := benchUnit(unit)
	var values []float64
	for _, r := range m.Benches[name] {
		if benchName(r) != benchmark {
			continue
		}
		for _, v := range r.Values {
			if v.OrigUnit == unit {
				values = append(values, factor*v.OrigValue)
			} else if v.Unit == unit {
				values = append(values, factor*v.Value)
			}
		}
	}
	if len(values) == 0 {
		return report.Spread{}, fmt.Errorf("benchmark report %s has no value in %s for %s: %w", name, unit, benchmark, errNoValue)
	}
	return report.SpreadOf(of, values), nil
}

func benchName(r *benchfmt.Result) string {
	name, parts := r.Name.Parts()
	for _, p := range parts {
		if p[0] != '-' {
			name = append(name, p...)
		}
	}
	return string(name)
}

// Trim removes the seconds and the histograms from a report. They make up most of its size, and the
// page does not show them.
func Trim(r *report.Report) {
	for i := range r.Repeats {
		r.Repeats[i].Series = nil
		for j := range r.Repeats[i].Phases {
			p := &r.Repeats[i].Phases[j]
			p.Latency.Histogram = ""
			if p.SlowLatency != nil {
				p.SlowLatency.Histogram = ""
			}
			if c := p.Convergence; c != nil {
				c.Nodes50.Histogram, c.Nodes99.Histogram, c.Nodes100.Histogram = "", "", ""
			}
		}
	}
}
