package engine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
)

const (
	// portRange is the file with the range of local ports. Each connection to the same address
	// needs a port of its own.
	portRange = "/proc/sys/net/ipv4/ip_local_port_range"
	// apiServerFiles is an upper bound on the files that an API server has open besides connections
	// of watchers. An idle one has about 70, most of them connections to etcd.
	apiServerFiles = 256
)

// limits returns an error if a limit of this machine does not allow the run. Otherwise nodes would
// wait for connections and nothing would say why.
func limits(o *Options, s *scenario.Scenario) error {
	content, err := os.ReadFile(portRange)
	if err != nil {
		return fmt.Errorf("read the range of local ports: %w", err)
	}
	var first, last int
	if _, err := fmt.Sscan(string(content), &first, &last); err != nil {
		return fmt.Errorf("parse the range of local ports in %s: %w", portRange, err)
	}
	if err := portsFor(o, s, last-first+1); err != nil {
		return err
	}
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}
	return filesFor(o, s, files.Max)
}

// portsFor returns an error if there are not enough local ports for the connections of all nodes to
// one address.
func portsFor(o *Options, s *scenario.Scenario, ports int) error {
	if most := share(s.Nodes, addresses(o, s)); most > ports {
		return fmt.Errorf("%d nodes connect to one address, but the machine has only %d local ports: use fewer nodes or more relays, or widen the range "+
			"(sysctl net.ipv4.ip_local_port_range)", most, ports)
	}
	return nil
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

// filesFor returns an error if the limit of open files is too low for an API server that the run
// starts and all nodes watch.
func filesFor(o *Options, s *scenario.Scenario, files uint64) error {
	if open := uint64(s.Nodes) + apiServerFiles; o.Peer == report.KubeAPIServer && o.KubeAPIServer == Own && open > files {
		return fmt.Errorf("the API server needs %d open files for %d nodes, but the limit is %d: use fewer nodes, or raise the limit (ulimit -Hn)",
			open, s.Nodes, files)
	}
	return nil
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
