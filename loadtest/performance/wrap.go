package performance

import (
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// pageColumns is the width of the page's prose, in characters.
const pageColumns = 120

var (
	listItem = regexp.MustCompile(`^(- |\d+\. )`)
	// notProse matches lines that must stay as they are: of tables, headings, images and HTML.
	notProse = regexp.MustCompile("^(\\||#|!|<|```|$)")
)

// wrap wraps the paragraphs and list items of a Markdown page that have a line wider than
// pageColumns. Figures make some lines of the template as wide as that.
func wrap(page string) string {
	var out, block []string
	code := false
	end := func() {
		out = append(out, wrapBlock(block)...)
		block = nil
	}
	for line := range strings.SplitSeq(page, "\n") {
		if strings.HasPrefix(line, "```") {
			code = !code
		}
		if code || notProse.MatchString(line) {
			end()
			out = append(out, line)
			continue
		}
		if listItem.MatchString(line) {
			end()
		}
		block = append(block, line)
	}
	end()
	return strings.Join(out, "\n")
}

// wrapBlock wraps a paragraph or list item, given as its lines.
func wrapBlock(lines []string) []string {
	if !slices.ContainsFunc(lines, func(l string) bool { return utf8.RuneCountInString(l) > pageColumns }) {
		return lines
	}
	indent := strings.Repeat(" ", len(listItem.FindString(lines[0])))
	var out []string
	line := ""
	for _, word := range strings.Fields(strings.Join(lines, " ")) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > pageColumns:
			out = append(out, line)
			line = indent + word
		default:
			line += " " + word
		}
	}
	return append(out, line)
}
