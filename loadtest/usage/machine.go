package usage

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine describes the machine for a report.
type Machine struct {
	CPUs   int    `json:"cpus"`
	CPU    string `json:"cpu"`
	Memory int64  `json:"memoryBytes"`
	Kernel string `json:"kernel"`
	// OpenFiles is how many files a process may have open, Ports how many connections can go from one address to one other address and
	// port (ip_local_port_range); 0: an earlier release did not say.
	OpenFiles int64 `json:"openFiles,omitempty"`
	Ports     int64 `json:"ports,omitempty"`
}

// ThisMachine describes the machine that this runs on.
func ThisMachine() (Machine, error) {
	m := Machine{CPUs: runtime.NumCPU()}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return m, fmt.Errorf("processors of the machine: %w", err)
	}
	for line := range strings.Lines(string(info)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			m.CPU = strings.TrimSpace(value) // not all architectures have one
			break
		}
	}
	memory, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return m, fmt.Errorf("memory of the machine: %w", err)
	}
	total, err := kibibytes(memory, "MemTotal")
	if err != nil {
		return m, fmt.Errorf("memory of the machine: %w", err)
	}
	m.Memory = total << 10
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return m, fmt.Errorf("kernel of the machine: %w", err)
	}
	m.Kernel = strings.TrimSpace(string(kernel))
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return m, fmt.Errorf("limit of open files: %w", err)
	}
	m.OpenFiles = int64(min(limit.Max, math.MaxInt64))
	ports, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return m, fmt.Errorf("ports of the machine: %w", err)
	}
	var first, last int64
	if _, err := fmt.Sscan(string(ports), &first, &last); err != nil {
		return m, fmt.Errorf("ports of the machine: %w", err)
	}
	m.Ports = last - first + 1
	return m, nil
}
