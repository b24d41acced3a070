// Package usage reads what processes and the machine use of CPU and memory, by the accounting of the operating system.
package usage

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of CPU times in /proc, on all of Go's Linux ports.
const tick = 10 * time.Millisecond

// CPU is time on processors by the kernel's accounting, in steps of 10 ms.
type CPU struct {
	User, System time.Duration
}

// Total is user and system time.
func (c CPU) Total() time.Duration { return c.User + c.System }

// Sub is the time between two readings.
func (c CPU) Sub(earlier CPU) CPU { return CPU{c.User - earlier.User, c.System - earlier.System} }

// CPUOf reads what a process, with all its threads, has used so far.
func CPUOf(pid int) (CPU, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return CPU{}, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	// The second field is the command's name in parentheses, which may hold anything; see proc_pid_stat(5).
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const utime, stime = 14 - 3, 15 - 3
	if len(fields) <= stime {
		return CPU{}, fmt.Errorf("CPU time of process %d: /proc has %d fields", pid, len(fields))
	}
	user, err1 := strconv.ParseInt(fields[utime], 10, 64)
	system, err2 := strconv.ParseInt(fields[stime], 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return CPU{}, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return CPU{time.Duration(user) * tick, time.Duration(system) * tick}, nil
}

// MachineCPU reads what everything on the machine has used so far.
func MachineCPU() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, fmt.Errorf("CPU time of the machine: %w", err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	fields := strings.Fields(line)
	// cpu user nice system idle iowait irq softirq steal; see proc_stat(5).
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("CPU time of the machine: /proc/stat begins with %q", line)
	}
	var ticks int64
	for _, i := range []int{1, 2, 3, 6, 7} {
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("CPU time of the machine: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * tick, nil
}

// Memory is what a process has in RAM, in bytes.
type Memory struct {
	Resident, Peak int64
}

// MemoryOf reads it.
func MemoryOf(pid int) (Memory, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Memory{}, fmt.Errorf("memory of process %d: %w", pid, err)
	}
	var m Memory
	for name, into := range map[string]*int64{"VmRSS": &m.Resident, "VmHWM": &m.Peak} {
		n, err := kibibytes(b, name)
		if err != nil {
			return Memory{}, fmt.Errorf("memory of process %d: %w", pid, err)
		}
		*into = n << 10
	}
	return m, nil
}

func kibibytes(content []byte, name string) (int64, error) {
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		}
	}
	return 0, fmt.Errorf("/proc does not tell %s", name)
}
