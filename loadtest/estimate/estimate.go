// Package estimate computes what the distribution of Services costs a cluster today, with a kube-proxy on each node that watches
// the API server, and what it would cost with Slicecast. Bytes are those of the cluster's own objects and changes, as both sides
// encode them; CPU time is that many updates times what one was measured to cost (see loadtest/performance). Every figure comes
// with its arithmetic.
package estimate

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/server/fanout"
)

// Schema names the form of the JSON. Fields may be added to it; anything else gets a new name.
const Schema = "slicecast-estimate/v1"

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
	for _, s := range e.Sections {
		for _, l := range s.Lines {
			if l.Name == name {
				return l.Value, true
			}
		}
	}
	return 0, false
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
	fmt.Fprintf(&out, "source      %s, %s\n", e.Source, e.Start.UTC().Format(time.RFC3339))
	for _, s := range e.Sections {
		const padding = 2
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

// bookmarkInterval is how often an API server sends a bookmark to a watch that has nothing else.
const bookmarkInterval = time.Minute

// coefficient is what something was measured to cost.
type coefficient struct {
	value  float64
	source string
}

// The reports that coefficients are of: the one with the most nodes on both sides.
const (
	slicecastReport = "steady-3000"
	apiServerReport = "apiserver-steady-3000"
)

func measured(name, metric string) (coefficient, error) {
	m, err := performance.CheckedIn()
	if err != nil {
		return coefficient{}, err
	}
	s, err := m.Figure(name, metric)
	if err != nil {
		return coefficient{}, err
	}
	return coefficient{s.Median, fmt.Sprintf("%s/%s.json, %s, on %s", performance.Directory, name, metric, m.Reports[name].MachineText())}, nil
}

// conclude computes everything from what was counted.
func conclude(c *count, nodes, apiServers, servers int) ([]Section, []string, error) {
	bookmarkService, bookmarkSlice, err := bookmarkBytes()
	if err != nil {
		return nil, nil, err
	}
	heartbeat, err := heartbeatBytes(c.store)
	if err != nil {
		return nil, nil, err
	}
	cold, err := coldBytes(c.store)
	if err != nil {
		return nil, nil, err
	}
	api, err := measured(apiServerReport, "cpu-per-update")
	if err != nil {
		return nil, nil, err
	}
	slicecast, err := measured(slicecastReport, "cpu-per-update")
	if err != nil {
		return nil, nil, err
	}
	apiBytes, err := measured(apiServerReport, "bytes-per-update")
	if err != nil {
		return nil, nil, err
	}

	seconds := c.seconds
	events := float64(c.services.events + c.slices.events)
	today := float64(c.services.today + c.slices.today)
	with := float64(c.services.slicecast + c.slices.slicecast)
	updates := float64(c.services.updates + c.slices.updates)
	n, a, s := float64(nodes), float64(apiServers), float64(servers)
	bookmarks := float64(bookmarkService+bookmarkSlice) / bookmarkInterval.Seconds()
	heartbeats := float64(heartbeat) / fanout.DefaultHeartbeat.Seconds()
	size := func(v float64) string { return report.FormatValue(v, report.Bytes) }
	rate := func(v float64) string { return size(v) + "/s" }
	toNode, toNodeWith := today/seconds+bookmarks, with/seconds+heartbeats

	var sections []Section
	add := func(title string, lines ...Line) { sections = append(sections, Section{title, lines}) }
	number := func(name, what string, v float64) Line { return Line{Name: name, What: what, Value: v} }
	sized := func(name, what string, v float64, format string, args ...any) Line {
		return Line{Name: name, What: what, Value: v, Unit: report.Bytes, Arithmetic: fmt.Sprintf(format, args...)}
	}
	perSecond := func(l Line) Line {
		l.PerSecond = true
		return l
	}
	cores := func(name, what string, v float64, format string, args ...any) Line {
		return Line{Name: name, What: what, Value: v, Arithmetic: fmt.Sprintf(format, args...)}
	}

	add("What there is and what happened",
		number("nodes", "nodes", n), number("api-servers", "API servers", a), number("servers", "Slicecast servers", s),
		number("services", "Services that nodes get", float64(c.objects.services)),
		number("slices", "EndpointSlices that nodes get", float64(c.objects.slices)),
		number("endpoints", "endpoints in them", float64(c.objects.endpoints)),
		Line{Name: "seconds", What: "watched for", Value: seconds, Unit: report.Seconds},
		number("service-events", "events of Services", float64(c.services.events)),
		number("slice-events", "events of EndpointSlices", float64(c.slices.events)),
		Line{Name: "updates", What: "updates by Slicecast", Value: updates, Arithmetic: "events that change what nodes need, one update each"},
	)
	add("To each node, all the time",
		perSecond(sized("node-bytes-today", "today", toNode, "(%s of Services + %s of EndpointSlices) / %.0f s = %s; bookmarks of two watches (%d B + %d B) / %.0f s = %s",
			size(float64(c.services.today)), size(float64(c.slices.today)), seconds, rate(today/seconds), bookmarkService, bookmarkSlice,
			bookmarkInterval.Seconds(), rate(bookmarks))),
		perSecond(sized("node-bytes-slicecast", "with Slicecast", toNodeWith, "(%s of Services + %s of EndpointSlices) / %.0f s = %s; heartbeats %d B / %.0f s = %s",
			size(float64(c.services.slicecast)), size(float64(c.slices.slicecast)), seconds, rate(with/seconds), heartbeat,
			fanout.DefaultHeartbeat.Seconds(), rate(heartbeats))),
	)
	add("From all servers together, all the time",
		perSecond(sized("all-bytes-today", "API servers today", n*toNode, "%s × %d nodes", rate(toNode), nodes)),
		perSecond(sized("api-server-bytes-today", "… each", n*toNode/a, "%s / %d API servers", rate(n*toNode), apiServers)),
		perSecond(sized("all-bytes-slicecast", "Slicecast's servers", n*toNodeWith, "%s × %d nodes", rate(toNodeWith), nodes)),
		perSecond(sized("server-bytes-slicecast", "… each", n*toNodeWith/s, "%s / %d servers", rate(n*toNodeWith), servers)),
		perSecond(sized("all-bytes-api-server-slicecast", "API servers with Slicecast", s*toNode, "%s × %d Slicecast servers that watch", rate(toNode), servers)),
	)
	micros := func(v float64) string { return report.FormatValue(v, report.Micros) }
	const perMicro = 1e-6
	apiCores := events / seconds * n * api.value * perMicro
	add("CPU, all the time, in cores of the machine that the coefficients are from",
		cores("all-cores-today", "API servers today", apiCores, "%.0f events / %.0f s × %d nodes × %s an event", events, seconds, nodes, micros(api.value)),
		cores("api-server-cores-today", "… each", apiCores/a, "%.3g / %d API servers", apiCores, apiServers),
		cores("all-cores-slicecast", "Slicecast's servers", updates/seconds*n*slicecast.value*perMicro, "%.0f updates / %.0f s × %d nodes × %s an update",
			updates, seconds, nodes, micros(slicecast.value)),
		cores("all-cores-api-server-slicecast", "API servers with Slicecast", events/seconds*s*api.value*perMicro, "%.0f events / %.0f s × %d servers × %s an event",
			events, seconds, servers, micros(api.value)),
	)
	add("When a node starts, or all do",
		sized("cold-bytes-today", "today", float64(c.cold), "each object once, as the initial events of its watch"),
		sized("cold-list-bytes-today", "today, if it gets lists", float64(c.lists.bytes), "each object once, all of them compressed with gzip"),
		sized("cold-bytes-slicecast", "with Slicecast", float64(cold), "each shard once, compressed"),
		sized("all-cold-bytes-today", "all nodes today", n*float64(c.cold), "%s × %d nodes", size(float64(c.cold)), nodes),
		sized("all-cold-bytes-slicecast", "all nodes with Slicecast", n*float64(cold), "%s × %d nodes", size(float64(cold)), nodes),
	)

	mean := "no event"
	if events > 0 {
		mean = size(today / events)
	}
	assumptions := []string{
		"Bytes are what TLS gives to TCP: messages with their frames and records. On the way back there are acks, which are not in the figures.",
		"Today each node has a kube-proxy that watches Services and EndpointSlices with its own selectors, in protobuf. Its watch of its Node, and other watchers " +
			"(CoreDNS, ingress controllers), cost the same with Slicecast and are not in the figures.",
		"A kube-proxy of today streams its lists, as initial events of watches, which are not compressed. One that is older, or whose API server does not stream, gets " +
			"lists; those of more than 128 KiB are compressed.",
		"Slicecast is counted without joining changes that come close together, as a server does under load: it sends no more than this.",
		fmt.Sprintf("CPU of API servers: %s for an event to a watcher, with the writes of the changes in it. Source: %s. There an event had %s; here it has %s in "+
			"the mean, and smaller ones cost less.", micros(api.value), api.source, size(apiBytes.value), mean),
		fmt.Sprintf("CPU of Slicecast's servers: %s for an update to a node. Source: %s.", micros(slicecast.value), slicecast.source),
	}
	return sections, assumptions, nil
}
