// Package estimate computes what the distribution of Services costs a cluster today, with a kube-proxy on each node that watches
// the API server, and what it would cost with Slicecast. Bytes are those of the cluster's own objects and changes, as both sides
// encode them; CPU time is that many messages times what one was measured to cost (see loadtest/performance); memory is measured with
// the cluster's own objects. Every figure comes with its arithmetic.
package estimate

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/slicecast/slicecast/loadtest/report"
)

// Schema names the form of the JSON. Fields may be added to it; anything else gets a new name.
const Schema = "slicecast-estimate/v1"

// JSONSchema is the JSON Schema of estimates, as it is published: made of the types in this package.
//
//go:embed schema.json
var JSONSchema []byte

// Estimate is what came of it.
type Estimate struct {
	Schema string    `json:"schema"`
	Start  time.Time `json:"start"`
	// Source is where the objects are from.
	Source string `json:"source"`
	// Assumptions are what is not from the cluster.
	Assumptions []string  `json:"assumptions"`
	Sections    []Section `json:"sections"`
}

// Section is a group of figures.
type Section struct {
	Title string `json:"title"`
	Lines []Line `json:"lines"`
}

// Line is a figure and how it comes about.
type Line struct {
	// Name is the figure's for programs; it does not change.
	Name  string      `json:"name"`
	What  string      `json:"what"`
	Value float64     `json:"value"`
	Unit  report.Unit `json:"unit"`
	// PerSecond tells that the value is a rate.
	PerSecond bool `json:"perSecond,omitempty"`
	// Arithmetic has the numbers that the value is computed from; empty: it was counted.
	Arithmetic string `json:"arithmetic,omitempty"`
}

// Text is the value for people.
func (l *Line) Text() string {
	text := report.FormatValue(l.Value, l.Unit)
	if l.PerSecond {
		text += "/s"
	}
	return text
}

// Value finds a figure by its name.
func (e *Estimate) Value(name string) (float64, bool) {
	if l := e.line(name); l != nil {
		return l.Value, true
	}
	return 0, false
}

// line finds a line by its name, nil if there is none.
func (e *Estimate) line(name string) *Line {
	for _, s := range e.Sections {
		for i := range s.Lines {
			if s.Lines[i].Name == name {
				return &s.Lines[i]
			}
		}
	}
	return nil
}

// text is a figure for people, empty if there is none.
func (e *Estimate) text(name string) string {
	l := e.line(name)
	if l == nil {
		return ""
	}
	return l.Text()
}

// short is what most people want to know, by the figures' names.
var short = []struct{ what, today, slicecast string }{
	{"API servers send", "all-bytes-today", "all-bytes-api-server-slicecast"},
	{"Slicecast's servers send", "", "all-bytes-slicecast"},
	{"each node gets", "node-bytes-today", "node-bytes-slicecast"},
	{"cores of API servers", "all-cores-today", "all-cores-api-server-slicecast"},
	{"cores of Slicecast's servers", "", "all-cores-slicecast"},
	{"when all nodes start, they get", "all-cold-bytes-today", "all-cold-bytes-slicecast"},
}

// WriteJSON writes the estimate for machines.
func (e *Estimate) WriteJSON(w io.Writer) error {
	j := json.NewEncoder(w)
	j.SetIndent("", "  ")
	j.SetEscapeHTML(false)
	return j.Encode(e)
}

// WriteText writes the estimate for people.
func (e *Estimate) WriteText(w io.Writer) error {
	var out bytes.Buffer // whose writes do not fail
	const padding = 2
	fmt.Fprintf(&out, "source      %s, %s\n\n", e.Source, e.Start.UTC().Format(time.RFC3339))
	t := tabwriter.NewWriter(&out, 0, 0, padding, ' ', 0)
	if _, err := io.WriteString(t, "In short\ttoday\twith Slicecast\n"); err != nil {
		return err
	}
	for _, l := range short {
		line := strings.TrimRight(fmt.Sprintf("  %s\t%s\t%s", l.what, e.text(l.today), e.text(l.slicecast)), "\t")
		if _, err := io.WriteString(t, line+"\n"); err != nil {
			return err
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, s := range e.Sections {
		fmt.Fprintf(&out, "\n%s\n", s.Title)
		t := tabwriter.NewWriter(&out, 0, 0, padding, ' ', 0)
		for i := range s.Lines {
			l := &s.Lines[i]
			line := strings.TrimRight(fmt.Sprintf("  %s\t%s\t%s", l.What, l.Text(), l.Arithmetic), "\t")
			if _, err := io.WriteString(t, line+"\n"); err != nil {
				return err
			}
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	out.WriteString("\nAssumptions\n")
	for _, a := range e.Assumptions {
		out.WriteString("  - " + a + "\n")
	}
	_, err := out.WriteTo(w)
	return err
}
