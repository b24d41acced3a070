package daemon

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
)

// InNetwork returns the directories in /proc of other processes with this name in the network
// namespace of the calling thread. The kernel truncates names to 15 characters. In a container only
// few processes are visible.
func InNetwork(name string) (processes []string) {
	own, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return nil
	}
	commands, _ := filepath.Glob("/proc/[0-9]*/comm") // fails only for invalid patterns
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
