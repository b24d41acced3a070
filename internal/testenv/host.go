package testenv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Host is a network namespace: that of a node, a pod, a client or the world.
type Host struct {
	// Name is the name by which its servers identify themselves.
	Name string
	// IPv4 and IPv6 are its addresses on the network.
	IPv4, IPv6 netip.Addr

	t     TB
	links *netlink.Handle
	eth0  netlink.Link
	// attract makes the host's neighboring router deliver packets for a network to the host. via
	// is an address of the host that the router uses as next hop; it is invalid if dst is an
	// address of the host. attract is nil for the world.
	attract func(dst netip.Prefix, via netip.Addr) error
	// world marks the namespace of the process itself. It may be in several networks with the same
	// addresses. The source address of a packet, an address of the world, decides which network
	// receives it.
	world bool

	mu      sync.RWMutex   // guards the fields below
	ns      netns.NsHandle // closed and set to -1 by close
	servers []*Server
	used    map[string]uint16 // the last port of DialUnused, by network and destination
}

// hostSysctls are set in every namespace before it has interfaces.
var hostSysctls = map[string]string{
	// Accept packets from addresses to which no route leads back, because of policy routing and
	// direct replies.
	"net/ipv4/conf/all/rp_filter":     "0",
	"net/ipv4/conf/default/rp_filter": "0",
	// Addresses are usable at once, and only this package configures addresses.
	"net/ipv6/conf/all/accept_dad":     "0",
	"net/ipv6/conf/default/accept_dad": "0",
	"net/ipv6/conf/all/accept_ra":      "0",
	"net/ipv6/conf/default/accept_ra":  "0",
	// Answer every refused probe. By default the kernel answers six and then one a second.
	"net/ipv4/icmp_ratelimit":     "0",
	"net/ipv6/icmp/ratelimit":     "0",
	"?net/ipv4/icmp_msgs_burst":   "1000000", // per namespace since Linux 6.13
	"?net/ipv4/icmp_msgs_per_sec": "1000000",
}

// routerSysctls are set in namespaces that forward packets: nodes and the router between them.
var routerSysctls = map[string]string{
	"net/ipv4/ip_forward":                  "1",
	"net/ipv6/conf/all/forwarding":         "1",
	"net/ipv6/conf/default/forwarding":     "1",
	"net/ipv4/conf/all/send_redirects":     "0",
	"net/ipv4/conf/default/send_redirects": "0",
	// All packets of a connection take one way; see RouteAcross.
	"net/ipv4/fib_multipath_hash_policy": "1",
	"net/ipv6/fib_multipath_hash_policy": "1",
}

// setSysctls writes settings to the network namespace of the calling thread. Settings marked with ?
// may be missing in the kernel.
func setSysctls(settings map[string]string) error {
	for name, value := range settings {
		name, optional := strings.CutPrefix(name, "?")
		err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
		if err != nil && (!optional || !errors.Is(err, os.ErrNotExist)) {
			return fmt.Errorf("set sysctl %s: %w", name, err)
		}
	}
	return nil
}

// newHost creates an empty namespace in which lo is up.
func newHost(t TB, name string, sysctls ...map[string]string) (h *Host, err error) {
	h = &Host{Name: name, t: t}
	if h.ns, err = newNamespace(); err != nil {
		return nil, fmt.Errorf("make a network namespace for %s: %w", name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("set up %s: %w", name, err), h.close())
		}
	}()
	if h.links, err = netlink.NewHandleAt(h.ns, unix.NETLINK_ROUTE); err != nil {
		return nil, err
	}
	err = h.Do(func() error {
		for _, settings := range append(sysctls, hostSysctls) {
			if err := setSysctls(settings); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	lo, err := h.links.LinkByName("lo")
	if err != nil {
		return nil, err
	}
	return h, h.links.LinkSetUp(lo)
}

func newNamespace() (netns.NsHandle, error) {
	runtime.LockOSThread()
	origin, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return netns.None(), err
	}
	defer origin.Close() //nolint:errcheck // read-only descriptor
	ns, err := netns.New()
	restoreThread(origin)
	return ns, err
}

// restoreThread returns the calling thread to the namespace origin and unlocks it.
func restoreThread(origin netns.NsHandle) {
	if err := netns.Set(origin); err != nil {
		panic(fmt.Sprintf("testenv: cannot return to the network namespace that this thread came from: %v", err))
	}
	runtime.UnlockOSThread()
}

// Do runs f in the host's namespace, in the calling goroutine, on a thread that runs nothing else
// meanwhile. Sockets that f opens and processes that it starts stay in the namespace. Goroutines
// that f starts do not run in it. f must not start a process with Pdeathsig, because that signal
// depends on the thread.
func (h *Host) Do(f func() error) error {
	runtime.LockOSThread()
	origin, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("find this thread's network namespace: %w", err)
	}
	defer origin.Close() //nolint:errcheck // read-only descriptor
	if err := h.enter(); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	// The deferred call also runs if f panics or calls runtime.Goexit, as a failing test does.
	defer restoreThread(origin)
	return f()
}

// enter moves the calling thread into the namespace. The lock prevents a concurrent close, after
// which the number of the descriptor could be reused.
func (h *Host) enter() error {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if !h.ns.IsOpen() {
		return fmt.Errorf("%s has been deleted", h.Name)
	}
	if err := netns.Set(h.ns); err != nil {
		return fmt.Errorf("enter the network namespace of %s: %w", h.Name, err)
	}
	return nil
}

// Addr returns the IPv6 address if ipv6 is true, and the IPv4 address otherwise. It is for tests
// that run once for each family.
func (h *Host) Addr(ipv6 bool) netip.Addr {
	if ipv6 {
		return h.IPv6
	}
	return h.IPv4
}

// Cmd is a command that runs in a host.
type Cmd struct {
	*exec.Cmd
	host *Host
}

// Command is [exec.CommandContext] in the host's network namespace. Deleting the host kills the
// command and all processes that it has started; the caller must still call Wait.
func (h *Host) Command(ctx context.Context, name string, args ...string) *Cmd {
	return &Cmd{Cmd: exec.CommandContext(ctx, name, args...), host: h}
}

// Start is [exec.Cmd.Start] in the host.
func (c *Cmd) Start() error { return c.host.Do(c.Cmd.Start) }

// Run is [exec.Cmd.Run] in the host.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output is [exec.Cmd.Output] in the host.
func (c *Cmd) Output() (output []byte, err error) {
	err = c.host.Do(func() (err error) {
		output, err = c.Cmd.Output()
		return err
	})
	return output, err
}

// CombinedOutput is [exec.Cmd.CombinedOutput] in the host.
func (c *Cmd) CombinedOutput() (output []byte, err error) {
	err = c.host.Do(func() (err error) {
		output, err = c.Cmd.CombinedOutput()
		return err
	})
	return output, err
}

// Run runs a command in the host and returns its combined standard output and standard error. An
// error contains the output, too.
func (h *Host) Run(ctx context.Context, name string, args ...string) (string, error) {
	output, err := h.Command(ctx, name, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %s %s: %w\n%s", h.Name, name, strings.Join(args, " "), err, output)
	}
	return string(output), err
}

// close stops the host's servers and processes and closes the namespace, which the kernel removes
// with its last user.
func (h *Host) close() error {
	h.mu.Lock()
	servers, open := h.servers, h.ns.IsOpen()
	h.servers = nil
	h.mu.Unlock()
	if !open {
		return nil
	}
	for _, server := range servers {
		server.Close()
	}
	var err error
	if !h.world {
		err = killProcesses(h.ns)
	}
	if h.links != nil {
		h.links.Close()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return errors.Join(err, h.ns.Close())
}

var errStillThere = errors.New("it still exists")

// killProcesses kills all processes in a network namespace except this one. It returns when they
// are gone.
func killProcesses(ns netns.NsHandle) error {
	var want unix.Stat_t
	if err := unix.Fstat(int(ns), &want); err != nil {
		return fmt.Errorf("identify a network namespace: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), kernelPatience)
	defer cancel()
	return WaitForEvery(ctx, time.Millisecond, func() error {
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return err
		}
		var errs []error
		for _, entry := range entries {
			pid, err := strconv.Atoi(entry.Name())
			if err != nil || pid == os.Getpid() {
				continue
			}
			var have unix.Stat_t
			// A process that has exited but was not waited for yet has no namespace any more.
			if unix.Stat(filepath.Join("/proc", entry.Name(), "ns/net"), &have) != nil || have.Ino != want.Ino || have.Dev != want.Dev {
				continue
			}
			// Report an error, so that waitFor looks again: for this process, and for processes
			// that it has started meanwhile.
			errs = append(errs, fmt.Errorf("kill process %d: %w", pid, cmp.Or(syscall.Kill(pid, syscall.SIGKILL), errStillThere)))
		}
		return errors.Join(errs...)
	})
}
