package performance

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

type row struct{ Name, Peer, Nodes, Latency, Bytes, CPU, Time, Memory string }

func (m *Measured) played() (out []row) {
	names := slices.SortedFunc(maps.Keys(m.Reports), func(a, b string) int {
		x, y := m.Reports[a], m.Reports[b]
		if c := strings.Compare(x.Scenario.Name, y.Scenario.Name); c != 0 {
			return c
		}
		if x.Nodes != y.Nodes {
			return x.Nodes - y.Nodes
		}
		return strings.Compare(string(y.Peer)+b, string(x.Peer)+a)
	})
	for _, name := range names {
		r := m.Reports[name]
		text := func(metrics ...string) string {
			var parts []string
			for _, metric := range metrics {
				if s, ok := r.Summary[metric]; ok {
					parts = append(parts, s.Text())
				}
			}
			return strings.Join(parts, " / ")
		}
		out = append(out, row{
			Name: name, Peer: string(r.Peer), Nodes: fmt.Sprint(r.Nodes), Latency: text("p50", "p99"), Bytes: text("bytes-per-update"),
			CPU: text("cpu-per-update"), Time: text("changes-time", "resync-time"), Memory: text("server-peak"),
		})
	}
	return out
}

// note is a note for readers of figures, with the names of the reports that have it.
type note struct{ Text, Reports string }

func (m *Measured) notes() (out []note) {
	of := make(map[string][]string)
	for _, name := range slices.Sorted(maps.Keys(m.Reports)) {
		for _, text := range m.Reports[name].AllNotes() {
			of[text] = append(of[text], "`"+name+"`")
		}
	}
	for _, text := range slices.Sorted(maps.Keys(of)) {
		out = append(out, note{text, strings.Join(of[text], ", ")})
	}
	return out
}
