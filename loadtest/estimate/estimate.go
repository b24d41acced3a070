// Package estimate computes what the distribution of Services costs a cluster today, with a
// kube-proxy on each node that watches the API server, and what it would cost with Slicecast.
//
// Bytes are those of the cluster's own objects and changes, as both sides encode them. CPU time is
// a number of messages times the measured cost of one message (see loadtest/performance). Memory is
// measured with the cluster's own objects. Every figure comes with its arithmetic.
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

// Schema names the JSON schema of estimates. Fields may be added under this name; any other change
// needs a new name.
const Schema = "slicecast-estimate/v1"

// JSONSchema is the published JSON Schema of estimates. It is generated from the types of this
// package.
//
//go:embed schema.json
var JSONSchema []byte

// Estimate is the result of an estimate.
type Estimate struct {
	Schema string    `json:"schema"`
	Start  time.Time `json:"start"`
	// Source says where the objects come from.
	Source string `json:"source"`
	// Assumptions are statements that do not follow from the cluster's data.
	Assumptions []string  `json:"assumptions"`
	Sections    []Section `json:"sections"`
}

// Section is a group of figures.
type Section struct {
	Title string `json:"title"`
	Lines []Line `json:"lines"`
}

// Line is a figure and its arithmetic.
type Line struct {
	// Name identifies the figure to programs. It does not change between releases.
	Name  string      `json:"name"`
	What  string      `json:"what"`
	Value float64     `json:"value"`
	Unit  report.Unit `json:"unit"`
	// PerSecond means that the value is a rate per second.
	PerSecond bool `json:"perSecond,omitempty"`
	// Arithmetic shows how the value is computed. It is empty if the value was counted.
	Arithmetic string `json:"arithmetic,omitempty"`
}

// Text returns the value, formatted for people.
func (l *Line) Text() string {
	text := report.FormatValue(l.Value, l.Unit)
	if l.PerSecond {
		text += "/s"
	}
	return text
}

// Value returns the value of the figure with a name. It returns false if there is none.
func (e *Estimate) Value(name string) (float64, bool) {
	if l := e.line(name); l != nil {
		return l.Value, true
	}
	return 0, false
}

// line returns the line with a name, or nil if there is none.
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

// text returns the formatted value of a figure, or "" if there is none.
func (e *Estimate) text(name string) string {
	l := e.line(name)
	if l == nil {
		return ""
	}
	return l.Text()
}

// short lists the figures of the summary by name.
var short = []struct{ what, today, slicecast string }{
	{"API servers send", "all-bytes-today", "all-bytes-api-server-slicecast"},
	{"Slicecast's servers send", "", "all-bytes-slicecast"},
	{"each node receives", "node-bytes-today", "node-bytes-slicecast"},
	{"CPU cores of API servers", "all-cores-today", "all-cores-api-server-slicecast"},
	{"CPU cores of Slicecast's servers", "", "all-cores-slicecast"},
	{"when all nodes start, they receive", "all-cold-bytes-today", "all-cold-bytes-slicecast"},
}

// WriteJSON writes the estimate as JSON.
func (e *Estimate) WriteJSON(w io.Writer) error {
	j := json.NewEncoder(w)
	j.SetIndent("", "  ")
	j.SetEscapeHTML(false)
	return j.Encode(e)
}

// WriteText writes the estimate for people.
func (e *Estimate) WriteText(w io.Writer) error {
	var out bytes.Buffer // writes to it do not fail
	const padding = 2
	fmt.Fprintf(&out, "source      %s, %s\n\n", e.Source, e.Start.UTC().Format(time.RFC3339))
	t := tabwriter.NewWriter(&out, 0, 0, padding, ' ', 0)
	if _, err := io.WriteString(t, "Summary\ttoday\twith Slicecast\n"); err != nil {
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
