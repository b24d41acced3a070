// These tests prove that charts are well-formed SVG and equal to the files in testdata, and that no
// values break a scale.
package chart_test

import (
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/loadtest/report/chart"
)

var update = flag.Bool("update", false, "write the files in testdata anew")

// golden compares a chart, as an SVG file, with a file in testdata, and checks that it is
// well-formed XML.
func golden(t *testing.T, name, got string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(got))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
	}
	path := "testdata/" + name
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got, "if this is intended, look at the picture and run the test with -update")
}

func number(v float64) string { return fmt.Sprintf("%g", v) }

func TestLines(t *testing.T) {
	c := chart.Lines{
		Head: chart.Head{ID: "lines", Title: "Lines & <marks>", Text: "Two lines that cross."},
		X:    chart.Axis{Title: "x", Format: number}, Y: chart.Axis{Title: "y, logarithmic", Log: true, Format: number},
		Lines: []chart.Line{
			{Name: "rising", Points: []chart.Point{{1, 3}, {2, 0}, {3, 30}, {4, 300}}}, // has a gap at 0
			{Name: "falling", Points: []chart.Point{{1, 250}, {4, 4}}},
		},
		Marks: []chart.Tick{{At: 0.1, Text: "one"}, {At: 0.2, Text: "beneath"}, {At: 4, Text: "at the end"}},
	}
	golden(t, "lines.svg", chart.File(c.SVG()))
	svg := string(c.SVG())
	require.NotContains(t, svg, "http")
	require.Contains(t, svg, "Lines &amp; &lt;marks&gt;")
	require.Equal(t, 3, strings.Count(svg, "M"), "one line has two parts, the other has one")
	for _, tick := range []string{">2<", ">5<", ">500<"} {
		require.Contains(t, svg, tick)
	}
	require.NotContains(t, svg, ">1000<")
}

func TestBars(t *testing.T) {
	c := chart.Bars{
		Head: chart.Head{ID: "bars", Title: "Bars", Text: "One is ten times the other."}, Parts: []string{"user", "system"},
		Bars: []chart.Bar{
			{Name: "much", Parts: []float64{70, 30}, Low: 90, High: 110, Text: "100 µs"}, {Name: "little", Parts: []float64{7, 3}, Text: "10 µs"},
		},
	}
	golden(t, "bars.svg", chart.File(c.SVG()))
}

// TestAnyValues draws values that a scale could fail on, such as none, equal and huge ones.
func TestAnyValues(t *testing.T) {
	for name, points := range map[string][]chart.Point{
		"none": nil, "one": {{1, 1}}, "zero": {{0, 0}, {0, 0}}, "equal": {{1, 7}, {2, 7}}, "negative": {{0, -5}, {1, 5}}, "tiny": {{0, 1e-12}, {1, 2e-12}},
		"huge": {{0, 1e15}, {1, 9e17}},
	} {
		for _, axis := range []chart.Axis{{Format: number}, {Format: number, Binary: true}, {Format: number, Log: true}} {
			c := chart.Lines{X: chart.Axis{Format: number}, Y: axis, Lines: []chart.Line{{Points: points}}}
			svg := string(c.SVG())
			require.NotContains(t, svg, "NaN", name)
			require.NotContains(t, svg, "Inf", name)
			require.Less(t, strings.Count(svg, "<text"), 40, name)
		}
	}
	svg := string(chart.Bars{Bars: []chart.Bar{{Name: "nothing", Parts: []float64{0}}}}.SVG())
	require.NotContains(t, svg, "NaN")
}
