// Package performance holds what was measured of Slicecast and of its peers: the reports that docs/performance.md and the chart
// of README.md are made of, and that estimates take their coefficients from. They are checked in, so that every figure can be
// traced to a report, and the page can be made again from what is there.
package performance

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"golang.org/x/perf/benchfmt"

	"github.com/slicecast/slicecast/loadtest/report"
)

// Directory is where the reports are, from the module's root.
const Directory = "loadtest/performance/reports"

//go:embed reports
var embedded embed.FS

// Measured is what was measured, by the names of reports: those of their files.
type Measured struct {
	// Reports of load tests.
	Reports map[string]*report.Report
	// Benches are results of Go benchmarks.
	Benches map[string][]*benchfmt.Result
}

// CheckedIn gives what is checked in.
func CheckedIn() (*Measured, error) {
	reports, err := fs.Sub(embedded, "reports")
	if err != nil {
		return nil, err
	}
	return Read(reports)
}

// Read reads NAME.json, reports of load tests, and NAME.txt, what benchmarks print.
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
			m.Benches[name], err = benches(bytes.NewReader(content), f.Name())
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
	}
	return m, nil
}

func benches(r io.Reader, name string) (out []*benchfmt.Result, err error) {
	lines := benchfmt.NewReader(r, name)
	for lines.Scan() {
		switch line := lines.Result().(type) {
		case *benchfmt.Result:
			out = append(out, line.Clone())
		case *benchfmt.SyntaxError:
			return nil, line
		}
	}
	if len(out) == 0 && lines.Err() == nil {
		return nil, errors.New("there is no result of a benchmark")
	}
	return out, lines.Err()
}

// Figure gives a metric of a report. The error says what there is.
func (m *Measured) Figure(name, metric string) (report.Spread, error) {
	r, ok := m.Reports[name]
	if !ok {
		return report.Spread{}, fmt.Errorf("there is no report %s: there are %s", name, strings.Join(slices.Sorted(maps.Keys(m.Reports)), ", "))
	}
	s, ok := r.Summary[metric]
	if !ok {
		return report.Spread{}, fmt.Errorf("report %s has no metric %s: it has %s", name, metric, strings.Join(slices.Sorted(maps.Keys(r.Summary)), ", "))
	}
	return s, nil
}

// Bench gives a value of a benchmark, by its name without "Benchmark" and the number of CPUs, and by the unit as it is printed.
func (m *Measured) Bench(name, benchmark, unit string) (float64, error) {
	for _, r := range m.Benches[name] {
		base, _, _ := bytes.Cut(r.Name.Full(), []byte("-"))
		if string(base) != benchmark {
			continue
		}
		for _, v := range r.Values {
			if v.Unit == unit || v.OrigUnit == unit {
				if v.OrigUnit == unit {
					return v.OrigValue, nil
				}
				return v.Value, nil
			}
		}
	}
	return 0, fmt.Errorf("bench %s has no %s in %s", name, unit, benchmark)
}

// Trim leaves out of a report what the page does not show and most of its bytes are: the seconds, and histograms.
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
