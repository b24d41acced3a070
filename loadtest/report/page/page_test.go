// These tests prove that the HTML page of reports is well-formed, shows the figures that it should,
// and copes with reports that lack most of them.
package page_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/page"
	"github.com/slicecast/slicecast/loadtest/report/reporttest"
)

// write renders a page and checks what must hold for every page.
func write(t *testing.T, reports ...*report.Report) (text string, root *html.Node) {
	t.Helper()
	return writeWith(t, report.DefaultTolerance, reports...)
}

func writeWith(t *testing.T, tolerance float64, reports ...*report.Report) (text string, root *html.Node) {
	t.Helper()
	var out strings.Builder
	require.NoError(t, page.Write(&out, tolerance, reports...))
	text = out.String()
	requireWellFormed(t, text)
	require.NotRegexp(t, regexp.MustCompile(`(?i)https?://|url\(|@import|<script|<link|<img|\bsrc=|\bhref=`), text, "the page refers to other files")
	require.NotContains(t, text, "NaN")
	require.NotContains(t, text, "Inf")
	require.NotContains(t, text, "ZgotmplZ", "the template refused a value")
	root, err := html.Parse(strings.NewReader(text))
	require.NoError(t, err)

	ids := make(map[string]bool)
	for n := range root.Descendants() {
		if id := attribute(n, "id"); id != "" {
			require.False(t, ids[id], "duplicate id %q", id)
			ids[id] = true
		}
	}
	for n := range root.Descendants() {
		for _, id := range strings.Fields(attribute(n, "aria-labelledby")) {
			require.True(t, ids[id], "nothing has the id %q", id)
		}
	}
	return text, root
}

// void are the elements without an end tag.
var void = map[atom.Atom]bool{atom.Meta: true, atom.Br: true, atom.Hr: true, atom.Input: true}

// requireWellFormed checks that every start tag has its end tag. An HTML parser would repair the
// page silently.
func requireWellFormed(t *testing.T, text string) {
	t.Helper()
	var open []string
	z := html.NewTokenizer(strings.NewReader(text))
	for {
		switch z.Next() {
		case html.ErrorToken:
			require.ErrorContains(t, z.Err(), "EOF")
			require.Empty(t, open)
			return
		case html.StartTagToken:
			if token := z.Token(); !void[token.DataAtom] {
				open = append(open, token.Data)
			}
		case html.EndTagToken:
			token := z.Token()
			require.NotEmpty(t, open, "</%s> has no start tag", token.Data)
			require.Equal(t, open[len(open)-1], token.Data, "end tag")
			open = open[:len(open)-1]
		case html.TextToken, html.SelfClosingTagToken, html.CommentToken, html.DoctypeToken:
		}
	}
}

func attribute(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

// figures returns the page's figures by the titles of their charts.
func figures(t *testing.T, root *html.Node) map[string]*html.Node {
	t.Helper()
	out := make(map[string]*html.Node)
	for n := range root.Descendants() {
		if n.DataAtom != atom.Figure {
			continue
		}
		var title, description string
		tables := 0
		for d := range n.Descendants() {
			switch {
			case d.Data == "svg":
				require.Equal(t, "img", attribute(d, "role"))
			case d.Data == "title":
				title = d.FirstChild.Data
			case d.Data == "desc":
				description = d.FirstChild.Data
			case d.DataAtom == atom.Table:
				tables++
			}
		}
		require.NotEmpty(t, title)
		require.NotEmpty(t, description, "%s has no description", title)
		require.Equal(t, 1, tables, "%s needs one table of its figures", title)
		out[title] = n
	}
	return out
}

func TestPage(t *testing.T) {
	text, root := write(t, reporttest.Slicecast(3, 1))
	require.Contains(t, text, "Example &lt;CPU&gt;")
	require.Contains(t, text, "all nodes ended with the true state")
	require.Contains(t, text, "<dt>nodes</dt><dd>1000</dd>")
	all := figures(t, root)
	for _, title := range []string{
		"Latency distribution", "Latency over time", "Bytes per node-update", "Server CPU per node-update", "Node-updates over time",
		"Server CPU over time", "Memory over time", "Convergence",
	} {
		require.Contains(t, all, title)
	}
	for i := range report.Metrics {
		require.Contains(t, text, ">"+report.Metrics[i].Name+"<")
	}
}

func TestComparisonPage(t *testing.T) {
	several := reporttest.APIServer(4)
	several.Processes = 2
	text, root := write(t, several, reporttest.Slicecast(4, 1))
	require.Contains(t, text, "<dt>nodes</dt><dd>1000 in 2 processes</dd>")
	require.Contains(t, text, "steady, 1000 nodes: kube-apiserver and slicecast")
	require.Contains(t, text, "5.00 × less")
	require.Contains(t, text, `<span class="good">better</span> (p=0.029)`)
	require.Contains(t, figures(t, root), "Latency distribution")
	text, root = write(t, reporttest.Slicecast(4, 1), reporttest.Slicecast(4, 2))
	require.Contains(t, text, `<span class="bad">worse</span>`)
	require.Contains(t, text, "medians of more than 5 %")
	// Two sides with the same peer and version have distinct names, in the table and in the charts.
	require.Contains(t, text, `<th scope="col" class="n">before</th><th scope="col" class="n">after</th>`)
	for title, figure := range figures(t, root) {
		if title != "Convergence" && !strings.Contains(title, "over time") {
			require.Contains(t, rows(figure), "after", title)
		}
	}
	require.NotContains(t, text, "(2)")

	text, _ = writeWith(t, 1.5, reporttest.Slicecast(4, 1), reporttest.Slicecast(4, 2))
	require.NotContains(t, text, `<span class="bad">worse</span>`)
	require.Contains(t, text, "medians of more than 150 %")

	text, _ = write(t, reporttest.Slicecast(4, 1), reporttest.Slicecast(4, 2), reporttest.Slicecast(4, 1))
	require.Contains(t, text, "<h2>1: slicecast v1.0.0 and 3: slicecast v1.0.0</h2>")
}

// rows returns the first cells of the rows of a figure's table.
func rows(figure *html.Node) (out []string) {
	for n := range figure.Descendants() {
		if n.DataAtom == atom.Th && attribute(n, "scope") == "row" && n.FirstChild != nil {
			out = append(out, n.FirstChild.Data)
		}
	}
	return out
}

// TestSparsePages renders reports that lack the figures for most charts.
func TestSparsePages(t *testing.T) {
	failed := reporttest.Slicecast(1, 1)
	failed.Repeats[0].Series = nil
	failed.Repeats[0].Check = report.Check{Error: "node-00003 <lacks> a shard"}
	for i := range failed.Repeats[0].Phases {
		p := &failed.Repeats[0].Phases[i]
		p.ServerCPU, p.Convergence, p.Latency.Histogram = nil, nil, ""
	}
	failed.Summarize()
	text, root := write(t, failed)
	require.Contains(t, text, "a check of the run failed")
	require.Contains(t, text, "node-00003 &lt;lacks&gt; a shard")
	require.Contains(t, text, `<td class="n">–</td>`)
	require.Equal(t, 1, strings.Count(text, ">0 µs<"), "only the first phase starts at 0; unknown figures are not 0")
	require.Len(t, figures(t, root), 1, "only the bytes were measured")
	require.NotContains(t, text, `<td class="n">0 µs</td><td class="n">0 µs</td>`, "an unknown CPU time is not 0")
	require.Contains(t, text, `<td class="n">–</td><td class="n">–</td><td class="n">–</td>`)

	empty := reporttest.Slicecast(0, 1)
	_, root = write(t, empty)
	require.Empty(t, figures(t, root))

	idle := reporttest.Slicecast(1, 1)
	for i := range idle.Repeats[0].Series {
		s := &idle.Repeats[0].Series[i]
		*s = report.Second{At: s.At}
	}
	write(t, idle)
}

// TestUndividedCPU compares an API server that reports only its total CPU time with one whose user
// and system time are known.
func TestUndividedCPU(t *testing.T) {
	whole := reporttest.APIServer(4)
	for i := range whole.Repeats {
		for j := range whole.Repeats[i].Phases {
			p := &whole.Repeats[i].Phases[j]
			p.ServerCPU = &report.CPU{Undivided: p.ServerCPU.Total()}
		}
	}
	whole.Summarize()
	for _, reports := range [][]*report.Report{{whole}, {whole, reporttest.Slicecast(4, 1)}, {reporttest.Slicecast(4, 1), whole}} {
		text, root := write(t, reports...)
		figure := figures(t, root)["Server CPU per node-update"]
		require.NotNil(t, figure)
		require.Len(t, rows(figure), len(reports), "a side is missing")
		require.Contains(t, text, whole.Summary["cpu-per-update"].Text())
		require.Contains(t, text, "user and system")
	}
	_, root := write(t, reporttest.Slicecast(4, 1))
	figure := figures(t, root)["Server CPU per node-update"]
	words := ""
	for n := range figure.Descendants() {
		if n.Type == html.TextNode {
			words += n.Data + " "
		}
	}
	require.NotContains(t, words, "user and system")
}

// TestOwnAPIServer renders the CPU time of an API server that the servers watch.
func TestOwnAPIServer(t *testing.T) {
	text, _ := write(t, reporttest.Slicecast(1, 1))
	require.Contains(t, text, ">API server CPU</th>")
	require.Contains(t, text, `<td class="n">900 ms</td></tr>`)
	text, _ = write(t, reporttest.APIServer(1))
	require.NotContains(t, text, ">API server CPU</th>")
}

func TestSlowNodes(t *testing.T) {
	r := reporttest.Slicecast(1, 1)
	slow := reporttest.Slicecast(1, 50).Repeats[0].Phases[2].Latency
	r.Repeats[0].Phases[2].SlowLatency = &slow
	text, _ := write(t, r)
	require.Contains(t, text, "slicecast, slow nodes: 50 % within")
}
