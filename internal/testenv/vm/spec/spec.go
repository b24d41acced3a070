// Package spec is what the two ends of package vm tell each other: the host a Spec, in a file of the machine's first file
// system, and the machine a Result for each Run.
package spec

import "fmt"

// File is the name of the file with the Spec. ModulesFile has a line for each name that a module may be asked for by: the
// name, and the files to load in their order, with spaces in between. It is searched rather than parsed, for each module
// that is asked for.
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

// NextRun is on StdoutPort between what two Runs write.
const NextRun = "\x00next\x00"

// The network that the emulator makes: the machine's address, and where the host's loopback address is.
const (
	GuestAddress = "10.0.2.15/24"
	HostAddress  = "10.0.2.2"
)

// Socket is where the machine has a TCP port of the host's loopback address, as a unix socket: so network namespaces reach it, too.
func Socket(port uint16) string { return fmt.Sprintf("%s/host-%d", KeptAt, port) }

// KeptAt is where the machine's first file system is, after the host's took its place.
const KeptAt = "/vm"

// Spec is what the machine is to do.
type Spec struct {
	// Boot are the modules to load before the host's files can be read, in this order.
	Boot []string
	// Ports are those of the host that are to be reached; see Socket.
	Ports []uint16
	Runs  []Run
}

// Run is a program to run, with the host's files, one after the other.
type Run struct {
	Program string
	Args    []string
	Dir     string
	Env     []string
}

// Result tells how a Run ended.
type Result struct {
	// Code is the exit code as a shell would report it.
	Code int
	// Error is set if the program could not be run.
	Error string
}
