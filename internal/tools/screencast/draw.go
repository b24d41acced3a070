package main

import (
	"bytes"
	"fmt"
	"html"
	"strings"
	"unicode/utf8"
)

const (
	fontSize   = 13  // pixels
	letter     = 7.9 // width of a letter, in pixels, for the widest of the usual fonts
	lineHeight = 18  // pixels
	margin     = 14  // pixels
	// slower is by how much the animation is slower than the recording, so that it can be read.
	slower = 5
	// hold is how long the complete output is shown before the animation starts again, in seconds.
	hold = 8
)

// style has one background for readers with light and with dark pages. A cover that hides what is
// not printed yet moves down with each line. Without animations, the cover is below the picture.
const style = `
text { font: %dpx ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #e6edf3; white-space: pre; }
.paper { fill: #0d1117; stroke: #3d444d; } .cover { fill: #0d1117; animation: print %.1fs step-end infinite; }
.prompt { fill: #79c0ff; font-weight: bold; } .title { fill: #7ee787; font-weight: bold; }
@media (prefers-reduced-motion: reduce) { .cover { animation: none; } }
@keyframes print {
`

func (r *recording) columns() int {
	longest := len(r.prompt())
	for _, l := range r.Lines {
		longest = max(longest, utf8.RuneCountInString(l.Text))
	}
	return longest
}

func (r *recording) prompt() string { return "$ " + r.Command }

func (r *recording) draw() []byte {
	width, height := int(letter*float64(r.columns()))+2*margin, lineHeight*(len(r.Lines)+1)
	duration := slower*r.Lines[len(r.Lines)-1].At + hold
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" role="img" aria-labelledby="title">`, width, height+2*margin, width)
	fmt.Fprintf(&out, "\n<title id=\"title\">What %s prints</title>\n<style>", html.EscapeString(r.Command))
	fmt.Fprintf(&out, style, fontSize, duration)
	for i := range r.Lines {
		at := 0. // the prompt is there from the beginning
		if i > 0 {
			at = r.Lines[i-1].At
		}
		if r.Lines[i].At > at || i == 0 { // otherwise both lines appear at once
			fmt.Fprintf(&out, "%.2f%% { transform: translateY(-%dpx); }\n", 100*slower*at/duration, height-lineHeight*(i+1))
		}
	}
	fmt.Fprintf(&out, "%.2f%% { transform: none; }\n}\n</style>\n", 100*slower*r.Lines[len(r.Lines)-1].At/duration)
	fmt.Fprintf(&out, "<rect class=\"paper\" x=\"0.5\" y=\"0.5\" width=\"%d\" height=\"%d\" rx=\"8\"/>\n", width-1, height+2*margin-1)
	fmt.Fprintf(&out, "<svg x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\">\n", margin, margin, width-2*margin, height)
	text := func(row int, class, s string) {
		if s != "" {
			fmt.Fprintf(&out, "<text%s y=\"%d\" xml:space=\"preserve\">%s</text>\n", class, row*lineHeight+fontSize, html.EscapeString(s))
		}
	}
	text(0, ` class="prompt"`, r.prompt())
	for i, l := range r.Lines {
		class := ""
		if strings.HasPrefix(l.Text, "== ") {
			class = ` class="title"`
		}
		text(i+1, class, l.Text)
	}
	fmt.Fprintf(&out, "<rect class=\"cover\" y=\"%d\" width=\"%d\" height=\"%d\"/>\n</svg>\n</svg>\n", height, width, height)
	return out.Bytes()
}
