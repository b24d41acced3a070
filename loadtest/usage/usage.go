// Package usage reads what processes and the machine use of CPU and memory, by the accounting of the operating system.
package usage

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// tick is the unit of CPU times in /proc, on all of Go's Linux ports. It is too long for what is done in a second or two.
const tick = 10 * time.Millisecond

// CPU is time on processors by the kernel's accounting.
type CPU struct {
	// total is what the process's clock says, in nanoseconds; user and system are in ticks.
	total, user, system time.Duration
}

// Total is user and system time. It is as exact as the kernel is.
func (c CPU) Total() time.Duration { return c.total }

// Split divides the total by the ticks in which the kernel tells user and system time, in halves if there was none.
func (c CPU) Split() (user, system time.Duration) {
	share := 0.5
	if ticks := c.user + c.system; ticks > 0 {
		share = float64(c.user) / float64(ticks)
	}
	user = time.Duration(share * float64(c.total))
	return user, c.total - user
}

// Sub is the time between two readings.
func (c CPU) Sub(earlier CPU) CPU {
	return CPU{c.total - earlier.total, c.user - earlier.user, c.system - earlier.system}
}

// Add is the time of both.
func (c CPU) Add(o CPU) CPU { return CPU{c.total + o.total, c.user + o.user, c.system + o.system} }

// CPUOf reads what a process, with all its threads, has used so far.
func CPUOf(pid int) (CPU, error) {
	own, _, err := cpuOf(pid)
	return own, err
}

// FamilyCPUOf reads what a process and the processes that it has started, and that have ended, have used so far.
func FamilyCPUOf(pid int) (CPU, error) {
	own, children, err := cpuOf(pid)
	return own.Add(children), err
}

func cpuOf(pid int) (own, children CPU, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return CPU{}, CPU{}, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	// The second field is the command's name in parentheses, which may hold anything; see proc_pid_stat(5).
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const utime, cstime = 14 - 3, 17 - 3
	if len(fields) <= cstime {
		return CPU{}, CPU{}, fmt.Errorf("CPU time of process %d: /proc has %d fields", pid, len(fields))
	}
	for i, into := range []*time.Duration{&own.user, &own.system, &children.user, &children.system} {
		ticks, err := strconv.ParseInt(fields[utime+i], 10, 64)
		if err != nil {
			return CPU{}, CPU{}, fmt.Errorf("CPU time of process %d: %w", pid, err)
		}
		*into = time.Duration(ticks) * tick
	}
	children.total = children.user + children.system // there is no clock of theirs
	own.total, err = clock(pid)
	return own, children, err
}

// clock reads the CPU-time clock of a process, all threads that it ever had included; see clock_getcpuclockid(3).
func clock(pid int) (time.Duration, error) {
	const scheduler = 2 // which of the process's clocks: what the scheduler has counted
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|scheduler), &t); err != nil {
		return 0, fmt.Errorf("CPU-time clock of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
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

// Memory is what a process has in RAM, in bytes: all, at most so far, and without what is of files, such as its own code.
type Memory struct {
	Resident, Peak, Anonymous int64
}

// MemoryOf reads it.
func MemoryOf(pid int) (Memory, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Memory{}, fmt.Errorf("memory of process %d: %w", pid, err)
	}
	var m Memory
	for name, into := range map[string]*int64{"VmRSS": &m.Resident, "VmHWM": &m.Peak, "RssAnon": &m.Anonymous} {
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
