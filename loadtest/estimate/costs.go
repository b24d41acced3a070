package estimate

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/report"
)

// Reports from which the coefficients are taken. What a server spends on one of its nodes depends
// on the number of nodes, so there are several reports for it. The cost of an event by its size
// lies between two reports with the same number of nodes, and so does the memory of a state by its
// endpoints. The cost of writes, with all else that an API server does meanwhile, is that of a
// report with one watcher and the same rate of changes. In reports with a single node, the load
// tester does nothing for other nodes, and the API server mostly writes.
var (
	slicecastReports = []string{"steady-100", "steady-1000", "steady-3000"}
	apiServerReports = []string{"apiserver-steady-100", "apiserver-steady-1000", "apiserver-steady-3000"}
)

const (
	smallEventsReport   = "apiserver-many-small-1000"
	largeEventsReport   = "apiserver-steady-1000"
	smallWritesReport   = "apiserver-many-small-1"
	largeWritesReport   = "apiserver-steady-1"
	slicecastNodeReport = "node-1"
	apiServerNodeReport = "apiserver-node-1"
	smallStateReport    = "headline-1000"
	largeStateReport    = "steady-1000"
	manyServicesReport  = "many-small-1000"
)

// coefficient is a measured cost and its source.
type coefficient struct {
	value  float64
	source string
}

type costs struct {
	// write is the API server's cost of a change with one watcher, in µs. It does not depend on the
	// watchers.
	write coefficient
	// small and large are the API server's costs of an event for each further watcher, for two
	// sizes. crowd is the same as large, with about as many watchers as in the cluster.
	small, large, crowd point
	// update is the cost of an update to a node on a Slicecast server with about as many nodes, in
	// µs. ram is the memory of a connected node on that server, in bytes.
	update, ram coefficient
	// smallState and largeState are servers without nodes, with few and with many endpoints.
	// manyServices has about as many endpoints as largeState, in many more Services.
	smallState, largeState, manyServices state
	// nodeEvent is the cost of an event of a given size to a node today. nodeUpdate is the cost of
	// an update to a node with Slicecast, in µs.
	nodeEvent  point
	nodeUpdate coefficient

	measured *performance.Measured
	// used are the names of the reports used.
	used []string
}

type point struct {
	bytes float64
	coefficient
}

// state is the memory of a server that has a state but no nodes.
type state struct {
	report.State
	coefficient
}

// measuredCosts returns the coefficients for a number of nodes at an API server and at a Slicecast
// server.
func measuredCosts(m *performance.Measured, ofAPIServer, ofServer float64) (*costs, error) {
	c := &costs{measured: m}
	crowd, err := nearest(m, ofAPIServer, apiServerReports)
	if err != nil {
		return nil, err
	}
	slicecast, err := nearest(m, ofServer, slicecastReports)
	if err != nil {
		return nil, err
	}
	for _, f := range []struct {
		into         *coefficient
		name, metric string
	}{
		{&c.write, apiServerNodeReport, "cpu-per-update"},
		{&c.update, slicecast, "cpu-per-update"}, {&c.ram, slicecast, "resident-per-node"},
		{&c.nodeUpdate, slicecastNodeReport, "client-cpu-per-update"},
		{&c.small.coefficient, smallEventsReport, "cpu-per-update"}, {&c.large.coefficient, largeEventsReport, "cpu-per-update"},
		{&c.crowd.coefficient, crowd, "cpu-per-update"}, {&c.nodeEvent.coefficient, apiServerNodeReport, "client-cpu-per-update"},
	} {
		if *f.into, err = c.take(f.name, f.metric); err != nil {
			return nil, err
		}
	}
	for _, s := range []struct {
		into *state
		name string
	}{{&c.smallState, smallStateReport}, {&c.largeState, largeStateReport}, {&c.manyServices, manyServicesReport}} {
		if s.into.coefficient, err = c.take(s.name, "resident-state"); err != nil {
			return nil, err
		}
		s.into.State = m.Reports[s.name].Repeats[0].State
	}
	return c, c.measureSizes(crowd)
}

// measureSizes sets the sizes of events, and takes the costs of writes off the costs of events.
func (c *costs) measureSizes(crowd string) error {
	for _, p := range []struct {
		*point
		name, writes string
	}{
		{&c.small, smallEventsReport, smallWritesReport}, {&c.large, largeEventsReport, largeWritesReport}, {&c.crowd, crowd, largeWritesReport},
		{&c.nodeEvent, apiServerNodeReport, ""},
	} {
		size, err := c.measured.Figure(p.name, "bytes-per-update")
		if err != nil {
			return err
		}
		p.bytes = size.Median
		if p.writes == "" {
			continue
		}
		writes, err := c.take(p.writes, "cpu-per-update")
		if err != nil {
			return err
		}
		p.value -= writes.value / float64(c.measured.Reports[p.name].Nodes)
		p.source += " minus that of " + p.writes
	}
	return nil
}

// nearest returns the report whose number of nodes differs by the smallest factor.
func nearest(m *performance.Measured, nodes float64, names []string) (string, error) {
	for _, name := range names {
		if m.Reports[name] == nil {
			return "", fmt.Errorf("there is no report %s", name)
		}
	}
	return slices.MinFunc(names, func(a, b string) int {
		factor := func(name string) float64 { return math.Abs(math.Log(float64(m.Reports[name].Nodes) / nodes)) }
		return cmp.Compare(factor(a), factor(b))
	}), nil
}

func (c *costs) take(name, metric string) (coefficient, error) {
	s, err := c.measured.Figure(name, metric)
	if err != nil {
		return coefficient{}, err
	}
	if !slices.Contains(c.used, name) {
		c.used = append(c.used, name)
	}
	r := c.measured.Reports[name]
	return coefficient{s.Median, fmt.Sprintf("%s/%s.json, %s, nodes: %d, on %s", performance.Directory, name, metric, r.Nodes, r.MachineText())}, nil
}

// eventMicros returns the cost of an event of a given size to an API server for each watcher, in
// µs. It lies on the line through small and large, but not below small. The result is scaled by the
// factor by which crowd differs from large.
func (c *costs) eventMicros(bytes float64) float64 {
	low, high := c.small, c.large
	line := low.value
	if bytes > low.bytes {
		line = max(line, line+(high.value-low.value)*(bytes-low.bytes)/(high.bytes-low.bytes))
	}
	return line * c.crowd.value / c.large.value
}

// stateBytes returns the memory of a server without any state, and the memory of each endpoint and
// each Service. They define the plane through the three states.
func (c *costs) stateBytes() (empty, endpoint, service float64) {
	beyond := func(s state) (endpoints, services, bytes float64) {
		return float64(s.Endpoints - c.smallState.Endpoints), float64(s.Services - c.smallState.Services), s.value - c.smallState.value
	}
	e1, s1, b1 := beyond(c.largeState)
	e2, s2, b2 := beyond(c.manyServices)
	determinant := e1*s2 - e2*s1
	endpoint, service = (b1*s2-b2*s1)/determinant, (e1*b2-e2*b1)/determinant
	return c.smallState.value - endpoint*float64(c.smallState.Endpoints) - service*float64(c.smallState.Services), endpoint, service
}

// memoryText describes the coefficients for the memory of Slicecast's servers, and their sources.
func (c *costs) memoryText() string {
	of := func(s state) string {
		return fmt.Sprintf("%s with %d endpoints, Services: %d (%s)", sizeText(s.value), s.Endpoints, s.Services, s.source)
	}
	return fmt.Sprintf("Memory of Slicecast's servers: %s for a connected node. Source: %s. Without nodes it is "+
		"%s; %s; and %s. Other states are on the "+
		"plane through these three. The servers of these reports generate their state, so the figure does not include the memory of "+
		"an API server's client.",
		sizeText(c.ram.value), c.ram.source, of(c.smallState), of(c.largeState), of(c.manyServices))
}

// eventText describes the coefficients for the CPU time of API servers, and their sources.
func (c *costs) eventText() string {
	at := func(p point) string {
		return fmt.Sprintf("%s for an event of %s (%s)", microsText(p.value), sizeText(p.bytes), p.source)
	}
	return fmt.Sprintf("CPU of API servers: a change is written once, today and with Slicecast, which costs %s. "+
		"Source: %s. The figures include only the part of one API server, "+
		"and neither etcd nor what an API server does without changes. An event to a watcher, minus the watcher's "+
		"part of the costs with one watcher, costs %s, and %s; "+
		"other sizes are on the line through these two, but not below the lower one. With about as many watchers "+
		"of an API server as here, it costs %s, and all sizes are assumed "+
		"to differ by the same factor.",
		microsText(c.write.value), c.write.source, at(c.small), at(c.large), at(c.crowd))
}

func (c *costs) notes() (out []string) {
	for _, name := range c.used {
		if notes := c.measured.Reports[name].AllNotes(); len(notes) > 0 {
			out = append(out, fmt.Sprintf("The report %s notes: %s.", name, strings.Join(notes, "; ")))
		}
	}
	return out
}
