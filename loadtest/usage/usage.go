// Package usage reads the CPU and memory usage of processes and of the machine from the operating
// system.
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

// tick is the unit of CPU times in /proc, on all Linux ports of Go. It is too coarse for work of a
// second or two.
const tick = 10 * time.Millisecond

// CPU is CPU time as the kernel accounts for it.
type CPU struct {
	// total is the exact time of the process's CPU clock. user and system are multiples of tick.
	total, user, system time.Duration
}

// Split divides the total in the proportion of the ticks in user mode and kernel, or in halves if
// there were no ticks.
func (c CPU) Split() (user, system time.Duration) {
	share := 0.5
	if ticks := c.user + c.system; ticks > 0 {
		share = float64(c.user) / float64(ticks)
	}
	user = time.Duration(share * float64(c.total))
	return user, c.total - user
}

// Sub returns the time between an earlier reading and c.
func (c CPU) Sub(earlier CPU) CPU {
	return CPU{c.total - earlier.total, c.user - earlier.user, c.system - earlier.system}
}

// Add returns the sum of two times.
func (c CPU) Add(o CPU) CPU { return CPU{c.total + o.total, c.user + o.user, c.system + o.system} }

// CPUOf returns the CPU time that a process, with all its threads, has used so far.
func CPUOf(pid int) (c CPU, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return c, fmt.Errorf("read the CPU time of process %d: %w", pid, err)
	}
	// The second field is the command's name in parentheses, which may contain any characters; see
	// proc_pid_stat(5).
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const utime, stime = 14 - 3, 15 - 3
	if len(fields) <= stime {
		return c, fmt.Errorf("read the CPU time of process %d: /proc has only %d fields", pid, len(fields))
	}
	if c.user, err = ticks(fields[utime]); err == nil {
		c.system, err = ticks(fields[stime])
	}
	if err != nil {
		return c, fmt.Errorf("read the CPU time of process %d: %w", pid, err)
	}
	// The process's CPU clock includes threads that have ended; see clock_getcpuclockid(3).
	const scheduler = 2 // the clock of the process that counts scheduled time
	var clock unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|scheduler), &clock); err != nil {
		return c, fmt.Errorf("read the CPU clock of process %d: %w", pid, err)
	}
	c.total = time.Duration(clock.Nano())
	return c, nil
}

func ticks(field string) (time.Duration, error) {
	n, err := strconv.ParseInt(field, 10, 64)
	return time.Duration(n) * tick, err
}

// MachineCPU returns the CPU time that the whole machine has used so far.
func MachineCPU() (sum time.Duration, err error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, fmt.Errorf("read the CPU time of the machine: %w", err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	fields := strings.Fields(line)
	// The fields are cpu user nice system idle iowait irq softirq steal; see proc_stat(5).
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("read the CPU time of the machine: /proc/stat starts with %q", line)
	}
	for _, i := range []int{1, 2, 3, 6, 7} {
		n, err := ticks(fields[i])
		if err != nil {
			return 0, fmt.Errorf("read the CPU time of the machine: %w", err)
		}
		sum += n
	}
	return sum, nil
}

// Memory is the resident memory of a process, in bytes: now, at its peak, and now without pages of
// files such as the program.
type Memory struct {
	Resident, Peak, Anonymous int64
}

// MemoryOf returns the memory of a process.
func MemoryOf(pid int) (Memory, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Memory{}, fmt.Errorf("read the memory of process %d: %w", pid, err)
	}
	var m Memory
	for name, into := range map[string]*int64{"VmRSS": &m.Resident, "VmHWM": &m.Peak, "RssAnon": &m.Anonymous} {
		if *into, err = kibibytes(b, name); err != nil {
			return Memory{}, fmt.Errorf("read the memory of process %d: %w", pid, err)
		}
	}
	return m, nil
}

// kibibytes returns the value in bytes of a line of /proc that has it in KiB.
func kibibytes(content []byte, name string) (int64, error) {
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("/proc does not have %s", name)
}
