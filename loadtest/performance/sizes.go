package performance

import (
	"fmt"

	"github.com/slicecast/slicecast/loadtest/engine"
	"github.com/slicecast/slicecast/loadtest/report"
)

// size is a run with a large number of nodes: how many connected, what they cost, and which
// resource limits their number.
type size struct {
	Name  string
	Nodes int
	// Processes is the number of processes with nodes. Servers is the number of servers or relays
	// that the nodes are connected to.
	Processes, Servers int
	// ServerPeak is the peak RAM of all servers and relays, and ClientPeak that of all processes
	// with nodes.
	ServerPeak, ClientPeak value
	// Each is the sum of both for each node, and Share is their share of the machine's memory.
	Each  value
	Share string
	// P50 and P99 are latencies.
	P50, P99 value
	// ServerCPU is the share of the machine's CPUs that all servers and relays used, and ClientCPU
	// is that of all processes with nodes. CPU is the sum.
	ServerCPU, ClientCPU, CPU string
	// Memory, Files and Ports are the numbers of nodes for which these resources are sufficient:
	// the machine's memory, the open files of each server, and the local ports for connections to
	// each server. Least names the resource that is exhausted first.
	Memory, Files, Ports int
	Least                string
}

// most returns the sizes for those of the reports that exist.
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
			return nil, fmt.Errorf("report %s does not have the limits of files and ports: measure it again", name)
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

// Behind reports whether the nodes do not keep up with the changes.
func (s size) Behind() bool { return s.P99.Median > report.Pace }

// tier returns the number of relays or, if there are none, of servers.
func tier(r *report.Report) (int, error) {
	for _, parameter := range []string{"relays", "servers"} {
		if n, ok := r.Scenario.Parameters[parameter].(float64); ok && n > 0 {
			return int(n), nil
		}
	}
	return 0, fmt.Errorf("invalid numbers of servers (%v) and relays (%v)", r.Scenario.Parameters["servers"], r.Scenario.Parameters["relays"])
}
