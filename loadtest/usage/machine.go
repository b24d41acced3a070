package usage

import (
	"fmt"
	"os"
	"runtime"
	"strings"
)

// Machine describes the machine for a report.
type Machine struct {
	CPUs   int    `json:"cpus"`
	CPU    string `json:"cpu"`
	Memory int64  `json:"memoryBytes"`
	Kernel string `json:"kernel"`
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
	return m, nil
}
