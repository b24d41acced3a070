// Package spec defines what the host and the virtual machine of package vm send each other. The
// host sends a Spec, as a file in the machine's initial file system. The machine sends a Result for
// each Run.
package spec

import "fmt"

// File is the name of the file with the Spec. ModulesFile is the name of a file with one line for
// each name or alias of a module: the name and then the files to load in order, separated by
// spaces. The guest searches this file for each request instead of parsing it.
const (
	File        = "spec.json"
	ModulesFile = "modules"
)

// The names of the virtio ports on which the machine writes to the host.
const (
	StdoutPort = "stdout"
	StderrPort = "stderr"
	ResultPort = "result"
)

// NextRun separates the output of two Runs on StdoutPort.
const NextRun = "\x00next\x00"

// The network of the emulator: the machine's address, and the address that stands for the host's
// loopback address.
const (
	GuestAddress = "10.0.2.15/24"
	HostAddress  = "10.0.2.2"
)

// Socket returns the path of the unix socket in the machine that is forwarded to a TCP port of the
// host's loopback address. Unlike a TCP port, a socket is reachable from every network namespace.
func Socket(port uint16) string { return fmt.Sprintf("%s/host-%d", KeptAt, port) }

// KeptAt is where the machine's initial file system is mounted once the host's file system is the
// root.
const KeptAt = "/vm"

// Spec is the task of the machine.
type Spec struct {
	// Boot lists the modules to load before the host's files are readable, in order.
	Boot []string
	// Ports lists the host's ports to forward; see Socket.
	Ports []uint16
	Runs  []Run
}

// Run is a program to run in the machine, with the host's files.
type Run struct {
	Program string
	Args    []string
	Dir     string
	Env     []string
}

// Result is how a Run ended.
type Result struct {
	// Code is the exit code that a shell would report.
	Code int
	// Error is set if the program could not be run, and empty otherwise.
	Error string
}
