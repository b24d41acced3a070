package estimate

import (
	"fmt"
	"slices"

	"github.com/slicecast/slicecast/loadtest/performance"
	"github.com/slicecast/slicecast/loadtest/report"
)

// The reports that coefficients are of: on both sides the one with the most nodes, an API server's with small events, where what an event
// costs is between them, and those of a single node, whose load tester does nothing for others.
const (
	slicecastReport     = "steady-3000"
	apiServerReport     = "apiserver-steady-3000"
	smallEventsReport   = "apiserver-many-small-1000"
	slicecastNodeReport = "node-1"
	apiServerNodeReport = "apiserver-node-1"
)

// coefficient is what something was measured to cost.
type coefficient struct {
	value  float64
	source string
}

func measured(m *performance.Measured, name, metric string) (coefficient, error) {
	s, err := m.Figure(name, metric)
	if err != nil {
		return coefficient{}, err
	}
	return coefficient{s.Median, fmt.Sprintf("%s/%s.json, %s, on %s", performance.Directory, name, metric, m.Reports[name].MachineText())}, nil
}

// costs are all coefficients.
type costs struct {
	// event is what an event costs an API server, by its bytes, ascending: at least one point.
	event []point
	// update is what one costs Slicecast's server; ram what a connected node takes there, and stateRAM the server without nodes.
	update, ram, stateRAM coefficient
	// nodeEvent and nodeUpdate are what an event of so many bytes and an update cost a node; nil: nobody has measured.
	nodeEvent  *point
	nodeUpdate *coefficient
}

// point is what a message of a size costs.
type point struct {
	bytes float64
	coefficient
}

func measuredCosts(m *performance.Measured) (c costs, err error) {
	for _, f := range []struct {
		into         *coefficient
		name, metric string
	}{
		{&c.update, slicecastReport, "cpu-per-update"}, {&c.ram, slicecastReport, "resident-per-node"}, {&c.stateRAM, slicecastReport, "resident-state"},
	} {
		if *f.into, err = measured(m, f.name, f.metric); err != nil {
			return c, err
		}
	}
	at := func(name, metric string) (p point, err error) {
		size, err := measured(m, name, "bytes-per-update")
		if err != nil {
			return p, err
		}
		p.bytes = size.value
		p.coefficient, err = measured(m, name, metric)
		return p, err
	}
	for _, name := range []string{apiServerReport, smallEventsReport} {
		if m.Reports[name] == nil && name == smallEventsReport {
			continue
		}
		p, err := at(name, "cpu-per-update")
		if err != nil {
			return c, err
		}
		c.event = append(c.event, p)
	}
	slices.SortFunc(c.event, func(a, b point) int { return int(a.bytes - b.bytes) })
	if m.Reports[apiServerNodeReport] != nil && m.Reports[slicecastNodeReport] != nil {
		event, err := at(apiServerNodeReport, "client-cpu-per-update")
		if err != nil {
			return c, err
		}
		update, err := measured(m, slicecastNodeReport, "client-cpu-per-update")
		if err != nil {
			return c, err
		}
		c.nodeEvent, c.nodeUpdate = &event, &update
	}
	return c, nil
}

// eventMicros is what an event of so many bytes costs an API server: on the line through what was measured, and never less than the
// least of that.
func (c *costs) eventMicros(bytes float64) float64 {
	small, large := c.event[0], c.event[len(c.event)-1]
	if len(c.event) == 1 || bytes <= small.bytes || large.bytes <= small.bytes {
		return small.value
	}
	return max(small.value, small.value+(large.value-small.value)*(bytes-small.bytes)/(large.bytes-small.bytes))
}

// eventText says where that is from.
func (c *costs) eventText() string {
	out := "CPU of API servers: an event to a watcher, with the writes of the changes in it, "
	for i, p := range c.event {
		if i > 0 {
			out += ", and "
		}
		out += fmt.Sprintf("is %s where it has %s (%s)", report.FormatValue(p.value, report.Micros), report.FormatValue(p.bytes, report.Bytes), p.source)
	}
	if len(c.event) == 1 {
		return out + ". Other sizes are taken to cost the same, so that smaller ones are overestimated and larger ones underestimated."
	}
	return out + ". Other sizes are on the line through these two, and at least at the lower one."
}
