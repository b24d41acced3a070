// Package chart draws the charts of reports as self-contained SVG, without scripts, fonts or
// network access. Each chart has a text alternative. Lines differ in their dashes as well as in
// color. Colors follow the light or dark scheme of the page around the chart (Style).
package chart

import (
	"fmt"
	"html"
	"html/template"
	"math"
	"strings"
)

// Sizes in user units. The page scales the chart: on a phone 340 pixels wide, a letter is still 9
// pixels high.
const (
	width, height            = 480, 270
	left, right, top, bottom = 62, 12, 22, 40
	fontSize                 = 13
	lineHeight               = 18
	barHeight, groupGap      = 16, 12
	// letterWidth is the approximate width of a letter.
	letterWidth = 7
)

// Style is the CSS that charts need, in the style sheet of the page or in the SVG file.
const Style = `
.chart { --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #a63d86; --ink: #1f2328; --faint: #d0d7de; }
@media (prefers-color-scheme: dark) {
  .chart { --c0: #6cb8ee; --c1: #ff9d4d; --c2: #3fcf9f; --c3: #ea94c9; --ink: #e6edf3; --faint: #3d444d; }
}
.chart text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.chart .grid { stroke: var(--faint); stroke-width: 1; }
.chart .mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 1 4; }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.chart .s0 { stroke: var(--c0); } .chart .s1 { stroke: var(--c1); stroke-dasharray: 7 3; }
.chart .s2 { stroke: var(--c2); stroke-dasharray: 2 3; } .chart .s3 { stroke: var(--c3); stroke-dasharray: 8 3 2 3; }
.chart .f0 { fill: var(--c0); } .chart .f1 { fill: var(--c1); } .chart .f2 { fill: var(--c2); } .chart .f3 { fill: var(--c3); }
.chart .range { stroke: var(--ink); stroke-width: 1.5; }
`

// series is the number of colors. Further lines reuse them from the first on.
const series = 4

// Head is the part that all charts have.
type Head struct {
	// ID is unique in the page.
	ID string
	// Title names the chart. Text describes it in words for people who cannot see it.
	Title, Text string
}

// open writes the start of a chart of the given height.
func (h Head) open(b *strings.Builder, height int) {
	fmt.Fprintf(b, `<svg class="chart" viewBox="0 0 %d %d" role="img" aria-labelledby="%s-title %s-text">`+"\n", width, height, h.ID, h.ID)
	fmt.Fprintf(b, "<title id=\"%s-title\">%s</title><desc id=\"%s-text\">%s</desc>\n", h.ID, html.EscapeString(h.Title), h.ID, html.EscapeString(h.Text))
}

// File returns a chart as an SVG file of its own, for use with <img>.
func File(svg template.HTML) string {
	s := strings.Replace(string(svg), "<svg ", `<svg xmlns="http://www.w3.org/2000/svg" `, 1)
	return strings.Replace(s, ">\n", ">\n<style>"+Style+"</style>\n", 1)
}

// Point is a point of a line.
type Point struct{ X, Y float64 }

// Line is a line of a chart.
type Line struct {
	Name   string
	Points []Point
}

// Tick is a labeled position on an axis.
type Tick struct {
	At   float64
	Text string
}

// Axis is an axis of a chart.
type Axis struct {
	Title string
	// Log selects a logarithmic scale. Values of 0 or less are then left out.
	Log bool
	// Format formats a value.
	Format func(float64) string
	// Binary makes powers of two the round values, as for bytes.
	Binary bool
	// Ticks are the ticks to draw. If nil, they are derived from the values.
	Ticks []Tick
}

// Lines is a line chart.
type Lines struct {
	Head
	X, Y  Axis
	Lines []Line
	// Marks are vertical lines with a label.
	Marks []Tick
}

// SVG returns the chart.
func (c Lines) SVG() template.HTML {
	x, y := c.X.scale(c.values(func(p Point) float64 { return p.X })), c.Y.scale(c.values(func(p Point) float64 { return p.Y }))
	px := func(v float64) float64 { return left + x.place(v)*(width-left-right) }
	py := func(v float64) float64 { return height - bottom - y.place(v)*(height-top-bottom) }
	legend := len(c.Lines) > 1
	full := height
	if legend {
		full += lineHeight * ((len(c.Lines) + 1) / 2)
	}
	var b strings.Builder
	c.open(&b, full)
	for _, t := range y.ticks {
		fmt.Fprintf(&b, `<line class="grid" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/>`, left, width-right, py(t.At), py(t.At))
		text(&b, left-6, py(t.At)+fontSize/3, "end", t.Text)
	}
	for i, t := range x.ticks {
		anchor := "middle"
		if i == len(x.ticks)-1 && px(t.At) > width-3*right {
			anchor = "end"
		}
		fmt.Fprintf(&b, `<line class="grid" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>`, px(t.At), px(t.At), top, height-bottom)
		text(&b, px(t.At), height-bottom+fontSize+3, anchor, t.Text)
	}
	c.marks(&b, px)
	text(&b, 0, fontSize, "start", c.Y.Title)
	text(&b, width-right, height-6, "end", c.X.Title)
	for i, l := range c.Lines {
		fmt.Fprintf(&b, "\n<path class=\"line s%d\" d=\"", i%series)
		pen := "M"
		for _, p := range l.Points {
			if c.X.Log && p.X <= 0 || c.Y.Log && p.Y <= 0 {
				pen = "M" // leave a gap
				continue
			}
			fmt.Fprintf(&b, "%s%.1f %.1f", pen, px(p.X), py(p.Y))
			pen = "L"
		}
		b.WriteString(`"/>`)
		if legend {
			lx, ly := float64(left+i%2*(width-left)/2), float64(height+fontSize+i/2*lineHeight)
			fmt.Fprintf(&b, `<line class="line s%d" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, i%series, lx, lx+24, ly-fontSize/3, ly-fontSize/3)
			text(&b, lx+30, ly, "start", l.Name)
		}
	}
	b.WriteString("\n</svg>\n")
	return template.HTML(b.String()) //nolint:gosec // all texts are escaped
}

// marks draws the marks. Labels that would overlap are placed in different rows.
func (c Lines) marks(b *strings.Builder, px func(float64) float64) {
	var taken []float64 // right end of the last label, by row
	for _, m := range c.Marks {
		x, wide := px(m.At)+3, float64(letterWidth*len(m.Text))
		fmt.Fprintf(b, `<line class="mark" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>`, x-3, x-3, top, height-bottom)
		x = min(x, width-right-wide)
		row := 0
		for row < len(taken) && taken[row] > x {
			row++
		}
		if row == len(taken) {
			taken = append(taken, 0)
		}
		taken[row] = x + wide
		text(b, x, float64(top+fontSize+row*(fontSize+2)), "start", m.Text)
	}
}

func (c Lines) values(of func(Point) float64) (out []float64) {
	for _, l := range c.Lines {
		for _, p := range l.Points {
			out = append(out, of(p))
		}
	}
	return out
}

func text(b *strings.Builder, x, y float64, anchor, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`, x, y, anchor, html.EscapeString(s))
}

// scale maps values to positions on an axis.
type scale struct {
	log       bool
	low, high float64 // logarithms if log is set
	ticks     []Tick
}

// place returns the position of a value, from 0 to 1.
func (s scale) place(v float64) float64 {
	if s.log {
		v = math.Log10(v)
	}
	return min(max((v-s.low)/(s.high-s.low), 0), 1)
}

// maxTicks is the maximum number of ticks that are derived from values.
const maxTicks = 6

// scale returns a scale that covers the values. It includes 0 unless it is logarithmic.
func (a Axis) scale(values []float64) scale {
	s := scale{log: a.Log, low: math.Inf(1), high: math.Inf(-1)}
	for _, v := range values {
		if a.Log {
			if v <= 0 {
				continue
			}
			v = math.Log10(v)
		}
		s.low, s.high = min(s.low, v), max(s.high, v)
	}
	if math.IsInf(s.low, 0) {
		s.low, s.high = 0, 1 // there are no values
	}
	switch {
	case a.Ticks != nil:
		s.low, s.ticks = min(s.low, 0), a.Ticks
		s.high = max(s.high, a.Ticks[len(a.Ticks)-1].At)
	case a.Log:
		a.logTicks(&s)
	default:
		s.low = min(s.low, 0)
		if s.high == s.low {
			s.high++
		}
		step := niceStep((s.high-s.low)/maxTicks, a.Binary)
		s.high = math.Ceil(s.high/step) * step
		for i := math.Ceil(s.low / step); i*step <= s.high+step/2; i++ {
			s.ticks = append(s.ticks, Tick{i * step, a.Format(i * step)})
		}
	}
	return s
}

// logTicks sets ticks at powers of ten and, if there are few of these, between them. The scale
// starts and ends at a tick.
func (a Axis) logTicks(s *scale) {
	const few = 2
	between := []float64{1}
	if s.high-s.low <= few {
		between = []float64{1, 2, 5}
	}
	low, high := s.low, s.high
	s.low, s.high = math.Floor(low), math.Ceil(high)
	if s.high == s.low {
		s.high++
	}
	for e := s.low; e <= s.high; e++ {
		for _, m := range between {
			if at := e + math.Log10(m); at <= s.high {
				s.ticks = append(s.ticks, Tick{m * math.Pow(10, e), a.Format(m * math.Pow(10, e))})
			}
		}
	}
	// Drop ticks below the last one that is below all values, and ticks above the first one that is
	// above all values.
	for len(s.ticks) > 2 && math.Log10(s.ticks[1].At) <= low {
		s.ticks = s.ticks[1:]
	}
	for len(s.ticks) > 2 && math.Log10(s.ticks[len(s.ticks)-2].At) >= high {
		s.ticks = s.ticks[:len(s.ticks)-1]
	}
	s.low, s.high = math.Log10(s.ticks[0].At), math.Log10(s.ticks[len(s.ticks)-1].At)
}

// niceStep returns the smallest round number that is at least v: a power of two if binary, else 1,
// 2 or 5 times a power of ten.
func niceStep(v float64, binary bool) float64 {
	if binary {
		return math.Pow(2, math.Ceil(math.Log2(v)))
	}
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if m*power >= v {
			return m * power
		}
	}
	return 10 * power
}

// Bar is a value with its parts, from left to right, and its range over repeats.
type Bar struct {
	Name  string
	Parts []float64
	// Low and High are the range of the sum of the parts. If they are equal, no range is drawn.
	Low, High float64
	// Text is the value as text.
	Text string
	// Color is the color of the first part; the other parts have the following colors.
	Color int
}

// Bars is a chart of horizontal bars.
type Bars struct {
	Head
	Bars []Bar
	// Parts are the names of the parts of bars. It is nil if bars have one part.
	Parts []string
	// Heading is drawn above the bars. It is empty if the page around the chart has a heading.
	Heading string
}

// SVG returns the chart.
func (c Bars) SVG() template.HTML {
	most, longest := 0., 0
	for _, bar := range c.Bars {
		most = max(most, sum(bar.Parts), bar.High)
		longest = max(longest, len(bar.Text))
	}
	if most == 0 {
		most = 1
	}
	full := top/2 + len(c.Bars)*(barHeight+lineHeight+groupGap)
	if len(c.Parts) > 0 {
		full += lineHeight
	}
	y := float64(top / 2)
	if c.Heading != "" {
		full += lineHeight + groupGap
		y += lineHeight + groupGap
	}
	var b strings.Builder
	c.open(&b, full)
	scale := float64(width-letterWidth*longest-right) / most
	if c.Heading != "" {
		text(&b, 0, lineHeight, "start", c.Heading)
	}
	for _, bar := range c.Bars {
		text(&b, 0, y+fontSize-2, "start", bar.Name)
		y += lineHeight
		x := 0.
		for i, v := range bar.Parts {
			fmt.Fprintf(&b, `<rect class="f%d" x="%.1f" y="%.1f" width="%.1f" height="%d"/>`, (bar.Color+i)%series, x, y, max(v*scale, 1), barHeight)
			x += max(v*scale, 1)
		}
		if bar.High > bar.Low {
			middle := y + barHeight/2
			fmt.Fprintf(&b, `<line class="range" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, bar.Low*scale, bar.High*scale, middle, middle)
			x = max(x, bar.High*scale)
		}
		text(&b, x+6, y+fontSize, "start", bar.Text)
		y += barHeight + groupGap
		b.WriteString("\n")
	}
	for i, name := range c.Parts {
		x := float64(i * width / len(c.Parts))
		fmt.Fprintf(&b, `<rect class="f%d" x="%.1f" y="%.1f" width="12" height="12"/>`, i%series, x, y-2)
		text(&b, x+18, y+9, "start", name)
	}
	b.WriteString("\n</svg>\n")
	return template.HTML(b.String()) //nolint:gosec // all texts are escaped
}

func sum(values []float64) (out float64) {
	for _, v := range values {
		out += v
	}
	return out
}
