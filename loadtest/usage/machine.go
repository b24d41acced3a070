package usage

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine describes the machine in reports.
type Machine struct {
	CPUs   int    `json:"cpus"`
	CPU    string `json:"cpu"`
	Memory int64  `json:"memoryBytes"`
	Kernel string `json:"kernel"`
	// OpenFiles is the maximum number of open files of a process. Ports is the maximum number of
	// connections from one address to one address and port (ip_local_port_range). Both are 0 in
	// reports of releases that did not record them.
	OpenFiles int64 `json:"openFiles,omitempty"`
	Ports     int64 `json:"ports,omitempty"`
}

// ThisMachine describes the machine that runs this process.
func ThisMachine() (m Machine, err error) {
	m.CPUs = runtime.NumCPU()
	var info, memory, kernel, ports []byte
	for file, content := range map[string]*[]byte{
		"cpuinfo": &info, "meminfo": &memory, "sys/kernel/osrelease": &kernel, "sys/net/ipv4/ip_local_port_range": &ports,
	} {
		if *content, err = os.ReadFile("/proc/" + file); err != nil {
			return m, fmt.Errorf("describe the machine: %w", err)
		}
	}
	for line := range strings.Lines(string(info)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			m.CPU = strings.TrimSpace(value) // some architectures do not have a model name
			break
		}
	}
	m.Kernel = strings.TrimSpace(string(kernel))
	if m.Memory, err = kibibytes(memory, "MemTotal"); err != nil {
		return m, fmt.Errorf("describe the machine: %w", err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return m, fmt.Errorf("read the limit of open files: %w", err)
	}
	m.OpenFiles = int64(min(limit.Max, math.MaxInt64))
	var first, last int64
	if _, err := fmt.Sscan(string(ports), &first, &last); err != nil {
		return m, fmt.Errorf("parse the range of local ports %q: %w", ports, err)
	}
	m.Ports = last - first + 1
	return m, nil
}
