// Package estimate computes what the distribution of Services costs a cluster today, with a
// kube-proxy on each node that watches the API server, and what it would cost with Slicecast.
//
// Bytes are those of the cluster's own objects and changes, as both sides encode them. CPU time is
// a number of messages times the measured cost of one message (see loadtest/performance). Memory is
// measured with the cluster's own objects. Every figure comes with its arithmetic.
package estimate

import (
	_ "embed"
	"fmt"
	"strings"
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

// text returns the formatted value of the figure with a name, or "" if there is none.
func (e *Estimate) text(name string) string {
	for _, s := range e.Sections {
		for i := range s.Lines {
			if s.Lines[i].Name == name {
				return s.Lines[i].Text()
			}
		}
	}
	return ""
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

// Text returns the estimate for people.
func (e *Estimate) Text() string {
	var out strings.Builder
	fmt.Fprintf(&out, "source      %s, %s\n\n", e.Source, e.Start.UTC().Format(time.RFC3339))
	rows := [][]string{{"Summary", "today", "with Slicecast"}}
	for _, l := range short {
		rows = append(rows, []string{"  " + l.what, e.text(l.today), e.text(l.slicecast)})
	}
	out.WriteString(report.Table(rows))
	for _, s := range e.Sections {
		rows = nil
		for _, l := range s.Lines {
			rows = append(rows, []string{"  " + l.What, l.Text(), l.Arithmetic})
		}
		fmt.Fprintf(&out, "\n%s\n%s", s.Title, report.Table(rows))
	}
	out.WriteString("\nAssumptions\n")
	for _, a := range e.Assumptions {
		out.WriteString("  - " + a + "\n")
	}
	return out.String()
}
