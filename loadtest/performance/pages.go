package performance

import (
	"embed"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strings"
	"text/template"

	"github.com/slicecast/slicecast/loadtest/report"
)

const (
	// directory of the pages, relative to the module's root. The first page, index.md.tmpl, is not
	// in it, but beside it.
	pageDirectory = "docs/performance"
	chartFile     = "docs/performance.svg"
	// hours is how long all commands take on the machine of the reports.
	hours = 6
)

//go:embed pages
var pageSources embed.FS

const perUpdate = "cpu-per-update"

// Files returns the content of all files that are generated from the measurements, by their names
// relative to the module's root: the pages and their chart.
func (m *Measured) Files() (map[string]string, error) {
	pages, err := template.New("pages").Option("missingkey=error").Funcs(m.functions()).ParseFS(pageSources, "pages/*.md.tmpl")
	if err != nil {
		return nil, err
	}
	files := make(map[string]string)
	for _, p := range pages.Templates() {
		var out strings.Builder
		if err := p.Execute(&out, nil); err != nil {
			return nil, err
		}
		name := path.Join(pageDirectory, strings.TrimSuffix(p.Name(), ".tmpl"))
		if p.Name() == "index.md.tmpl" {
			name = pageDirectory + ".md"
		}
		files[name] = wrap(out.String())
	}
	if files[chartFile], err = m.Chart(); err != nil {
		return nil, fmt.Errorf("%s: %w", chartFile, err)
	}
	return files, nil
}

// functions returns the functions that the pages' templates may call. Each fails for a figure that
// was not measured, so that no figure is missing silently.
func (m *Measured) functions() template.FuncMap {
	return template.FuncMap{
		"fig": func(name, metric string) (value, error) {
			s, err := m.Figure(name, metric)
			return value{Spread: s}, err
		},
		"bound": bounded, "minus": value.minus, "share": value.ratio, "times": times, "watches": m.watches,
		"bench": func(name, benchmark, unit string) (value, error) {
			s, err := m.Bench(name, benchmark, unit)
			return value{Spread: s}, err
		},
		// each returns the time of one operation, from the number of operations per second of a
		// benchmark.
		"each": func(name, benchmark, unit string) (value, error) {
			s, err := m.Bench(name, benchmark, unit)
			return single(report.Micros, 1e6/s.Median), err
		},
		"warmUp": m.warmUp, "beside": m.beside, "agent": m.agentTable, "stalls": m.stalls, "ipvs": m.ipvsTable,
		"measured": m.measured, "machine": m.machine, "repeats": m.repeats, "commit": m.commit, "config": m.config, "command": command,
		"played": m.played, "most": m.most, "notes": m.notes, "endpoints": endpoints,
		"commands":  Commands,
		"hours":     func() int { return hours },
		"directory": func() string { return Directory },
		"list":      func(items ...string) []string { return items },
	}
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
	share := 1.
	if metric == perUpdate {
		share = 1 / float64(m.Reports[name].Nodes)
	}
	return value{Spread: all}.minus(times(share, value{Spread: writes}))
}

// warmUp returns the 99th percentile of latencies during the warm-up before the changes.
func (m *Measured) warmUp(name string) (value, error) {
	if m.Reports[name] == nil {
		return value{}, fmt.Errorf("there is no report %s", name)
	}
	var values []float64
	for _, r := range m.Reports[name].Repeats {
		for _, p := range r.Phases {
			if p.Kind == report.WarmUp {
				values = append(values, p.Latency.P99)
			}
		}
	}
	if len(values) == 0 {
		return value{}, fmt.Errorf("report %s has no warm-up", name)
	}
	return value{Spread: report.SpreadOf(report.Millis, values)}, nil
}

// measured says which commit the figures were measured at. If there are several, it refers to the
// table of reports; toPages is the path from the page to the directory of the pages.
func (m *Measured) measured(toPages string) (string, error) {
	commits := make(map[string]bool)
	for _, c := range Commands() {
		commit, err := m.commit(c.Name)
		if err != nil {
			return "", err
		}
		commits[commit] = true
	}
	if len(commits) == 1 {
		return fmt.Sprintf("All figures were measured at commit %s.", slices.Collect(maps.Keys(commits))[0]), nil
	}
	return fmt.Sprintf("**The figures were measured at %d commits:** [which report at which](%smethod.md#reports).", len(commits), toPages), nil
}

// commit returns the version of Slicecast that a report is of.
func (m *Measured) commit(name string) (string, error) {
	if r := m.Reports[name]; r != nil {
		return r.Versions.Slicecast, nil
	}
	return m.config(name, "commit")
}

// config returns a property that a report of benchmarks has besides its figures.
func (m *Measured) config(name, key string) (string, error) {
	if results := m.Benches[name]; results != nil && results[0].GetConfig(key) != "" {
		return results[0].GetConfig(key), nil
	}
	return "", fmt.Errorf("there is no report %s, or it does not say its %s: run make performance", name, key)
}

// command returns a command that makes a load test's report, without the program's name.
func command(name string) (string, error) {
	i := slices.IndexFunc(Commands(), func(c Command) bool { return c.Name == name })
	if i < 0 {
		return "", fmt.Errorf("no command makes the report %s", name)
	}
	return "`" + strings.TrimPrefix(Commands()[i].Command, "slicecast-loadtest ") + "`", nil
}

// emulated is how the names of emulated CPUs begin: those of the virtual machine, which runs on the
// machine of all other measurements.
const emulated = "QEMU "

func (m *Measured) machine() (string, error) {
	all := make(map[string]bool)
	for _, r := range m.Reports {
		all[r.MachineText()] = true
	}
	text := strings.Join(slices.Sorted(maps.Keys(all)), "; ")
	if len(all) != 1 { // figures of different machines cannot be compared
		return "", fmt.Errorf("the machine differs between reports, run make performance: %s", text)
	}
	for name, results := range m.Benches {
		for _, r := range results {
			if cpu := r.GetConfig("cpu"); !strings.Contains(text, cpu) && !strings.HasPrefix(cpu, emulated) {
				return "", fmt.Errorf("%s was measured on a machine with %s, but the reports on one with %s: run make performance", name, cpu, text)
			}
		}
	}
	return text, nil
}

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
