// These tests prove that reports survive JSON, match their schema, and yield the right metrics,
// objectives and comparisons. The texts are compared with files in testdata.
package report_test

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/reporttest"
)

var update = flag.Bool("update", false, "write the files in testdata anew")

// golden compares a text with a file in testdata, or writes that file with -update.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := "testdata/" + name
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got, "if this is intended, run the test with -update")
}

func TestText(t *testing.T) {
	var out strings.Builder
	out.WriteString(reporttest.Slicecast(3, 1).Text())
	golden(t, "report.txt", out.String())
	out.Reset()
	failed := reporttest.APIServer(1)
	failed.Repeats[0].Check = report.Check{Nodes: 1000, Error: "node-00003 lacks default/web"}
	failed.Server, failed.Versions.Etcd, failed.Processes = "https://cluster:6443", "", 2
	require.False(t, failed.OK())
	out.WriteString(failed.Text())
	golden(t, "failed.txt", out.String())
}

func TestReportRoundTrip(t *testing.T) {
	r := reporttest.Slicecast(2, 1)
	var out bytes.Buffer
	require.NoError(t, report.WriteJSON(&out, r))
	text := out.String()
	read, err := report.Read(&out)
	require.NoError(t, err)
	require.True(t, read.OK())
	var again bytes.Buffer
	require.NoError(t, report.WriteJSON(&again, read))
	require.Equal(t, text, again.String())
}

func TestOtherSchemasAreRefused(t *testing.T) {
	for text, message := range map[string]string{
		`{"schema": "slicecast-loadtest/v1", "churn": {}}`: `schema is "slicecast-loadtest/v1", but this load tester reads only "slicecast-loadtest/v2"`,
		`{"schema": "slicecast-loadtest/v3"}`:              `"slicecast-loadtest/v3"`,
		`{}`:                                               "its schema is missing",
		`[]`:                                               "not a report: ",
		`{"schema": "slicecast-loadtest/v2", "nodes": "many"}`: "not a report: ",
		`p99`: "not a report: ",
	} {
		_, err := report.Read(strings.NewReader(text))
		require.ErrorContains(t, err, message, text)
	}
}

func TestSchema(t *testing.T) {
	for name, change := range map[string]struct {
		make  func(*report.Report)
		valid bool
	}{
		"unchanged":      {func(*report.Report) {}, true},
		"no fields":      {func(r *report.Report) { *r = report.Report{Schema: report.Schema, Peer: report.Slicecast} }, false},
		"no repeat":      {func(r *report.Report) { r.Repeats = nil }, true},
		"unknown peer":   {func(r *report.Report) { r.Peer = "typha" }, false},
		"other schema":   {func(r *report.Report) { r.Schema = "slicecast-loadtest/v1" }, false},
		"unknown phase":  {func(r *report.Report) { r.Repeats[0].Phases[0].Kind = "nap" }, false},
		"running server": {func(r *report.Report) { r.Repeats[0].ServerMemory, r.Repeats[0].Phases[0].ServerCPU = nil, nil }, true},
		"no floor":       {func(r *report.Report) { r.Repeats[0].Floor = nil }, true},
		"API server":     {func(r *report.Report) { *r = *reporttest.APIServer(1) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := reporttest.Slicecast(1, 1)
			change.make(r)
			var out bytes.Buffer
			require.NoError(t, report.WriteJSON(&out, r))
			err := reporttest.Validate(out.Bytes())
			if change.valid {
				require.NoError(t, err)
			} else {
				require.Error(t, err)
			}
		})
	}
}

func TestDistributions(t *testing.T) {
	a, b := report.NewHistogram(), report.NewHistogram()
	for i := range int64(1000) {
		require.NoError(t, a.RecordValue(1000*(i+1)))
		require.NoError(t, b.RecordValue(1000_000*(i+1)))
	}
	d := report.DistributionOf(a)
	require.EqualValues(t, 1000, d.Count)
	require.InEpsilon(t, 1, d.Min, 0.002)
	require.InEpsilon(t, 500, d.P50, 0.002)
	require.InEpsilon(t, 990, d.P99, 0.002)
	require.InEpsilon(t, 1000, d.Max, 0.002)
	merged, err := report.Merge(d, report.DistributionOf(b), report.Distribution{})
	require.NoError(t, err)
	require.EqualValues(t, 2000, merged.Count)
	require.InEpsilon(t, 1000, merged.P50, 0.002)
	require.InEpsilon(t, 1_000_000, merged.Max, 0.002)

	d.Histogram = ""
	_, err = report.Merge(d)
	require.ErrorContains(t, err, "histogram of a distribution", "a distribution without its histogram cannot be merged")
	require.Equal(t, report.Distribution{}, report.DistributionOf(report.NewHistogram()))
}

// summary returns the value of a metric in a report with one repeat.
func summary(t *testing.T, r *report.Report, name string) float64 {
	t.Helper()
	r.Summarize()
	require.Contains(t, r.Summary, name)
	return r.Summary[name].Median
}

func TestMetrics(t *testing.T) {
	r := reporttest.Slicecast(1, 1)
	for name, want := range map[string]float64{
		"bytes-per-update": 110, "sent-bytes-per-update": 11, "cpu-per-update": 14, "cpu-user-per-update": 14. / 3, "api-server-cpu-per-change": 9000, "changes-time": 20,
		"changes-cpu": 1.4, "changes-bytes": 11e6, "cold-bytes-per-node": 565_000, "cold-cpu-per-node": 1200, "cold-time": 3,
		"resync-bytes-per-node": 2500, "resync-cpu-per-node": 600, "resync-time": 5, "source-lag": 1.5, "reconnects": 0,
		"floor-handshake-cpu": 600, "floor-handshake-bytes": 1986, "floor-cold-cpu": 400, "floor-write-cpu": 9,
		"memory-per-node": (60<<20 - 16<<20 - 1<<19) / 1000., "server-peak": 120 << 20,
	} {
		require.InDelta(t, want, summary(t, r, name), 1e-6*want, name)
	}
	for _, m := range report.Metrics {
		require.Contains(t, r.Summary, m.Name, "the fixture lacks a metric")
		require.NotEmpty(t, m.Help, m.Name)
	}

	// The costs of an event count in the totals, but not per update.
	with := r.Repeats[0].Phases[2]
	with.Aside = &report.Aside{
		Updates: with.Updates / 2, ReceivedBytes: with.ReceivedBytes * 3 / 4, SentBytes: with.SentBytes * 3 / 4,
		ServerCPU: &report.CPU{User: with.ServerCPU.User * 3 / 4, System: with.ServerCPU.System * 3 / 4},
	}
	without := r.Repeats[0].Phases[2]
	r.Repeats[0].Phases[2] = with
	for name, want := range map[string]float64{
		"bytes-per-update": 110. / 2, "sent-bytes-per-update": 11. / 2, "cpu-per-update": 14. / 2, "cpu-user-per-update": 14. / 6, "changes-cpu": 1.4,
		"changes-bytes": 11e6,
	} {
		require.InDelta(t, want, summary(t, r, name), 1e-6*want, name)
	}
	with.Aside.Updates = with.Updates
	r.Summarize()
	require.NotContains(t, r.Summary, "bytes-per-update", "no update arrived outside of the event")
	require.NotContains(t, r.Summary, "cpu-per-update")
	r.Repeats[0].Phases[2] = without
	r.Repeats[0].Reconnects = 7
	require.EqualValues(t, 7, summary(t, r, "reconnects"))

	// A second changes phase counts as much as the first.
	more := r.Repeats[0].Phases[2]
	more.Latency = report.Distribution{Count: 1, P99: 1} // has no histogram
	r.Repeats[0].Phases = append(r.Repeats[0].Phases, more)
	require.InDelta(t, 2.8, summary(t, r, "changes-cpu"), 1e-9)
	require.InDelta(t, 14, summary(t, r, "cpu-per-update"), 1e-9)
	require.NotContains(t, r.Summary, "p99", "latencies that cannot be merged are unknown")

	// Metrics that were not measured are absent.
	r.Repeats[0].Phases = r.Repeats[0].Phases[:1]
	r.Repeats[0].Phases[0].ServerCPU = nil
	r.Summarize()
	require.Contains(t, r.Summary, "cold-bytes-per-node")
	for _, name := range []string{"p50", "bytes-per-update", "cpu-per-update", "cold-cpu-per-node", "resync-time", "changes-time"} {
		require.NotContains(t, r.Summary, name)
	}
}

func TestSpread(t *testing.T) {
	r := reporttest.Slicecast(4, 1)
	s := r.Summary["cpu-per-update"]
	require.Len(t, s.Values, 4)
	require.InDelta(t, 14, s.Min, 1e-9)
	require.InDelta(t, 14*1.03, s.Max, 1e-9)
	require.InDelta(t, 14*1.015, s.Median, 1e-9)
	require.Equal(t, "14.2 µs (14.0 µs to 14.4 µs)", s.Text())
}

func TestFormatValue(t *testing.T) {
	for want, v := range map[string]struct {
		value float64
		unit  report.Unit
	}{
		"0 µs":      {0, report.Millis},
		"1.50 s":    {1500, report.Millis},
		"45.3 ms":   {45.311, report.Millis},
		"13.1 µs":   {13.1333, report.Micros},
		"2.88 s":    {2.88, report.Seconds},
		"110 B":     {110, report.Bytes},
		"14.6 KiB":  {14926, report.Bytes},
		"20.5 TiB":  {22.5e12, report.Bytes},
		"-1.00 KiB": {-1024, report.Bytes},
		"12345":     {12345, report.Number},
		"0.5":       {0.5, report.Number},
		"0.000665":  {0.00066489, report.Number},
		"3":         {3, report.Number},
	} {
		require.Equal(t, want, report.FormatValue(v.value, v.unit))
	}
}

func TestObjectives(t *testing.T) {
	r := reporttest.Slicecast(3, 1)
	for text, kept := range map[string]bool{
		"cpu-per-update<15us":     true,
		"cpu-per-update < 0.01ms": false,
		"cpu-per-update<14.2µs":   false, // the median keeps it, the worst repeat does not
		"bytes-per-update<1KB":    true,
		"bytes-per-update<0.1KiB": false,
		"changes-time<=20s":       true,
		"changes-time<20s":        false,
		"changes-time<1m":         true,
		"reconnects<=0":           true,
		"reconnects<0":            false,
	} {
		o, err := report.ParseObjective(text)
		require.NoError(t, err)
		got, why := o.Judge(r)
		require.Equal(t, kept, got, why)
		require.Contains(t, why, text)
	}
	o, err := report.ParseObjective("p99<1s")
	require.NoError(t, err)
	r.Repeats[1].Phases = nil
	r.Summarize()
	kept, why := o.Judge(r)
	require.False(t, kept)
	require.Contains(t, why, "p99 was not measured in all repeats")
}

func TestInvalidObjectives(t *testing.T) {
	for text, message := range map[string]string{
		"p99":             "METRIC<VALUE",
		"p99>250ms":       "METRIC<VALUE",
		"p99=250ms":       "METRIC<VALUE",
		"p99<fast":        "METRIC<VALUE",
		"p99<-1ms":        "METRIC<VALUE",
		"":                "METRIC<VALUE",
		"p98<1s":          `there is no metric "p98": use one of p50, p90`,
		"p99<250":         `p99: "" is not one of its units`,
		"p99<250KB":       `p99: "KB" is not one of its units`,
		"reconnects<1ms":  `reconnects: "ms" is not one of its units`,
		"changes-bytes<1": `changes-bytes: "" is not one of its units`,
	} {
		_, err := report.ParseObjective(text)
		require.ErrorContains(t, err, message, text)
	}
}

func TestBounds(t *testing.T) {
	for text, want := range map[string]report.Bound{
		"<= 15us":  {Equal: true, Value: 0.015, Text: "≤ 15 µs"},
		" <0.5 s ": {Value: 500, Text: "< 0.5 s"},
		"<=1.5m":   {Equal: true, Value: 90_000, Text: "≤ 1.5 m"},
	} {
		b, err := report.ParseBound(text, report.Millis)
		require.NoError(t, err)
		require.InEpsilon(t, want.Value, b.Value, 1e-9)
		b.Value = want.Value
		require.Equal(t, want, b)
	}
	_, err := report.ParseBound("15us", report.Millis)
	require.ErrorContains(t, err, "METRIC<VALUE")
	_, err = report.ParseBound("<15KB", report.Millis)
	require.ErrorContains(t, err, `"KB" is not one of its units`)
}

func TestCompare(t *testing.T) {
	find := func(c *report.Comparison, name string) report.Change {
		for _, ch := range c.Changes {
			if ch.Metric.Name == name {
				return ch
			}
		}
		require.Fail(t, "the comparison lacks the metric", name)
		return report.Change{}
	}
	const tolerance = 0.05
	base := reporttest.Slicecast(5, 1)

	c := report.Compare(base, reporttest.Slicecast(5, 1), tolerance)
	require.Empty(t, c.Regressed())
	require.Equal(t, report.Same, find(c, "cpu-per-update").Verdict)
	require.Equal(t, "the same", new(find(c, "cpu-per-update")).Ratio())

	c = report.Compare(base, reporttest.Slicecast(5, 1.03), tolerance)
	require.Equal(t, report.Same, find(c, "cpu-per-update").Verdict, "within the tolerance")

	c = report.Compare(base, reporttest.Slicecast(5, 1.2), tolerance)
	slower := find(c, "cpu-per-update")
	require.Equal(t, report.Worse, slower.Verdict)
	require.Less(t, slower.P, 0.01)
	require.Equal(t, "+20.0 %", slower.Ratio())
	require.NotEmpty(t, c.Regressed())
	require.Equal(t, report.Worse, find(c, "client-cores").Verdict)
	for _, ch := range c.Regressed() {
		require.NotContains(t, []string{"client-cores", "floor-write-cpu"}, ch.Metric.Name, "not a metric of the peer")
	}
	require.Equal(t, report.Better, find(report.Compare(reporttest.Slicecast(5, 1.2), base, tolerance), "cpu-per-update").Verdict)

	c = report.Compare(reporttest.Slicecast(1, 1), reporttest.Slicecast(1, 10), tolerance)
	require.Equal(t, report.Unknown, find(c, "cpu-per-update").Verdict, "one repeat on each side is not enough")
	require.Equal(t, "10.0 × more", new(find(c, "cpu-per-update")).Ratio())
	require.Empty(t, c.Regressed())

	other := reporttest.APIServer(5)
	other.Scenario.Parameters["seed"] = 2
	other.Nodes, other.Machine.CPUs = 999, 64
	other.Repeats[0].Check.OK = false
	c = report.Compare(other, base, tolerance)
	require.NotEqual(t, c.From.Peer, c.To.Peer)
	require.Equal(t, "5.00 × less", new(find(c, "bytes-per-update")).Ratio())
	notes := strings.Join(c.Notes, "\n")
	require.Contains(t, notes, "the states' sources differ: own-api-server and generated")
	for _, part := range []string{`parameter seed differs: "2" and "1"`, "nodes differ: 999 and 1000", "machines differ", "a check failed"} {
		require.Contains(t, notes, part)
	}

	var out strings.Builder
	out.WriteString(report.Compare(reporttest.APIServer(4), reporttest.Slicecast(4, 1), tolerance).Text())
	golden(t, "compare.txt", out.String())
	require.False(t, math.IsNaN(slower.P))
}

// TestMetricsAreDocumented checks that docs/loadtest.md lists all metrics, with their descriptions.
func TestMetricsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/loadtest.md")
	require.NoError(t, err)
	var want strings.Builder
	for i := range report.Metrics {
		m := &report.Metrics[i]
		fmt.Fprintf(&want, "| `%s` | %s | %s |\n", m.Name, m.Unit, m.Help)
	}
	require.Contains(t, string(page), "| --- | --- | --- |\n"+want.String()+"\n")
}

// TestUndividedCPU summarizes a report of a server that reports only its total CPU time.
func TestUndividedCPU(t *testing.T) {
	r := reporttest.Slicecast(1, 1)
	for i := range r.Repeats[0].Phases {
		p := &r.Repeats[0].Phases[i]
		p.ServerCPU, p.APIServerCPU = &report.CPU{Undivided: 2 * float64(p.Updates) / 1e6}, nil
	}
	r.Summarize()
	require.InDelta(t, 2, r.Summary["cpu-per-update"].Median, 1e-6)
	require.NotContains(t, r.Summary, "cpu-user-per-update")
	require.NotContains(t, r.Summary, "cpu-system-per-update")
	var out strings.Builder
	out.WriteString(r.Text())
	require.NotContains(t, out.String(), "(user")
}
