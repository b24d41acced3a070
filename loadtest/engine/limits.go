package engine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/loadtest/report"
	"github.com/slicecast/slicecast/loadtest/scenario"
)

const (
	// portRange is where the kernel tells which ports connections get: those to one address each another one.
	portRange = "/proc/sys/net/ipv4/ip_local_port_range"
	// apiServerFiles is room for what an API server has open beside watchers' connections: some 70 files when nothing happens, most to etcd.
	apiServerFiles = 256
)

// limits finds what this machine does not allow, which nobody would understand when it happens: nodes would wait for a connection.
func limits(o *Options, s *scenario.Scenario) error {
	content, err := os.ReadFile(portRange)
	if err != nil {
		return fmt.Errorf("ports for connections: %w", err)
	}
	var first, last int
	if _, err := fmt.Sscan(string(content), &first, &last); err != nil {
		return fmt.Errorf("ports for connections: %s: %w", portRange, err)
	}
	if err := portsFor(o, s, last-first+1); err != nil {
		return err
	}
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("limit of open files: %w", err)
	}
	return filesFor(o, s, files.Max)
}

// portsFor finds out whether there are enough ports for the connections of all nodes to one address.
func portsFor(o *Options, s *scenario.Scenario, ports int) error {
	if most := share(s.Nodes, addresses(o, s)); most > ports {
		return fmt.Errorf("%d nodes connect to one address, and the machine has %d ports for that: use fewer nodes or more relays, or widen the range "+
			"(sysctl net.ipv4.ip_local_port_range)", most, ports)
	}
	return nil
}

// addresses is how many servers or relays nodes connect to when they are fewest.
func addresses(o *Options, s *scenario.Scenario) int {
	if o.Server != "" || o.Peer == report.KubeAPIServer {
		return 1
	}
	n := s.Servers
	if s.Relays > 0 {
		n = s.Relays
	}
	if s.Event == scenario.Failover || s.Event == scenario.Restart && n > 1 {
		n-- // the others get the nodes of the one that is killed
	}
	return max(n, 1) // scenarios are validated elsewhere
}

// filesFor finds out whether an API server of the run's own may have as many files open as there are nodes.
func filesFor(o *Options, s *scenario.Scenario, files uint64) error {
	if open := uint64(s.Nodes) + apiServerFiles; o.Peer == report.KubeAPIServer && o.KubeAPIServer == Own && open > files {
		return fmt.Errorf("the API server has %d files open for %d nodes, and it may have %d: use fewer nodes, or raise the limit (ulimit -Hn)",
			open, s.Nodes, files)
	}
	return nil
}

// share is how many nodes one of several addresses gets at most: rendezvous hashing does not divide evenly.
func share(nodes, addresses int) int {
	if addresses == 1 {
		return nodes
	}
	return nodes * 5 / (4 * addresses)
}

// Fit tells how many nodes may connect to so many servers or relays: by the files that each may have open, and by the ports of this machine
// for connections to each.
func Fit(addresses, files, ports int) (byFiles, byPorts int) {
	fit := func(each int) int {
		if addresses == 1 {
			return each
		}
		return each * 4 * addresses / 5 // the inverse of share
	}
	return fit(files - spareFiles), fit(ports)
}
