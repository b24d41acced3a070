package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/internal/model"
)

// maxFlows bounds the size of the table that follows from Settings.MaxPerCore, as in kube-proxy.
const maxFlows = 1 << 20

// Settings are settings of the kernel's connection tracking, with the meanings that they have in
// kube-proxy. A setting whose value is zero is left as it is.
type Settings struct {
	// MaxPerCore is the number of flows that the table may hold for each CPU of the machine, and Min
	// the least number in total. Min is ignored without MaxPerCore. A larger table stays as it is.
	MaxPerCore, Min int
	// The timeouts are how long a flow may be idle until it is forgotten. They are applied in whole
	// seconds.
	TCPEstablishedTimeout, TCPCloseWaitTimeout, UDPTimeout, UDPStreamTimeout time.Duration
	// TCPBeLiberal prevents TCP packets outside of the window from counting as invalid.
	TCPBeLiberal bool
}

// Apply makes the settings that differ from the kernel's, and logs what it changes. The size of the
// table belongs to the machine: in a network namespace other than the machine's initial one, it is
// left as it is. The error names all settings that could not be made.
func (s Settings) Apply(logger *slog.Logger) error {
	return s.apply(sysctls{procfs: "/proc/sys/net/netfilter", log: logger}, cpus())
}

func (s Settings) apply(k sysctls, cpus int) error {
	wanted := []struct {
		name  string
		value int
	}{
		{"nf_conntrack_tcp_timeout_established", int(s.TCPEstablishedTimeout / time.Second)},
		{"nf_conntrack_tcp_timeout_close_wait", int(s.TCPCloseWaitTimeout / time.Second)},
		{"nf_conntrack_udp_timeout", int(s.UDPTimeout / time.Second)},
		{"nf_conntrack_udp_timeout_stream", int(s.UDPStreamTimeout / time.Second)},
		{"nf_conntrack_tcp_be_liberal", 0},
	}
	if s.TCPBeLiberal {
		wanted[len(wanted)-1].value = 1
	}
	var errs []error
	for _, w := range wanted {
		if w.value > 0 {
			errs = append(errs, k.set(w.name, w.value, false))
		}
	}
	if s.max(cpus) > 0 {
		errs = append(errs, k.set("nf_conntrack_max", s.max(cpus), true), k.set("nf_conntrack_buckets", s.max(cpus)/4, true))
	}
	return errors.Join(errs...)
}

func (s Settings) max(cpus int) int {
	if s.MaxPerCore <= 0 {
		return 0
	}
	return min(max(s.MaxPerCore*cpus, s.Min), max(maxFlows, s.Min))
}

// sysctls is a directory of the kernel's settings.
type sysctls struct {
	procfs string
	log    *slog.Logger
}

// set sets one setting if it differs from value. If least is true, it sets only one that is less
// than value.
func (k sysctls) set(name string, value int, least bool) error {
	path := filepath.Join(k.procfs, name)
	now, err := read(path)
	if errors.Is(err, fs.ErrNotExist) {
		loadModule()
		now, err = read(path)
	}
	if err != nil {
		return fmt.Errorf("read the sysctl net.netfilter.%s: %w", name, err)
	}
	if now == value || least && now > value {
		return nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Mode().Perm()&0o200 == 0 {
		k.log.Debug("Cannot set a sysctl from this network namespace",
			"sysctl", "net.netfilter."+name, "value", now, "wanted", value)
		return nil
	}
	if err := os.WriteFile(path, []byte(strconv.Itoa(value)), 0); err != nil {
		return fmt.Errorf("set the sysctl net.netfilter.%s from %d to %d: %w", name, now, value, err)
	}
	k.log.Info("Set a sysctl", "sysctl", "net.netfilter."+name, "from", now, "to", value)
	return nil
}

func read(path string) (int, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// loadModule makes the kernel load its connection tracking, which happens when the table is read.
func loadModule() {
	t, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return // the caller reports an error of its own
	}
	defer t.Close()
	_ = t.Flows(model.IPv4, unix.IPPROTO_UDP, func(netlink.Flow) {})
}

// cpus returns the number of the machine's CPUs, which may be more than this process may use.
func cpus() int {
	b, err := os.ReadFile("/sys/devices/system/cpu/online")
	if n, ok := countCPUs(strings.TrimSpace(string(b))); err == nil && ok {
		return n
	}
	return runtime.NumCPU()
}

// countCPUs returns the number of CPUs in a list of the kernel's, such as "0-3,8".
func countCPUs(list string) (count int, ok bool) {
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		first, err := strconv.Atoi(from)
		last := first
		if err == nil && isRange {
			last, err = strconv.Atoi(to)
		}
		if err != nil || last < first {
			return 0, false
		}
		count += last - first + 1
	}
	return count, true
}
