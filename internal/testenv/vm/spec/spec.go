// Package spec is what the two ends of package vm tell each other: the host a Spec, in a file of the machine's first file
// system, and the machine a Result for each Run.
package spec

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

// Spec is what the machine is to do.
type Spec struct {
	// Boot are the modules to load before the host's files can be read, in this order.
	Boot []string
	Runs []Run
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
