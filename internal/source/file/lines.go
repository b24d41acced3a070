package file

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	yamlv3 "go.yaml.in/yaml/v3"
)

// document is a part of a file that is parsed on its own: a YAML document or a JSON value.
type document struct {
	text []byte
	line int          // the line in the file at which it begins, from 1
	root *yamlv3.Node // parsed when a line is first looked up
}

// splitYAML splits a file before each line that begins a document.
func splitYAML(text []byte) []*document {
	d := &document{line: 1}
	docs := []*document{d}
	line := 1
	for l := range bytes.Lines(text) {
		if bytes.HasPrefix(l, []byte("---")) && (len(l) == 3 || strings.IndexByte(" \t\r\n", l[3]) >= 0) {
			d = &document{line: line}
			docs = append(docs, d)
		}
		d.text = append(d.text, l...)
		line++
	}
	return docs
}

// first returns the line in the file of the document's first content, or 0 if it only has comments.
func (d *document) first() int {
	line := d.line
	for l := range bytes.Lines(d.text) {
		l = bytes.TrimSpace(bytes.TrimPrefix(l, []byte("---")))
		if len(l) > 0 && l[0] != '#' {
			return line
		}
		line++
	}
	return 0
}

// last returns the line in the file at which the document ends.
func (d *document) last() int {
	return d.line + bytes.Count(bytes.TrimSuffix(d.text, []byte("\n")), []byte("\n"))
}

// padded returns the document after as many empty lines as precede it in the file, so that a YAML
// parser reports lines of the file.
func (d *document) padded() []byte {
	return append(bytes.Repeat([]byte("\n"), d.line-1), d.text...)
}

// lineOf returns the line in the file of the value at a path such as "spec.ports[2].port". If the
// path does not exist, it uses the longest part that does. It parses JSON as YAML.
func (d *document) lineOf(path string) int {
	line := d.first()
	if path == "" {
		return line
	}
	if d.root == nil {
		d.root = &yamlv3.Node{}
		if yamlv3.Unmarshal(d.padded(), d.root) != nil {
			d.root = &yamlv3.Node{}
		}
	}
	if len(d.root.Content) == 0 {
		return line
	}
	node := d.root.Content[0]
	for _, step := range steps(path) {
		if node.Kind == yamlv3.AliasNode {
			node = node.Alias
		}
		next := -1
		switch node.Kind {
		case yamlv3.SequenceNode:
			if i, err := strconv.Atoi(step); err == nil && i < len(node.Content) {
				next = i
				line = node.Content[i].Line
			}
		case yamlv3.MappingNode:
			for i := 0; i+1 < len(node.Content); i += 2 {
				if node.Content[i].Value == step {
					next = i + 1
					line = node.Content[i].Line
				}
			}
		}
		if next < 0 {
			break
		}
		node = node.Content[next]
	}
	return line
}

func steps(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '.' || r == '[' || r == ']' })
}

// pathAt returns the path of the value whose end, or whose opening bracket, is at the offset in a
// JSON text.
func pathAt(text []byte, offset int64) string {
	type level struct {
		array bool
		key   string // of the current member; empty before its key
		index int
	}
	var stack []level
	decoder := json.NewDecoder(bytes.NewReader(text))
	for {
		token, err := decoder.Token()
		if err != nil {
			break
		}
		top := len(stack) - 1
		delim, isDelim := token.(json.Delim)
		closes := isDelim && (delim == '}' || delim == ']')
		if top >= 0 && !closes && !stack[top].array && stack[top].key == "" {
			stack[top].key, _ = token.(string)
			continue
		}
		if closes {
			stack = stack[:top]
			top--
		}
		if decoder.InputOffset() >= offset {
			break
		}
		if isDelim && !closes {
			stack = append(stack, level{array: delim == '['})
		} else if top >= 0 {
			stack[top].key = ""
			stack[top].index++
		}
	}
	var path string
	for _, l := range stack {
		switch {
		case l.array:
			path += fmt.Sprintf("[%d]", l.index)
		case l.key != "":
			path = join(path, l.key)
		}
	}
	return path
}
