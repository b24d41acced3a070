// This file creates the node on which a program is measured, and watches its kernel for the time of
// a change.
package kubeproxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/moby/ipvs"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/testenv"
	"github.com/slicecast/slicecast/internal/xtables"
)

// node is a node with two pods. One pod has the addresses of all endpoints, the other is a client.
type node struct {
	*testenv.Node
	sink     *testenv.Pod // has the addresses of all endpoints
	client   *testenv.Pod
	mode     string // as in -kubeproxy.modes
	iptables string // variant of iptables, or "" if mode is not iptables
}

func (c *cluster) addNode(b *testing.B, name, mode string) *node {
	b.Helper()
	n := &node{Node: c.network.AddNode(name), mode: mode}
	if variant, ok := strings.CutPrefix(mode, "iptables-"); ok {
		n.iptables = variant
	}
	b.Cleanup(n.Delete)
	n.sink = n.AddPod("endpoints")
	n.client = n.AddPod("client")
	run := func(h *testenv.Host, command string) {
		words := strings.Fields(command)
		_, err := h.Run(b.Context(), words[0], words[1:]...)
		require.NoError(b, err)
	}
	run(n.sink.Host, fmt.Sprintf("ip route add local %v dev lo", endpointCIDR))
	run(n.Host, fmt.Sprintf("ip route add %v via %v dev pod1 onlink", endpointCIDR, n.sink.IPv4))
	listener, err := n.sink.Listen(b.Context(), "tcp4", fmt.Sprintf("0.0.0.0:%d", endpointPort))
	require.NoError(b, err)
	served := make(chan struct{})
	go func() {
		defer close(served)
		accept(listener)
	}()
	b.Cleanup(func() {
		_ = listener.Close()
		<-served
	})

	nodes := c.control.Client().CoreV1().Nodes()
	created, err := nodes.Create(b.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDR: n.PodCIDR4.String(), PodCIDRs: []string{n.PodCIDR4.String()}},
	}, metav1.CreateOptions{})
	require.NoError(b, err)
	created.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: n.IPv4.String()}}
	_, err = nodes.UpdateStatus(b.Context(), created, metav1.UpdateOptions{})
	require.NoError(b, err)
	return n
}

// accept accepts connections and closes them. The client resets them.
func accept(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_ = conn.Close()
		}
	}
}

// forgetFlows removes all flows from the connection tracking table. Attempts to connect that failed
// while there were no rules have left flows without a backend. A new connection from the same port
// would belong to such a flow, and be lost.
func (n *node) forgetFlows(b *testing.B) {
	b.Helper()
	require.NoError(b, n.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
}

// rules returns the rules of the tables nat and filter.
func (n *node) rules(b *testing.B) []string {
	b.Helper()
	var rules []string
	for _, table := range []string{"nat", "filter"} {
		out, err := n.Run(b.Context(), "iptables-"+n.iptables+"-save", "-t", table)
		require.NoError(b, err)
		for line := range strings.Lines(out) {
			if strings.HasPrefix(line, "-A ") {
				rules = append(rules, line)
			}
		}
	}
	return rules
}

// stamp returns a value that changes whenever the tables change.
func (n *node) stamp() (stamp any, err error) {
	err = n.Do(func() (err error) {
		if n.iptables == "legacy" {
			stamp, err = xtables.SizeOf(model.IPv4, "nat")
		} else {
			stamp, err = nft.Generation()
		}
		return err
	})
	return stamp, err
}

// weightIn returns a function that returns the weight of an endpoint in IPVS, or 0 if IPVS does not
// have it. The endpoint must exist at first, in one virtual service.
func (n *node) weightIn(b *testing.B, endpoint netip.AddrPort) (look func() (any, error), done func()) {
	b.Helper()
	var handle *ipvs.Handle
	var service *ipvs.Service
	weight := func(s *ipvs.Service) (weight int, err error) {
		destinations, err := handle.GetDestinations(s)
		for _, d := range destinations {
			if address, _ := netip.AddrFromSlice(d.Address); netip.AddrPortFrom(address.Unmap(), d.Port) == endpoint {
				weight = d.Weight
			}
		}
		return weight, err
	}
	require.NoError(b, n.Do(func() (err error) {
		if handle, err = ipvs.New(""); err != nil {
			return err
		}
		all, err := handle.GetServices()
		for _, s := range all {
			if w, _ := weight(s); w > 0 {
				service = s
				break
			}
		}
		return err
	}))
	require.NotNil(b, service, "IPVS has no virtual service that leads to %v", endpoint)
	return func() (any, error) { return weight(service) }, handle.Close
}

// awaitChange waits until look returns something other than from, and then the same for a while. It
// returns the time of the last change.
func awaitChange(ctx context.Context, look func() (any, error), every time.Duration, from any) (time.Time, error) {
	const quiet = 300 * time.Millisecond
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var last time.Time
	for now := from; ; {
		select {
		case <-ctx.Done():
			return last, context.Cause(ctx)
		case <-ticker.C:
		}
		next, err := look()
		if err != nil {
			return last, err
		}
		if next != now {
			now, last = next, time.Now()
		}
		if now != from && time.Since(last) > quiet {
			return last, nil
		}
	}
}

// awaitIPVS waits until IPVS has a number of backends and the node a number of cluster IPs. It
// checks rarely, because a check takes long and would take CPU time from the process that is
// measured.
func (n *node) awaitIPVS(ctx context.Context, backends, clusterIPs int) error {
	for {
		began := time.Now()
		var haveBackends, haveIPs int
		err := n.Do(func() error {
			text, err := os.ReadFile("/proc/thread-self/net/ip_vs")
			if err != nil && !errors.Is(err, os.ErrNotExist) { // the module is loaded only when it is used
				return err
			}
			haveBackends = bytes.Count(text, []byte("\n  -> ")) - 1    // one line is the heading
			addresses, err := netlink.AddrList(nil, netlink.FAMILY_V4) //nolint:forbidigo // this function repeats it
			if errors.Is(err, netlink.ErrDumpInterrupted) {
				err = nil // addresses are still changing
			}
			for _, a := range addresses {
				if ip, ok := netip.AddrFromSlice(a.IP); ok && testenv.ServiceCIDRs()[0].Contains(ip) {
					haveIPs++
				}
			}
			return err
		})
		if err != nil || haveBackends == backends && haveIPs >= clusterIPs {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: IPVS has %d backends and %d cluster IPs, want %d and %d", context.Cause(ctx), haveBackends, haveIPs, backends, clusterIPs)
		case <-time.After(max(200*time.Millisecond, 2*time.Since(began))):
		}
	}
}

// dial makes connections from the client, one after the other, and returns how long each took.
func (n *node) dial(to netip.AddrPort, count int, timeout time.Duration) (times []time.Duration, err error) {
	err = n.client.Do(func() error {
		for range count {
			start := time.Now()
			if err := connect(to, timeout); err != nil {
				return fmt.Errorf("connect to %v: %w", to, err)
			}
			times = append(times, time.Since(start))
		}
		return nil
	})
	return times, err
}

// connect makes a connection and resets it. It avoids Go's network poller, to measure only the
// kernel.
func connect(to netip.AddrPort, timeout time.Duration) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(socket) }()
	if err := unix.SetsockoptLinger(socket, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return err
	}
	err = unix.Connect(socket, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
	if !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	for deadline := time.Now().Add(timeout); ; {
		left := unix.NsecToTimespec(max(0, time.Until(deadline).Nanoseconds()))
		n, err := unix.Ppoll([]unix.PollFd{{Fd: int32(socket), Events: unix.POLLOUT}}, &left, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0 || time.Now().After(deadline):
			return unix.ETIMEDOUT
		default:
			if done, err := outcome(socket); done {
				return err
			}
		}
	}
}

// outcome returns what has come of a connection attempt, once it is done. A socket may seem ready,
// and have no error, while an ICMP error is being delivered to it. So it must have a peer, too.
func outcome(socket int) (done bool, err error) {
	code, err := unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && code != 0 {
		err = unix.Errno(code)
	}
	if err != nil {
		return true, err
	}
	if _, err = unix.Getpeername(socket); errors.Is(err, unix.ENOTCONN) {
		return false, nil
	}
	return true, err
}
