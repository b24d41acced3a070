// Package spec is what the two ends of package vm tell each other: the host a Spec, in a file of the machine's first file
// system, and the machine a Result for each Run.
package spec

import "strings"

// File is the name of the file with the Spec.
const File = "spec.json"

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
	// Modules are those that may be asked for later.
	Modules Modules
	Runs    []Run
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

// Modules are kernel modules by name.
type Modules map[string]*Module

// Module is one kernel module.
type Module struct {
	File    string
	Depends []string
	// Aliases are the names that the kernel asks for it by.
	Aliases []string
}

// Find gives the files to load, in their order, for a name or an alias.
func (m Modules) Find(name string) (files []string, ok bool) {
	seen := map[string]bool{}
	var add func(name string)
	add = func(name string) {
		module := m[name]
		if module == nil || seen[name] { // nil: built in
			return
		}
		seen[name] = true
		for _, d := range module.Depends {
			add(d)
		}
		files = append(files, module.File)
	}
	plain := Plain(name)
	if _, ok := m[plain]; ok {
		add(plain)
		return files, true
	}
	for own, module := range m {
		for _, alias := range module.Aliases {
			if Plain(alias) == plain {
				ok = true
				add(own)
			}
		}
	}
	return files, ok
}

// Plain gives a module's name as the kernel has it: - and _ are the same.
func Plain(name string) string { return strings.ReplaceAll(name, "-", "_") }
