package performance

import (
	"strings"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/report/chart"
)

// Chart returns the chart of docs/performance.md. It compares Slicecast with the API server's
// watches in the scenario "headline" with 1000 nodes. Bars of bytes and bars of CPU time are scaled
// separately, relative to the largest of each.
func (m *Measured) Chart() (string, error) {
	const ours, theirs, one = "headline-1000", "apiserver-headline-1000", "apiserver-headline-1"
	received, err := m.Figure(ours, "changes-bytes")
	if err != nil {
		return "", err
	}
	theirReceived, err := m.Figure(theirs, "changes-bytes")
	if err != nil {
		return "", err
	}
	cpu, err := m.Figure(ours, "changes-cpu")
	if err != nil {
		return "", err
	}
	watches, err := m.watches(theirs, one, "changes-cpu")
	if err != nil {
		return "", err
	}
	const heading = "5000 pods behind one Service are replaced, 1000 nodes"
	c := chart.Bars{Head: chart.Head{ID: "headline", Title: heading}, Heading: heading}
	var words []string
	for _, group := range []struct {
		what   string
		whose  [2]string
		values [2]report.Spread
	}{
		{"bytes to all nodes", [2]string{"Slicecast", "kube-apiserver"}, [2]report.Spread{received, theirReceived}},
		{"server CPU", [2]string{"Slicecast", "kube-apiserver's watches alone"}, [2]report.Spread{cpu, watches.Spread}},
	} {
		most := max(group.values[0].Median, group.values[1].Median)
		for color, v := range group.values {
			name, text := group.what+", "+group.whose[color], report.FormatValue(v.Median, v.Unit)
			c.Bars = append(c.Bars, chart.Bar{Name: name, Parts: []float64{v.Median / most}, Text: text, Color: color})
			words = append(words, name+": "+text)
		}
	}
	c.Text = strings.Join(words, "; ") + "."
	return chart.File(c.SVG()), nil
}
