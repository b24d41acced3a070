// This file holds the readers of each kind of file, which return its sentences, the lines that are
// too wide, and the comments of functions.
package prose

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// document is what a file says to its readers.
type document struct {
	// wide is the list of lines that are too wide.
	wide      []line
	sentences []sentence
	functions []function
	// test says that the file is a Go test file; head is the number of sentences above the package
	// clause.
	test bool
	head int
}

// line is a line of a file.
type line struct {
	number int
	text   string
}

// word is a word of a sentence and the number of its line.
type word struct {
	text string
	line int
}

type sentence []word

// function is a Go function with the first sentence of its comment.
type function struct {
	name    string
	comment sentence
}

func (s sentence) String() string {
	texts := make([]string, len(s))
	for i, w := range s {
		texts[i] = w.text
	}
	return strings.Join(texts, " ")
}

// read returns what the file says; nil if it is not of a kind that is checked.
func read(path string) (*document, error) {
	kind := filepath.Ext(path)
	if filepath.Base(path) == "Makefile" {
		kind = ".sh"
	}
	switch kind {
	case ".go", ".proto", ".sh", ".yaml", ".md":
	default:
		return nil, nil
	}
	src, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	d := &document{}
	lines := strings.Split(string(src), "\n")
	switch kind {
	case ".go":
		err = d.readGo(path, src, lines)
	case ".proto":
		d.readLines(lines, "//")
	case ".sh", ".yaml":
		d.readLines(lines, "#")
	case ".md":
		d.readMarkdown(lines)
	}
	return d, err
}

var (
	// directive matches a comment that is for a tool.
	directive = regexp.MustCompile(`^(//(nolint|line |[a-z0-9]+:[a-z0-9])|#!)`)
	// output matches the comment with the output of an example.
	output = regexp.MustCompile(`(?i)^//\s*(unordered )?output:`)
	// item matches the marker at the start of a list item, heading, quotation or footnote.
	item = regexp.MustCompile(`^\s*([-*+]|\d+[.)]|#+|>|[¹²³⁴])\s+`)
	// sentenceEnd matches the last word of a sentence, abbreviation a word that only looks like it.
	sentenceEnd  = regexp.MustCompile("[.?!…][)\"'*_`”]*$")
	abbreviation = regexp.MustCompile(`(?i)^\W*(e\.g|i\.e|cf|vs)\.$`)
)

// readGo reads the comments of a Go file, unless it is generated.
func (d *document) readGo(path string, src []byte, lines []string) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil || ast.IsGenerated(file) {
		return err
	}
	d.test = strings.HasSuffix(path, "_test.go")
	functions := make(map[*ast.CommentGroup]string)
	for _, declaration := range file.Decls {
		if f, ok := declaration.(*ast.FuncDecl); ok && f.Doc != nil && f.Name.Name != "init" {
			functions[f.Doc] = f.Name.Name
		}
	}
	for _, group := range file.Comments {
		before := len(d.sentences)
		d.group(files, group, lines)
		added := d.sentences[before:]
		if group.Pos() < file.Package {
			d.head += len(added)
		}
		if name := functions[group]; name != "" && len(added) > 0 {
			d.functions = append(d.functions, function{name, added[0]})
		}
	}
	return nil
}

// group reads one group of comments of a Go file with these lines.
func (d *document) group(files *token.FileSet, group *ast.CommentGroup, lines []string) {
	var text []line
	for _, comment := range group.List {
		if output.MatchString(comment.Text) {
			break
		}
		if directive.MatchString(comment.Text) {
			continue
		}
		number := files.Position(comment.Pos()).Line
		for i, t := range strings.Split(comment.Text, "\n") {
			t = strings.TrimSuffix(strings.TrimPrefix(strings.TrimPrefix(t, "//"), "/*"), "*/")
			text = append(text, line{number + i, t})
			d.checkWidth(line{number + i, lines[number+i-1]}, t, commentColumns)
		}
	}
	d.prose(text)
}

// readLines reads the comments of a file in which each line of a comment begins with the marker.
func (d *document) readLines(lines []string, marker string) {
	var group []line
	for i, l := range lines {
		t, ok := strings.CutPrefix(strings.TrimSpace(l), marker)
		if !ok || directive.MatchString(l) {
			d.prose(group)
			group = nil
			continue
		}
		group = append(group, line{i + 1, t})
		d.checkWidth(line{i + 1, l}, t, commentColumns)
	}
	d.prose(group)
}

// readMarkdown reads a Markdown file. Each cell of a table is a paragraph.
func (d *document) readMarkdown(lines []string) {
	var text []line
	code := false
	for i, l := range lines {
		number := i + 1
		trimmed := strings.TrimSpace(l)
		switch {
		case strings.HasPrefix(trimmed, "```"):
			code = !code
			text = append(text, line{number, ""})
		case code:
		case strings.HasPrefix(trimmed, "|"):
			for cell := range strings.SplitSeq(trimmed, "|") {
				text = append(text, line{number, ""}, line{number, strings.TrimSpace(cell)})
			}
			text = append(text, line{number, ""})
		default:
			text = append(text, line{number, l})
			if !strings.HasPrefix(trimmed, "![") {
				d.checkWidth(line{number, l}, l, markdownColumns)
			}
		}
	}
	d.prose(text)
}

// checkWidth notes the line if it is too wide, unless its text is code or a single word.
func (d *document) checkWidth(l line, text string, columns int) {
	if utf8.RuneCountInString(l.text) > columns && !isCode(text) && len(strings.Fields(item.ReplaceAllString(text, ""))) > 1 {
		d.wide = append(d.wide, l)
	}
}

// isCode reports whether the text of a line of a comment is a line of a code block.
func isCode(text string) bool { return strings.HasPrefix(text, "\t") }

// prose adds the sentences of the text. A sentence ends with its paragraph at the latest.
func (d *document) prose(text []line) {
	var s sentence
	end := func() {
		if len(s) > 0 {
			d.sentences = append(d.sentences, s)
		}
		s = nil
	}
	for _, l := range text {
		rest := l.text
		if isCode(rest) || strings.TrimSpace(rest) == "" {
			end()
			continue
		}
		if marker := item.FindString(rest); marker != "" {
			end()
			rest = rest[len(marker):]
		}
		for _, t := range strings.Fields(rest) {
			if !strings.ContainsFunc(t, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
				continue
			}
			s = append(s, word{t, l.number})
			if sentenceEnd.MatchString(t) && !abbreviation.MatchString(t) {
				end()
			}
		}
	}
	end()
}
