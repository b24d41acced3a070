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

// Host is a network namespace: a node, a pod, a client or the world.
type Host struct {
	// Name is what its servers call themselves.
	Name string
	// IPv4 and IPv6 are its addresses on the network.
	IPv4, IPv6 netip.Addr

	t     TB
	links *netlink.Handle
	eth0  netlink.Link
	// attract makes the host's neighbour router deliver a network to it, by way of an address of the host unless the
	// network is itself one. Nil for the world.
	attract func(dst netip.Prefix, via netip.Addr) error
	// world marks the process's own namespace. It may be in several networks with the same addresses: what it sends
	// reaches the one whose address of the world it has as source.
	world bool

	mu      sync.RWMutex
	ns      netns.NsHandle // closed and -1 after close
	servers []*Server
}

// hostSysctls are set in every namespace, before it has interfaces.
var hostSysctls = map[string]string{
	// Packets may arrive from where no route leads back: policy routing, direct replies.
	"net/ipv4/conf/all/rp_filter":     "0",
	"net/ipv4/conf/default/rp_filter": "0",
	// Addresses are usable at once, and nothing but this package configures them.
	"net/ipv6/conf/all/accept_dad":     "0",
	"net/ipv6/conf/default/accept_dad": "0",
	"net/ipv6/conf/all/accept_ra":      "0",
	"net/ipv6/conf/default/accept_ra":  "0",
	// Every refused probe is answered, not six and then one a second.
	"net/ipv4/icmp_ratelimit":     "0",
	"net/ipv6/icmp/ratelimit":     "0",
	"?net/ipv4/icmp_msgs_burst":   "1000000", // per namespace since Linux 6.13
	"?net/ipv4/icmp_msgs_per_sec": "1000000",
}

// routerSysctls are set in namespaces that forward: nodes and the router between them.
var routerSysctls = map[string]string{
	"net/ipv4/ip_forward":                  "1",
	"net/ipv6/conf/all/forwarding":         "1",
	"net/ipv6/conf/default/forwarding":     "1",
	"net/ipv4/conf/all/send_redirects":     "0",
	"net/ipv4/conf/default/send_redirects": "0",
}

// setSysctls writes settings to the calling thread's network namespace; those marked with ? may be missing.
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

// newHost makes an empty namespace with lo up.
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

// restoreThread ends what runtime.LockOSThread and a change of namespace began.
func restoreThread(origin netns.NsHandle) {
	if err := netns.Set(origin); err != nil {
		panic(fmt.Sprintf("testenv: cannot return to the network namespace that this thread came from: %v", err))
	}
	runtime.UnlockOSThread()
}

// Do runs f in the host's namespace, in the calling goroutine, on a thread that runs nothing else meanwhile. Sockets
// that f opens and processes that it starts stay in the namespace; goroutines that it starts are not in it. A process
// must not be started with Pdeathsig, which is bound to the thread.
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
	// Also when f panics or calls runtime.Goexit, as a failing test does.
	defer restoreThread(origin)
	return f()
}

// enter moves the calling thread. The lock keeps the descriptor from being closed, and its number reused, meanwhile.
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

// Addr is IPv6 if ipv6 is true, else IPv4: for tests that run once for each family.
func (h *Host) Addr(ipv6 bool) netip.Addr {
	if ipv6 {
		return h.IPv6
	}
	return h.IPv4
}

// Cmd is a command that starts in a host.
type Cmd struct {
	*exec.Cmd
	host *Host
}

// Command is [exec.CommandContext] in the host's network namespace. It is killed, with whatever it has started, when
// the host is deleted; its Wait must still be called.
func (h *Host) Command(ctx context.Context, name string, args ...string) *Cmd {
	return &Cmd{Cmd: exec.CommandContext(ctx, name, args...), host: h}
}

// Start is [exec.Cmd.Start].
func (c *Cmd) Start() error { return c.host.Do(c.Cmd.Start) }

// Run is [exec.Cmd.Run].
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output is [exec.Cmd.Output].
func (c *Cmd) Output() (output []byte, err error) {
	err = c.host.Do(func() (err error) {
		output, err = c.Cmd.Output()
		return err
	})
	return output, err
}

// CombinedOutput is [exec.Cmd.CombinedOutput].
func (c *Cmd) CombinedOutput() (output []byte, err error) {
	err = c.host.Do(func() (err error) {
		output, err = c.Cmd.CombinedOutput()
		return err
	})
	return output, err
}

// Run runs a command in the host and returns its standard output and standard error. The error holds them, too.
func (h *Host) Run(ctx context.Context, name string, args ...string) (string, error) {
	output, err := h.Command(ctx, name, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %s %s: %w\n%s", h.Name, name, strings.Join(args, " "), err, output)
	}
	return string(output), err
}

// close stops the host's servers and processes and gives up the namespace, which ends with its last user.
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

var errStillThere = errors.New("it is still there")

// killProcesses kills the processes in a network namespace, other than this one, and returns when they are gone.
func killProcesses(ns netns.NsHandle) error {
	var want unix.Stat_t
	if err := unix.Fstat(int(ns), &want); err != nil {
		return fmt.Errorf("identify a network namespace: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), kernelPatience)
	defer cancel()
	return waitFor(ctx, time.Millisecond, func() error {
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
			// A process that has exited, though nobody has waited for it yet, has no namespace any more.
			if unix.Stat(filepath.Join("/proc", entry.Name(), "ns/net"), &have) != nil || have.Ino != want.Ino || have.Dev != want.Dev {
				continue
			}
			// Look again until it is gone, and what it may have started meanwhile.
			errs = append(errs, fmt.Errorf("kill process %d: %w", pid, cmp.Or(syscall.Kill(pid, syscall.SIGKILL), errStillThere)))
		}
		return errors.Join(errs...)
	})
}
