package performance

import (
	"fmt"

	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/report"
)

// size is a run with as many nodes as that, what they connected for, and what limits how many connect.
type size struct {
	Name  string
	Nodes int
	// Processes with nodes, and how many servers or relays the nodes are connected to.
	Processes, Servers int
	// ServerPeak and ClientPeak are the most RAM of all servers and relays, and of all processes with nodes.
	ServerPeak, ClientPeak value
	// Each is what a node takes of both, and Share of the machine's memory.
	Each  value
	Share string
	// P50 and P99 are latencies.
	P50, P99 value
	// ServerCPU and ClientCPU are the shares of the machine's CPUs that all servers and relays, and all processes with nodes, used; CPU is both.
	ServerCPU, ClientCPU, CPU string
	// Memory, Files and Ports are how many nodes they are enough for: the machine's memory where each takes as much, the files that each server
	// may have open, and the ports for connections to each; Least is the one that is at its end first.
	Memory, Files, Ports int
	Least                string
}

// most lists those of the reports that there are.
func (m *Measured) most(names ...string) (out []size, err error) {
	for _, name := range names {
		r := m.Reports[name]
		if r == nil {
			continue
		}
		s := size{Name: name, Nodes: r.Nodes, Processes: r.Processes}
		var server, client value
		for metric, into := range map[string]*value{
			"server-peak": &s.ServerPeak, "client-peak": &s.ClientPeak, "p50": &s.P50, "p99": &s.P99, "server-cores": &server, "client-cores": &client,
		} {
			if into.Spread, err = m.Figure(name, metric); err != nil {
				return nil, err
			}
		}
		percent := func(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }
		cpus := float64(r.Machine.CPUs)
		s.ServerCPU, s.ClientCPU, s.CPU = percent(server.Median/cpus), percent(client.Median/cpus), percent((server.Median+client.Median)/cpus)
		if r.Machine.OpenFiles == 0 || r.Machine.Ports == 0 {
			return nil, fmt.Errorf("report %s does not say how many files and ports there are: measure it again", name)
		}
		if s.Servers, err = tier(r); err != nil {
			return nil, fmt.Errorf("report %s: %w", name, err)
		}
		together := s.ServerPeak.Median + s.ClientPeak.Median
		s.Each = single(report.Bytes, together/float64(r.Nodes))
		s.Share = percent(together / float64(r.Machine.Memory))
		s.Memory = int(float64(r.Machine.Memory) / s.Each.Median)
		s.Files, s.Ports = engine.Fit(s.Servers, int(r.Machine.OpenFiles), int(r.Machine.Ports))
		switch min(s.Memory, s.Files, s.Ports) {
		case s.Memory:
			s.Least = "memory"
		case s.Files:
			s.Least = "files"
		default:
			s.Least = "ports"
		}
		out = append(out, s)
	}
	return out, nil
}

// Behind tells whether the nodes do not keep pace with the changes.
func (s size) Behind() bool { return s.P99.Median > report.Pace }

// tier is how many servers or, where there are some, relays the nodes are connected to.
func tier(r *report.Report) (int, error) {
	for _, parameter := range []string{"relays", "servers"} {
		if n, ok := r.Scenario.Parameters[parameter].(float64); ok && n > 0 {
			return int(n), nil
		}
	}
	return 0, fmt.Errorf("it has %v servers and %v relays", r.Scenario.Parameters["servers"], r.Scenario.Parameters["relays"])
}
