package performance

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/slicecast/slicecast/loadtest/report"
)

// benchColumn is a column of a table of benchmarks. Without a benchmark, it has the ratio of the
// column before it to the one before that.
type benchColumn struct{ heading, benchmark string }

// benchRow is a row of a table of benchmarks.
type benchRow struct {
	label, report string
	// sub is the last part of the benchmark's name; "" if the column has the whole name.
	sub, unit string
	// bound is a bound that each cell is judged by; "" means none.
	bound string
	// floor is the unit of a figure of what the machine itself does. Cells are judged only where
	// that figure keeps the bound. "" means everywhere.
	floor string
}

// beside returns a table that compares kube-proxy and Slicecast on nodes with the given modes, in a
// cluster of one size.
func (m *Measured) beside(name, size string, modes ...string) (string, error) {
	var columns []benchColumn
	for _, mode := range modes {
		suffix := ""
		if len(modes) > 1 {
			suffix = ", " + mode
		}
		for _, subject := range []string{"kube-proxy", "Slicecast"} {
			columns = append(columns, benchColumn{subject + suffix, fmt.Sprintf("Node/%s/%s/%s", size, mode, strings.ToLower(subject))})
		}
		columns = append(columns, benchColumn{heading: "ratio"})
	}
	var rows []benchRow
	for _, r := range [][2]string{
		{"first programming", "program-s"}, {"… its CPU time", "program-cpu-s"},
		{"one endpoint changes: until the rules are in place, median", "change-ms"}, {"… slowest", "change-max-ms"}, {"… CPU time", "change-cpu-ms"},
		{"… in the large Service: median", "large-ms"}, {"… CPU time", "large-cpu-ms"},
		{"restart with nothing changed", "restart-s"}, {"… transactions of nftables meanwhile", "touched"},
		{"memory after that", "rss-MiB"}, {"… its peak", "peak-MiB"}, {"rules of iptables", "rules"},
		{"new connections per second, first Service", "first-conn/s"}, {"… p50", "first-p50-µs"}, {"… p99", "first-p99-µs"},
		{"new connections per second, last Service", "last-conn/s"}, {"… p50", "last-p50-µs"}, {"… p99", "last-p99-µs"},
	} {
		rows = append(rows, benchRow{label: r[0], report: name, unit: r[1]})
	}
	return m.benchTable(columns, rows)
}

// stalls returns a table of how long packets waited on nodes with the given modes while programs
// loaded their rules, in clusters of the given sizes. Each mode has the given programs.
func (m *Measured) stalls(name string, sizes, programs []string, modes ...string) (string, error) {
	var columns []benchColumn
	for _, size := range sizes {
		for _, mode := range modes {
			for _, subject := range programs {
				heading := subject + ", " + mode
				if len(sizes) > 1 {
					heading += ", " + strings.ReplaceAll(size, "x", " × ")
				}
				columns = append(columns, benchColumn{heading, fmt.Sprintf("Stall/%s/%s/%s", size, mode, strings.ToLower(subject))})
			}
		}
	}
	var rows []benchRow
	for _, phase := range [][2]string{
		{"from nothing", "program"}, {"restart", "restart"}, {"repair after the removal of all rules", "repair"},
	} {
		rows = append(rows, benchRow{label: phase[0], report: name, unit: phase[1] + "-s"})
		floor := phase[1] + "-floor-gap-ms"
		rows = append(rows, benchRow{label: "… longest gap: floor", report: name, unit: floor})
		for _, flow := range [][2]string{
			{"past Services", "past"}, {"past Services, new connections", "past-new"},
			{"another program's Service", "other"}, {"another program's Service, new connections", "other-new"},
			{"a Service", "service"}, {"a Service, new connections", "service-new"},
		} {
			rows = append(rows, benchRow{label: "… longest gap: " + flow[0], report: name, unit: phase[1] + "-" + flow[1] + "-gap-ms", bound: "<= 5ms", floor: floor})
		}
	}
	table, err := m.benchTable(columns, rows)
	if err != nil {
		return "", err
	}
	table += "| packets and connections lost, in all phases |"
	for _, c := range columns {
		table += fmt.Sprintf(" %g |", m.lost(name, c.benchmark))
	}
	return table + "\n", nil
}

// lost returns the sum of a benchmark's figures of what was lost.
func (m *Measured) lost(name, benchmark string) (sum float64) {
	for _, r := range m.Benches[name] {
		if benchName(r) != benchmark {
			continue
		}
		for _, v := range r.Values {
			if strings.HasSuffix(v.Unit, "-lost") {
				sum += v.Value
			}
		}
	}
	return sum
}

func (m *Measured) agentTable() (string, error) {
	return m.benchTable([]benchColumn{
		{"100 × 50", "Agent/99x50+50"}, {"1000 × 50, one × 5000", "Agent/1000x50+5000"}, {"10,000 × 50", "Agent/9999x50+50"},
		{"44,125 × 1", "Agent/44124x1+1"}, {"5005 × 49, one × 4766", "Agent/5005x49+4766"},
	}, []benchRow{
		{"an endpoint flips, 50 a second: frame to kernel, p50", "agent", "", "flip-p50-µs", "<= 150us", ""},
		{"… p99", "agent", "", "flip-p99-µs", "<= 1ms", ""},
		{"… of which the programmer and the kernel, p50", "agent", "", "flip-apply-p50-µs", "", ""},
		{"… CPU time, all included", "agent", "", "flip-cpu-µs", "", ""},
		{"the floor: two system calls that change one element, p50", "agent", "", "floor-p50-µs", "", ""},
		{"… p99", "agent", "", "floor-p99-µs", "", ""},
		{"… without pauses, p50", "agent", "", "floor-loop-p50-µs", "", ""},
		{"the large Service is rolled over, 100 pods a second (200 changes): p50", "agent", "", "rollover-p50-µs", "", ""},
		{"… p99", "agent", "", "rollover-p99-µs", "", ""},
		{"… percent of a CPU", "agent", "", "rollover-cpu-%", "", ""},
		{"from the start to all programmed", "agent", "", "sync-s", "", ""},
		{"programming all from nothing, the programmer alone", "agent", "", "program-s", "", ""},
		{"a new programmer finds all in place", "agent", "", "restart-s", "", ""},
		{"after `nft flush ruleset`, until all is there again", "agent", "", "repair-s", "", ""},
		{"heap without garbage", "agent", "", "heap-MiB", "", ""},
	})
}

func (m *Measured) ipvsTable() (string, error) {
	const programs, flips, rollover = "ipvs-programs", "ipvs-flips", "ipvs-rollover"
	return m.benchTable([]benchColumn{
		{"1000 × 50, one × 5000", "Programmer/services=1000/endpoints=50/big=5000"}, {"10,000 × 50", "Programmer/services=10000/endpoints=50/big=0"},
	}, []benchRow{
		{"an endpoint flips: a frame is decoded until the kernel has it, p50", flips, "Flip", "p50-µs", "", ""},
		{"… p99", flips, "Flip", "p99-µs", "", ""},
		{"… of which no program could avoid: one message to IPVS, and its answer, p50", flips, "FlipBare", "p50-µs", "", ""},
		{"an endpoint of the Service with 5000 flips, p50", flips, "FlipBig", "p50-µs", "", ""},
		{"… p99", flips, "FlipBig", "p99-µs", "", ""},
		{"… of which no program could avoid, p50", flips, "FlipBigBare", "p50-µs", "", ""},
		{"the large Service is rolled over, 100 pods a second (200 changes): p50", rollover, "Rollover", "p50-µs", "", ""},
		{"… p99", rollover, "Rollover", "p99-µs", "", ""},
		{"… percent of an emulated CPU", rollover, "Rollover", "cpu-%", "", ""},
		{"programming all from nothing", programs, "Load", "ns/op", "", ""},
		{"a new programmer finds all in place", programs, "Restart", "ns/op", "", ""},
		{"… of which no program could avoid: IPVS lists all backends", programs, "RestartBare", "ns/op", "", ""},
	})
}

// benchTable returns a table of benchmarks. It leaves out rows without a figure, because not all
// figures exist in all modes, and fails if a column has none.
func (m *Measured) benchTable(columns []benchColumn, rows []benchRow) (string, error) {
	text := "| |"
	for _, c := range columns {
		text += " " + c.heading + " |"
	}
	text += "\n|" + strings.Repeat(" --- |", len(columns)+1) + "\n"
	found := make([]bool, len(columns))
	for _, r := range rows {
		cells, err := m.benchCells(columns, &r)
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(cells, func(s string) bool { return s != "" }) {
			text += "| " + r.label + " | " + strings.Join(cells, " | ") + " |\n"
		}
		for i, s := range cells {
			found[i] = found[i] || s != ""
		}
	}
	if i := slices.Index(found, false); i >= 0 {
		return "", fmt.Errorf("report %s has no figure of %s", rows[0].report, columns[i])
	}
	return text, nil
}

// benchCells returns the cells of a row. It adds a bound to the label, unless a floor decides which
// cells it applies to.
func (m *Measured) benchCells(columns []benchColumn, r *benchRow) (cells []string, err error) {
	figures := make([]value, len(columns))
	bound := ""
	for i, c := range columns {
		v, text := &figures[i], ""
		switch {
		case c.benchmark != "":
			if v.Spread, err = m.Bench(r.report, strings.TrimSuffix(c.benchmark+"/"+r.sub, "/"), r.unit); errors.Is(err, errNoValue) {
				break
			}
			judged := err == nil && r.bound != ""
			if judged && r.floor != "" {
				judged, err = m.floorKeeps(c, r)
			}
			if text = v.String(); judged {
				bound, text, err = v.judge(r.bound)
			}
			if err != nil {
				return nil, err
			}
		case figures[i-2].Min > 0 && figures[i-1].Min > 0:
			ratio, err := figures[i-1].ratio(figures[i-2])
			if err != nil {
				return nil, err
			}
			text = ratio.String()
		}
		cells = append(cells, text)
	}
	if bound != "" && r.floor == "" {
		r.label += " (bound: " + bound + ")"
	}
	return cells, nil
}

// floorKeeps reports whether the floor of a row's cell keeps the row's bound.
func (m *Measured) floorKeeps(c benchColumn, r *benchRow) (bool, error) {
	floor, err := m.Bench(r.report, c.benchmark, r.floor)
	if err != nil {
		return false, err
	}
	bound, err := report.ParseBound(r.bound, floor.Unit)
	return err == nil && bound.Keeps(floor.Max), err
}

// benchUnit returns the unit of a benchmark's figure, and by what to multiply it.
func benchUnit(unit string) (report.Unit, float64) {
	switch suffix := unit[strings.LastIndex(unit, "-")+1:]; {
	case unit == "ns/op":
		return report.Micros, 1e-3
	case strings.Contains(unit, "/"):
		return report.Number, 1
	case suffix == "s":
		return report.Seconds, 1
	case suffix == "ms":
		return report.Millis, 1
	case suffix == "µs":
		return report.Micros, 1
	case suffix == "MiB":
		return report.Bytes, 1 << 20
	}
	return report.Number, 1
}
