package ipvs

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Device is the name of the dummy device that has the Services' addresses: IPVS sees only what is meant for the node.
const Device = "slicecast-ipvs0"

// KubeProxyDevice is the name of the one that kube-proxy has for the same.
const KubeProxyDevice = "kube-ipvs0"

// ensureDevice makes the device if it is not there, and sets it up.
func (p *Programmer) ensureDevice() error {
	link, err := p.links.LinkByName(Device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		made := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Device}}
		if err := p.links.LinkAdd(made); err != nil {
			return fmt.Errorf("make the dummy device %s: %w", Device, err)
		}
		link, err = p.links.LinkByName(Device)
	}
	if err != nil {
		return fmt.Errorf("find the device %s: %w", Device, err)
	}
	if link.Type() != "dummy" {
		return fmt.Errorf("there is a device %s that is no dummy device but of type %s: remove it", Device, link.Type())
	}
	if err := p.links.LinkSetUp(link); err != nil {
		return fmt.Errorf("set the device %s up: %w", Device, err)
	}
	p.device = link
	return nil
}

// deviceAddresses gives the addresses that the device has, without the one that the kernel gives each device.
func (p *Programmer) deviceAddresses() (map[netip.Addr]bool, error) {
	list, err := p.links.AddrList(p.device, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("read the addresses of %s: %w", Device, err)
	}
	held := map[netip.Addr]bool{}
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && !ip.IsLinkLocalUnicast() {
			held[ip.Unmap()] = true
		}
	}
	return held, nil
}

// findNodeAddresses gives the node's own addresses that have NodePorts.
func (p *Programmer) findNodeAddresses(node view.Node) (map[model.Family][]netip.Addr, error) {
	list, err := p.links.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("read the node's addresses: %w", err)
	}
	found := map[model.Family][]netip.Addr{}
	for _, a := range list {
		ip, ok := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		family := model.FamilyOf(ip)
		if ok && a.LinkIndex != p.device.Attrs().Index && hasNodePorts(node, ip) && !slices.Contains(found[family], ip) {
			found[family] = append(found[family], ip)
		}
	}
	for _, list := range found {
		slices.SortFunc(list, netip.Addr.Compare)
	}
	return found, nil
}

// hasNodePorts tells whether NodePorts are on an address, if it is the node's.
func hasNodePorts(node view.Node, a netip.Addr) bool {
	return !a.IsLoopback() && !a.IsLinkLocalUnicast() && slices.ContainsFunc(node.NodePorts, func(n netip.Prefix) bool { return n.Contains(a) })
}

// nodesOwn tells whether an address is another interface's, e.g. a node's own that a Service has as an external IP. Such
// a one is no Service's alone: other ports on it are none of our business.
func (p *Programmer) nodesOwn(a netip.Addr) bool {
	routes, err := p.links.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil {
		return false // there is no way there, and so it is not local
	}
	return slices.ContainsFunc(routes, func(r netlink.Route) bool {
		return r.Type == unix.RTN_LOCAL && r.LinkIndex != p.device.Attrs().Index && !p.isKubeProxys(r.LinkIndex)
	})
}

// isKubeProxys tells whether a device is the one on which kube-proxy has Services' addresses. Two may have the same, so that
// they are there when the other one is removed.
func (p *Programmer) isKubeProxys(index int) bool {
	link, err := p.links.LinkByName(KubeProxyDevice)
	return err == nil && link.Attrs().Index == index
}

// deviceAddress gives an address as the device has it: so that the kernel does not choose it as a source, e.g. of what is
// masqueraded.
func deviceAddress(a netip.Addr) *netlink.Addr {
	address := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if model.FamilyOf(a) == model.IPv4 {
		address.Scope = unix.RT_SCOPE_HOST
	} else {
		// Deprecated: valid for ever, preferred for no time.
		address.Flags = unix.IFA_F_NODAD
		address.ValidLft, address.PreferedLft = math.MaxUint32, 0
	}
	return address
}

func (p *Programmer) addAddress(a netip.Addr) error {
	if err := p.links.AddrAdd(p.device, deviceAddress(a)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("give %s the address %v: %w", Device, a, err)
	}
	return nil
}

func (p *Programmer) removeAddress(a netip.Addr) error {
	if err := p.links.AddrDel(p.device, deviceAddress(a)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("take the address %v from %s: %w", a, Device, err)
	}
	return nil
}

// removeDevice removes the device, if there is one.
func removeDevice(links *netlink.Handle) error {
	link, err := links.LinkByName(Device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err == nil {
		err = links.LinkDel(link)
	}
	if err != nil {
		return fmt.Errorf("remove the device %s: %w", Device, err)
	}
	return nil
}
