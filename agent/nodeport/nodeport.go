// Package nodeport determines on which of this machine's addresses NodePorts are open, for code
// other than programmers, which let the kernel decide for each packet.
package nodeport

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	vnetlink "github.com/vishvananda/netlink"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/view"
)

// The dummy devices of IPVS hold addresses of Services, which have no NodePorts.
const (
	IPVSDevice          = "slicecast-ipvs0" // the IPVS programmer's
	KubeProxyIPVSDevice = "kube-ipvs0"
)

// Addresses returns the addresses that this machine has now and on which NodePorts are open (see
// view.Node), ascending, each once.
func Addresses(node view.Node) ([]netip.Addr, error) {
	return addresses(func(a netlink.Address) bool { return on(node, a.Addr()) }, IPVSDevice, KubeProxyIPVSDevice)
}

// Local returns all addresses that this machine has now, ascending, each once.
func Local() ([]netip.Addr, error) { return addresses(func(netlink.Address) bool { return true }) }

// addresses returns the addresses that wanted accepts and that are on none of these devices.
func addresses(wanted func(netlink.Address) bool, except ...string) ([]netip.Addr, error) {
	list, err := netlink.Addresses()
	if err != nil {
		return nil, fmt.Errorf("list this machine's addresses: %w", err)
	}
	excepted := make(map[int]bool)
	for _, name := range except { // nodes may have thousands of other interfaces
		link, err := vnetlink.LinkByName(name)
		switch {
		case err == nil:
			excepted[link.Attrs().Index] = true
		case !errors.As(err, new(vnetlink.LinkNotFoundError)):
			return nil, fmt.Errorf("find this machine's interface %s: %w", name, err)
		}
	}
	var out []netip.Addr
	for _, a := range list {
		if wanted(a) && !excepted[a.Link] {
			out = append(out, a.Addr())
		}
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
