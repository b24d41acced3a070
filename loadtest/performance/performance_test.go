package performance_test

import (
	"io/fs"
	"os"
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

// TestPageIsCurrent proves that the page says what the reports say.
func TestPageIsCurrent(t *testing.T) {
	m := checkedIn(t)
	for name, produce := range map[string]func() (string, error){performance.PageFile: m.Page, performance.ChartFile: m.Chart} {
		content, err := produce()
		require.NoError(t, err)
		have, err := os.ReadFile(filepath.Join(root, name))
		require.NoError(t, err)
		require.Equal(t, string(have), content, "%s is not what its reports say: run 'go run ./internal/tools/performance' in the module's root", name)
	}
}

func TestReportsAreGood(t *testing.T) {
	m := checkedIn(t)
	known := make(map[string]bool)
	for _, c := range performance.Commands() {
		require.NotEmpty(t, c.Command)
		require.False(t, known[c.File()], "%s is there twice", c.Name)
		known[c.File()] = true
	}
	for name, r := range m.Reports {
		require.True(t, known[name+".json"], "no command makes %s", name)
		require.True(t, r.OK(), name)
		require.NotEmpty(t, r.Summary, name)
		require.Empty(t, r.Repeats[0].Series, "%s is not trimmed", name)
		content, err := os.ReadFile(filepath.Join("reports", name+".json"))
		require.NoError(t, err)
		require.NoError(t, reporttest.Validate(content), name)
	}
	for name := range m.Benches {
		require.True(t, known[name+".txt"], "no command makes %s", name)
	}
}

func TestMissingFiguresAreErrors(t *testing.T) {
	m := checkedIn(t)
	_, err := m.Figure("steady-7", "p99")
	require.ErrorContains(t, err, "there is no report steady-7: there are ")
	_, err = m.Figure("steady-1000", "p98")
	require.ErrorContains(t, err, "has no metric p98: it has ")
	_, err = m.Bench("ingest", "Ingest/readers=100", "apples")
	require.ErrorContains(t, err, "has no apples")

	delete(m.Reports["rate-50"].Summary, "p99")
	_, err = m.Page()
	require.ErrorContains(t, err, "report rate-50 has no metric p99")
	delete(m.Reports["steady-3000"].Summary, "cpu-per-update")
	_, err = m.Chart()
	require.ErrorContains(t, err, "report steady-3000 has no metric cpu-per-update")

	m = checkedIn(t)
	m.Reports["rate-50"].Machine.CPUs = 64
	_, err = m.Page()
	require.ErrorContains(t, err, "the machine is not the same in all reports")
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

// TestHeadline has the reports of the headline, which are not those of this machine.
func TestHeadline(t *testing.T) {
	m := checkedIn(t)
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
	require.Contains(t, headline, "| kube-apiserver's watches, measured | 1000 | 1.00 TiB |")
	require.Contains(t, headline, "| … Slicecast's share | | 1/1024 | 1/1024 |")
	require.Contains(t, headline, "| Slicecast, measured | 3000 | 2.00 GiB |")
	require.Contains(t, headline, "3 times those of 1000 nodes | 3000 | 3.00 TiB |")
	require.Regexp(t, `\d+ KiB × 5000 replaced pods × 3000 nodes = [0-9.]+ TiB`, headline)
}
