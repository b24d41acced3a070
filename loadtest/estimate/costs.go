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

// The reports that coefficients are of. What a server spends on one of its nodes depends on how many there are, so for that there are
// several. What it spends on an event by its size is between two reports of as many nodes, and so is what a state takes by its endpoints.
// What the writes take, with all else that an API server does meanwhile, is that of as many changes a second with one watcher.
// Those of a single node have a load tester that does nothing for others, and an API server whose work is to write.
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

// coefficient is what something was measured to cost.
type coefficient struct {
	value  float64
	source string
}

// costs are all coefficients.
type costs struct {
	// write is what a change costs an API server, whoever watches: with one watcher.
	write coefficient
	// small and large are what an event costs it for each watcher beyond that, by its size, and crowd is that of large where about as many watch as
	// in the cluster.
	small, large, crowd point
	// update is what one costs Slicecast's server where about as many nodes are connected, and ram what a connected node takes there.
	update, ram coefficient
	// smallState and largeState are the server without nodes, by the number of its endpoints; manyServices has about as many as largeState, of many
	// more Services.
	smallState, largeState, manyServices state
	// nodeEvent and nodeUpdate are what an event of so many bytes and an update cost a node.
	nodeEvent  point
	nodeUpdate coefficient

	measured *performance.Measured
	// used are the names of the reports.
	used []string
}

// point is what a message of a size costs.
type point struct {
	bytes float64
	coefficient
}

// state is the RAM of a server that has one, and no node.
type state struct {
	report.State
	coefficient
}

// measuredCosts takes the coefficients for so many nodes of an API server, and of a Slicecast server.
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
	for _, p := range []struct {
		*point
		name, writes string
	}{
		{&c.small, smallEventsReport, smallWritesReport}, {&c.large, largeEventsReport, largeWritesReport}, {&c.crowd, crowd, largeWritesReport},
		{&c.nodeEvent, apiServerNodeReport, ""},
	} {
		size, err := m.Figure(p.name, "bytes-per-update")
		if err != nil {
			return nil, err
		}
		p.bytes = size.Median
		if p.writes == "" {
			continue
		}
		writes, err := c.take(p.writes, "cpu-per-update")
		if err != nil {
			return nil, err
		}
		p.value -= writes.value / float64(m.Reports[p.name].Nodes)
		p.source += " without that of " + p.writes
	}
	return c, nil
}

// nearest gives the report whose number of nodes differs by the least factor.
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

// eventMicros is what an event of so many bytes costs an API server for each watcher: on the line through small and large, never less
// than the least of that, and as much less or more than there as large events are where about as many watch.
func (c *costs) eventMicros(bytes float64) float64 {
	low, high := c.small, c.large
	line := low.value
	if bytes > low.bytes {
		line = max(line, line+(high.value-low.value)*(bytes-low.bytes)/(high.bytes-low.bytes))
	}
	return line * c.crowd.value / c.large.value
}

// stateBytes is what a server takes for no state, for each endpoint and for each Service: the plane through the three states.
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

// memoryText says where that is from, and what a connected node takes.
func (c *costs) memoryText() string {
	of := func(s state) string {
		return fmt.Sprintf("%s with %d endpoints, Services: %d (%s)", sizeText(s.value), s.Endpoints, s.Services, s.source)
	}
	return fmt.Sprintf("Memory of Slicecast's servers: %s for a connected node. Source: %s. Without nodes it is %s; %s; and %s. Others are on the "+
		"plane through these three. The servers of these reports generate their state: what a "+
		"client of an API server takes is not in the figure.",
		sizeText(c.ram.value), c.ram.source, of(c.smallState), of(c.largeState), of(c.manyServices))
}

// eventText says where that is from.
func (c *costs) eventText() string {
	at := func(p point) string {
		return fmt.Sprintf("%s where it has %s (%s)", microsText(p.value), sizeText(p.bytes), p.source)
	}
	return fmt.Sprintf("CPU of API servers: a change is written once, today and with Slicecast, which is %s. Source: %s. Only one API server's part of that is in the figures, "+
		"and nothing of etcd's, nor of what an API server does where nothing changes. An event to a watcher, without its part of what it takes with one watcher, is %s, and %s; "+
		"other sizes are on the line through these two, and at least at the lower one. Where about as many watch an API server as here, it is %s, and all sizes are taken "+
		"to differ by that factor.",
		microsText(c.write.value), c.write.source, at(c.small), at(c.large), at(c.crowd))
}

// notes are those of the reports that coefficients are of.
func (c *costs) notes() (out []string) {
	for _, name := range c.used {
		if notes := c.measured.Reports[name].AllNotes(); len(notes) > 0 {
			out = append(out, fmt.Sprintf("The report %s notes: %s.", name, strings.Join(notes, "; ")))
		}
	}
	return out
}
