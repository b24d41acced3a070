// Package page renders reports as one self-contained HTML file. It is readable in a browser, on
// paper, on a phone and with a screen reader. Charts are inline SVG, and each has its figures in a
// table beside it.
package page

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/chart"
)

//go:embed page.html.tmpl
var source string

var parsed = template.Must(template.New("page").Parse(source))

// Write writes the page of one report, or of several reports of the same scenario. With several,
// each is compared with the first; the tolerance is that of report.Compare.
func Write(w io.Writer, tolerance float64, reports ...*report.Report) error {
	p := &content{
		Style: template.CSS(chart.Style), //nolint:gosec // it is a constant
		Title: title(reports), Tolerance: fmt.Sprintf("%g %%", 100*tolerance), Unknown: report.Unknown,
	}
	names := report.Names(reports...)
	for i, r := range reports {
		p.Sides = append(p.Sides, side{names[i], r, phases(r)})
	}
	if len(reports) > 1 {
		for i, r := range reports[1:] {
			p.Comparisons = append(p.Comparisons, comparison{names[0], names[i+1], report.Compare(reports[0], r, tolerance)})
		}
	} else {
		p.Key = key(reports[0])
	}
	p.Tiles = tiles(reports)
	p.Figures = figures(p.Sides)
	return parsed.Execute(w, p)
}

type content struct {
	Style template.CSS
	Title string
	Sides []side
	// Tiles are the figures at the top of the page.
	Tiles       []keyFigure
	Key         []keyFigure
	Comparisons []comparison
	// Tolerance is the tolerance of the comparisons, as text. Unknown is the verdict without a p.
	Tolerance string
	Unknown   report.Verdict
	Figures   []figure
}

type side struct {
	Name string
	*report.Report
	Phases table
}

// keyFigure is one metric of a report, formatted.
type keyFigure struct{ Name, Value, Range, Help string }

// comparison compares two reports. From and To are the names of their sides.
type comparison struct {
	From, To string
	*report.Comparison
}

// figure is a chart with a table of its figures.
type figure struct {
	Title, Text string
	Chart       template.HTML
	Table       table
}

type table struct {
	Head []string
	Rows [][]string
	// Long tables are collapsed.
	Long bool
}

func title(reports []*report.Report) string {
	var peers []string
	for _, r := range reports {
		if !slices.Contains(peers, string(r.Peer)) {
			peers = append(peers, string(r.Peer))
		}
	}
	return fmt.Sprintf("%s, %d nodes: %s", reports[0].Scenario.Name, reports[0].Nodes, strings.Join(peers, " and "))
}

func key(r *report.Report) (out []keyFigure) {
	for _, m := range report.Metrics {
		if s, ok := r.Summary[m.Name]; ok {
			out = append(out, keyFigure{Name: m.Name, Value: report.FormatValue(s.Median, s.Unit), Range: s.RangeText(), Help: m.Help})
		}
	}
	return out
}

// first lists the metrics for the tiles, with short descriptions. A scenario has some of them.
var first = []struct{ metric, words string }{
	{"p99", "latency of a node-update, p99"},
	{"bytes-per-update", "received per node-update"},
	{"cpu-per-update", "server CPU per node-update"},
	{"changes-time", "until all nodes had the last change"},
	{"cold-time", "until the last cold node was in sync"},
	{"resync-time", "until the last node was back in sync"},
	{"memory-per-node", "server memory per node"},
}

// tiles returns the tiles of one report or, with several reports, of the differences between the
// first two.
func tiles(reports []*report.Report) (out []keyFigure) {
	for _, f := range first {
		a, ok := reports[0].Summary[f.metric]
		if !ok {
			continue
		}
		tile := keyFigure{Value: report.FormatValue(a.Median, a.Unit), Help: f.words, Range: a.RangeText()}
		if len(reports) > 1 {
			b, ok := reports[1].Summary[f.metric]
			if !ok {
				continue
			}
			change := report.Change{From: a, To: b}
			tile.Value, tile.Range = change.Ratio(), tile.Value+" → "+report.FormatValue(b.Median, b.Unit)
		}
		out = append(out, tile)
	}
	return out
}

// unknown stands for a figure that was not measured.
const unknown = "–"

func phases(r *report.Report) table {
	t := table{
		Head: []string{"phase", "start", "duration", "updates", "received", "sent", "server CPU", "user", "system", "load tester CPU", "p50", "p99", "max"},
		Long: len(r.Repeats) > 1,
	}
	_, own := r.Summary["api-server-cpu-per-change"]
	own = own && r.Peer == report.Slicecast // otherwise the API server is the server itself
	if own {
		t.Head = append(t.Head, "API server CPU")
	}
	for i := range r.Repeats {
		for _, p := range r.Repeats[i].Phases {
			name := fmt.Sprintf("%s (%s)", p.Name, p.Kind)
			if len(r.Repeats) > 1 {
				name = fmt.Sprintf("repeat %d: %s", i+1, name)
			}
			cpu := []string{unknown, unknown, unknown}
			if c := p.ServerCPU; c != nil {
				cpu[0] = seconds(c.Total())
				if c.Undivided == 0 {
					cpu[1], cpu[2] = seconds(c.User), seconds(c.System)
				}
			}
			row := []string{
				name, seconds(p.StartSeconds), seconds(p.Seconds), fmt.Sprint(p.Updates), bytes(float64(p.ReceivedBytes)), bytes(float64(p.SentBytes)),
				cpu[0], cpu[1], cpu[2], seconds(p.ClientCPU.Total()),
				millis(p.Latency.P50), millis(p.Latency.P99), millis(p.Latency.Max),
			}
			switch {
			case own && p.APIServerCPU != nil:
				row = append(row, seconds(p.APIServerCPU.Total()))
			case own:
				row = append(row, unknown)
			}
			t.Rows = append(t.Rows, row)
		}
	}
	return t
}
