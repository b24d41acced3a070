package ipvs

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nodeport"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Device is the name of the dummy device that has the cluster IPs of Services. It makes them the
// node's own, because IPVS sees only packets for the node.
const Device = nodeport.IPVSDevice

// KubeProxyDevice is the name of kube-proxy's device for the same purpose. It has external
// addresses as well.
const KubeProxyDevice = nodeport.KubeProxyIPVSDevice

// device is the dummy device with the cluster IPs of Services, and the sockets to reach it. link is
// nil before find or ensure has found it.
type device struct {
	links *vnetlink.Handle
	// addresses carries requests about addresses, which are sent in batches.
	addresses *netlink.Socket
	requests  netlink.Writer // reused by each operation
	link      vnetlink.Link
	// watcher receives notifications about addresses and devices.
	watcher *netlink.Watcher
}

// openDevice opens the sockets. It neither looks for the device nor creates it.
func openDevice() (*device, error) {
	links, err := vnetlink.NewHandle()
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	addresses, err := netlink.Open(unix.NETLINK_ROUTE)
	if err != nil {
		links.Close()
		return nil, fmt.Errorf("open a netlink socket for addresses: %w", err)
	}
	return &device{links: links, addresses: addresses, watcher: netlink.NewWatcher(unix.NETLINK_ROUTE, addresses.Port,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)}, nil
}

func (d *device) close() {
	d.links.Close()
	d.addresses.Close()
	d.watcher.Close()
}

// findLink returns the network device with a name, or nil if there is none.
func findLink(links *vnetlink.Handle, name string) (vnetlink.Link, error) {
	link, err := links.LinkByName(name)
	if errors.As(err, new(vnetlink.LinkNotFoundError)) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find device %s: %w", name, err)
	}
	return link, nil
}

// find looks for the device, and reports whether it exists.
func (d *device) find() (exists bool, err error) {
	d.link, err = findLink(d.links, Device)
	return d.link != nil, err
}

// index returns the number of the device, or 0 before it has been found.
func (d *device) index() int {
	if d.link == nil {
		return 0
	}
	return d.link.Attrs().Index
}

// ensure creates the device unless it exists, and sets it up.
func (d *device) ensure() error {
	err := d.links.LinkAdd(&vnetlink.Dummy{LinkAttrs: vnetlink.LinkAttrs{Name: Device}})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("create the dummy device %s: %w", Device, err)
	}
	if exists, err := d.find(); !exists {
		return cmp.Or(err, fmt.Errorf("another process has removed the device %s", Device))
	}
	if d.link.Type() != "dummy" {
		return fmt.Errorf("device %s is of type %s, not dummy: remove it", Device, d.link.Type())
	}
	if err := d.links.LinkSetUp(d.link); err != nil {
		return fmt.Errorf("set device %s up: %w", Device, err)
	}
	return nil
}

// try creates the device, and removes it again unless it existed before.
func (d *device) try() error {
	if exists, err := d.find(); exists || err != nil {
		return err
	}
	return errors.Join(d.ensure(), d.remove())
}

// remove removes the device if it exists.
func (d *device) remove() error {
	exists, err := d.find()
	if !exists || err != nil {
		return err
	}
	if err := d.links.LinkDel(d.link); err != nil {
		return fmt.Errorf("remove device %s: %w", Device, err)
	}
	return nil
}

// isUp reports whether the device exists and is up. Otherwise its addresses are not the node's.
func (d *device) isUp() bool {
	link, err := findLink(d.links, Device)
	return err == nil && link != nil && link.Attrs().Flags&net.FlagUp != 0
}

// kubeProxys returns the index of kube-proxy's device, or 0 if there is none. Both devices may have
// the same address, so the address stays when one of them is removed.
func (d *device) kubeProxys() int {
	link, err := findLink(d.links, KubeProxyDevice)
	if link == nil || err != nil {
		return 0
	}
	return link.Attrs().Index
}

// read returns the node's addresses of an IP family: those of the device, except the link-local one
// that the kernel gives each device, and those of devices that do not hold addresses of Services.
func (d *device) read(family model.Family) (own, elsewhere map[netip.Addr]bool, err error) {
	list, err := d.addresses.Addresses(netlink.Domain(family))
	if err != nil {
		return nil, nil, fmt.Errorf("read the node's addresses: %w", err)
	}
	own, elsewhere = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	kubeProxys := d.kubeProxys()
	for _, a := range list {
		switch {
		case a.Link == d.index() && !a.Addr().IsLinkLocalUnicast():
			own[a.Addr()] = true
		case a.Link != d.index() && a.Link != kubeProxys:
			elsewhere[a.Addr()] = true
		}
	}
	return own, elsewhere, nil
}

// nodePortAddresses returns the addresses in own that have NodePorts, in ascending order.
func nodePortAddresses(node view.Node, own map[netip.Addr]bool) (found []netip.Addr) {
	for a := range own {
		if hasNodePorts(node, a) {
			found = append(found, a)
		}
	}
	slices.SortFunc(found, netip.Addr.Compare)
	return found
}

// hasNodePorts reports whether NodePorts are on an address, given that it is the node's.
func hasNodePorts(node view.Node, a netip.Addr) bool {
	contains := func(n netip.Prefix) bool { return n.Contains(a) }
	return !a.IsLoopback() && !a.IsLinkLocalUnicast() && slices.ContainsFunc(node.NodePorts, contains)
}

// nodesOwn reports whether an address is on another interface, for example on that of NodeLocal
// DNSCache. Such an address does not belong to a Service alone, so its other ports are left alone.
func (d *device) nodesOwn(a netip.Addr) bool {
	index := d.local(a)
	return index != 0 && index != d.index() && index != d.kubeProxys()
}

// local returns the index of the interface by which an address is the node's, or 0 if it is not.
func (d *device) local(a netip.Addr) int {
	routes, err := d.links.RouteGetWithOptions(a.AsSlice(), &vnetlink.RouteGetOptions{FIBMatch: true})
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_LOCAL {
		return 0
	}
	return routes[0].LinkIndex
}

// addAddresses adds addresses to the device. It returns those that the kernel refuses, each with
// the reason.
func (d *device) addAddresses(list []netip.Addr) (refused map[netip.Addr]error, err error) {
	refused = make(map[netip.Addr]error)
	err = d.change(list, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(a netip.Addr, errno unix.Errno) error {
		advice := ""
		if errno == unix.EACCES && a.Is6() {
			advice = "; IPv6 is disabled there, set the sysctl net.ipv6.conf." + Device + ".disable_ipv6 to 0"
		}
		if errno != unix.EEXIST {
			refused[a] = fmt.Errorf("add address %v to device %s: %w%s", a, Device, errno, advice)
		}
		return nil
	})
	return refused, err
}

func (d *device) removeAddresses(list []netip.Addr) error {
	return d.change(list, unix.RTM_DELADDR, 0, func(a netip.Addr, errno unix.Errno) error {
		if errno == unix.EADDRNOTAVAIL {
			return nil
		}
		return fmt.Errorf("remove address %v from device %s: %w", a, Device, errno)
	})
}

// change adds addresses to the device or removes them, depending on kind.
func (d *device) change(list []netip.Addr, kind, flags uint16, failure func(netip.Addr, unix.Errno) error) error {
	d.requests.Buf = d.requests.Buf[:0]
	for _, a := range list {
		writeAddress(&d.requests, kind, flags, d.index(), a)
	}
	var failed error
	err := d.addresses.Execute(&d.requests, func(i int, err *netlink.Error) {
		failed = cmp.Or(failed, failure(list[i], err.Errno))
	})
	return errors.Join(err, failed)
}

// writeAddress appends a message about an address of a device. The scope and flags keep the kernel
// from choosing the address as a source, for example when masquerading.
func writeAddress(w *netlink.Writer, kind, flags uint16, index int, a netip.Addr) {
	scope, addressFlags := byte(unix.RT_SCOPE_HOST), byte(0)
	if a.Is6() {
		// The address is deprecated: valid forever, but never preferred.
		scope, addressFlags = unix.RT_SCOPE_UNIVERSE, unix.IFA_F_NODAD
	}
	at := w.Begin(kind, flags)
	w.Buf = append(w.Buf, netlink.Domain(model.FamilyOf(a)), byte(a.BitLen()), addressFlags, scope)
	w.Buf = binary.NativeEndian.AppendUint32(w.Buf, uint32(index))
	w.Bytes(unix.IFA_LOCAL, a.AsSlice())
	w.Bytes(unix.IFA_ADDRESS, a.AsSlice())
	if a.Is6() {
		const preferred, valid = 0, math.MaxUint32
		lifetimes := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, preferred), valid)
		// Two times follow that only the kernel sets.
		w.Bytes(unix.IFA_CACHEINFO, append(lifetimes, make([]byte, 8)...))
	}
	w.End(at)
}
