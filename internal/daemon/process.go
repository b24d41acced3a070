package daemon

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
)

// InNetwork gives the directories in /proc of other processes with this name, of 15 characters at most, in this thread's network
// namespace: those that it can see, which in a container are few.
func InNetwork(name string) (processes []string) {
	own, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return nil
	}
	commands, _ := filepath.Glob("/proc/[0-9]*/comm") // the pattern is a good one
	for _, path := range commands {
		comm, err := os.ReadFile(path)
		process := filepath.Dir(path)
		if err != nil || string(bytes.TrimSpace(comm)) != name || filepath.Base(process) == strconv.Itoa(os.Getpid()) {
			continue
		}
		if its, err := os.Stat(filepath.Join(process, "ns/net")); err == nil && os.SameFile(own, its) {
			processes = append(processes, process)
		}
	}
	return processes
}
