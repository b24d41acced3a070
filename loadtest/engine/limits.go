package engine

import (
	"errors"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
	"github.com/slicecast/slicecast/loadtest/usage"
)

const (
	// spareFiles is the number of files that a process needs besides the connections of nodes.
	spareFiles = 64
	// apiServerFiles is an upper bound on the files that an API server has open besides connections
	// of watchers. An idle one has about 70, most of them connections to etcd.
	apiServerFiles = 256
)

// limits returns an error if a limit of the machine does not allow the run. Otherwise nodes would
// wait for connections and nothing would say why.
func limits(o *Options, s *scenario.Scenario, machine usage.Machine) error {
	var wrong scenario.Mistakes
	most := share(s.Nodes, addresses(o, s))
	// Each connection to the same address needs a local port of its own.
	wrong.When(int64(most) > machine.Ports, "%d nodes connect to one address, but the machine has only %d local ports: "+
		"use fewer nodes or more relays, or widen the range (sysctl net.ipv4.ip_local_port_range)", most, machine.Ports)
	connections := 1
	if s.Floor {
		connections = 2
	}
	open := int64(connections*min(s.Nodes, o.PerWorker) + spareFiles)
	wrong.When(open > machine.OpenFiles, "a process needs %d open files, but the limit is %d: "+
		"use a smaller --nodes-per-process, or raise the limit (ulimit -Hn)", open, machine.OpenFiles)
	open = int64(connections*most + spareFiles)
	wrong.When(o.Server == "" && o.Peer == report.Slicecast && open > machine.OpenFiles, "a server needs %d open files for its "+
		"share of %d nodes, but the limit is %d: use more relays, or raise the limit (ulimit -Hn)", open, s.Nodes, machine.OpenFiles)
	open = int64(s.Nodes + apiServerFiles)
	wrong.When(o.Peer == report.KubeAPIServer && o.KubeAPIServer == Own && open > machine.OpenFiles, "the API server needs %d "+
		"open files for %d nodes, but the limit is %d: use fewer nodes, or raise the limit (ulimit -Hn)", open, s.Nodes, machine.OpenFiles)
	return errors.Join(wrong...)
}

// addresses returns the smallest number of servers or relays that serve the nodes during the run.
func addresses(o *Options, s *scenario.Scenario) int {
	if o.Server != "" || o.Peer == report.KubeAPIServer {
		return 1
	}
	n := s.Servers
	if s.Relays > 0 {
		n = s.Relays
	}
	if s.Event == scenario.Failover || s.Event == scenario.Restart && n > 1 {
		n-- // the others serve the nodes of the one that is killed
	}
	return max(n, 1) // Scenario.Validate reports impossible numbers
}

// share returns an upper bound on the nodes at one of several addresses. Rendezvous hashing does
// not divide them evenly.
func share(nodes, addresses int) int {
	if addresses == 1 {
		return nodes
	}
	return nodes * 5 / (4 * addresses)
}

// Fit returns how many nodes can connect to a number of servers or relays. byFiles follows from the
// files that each of them may have open, and byPorts from the local ports of this machine.
func Fit(addresses, files, ports int) (byFiles, byPorts int) {
	fit := func(each int) int {
		if addresses == 1 {
			return each
		}
		return each * 4 * addresses / 5 // inverse of share
	}
	return fit(files - spareFiles), fit(ports)
}
