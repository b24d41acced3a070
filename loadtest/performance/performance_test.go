package performance_test

import (
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/reporttest"
)

const root = "../.."

func checkedIn(t *testing.T) *performance.Measured {
	t.Helper()
	m, err := performance.CheckedIn()
	require.NoError(t, err)
	return m
}

// TestPageIsCurrent checks that the page and the chart match the reports.
func TestPageIsCurrent(t *testing.T) {
	m := checkedIn(t)
	for name, produce := range map[string]func() (string, error){performance.PageFile: m.Page, performance.ChartFile: m.Chart} {
		content, err := produce()
		require.NoError(t, err)
		have, err := os.ReadFile(filepath.Join(root, name))
		require.NoError(t, err)
		require.Equal(t, string(have), content, "%s does not match its reports: run 'go run ./internal/tools/performance' in the module's root", name)
	}
}

func TestReportsAreGood(t *testing.T) {
	m := checkedIn(t)
	known := make(map[string]bool)
	for _, c := range performance.Commands() {
		require.NotEmpty(t, c.Command)
		require.False(t, known[c.File()], "duplicate command %s", c.Name)
		known[c.File()] = true
	}
	for name, r := range m.Reports {
		require.True(t, known[name+".json"], "no command produces %s", name)
		require.True(t, r.OK(), name)
		require.NotEmpty(t, r.Summary, name)
		require.Empty(t, r.Repeats[0].Series, "%s is not trimmed", name)
		content, err := os.ReadFile(filepath.Join("reports", name+".json"))
		require.NoError(t, err)
		require.NoError(t, reporttest.Validate(content), name)
	}
	for name := range m.Benches {
		require.True(t, known[name+".txt"], "no command produces %s", name)
	}
}

func TestMissingFiguresAreErrors(t *testing.T) {
	m := checkedIn(t)
	_, err := m.Figure("steady-7", "p99")
	require.ErrorContains(t, err, "there is no report steady-7: use one of ")
	_, err = m.Figure("steady-1000", "p98")
	require.ErrorContains(t, err, "has no metric p98: use one of ")
	_, err = m.Bench("ingest", "Ingest/readers=100", "apples")
	require.ErrorContains(t, err, "has no value in apples")

	delete(m.Reports["rate-50"].Summary, "p99")
	_, err = m.Page()
	require.ErrorContains(t, err, "report rate-50 has no metric p99")
	delete(m.Reports, "apiserver-headline-3000") // otherwise the chart is of 3000 nodes
	delete(m.Reports["headline-1000"].Summary, "changes-cpu")
	_, err = m.Chart()
	require.ErrorContains(t, err, "report headline-1000 has no metric changes-cpu")

	m = checkedIn(t)
	m.Reports["rate-50"].Machine.CPUs = 64
	_, err = m.Page()
	require.ErrorContains(t, err, "the machine differs between reports")

	m = checkedIn(t)
	m.Benches["ingest"][0].SetConfig("cpu", "Abacus")
	_, err = m.Page()
	require.ErrorContains(t, err, "ingest was measured on a machine with Abacus")
}

func TestBadReports(t *testing.T) {
	for name, content := range map[string]string{
		"a.json": `{"schema": "slicecast-loadtest/v1"}`, "b.txt": "nothing\n", "c.txt": "BenchmarkX 1 2\n",
	} {
		_, err := performance.Read(fstest.MapFS{name: {Data: []byte(content)}})
		require.ErrorContains(t, err, name+": ")
	}
	_, err := performance.Read(os.DirFS(filepath.Join(t.TempDir(), "none")))
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// TestHeadline uses made-up reports of the headline.
func TestHeadline(t *testing.T) {
	m := checkedIn(t)
	delete(m.Reports, "apiserver-headline-1")
	delete(m.Reports, "apiserver-headline-3000")
	for name, bytes := range map[string]float64{"headline-1000": 1 << 30, "headline-3000": 1 << 31, "apiserver-headline-1000": 1 << 40} {
		r := *m.Reports["steady-3000"]
		r.Scenario.Name = "headline"
		r.Summary = map[string]report.Spread{}
		for _, metric := range []string{"changes-bytes", "changes-cpu", "changes-time"} {
			found, err := report.MetricNamed(metric)
			require.NoError(t, err)
			r.Summary[metric] = report.Spread{Unit: found.Unit, Median: bytes, Min: bytes, Max: bytes, Values: []float64{bytes}}
		}
		m.Reports[name] = &r
	}
	svg, err := m.Chart()
	require.NoError(t, err)
	require.Contains(t, svg, "bytes to all nodes, kube-apiserver: 1.00 TiB")
	text, err := m.Page()
	require.NoError(t, err)
	_, headline, ok := strings.Cut(text, "## The headline")
	require.True(t, ok)
	require.Contains(t, headline, "| Slicecast, measured | 1000 | 1.00 GiB |")
	require.Contains(t, headline, "| kube-apiserver: watches and the writes, measured | 1000 | 1.00 TiB |")
	require.Contains(t, headline, "| … Slicecast's share of the watches and the writes | | 1/1024 | 1/1024 |")
	require.NotContains(t, headline, "of which the writes")
	require.Contains(t, headline, "| Slicecast, measured | 3000 | 2.00 GiB |")
	require.Contains(t, headline, "3 times those of 1000 nodes | 3000 | 3.00 TiB |  | |", "the writes do not grow with the number of nodes")
	require.Contains(t, headline, "is not measured yet (`apiserver-headline-1`)")
	require.Regexp(t, `\d+ KiB × 5000 replaced pods × 3000 nodes = [0-9.]+ TiB`, headline)
	require.Regexp(t, `\d+ KiB × 1000 syncs, two for each 10 pods, × 3000 nodes = [0-9.]+ TiB`, headline)
	require.Contains(t, text, "| the headline, 1000 nodes: bytes, beside the API server's | ≤ 1/50 | 1/1024 |")
	require.Contains(t, text, "| … server CPU, beside that of the API server's watches and the writes of the changes | ≤ 1/8 | 1/1024 |")
	require.Contains(t, svg, "server CPU, kube-apiserver&#39;s watches and the writes of the changes: ")

	for _, name := range []string{"headline-100", "apiserver-headline-100", "apiserver-headline-3000"} {
		m.Reports[name] = m.Reports["headline-1000"]
	}
	text, err = m.Page()
	require.NoError(t, err)
	require.Contains(t, text, "| kube-apiserver: watches and the writes, measured | 100 | 1.00 GiB |")
	require.Contains(t, text, "| kube-apiserver: watches and the writes, measured | 3000 | 1.00 GiB |")
	_, headline, _ = strings.Cut(text, "## The headline")
	headline, _, _ = strings.Cut(headline, "\n## ")
	require.NotContains(t, headline, "times those of", "all sizes are measured, so none is computed")
}

// TestHeadlineWithoutWrites uses a report of one watcher, which says what the writes cost.
func TestHeadlineWithoutWrites(t *testing.T) {
	m := checkedIn(t)
	for _, name := range []string{"apiserver-headline-100", "apiserver-headline-3000"} {
		delete(m.Reports, name)
	}
	one := *m.Reports["apiserver-headline-1000"]
	one.Nodes, one.Summary = 1, maps.Clone(one.Summary)
	m.Reports["apiserver-headline-1"] = &one
	set(&one, "changes-cpu", 100)
	set(m.Reports["apiserver-headline-1000"], "changes-cpu", 740)
	set(m.Reports["headline-1000"], "changes-cpu", 10)
	text, err := m.Page()
	require.NoError(t, err)
	_, headline, ok := strings.Cut(text, "## The headline")
	require.True(t, ok)
	require.Contains(t, headline, "| … of which the writes: all of it with one watcher | 1 | | 100 s | |\n| … and the watches | 1000 | | 640 s | |\n")
	require.Regexp(t, "Slicecast's share of the watches [|] [|] [^|]+ [|] 1/64 [|]", headline)
	require.Contains(t, headline, "| … of the watches and the writes | | | 1/74 | |")
	require.Regexp(t, "3 times those of 1000 nodes [|] 3000 [|] [^|]+ [|] 1920 s [|]", headline)
	require.NotContains(t, headline, "not measured yet")
	require.Contains(t, text, "| … server CPU, beside that of the API server's watches alone | ≤ 1/8 | 1/64 |")
	require.Contains(t, text, "| … beside that of its watches and the writes of the changes | | 1/74 |")
	svg, err := m.Chart()
	require.NoError(t, err)
	require.Contains(t, svg, "server CPU, kube-apiserver&#39;s watches alone: 640 s.")

	set(m.Reports["apiserver-headline-1000"], "changes-cpu", 170)
	text, err = m.Page()
	require.NoError(t, err)
	require.Contains(t, text, "watches alone | ≤ 1/8 | 1/7, **missed** |", "the bound applies to the watches alone")
}

func TestPeersWithoutWrites(t *testing.T) {
	m := checkedIn(t)
	one := *m.Reports["apiserver-steady-100"]
	one.Nodes, one.Summary = 1, maps.Clone(one.Summary)
	m.Reports["apiserver-steady-1"] = &one
	set(&one, "cpu-per-update", 8000)
	set(m.Reports["apiserver-steady-100"], "cpu-per-update", 200)
	row := "part of the write, 100 watchers | 200 µs |"
	text, err := m.Page()
	require.NoError(t, err)
	_, after, ok := strings.Cut(text, row)
	require.True(t, ok)
	require.Contains(t, after, "| … the watch alone | 120 µs | | |\n")
	delete(m.Reports, "headline-1000")
	delete(m.Reports, "headline-3000")
	set(m.Reports["apiserver-steady-3000"], "cpu-per-update", 82)
	set(&one, "cpu-per-update", 6000)
	svg, err := m.Chart()
	require.NoError(t, err)
	require.Contains(t, svg, "server CPU for a node, kube-apiserver&#39;s watches alone: 80.0 µs.")

	m = checkedIn(t)
	set(m.Reports["apiserver-steady-100"], "cpu-per-update", 200)
	delete(m.Reports, "apiserver-steady-1")
	text, err = m.Page()
	require.NoError(t, err)
	require.Contains(t, text, row)
	require.NotContains(t, text, "watch alone")
}

// TestStack adds a report of a server that watches an API server. The page works without it, too.
func TestStack(t *testing.T) {
	m := checkedIn(t)
	for _, name := range []string{"stack-steady-1000", "stack-headline-1000"} {
		delete(m.Reports, name)
	}
	text, err := m.Page()
	require.NoError(t, err)
	require.NotContains(t, text, "whose server watches an API server")
	r := *m.Reports["steady-1000"]
	r.Summary = maps.Clone(r.Summary)
	r.Summary["api-server-cpu-per-change"] = report.Spread{Unit: report.Micros}
	set(&r, "api-server-cpu-per-change", 9000)
	m.Reports["stack-steady-1000"] = &r
	text, err = m.Page()
	require.NoError(t, err)
	require.Contains(t, text, "| … that API server, which writes and has that one watcher: a node's part | 9.00 µs | | |")
}

// set sets a figure of a report.
func set(r *report.Report, metric string, v float64) {
	s := r.Summary[metric]
	s.Median, s.Min, s.Max, s.Values = v, v, v, []float64{v}
	r.Summary[metric] = s
}

func TestBoundsAreJudged(t *testing.T) {
	m := checkedIn(t)
	row := func() string {
		text, err := m.Page()
		require.NoError(t, err)
		_, row, ok := strings.Cut(text, "| p99 of a single update, 3000 nodes | ")
		require.True(t, ok)
		row, _, _ = strings.Cut(row, "\n")
		return row
	}
	set(m.Reports["steady-3000"], "p99", 99.9)
	require.Equal(t, "< 100 ms | 99.9 ms | `steady-3000` |", row())
	set(m.Reports["steady-3000"], "p99", 100)
	require.Equal(t, "< 100 ms | 100 ms, **missed** | `steady-3000` |", row())
	s := m.Reports["steady-3000"].Summary["p99"]
	s.Median, s.Min, s.Max, s.Values = 90, 80, 101, []float64{80, 101, 90}
	m.Reports["steady-3000"].Summary["p99"] = s
	require.Equal(t, "< 100 ms | 90.0 ms (80.0 ms to 101 ms), **missed in 1 of 3 runs** | `steady-3000` |", row(), "every repeat has to keep the bound")
	s.Median, s.Values = 101, []float64{80, 101, 101}
	m.Reports["steady-3000"].Summary["p99"] = s
	require.Equal(t, "< 100 ms | 101 ms (80.0 ms to 101 ms), **missed** | `steady-3000` |", row())

	delete(m.Reports, "apiserver-headline-1")
	for _, name := range []string{"headline-1000", "headline-3000", "apiserver-headline-1000"} {
		r := *m.Reports["steady-3000"]
		r.Summary = map[string]report.Spread{}
		for _, metric := range []string{"changes-bytes", "changes-cpu", "changes-time"} {
			set(&r, metric, 1)
		}
		m.Reports[name] = &r
	}
	set(m.Reports["apiserver-headline-1000"], "changes-cpu", 7.9)
	text, err := m.Page()
	require.NoError(t, err)
	require.Contains(t, text, "and the writes of the changes | ≤ 1/8 | 1/7.90, **missed** |")
}

// TestHowManyNodesFit uses made-up reports.
func TestHowManyNodesFit(t *testing.T) {
	m := checkedIn(t)
	text, err := m.Page()
	require.NoError(t, err)
	if m.Reports["steady-10000"] == nil {
		require.NotContains(t, text, "## How many nodes fit")
	}
	add := func(name string, nodes int, relays, gibibytes, files float64) {
		r := *m.Reports["steady-3000"]
		r.Nodes, r.Processes, r.Machine.OpenFiles, r.Machine.Ports = nodes, 2, int64(files), 28_000
		r.Machine.Memory = 24 << 30
		r.Scenario.Parameters = map[string]any{"relays": relays, "servers": 1., "rate": 5.}
		r.Summary = maps.Clone(r.Summary)
		set(&r, "server-peak", gibibytes*(1<<28))
		set(&r, "client-peak", gibibytes*(3<<28))
		m.Reports[name] = &r
	}
	for _, r := range m.Reports {
		r.Machine.Memory = 24 << 30
	}
	add("steady-10000", 10_000, 0, 8, 20_000)
	add("relays-20000", 20_000, 2, 18, 20_000)
	set(m.Reports["steady-10000"], "p99", 1000)
	set(m.Reports["relays-20000"], "p50", 5000)
	set(m.Reports["relays-20000"], "p99", 9000)
	set(m.Reports["relays-20000"], "server-cores", 0.8)
	set(m.Reports["relays-20000"], "client-cores", 1.1)
	text, err = m.Page()
	require.NoError(t, err)
	_, text, ok := strings.Cut(text, "## How many nodes fit")
	require.True(t, ok)
	require.Contains(t, text, "| `steady-10000` | 10000 | 1 | 2.00 GiB | 6.00 GiB, in 2 | 839 KiB | 33 % |")
	require.Contains(t, text, "| `steady-10000` | 30000 | 19936 | 28000 | files |")
	require.Contains(t, text, "| `relays-20000` | 26666 | 31897 | 44800 | memory |")
	require.Contains(t, text, "| `relays-20000` | 20000 | 5.00 s / 9.00 s | **no** | 40 % | 55 % | 95 % |")
	require.Regexp(t, "[|] `steady-10000` [|] 10000 [|] [^|]+ / 1.00 s [|] yes [|]", text)
	m.Reports["relays-20000"].Machine.OpenFiles = 1 << 30
	set(m.Reports["relays-20000"], "client-peak", 1<<20)
	set(m.Reports["relays-20000"], "server-peak", 1<<20)
	text, err = m.Page()
	require.NoError(t, err)
	require.Contains(t, text, "| 44800 | ports |")

	m.Reports["relays-20000"].Machine.Ports = 0
	_, err = m.Page()
	require.ErrorContains(t, err, "report relays-20000 does not have the limits of files and ports")
}

// TestReportsOfSeveralVersions checks that the page says which reports have which version.
func TestReportsOfSeveralVersions(t *testing.T) {
	m := checkedIn(t)
	for _, r := range m.Reports {
		r.Versions.Slicecast = "v1"
	}
	text, err := m.Page()
	require.NoError(t, err)
	require.Contains(t, text, "share the CPUs. Slicecast v1. ")
	m.Reports["rate-50"].Versions.Slicecast = "v2"
	text, err = m.Page()
	require.NoError(t, err)
	require.Regexp(t, "[*][*]Not all of the same[*][*] Slicecast: v1 in `.*; v2 in `rate-50`[.]", text)
}

// TestBench runs the script with fake programs, one of which fails.
func TestBench(t *testing.T) {
	for repeats, want := range map[string]string{
		"":  "{run --good --repeats=2 --output=json}\n",             // the number in the command
		"3": "{run --good --repeats=2 --repeats=3 --output=json}\n", // the last flag counts
	} {
		t.Run("REPEATS="+repeats, func(t *testing.T) { bench(t, repeats, want) })
	}
}

func bench(t *testing.T, repeats, good string) {
	t.Helper()
	dir := t.TempDir()
	script, err := os.ReadFile(filepath.Join(root, "internal/tools/bench.sh"))
	require.NoError(t, err)
	for name, content := range map[string]string{
		"internal/tools/bench.sh":           string(script),
		"loadtest/performance/commands.txt": "bad: slicecast-loadtest run --bad\ngood: slicecast-loadtest run --good --repeats=2\nempty: slicecast-loadtest run --none\nbench: go test -run '^$'\n",
		"bin/slicecast-loadtest":            "#!/bin/sh\necho under way >&2\ncase \"$*\" in show*) echo shown;; *--none*) exit 1;; *--bad*) echo '{bad}'; exit 1;; *) echo \"{$*}\";; esac\n",
		"path/go":                           "#!/bin/sh\necho \"$*\" >>" + dir + "/went\n",
	} {
		file := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte(content), 0o700))
	}
	c := exec.CommandContext(t.Context(), filepath.Join(dir, "internal/tools/bench.sh"))
	c.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "path")+":"+os.Getenv("PATH"), "REPEATS="+repeats)
	out, err := c.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "failed: bad empty; see above, bin/bench/NAME.failed.json and NAME.log")
	for name, want := range map[string]string{
		"bad.failed.json": "{bad}\n", "bad.log": "under way\n", "good.json": good, "good.txt": "shown\n", "empty.log": "under way\n",
	} {
		have, err := os.ReadFile(filepath.Join(dir, "bin/bench", name))
		require.NoError(t, err)
		require.Equal(t, want, string(have), name)
	}
	require.NoFileExists(t, filepath.Join(dir, "bin/bench/bad.json"), "a failed report must not be on the page")
	went, err := os.ReadFile(filepath.Join(dir, "went"))
	require.NoError(t, err)
	require.Equal(t, "build -buildvcs=auto -o bin/slicecast-loadtest ./loadtest\ntest -run ^$\nrun ./internal/tools/performance bin/bench good bench\n", string(went))
}
