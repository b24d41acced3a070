// Package nodeport determines on which of this machine's addresses NodePorts are open, for code
// other than programmers, which let the kernel decide for each packet.
package nodeport

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/view"
)

// Addresses returns the addresses that this machine has now and on which NodePorts are open (see
// view.Node), ascending, each once.
func Addresses(node view.Node) ([]netip.Addr, error) {
	all, err := Local()
	return slices.DeleteFunc(all, func(a netip.Addr) bool { return !on(node, a) }), err
}

// Local returns all addresses that this machine has now, ascending, each once.
func Local() ([]netip.Addr, error) {
	list, err := netlink.Addresses()
	if err != nil {
		return nil, fmt.Errorf("list this machine's addresses: %w", err)
	}
	var out []netip.Addr
	for _, a := range list {
		out = append(out, a.Addr())
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

func on(node view.Node, addr netip.Addr) bool {
	if addr.IsLoopback() && (addr.Is6() || !node.LocalhostNodePorts) {
		return false
	}
	return slices.ContainsFunc(node.NodePorts, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// RouteLocalnetPath is the sysctl that makes the kernel route packets of loopback addresses to and
// from the network.
const RouteLocalnetPath = "/proc/sys/net/ipv4/conf/all/route_localnet"

// SetRouteLocalnet sets that sysctl, so that NodePorts can be on loopback addresses. Rules must
// keep packets from outside away from these addresses before. The sysctl is never reset, because
// others may rely on it.
func SetRouteLocalnet() error {
	if is, err := os.ReadFile(RouteLocalnetPath); err == nil && string(bytes.TrimSpace(is)) == "1" {
		return nil // a container without privileges can read the sysctl but not set it
	}
	if err := os.WriteFile(RouteLocalnetPath, []byte("1"), 0o644); err != nil {
		return fmt.Errorf("set the sysctl net.ipv4.conf.all.route_localnet to 1: %w", err)
	}
	return nil
}
