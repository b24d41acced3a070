// This file holds the rules of the check of prose, and how they are applied to what files say.
package prose

import (
	"bytes"
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

const (
	commentColumns  = 100
	markdownColumns = 120
	// sentenceWords is the largest number of words in a sentence.
	sentenceWords = 40
	// headSentences is the largest number of sentences in the comment at the top of a test file.
	headSentences = 4
)

// rules is the content of the file of rules.
type rules struct {
	// Banned is the list of phrases that no sentence may contain.
	Banned []ban
	// Verbs maps a verb that must not follow the function's name in its comment to a better one.
	Verbs map[string]string
	// Accepted is the list of findings that are not reported.
	Accepted []acceptance
}

// ban is a phrase that no sentence may contain.
type ban struct {
	// Phrase is a regular expression, which matches whole words and ignores case.
	Phrase string
	// Instead says what to write.
	Instead string

	re *regexp.Regexp
}

// acceptance is a finding that is accepted.
type acceptance struct {
	// File is the path of the file below the folder that is checked.
	File string
	// Text is a part of the line or sentence that was found.
	Text string
	// Reason says why the text is best as it is.
	Reason string
}

func loadRules(file string) (*rules, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := &rules{}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(r); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for i := range r.Banned {
		b := &r.Banned[i]
		if b.re, err = regexp.Compile(`(?i)(^|\W)(` + b.Phrase + `)(\W|$)`); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if b.Instead == "" {
			return nil, fmt.Errorf("%s: banned phrase %q: instead is missing", file, b.Phrase)
		}
	}
	for _, a := range r.Accepted {
		if a.File == "" || a.Text == "" || a.Reason == "" {
			return nil, fmt.Errorf("%s: accepted text %q: file, text and reason are needed", file, a.Text)
		}
	}
	return r, nil
}

// finding is a place where the text breaks a rule.
type finding struct {
	file string
	line int
	// problem names the rule; text is the line or sentence that breaks it.
	problem, text string
}

func (f finding) String() string {
	return fmt.Sprintf("%s:%d: %s: %s", f.file, f.line, f.problem, f.text)
}

// tree checks all files in the folder root, in the order of their paths, and returns the findings
// that are not accepted.
func (r *rules) tree(root string) ([]finding, error) {
	var found []finding
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != root && (name == "bin" || strings.HasPrefix(name, ".")) {
				return fs.SkipDir
			}
			return nil
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		doc, err := read(path)
		if err != nil || doc == nil {
			return err
		}
		found = append(found, r.document(filepath.ToSlash(relative), doc)...)
		return nil
	})
	return r.filter(found), err
}

// document returns what is wrong with the text of a file.
func (r *rules) document(file string, d *document) []finding {
	var found []finding
	for _, l := range d.wide {
		found = append(found, finding{file, l.number, "too wide", strings.TrimSpace(l.text)})
	}
	for _, s := range d.sentences {
		if len(s) > sentenceWords {
			found = append(found, finding{file, s[0].line, fmt.Sprintf("%d words", len(s)), s.String()})
		}
		text := s.String()
		for _, b := range r.Banned {
			if m := b.re.FindStringSubmatch(text); m != nil {
				found = append(found, finding{file, s[0].line, fmt.Sprintf("%q, write %q", m[2], b.Instead), text})
			}
		}
	}
	for _, f := range d.functions {
		s := f.comment
		if !strings.HasPrefix(s[0].text, f.name) {
			found = append(found, finding{file, s[0].line, "start with " + f.name, s.String()})
		} else if len(s) > 1 && r.Verbs[s[1].text] != "" {
			found = append(found, finding{file, s[0].line, fmt.Sprintf("%q, write %q", s[1].text, r.Verbs[s[1].text]), s.String()})
		}
	}
	if d.test && (d.head == 0 || d.head > headSentences) {
		found = append(found, finding{file, 1, "test file", fmt.Sprintf(
			"say above the package clause, in one to %d sentences, what it proves; now %d", headSentences, d.head)})
	}
	slices.SortStableFunc(found, func(a, b finding) int { return cmp.Compare(a.line, b.line) })
	return found
}

// filter returns the findings that are not accepted, and one for each acceptance without a finding.
func (r *rules) filter(found []finding) []finding {
	used := make([]bool, len(r.Accepted))
	found = slices.DeleteFunc(found, func(f finding) bool {
		i := slices.IndexFunc(r.Accepted, func(a acceptance) bool {
			return a.File == f.file && strings.Contains(f.text, a.Text)
		})
		if i >= 0 {
			used[i] = true
		}
		return i >= 0
	})
	for i, a := range r.Accepted {
		if !used[i] {
			found = append(found, finding{a.File, 1, "no longer found, remove it from the rules", a.Text})
		}
	}
	return found
}
