package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Device is the name of the dummy device that has the addresses of Services. It makes them the
// node's own, because IPVS sees only packets for the node.
const Device = "slicecast-ipvs0"

// KubeProxyDevice is the name of kube-proxy's device for the same purpose.
const KubeProxyDevice = "kube-ipvs0"

// ensureDevice creates the device unless it exists, and sets it up.
func (m *machine) ensureDevice() error {
	link, err := m.links.LinkByName(Device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		made := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: Device}}
		if err := m.links.LinkAdd(made); err != nil {
			return fmt.Errorf("make the dummy device %s: %w", Device, err)
		}
		link, err = m.links.LinkByName(Device)
	}
	if err != nil {
		return fmt.Errorf("find the device %s: %w", Device, err)
	}
	if link.Type() != "dummy" {
		return fmt.Errorf("there is a device %s that is no dummy device but of type %s: remove it", Device, link.Type())
	}
	if err := m.links.LinkSetUp(link); err != nil {
		return fmt.Errorf("set the device %s up: %w", Device, err)
	}
	m.device = link
	return nil
}

// domain returns the kernel's number of an IP family.
func domain(family model.Family) byte {
	if family == model.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// deviceAddresses returns a device's addresses of a domain, except the link-local one that the
// kernel gives each device.
func (m *machine) deviceAddresses(device netlink.Link, domain byte) (map[netip.Addr]bool, error) {
	list, err := m.listAddresses(domain)
	if err != nil {
		return nil, fmt.Errorf("read the addresses of %s: %w", device.Attrs().Name, err)
	}
	held := map[netip.Addr]bool{}
	for _, a := range list {
		if a.device == device.Attrs().Index && !a.IsLinkLocalUnicast() {
			held[a.Addr] = true
		}
	}
	return held, nil
}

// deviceAddress is an address of a device.
type deviceAddress struct {
	netip.Addr
	device int // index of the device
}

// listAddresses returns the addresses of a domain that any device has. It reads them again if some
// changed meanwhile. AF_UNSPEC stands for both IP families.
func (m *machine) listAddresses(domain byte) (list []deviceAddress, err error) {
	err = readAgain(func() error {
		list = list[:0]
		r := &m.requests
		r.reset()
		r.begin(unix.RTM_GETADDR, 0)
		r.buf = append(r.buf, domain)
		r.buf = append(r.buf, make([]byte, unix.SizeofIfAddrmsg-1)...) // for all devices
		r.end()
		return m.addresses.dump(r, func(body []byte) {
			if a := parseAddress(body); a.IsValid() {
				list = append(list, a)
			}
		})
	})
	return list, err
}

// parseAddress parses a message about an address. The result is not valid if the address belongs to
// neither IP family.
func parseAddress(body []byte) (a deviceAddress) {
	if len(body) < unix.SizeofIfAddrmsg || body[0] != unix.AF_INET && body[0] != unix.AF_INET6 {
		return a
	}
	a.device = int(hostNumber(body[4:]))
	for kind, value := range attributes(body[unix.SizeofIfAddrmsg:]) {
		// On a point-to-point device, IFA_ADDRESS is the address of the other end.
		if kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !a.IsValid() {
			a.Addr, _ = netip.AddrFromSlice(value)
		}
	}
	return a
}

// readAgain calls read again while others change its object meanwhile, up to maxReads times.
func readAgain(read func() error) (err error) {
	for range maxReads {
		if err = read(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return err
}

// readAddresses reads which addresses are the node's own, apart from those of Services.
func (f *family) readAddresses() (err error) {
	if err := f.restoreSources(); err != nil {
		return err
	}
	f.elsewhere, err = f.addressesElsewhere()
	f.nodeAddresses = nodePortAddresses(f.layout.node, f.elsewhere)
	return err
}

// addressesElsewhere returns the node's addresses on devices that do not hold the addresses of
// Services.
func (f *family) addressesElsewhere() (map[netip.Addr]bool, error) {
	list, err := f.listAddresses(domain(f.family))
	if err != nil {
		return nil, fmt.Errorf("read the node's addresses: %w", err)
	}
	kubeProxys := 0
	if link, err := f.links.LinkByName(KubeProxyDevice); err == nil {
		kubeProxys = link.Attrs().Index
	}
	found := map[netip.Addr]bool{}
	for _, a := range list {
		if a.device != f.device.Attrs().Index && a.device != kubeProxys {
			found[a.Addr] = true
		}
	}
	return found, nil
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
	return !a.IsLoopback() && !a.IsLinkLocalUnicast() && slices.ContainsFunc(node.NodePorts, func(n netip.Prefix) bool { return n.Contains(a) })
}

// nodesOwn reports whether an address is on another interface, for example a node's address that a
// Service has as an external IP. Such an address does not belong to a Service alone, so its other
// ports are left alone.
func (m *machine) nodesOwn(a netip.Addr) bool {
	routes, err := m.links.RouteGetWithOptions(a.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil {
		return false // without a route, the address is not local
	}
	return slices.ContainsFunc(routes, func(r netlink.Route) bool {
		return r.Type == unix.RTN_LOCAL && r.LinkIndex != m.device.Attrs().Index && !m.isKubeProxys(r.LinkIndex)
	})
}

// isKubeProxys reports whether a device is the one with the addresses of kube-proxy's Services.
// Both devices may have the same address, so the address stays when one of them is removed.
func (m *machine) isKubeProxys(index int) bool {
	link, err := m.links.LinkByName(KubeProxyDevice)
	return err == nil && link.Attrs().Index == index
}

// addAddresses adds addresses to the device. It returns those that the kernel refuses, each with
// the reason.
func (m *machine) addAddresses(list []netip.Addr) (refused map[netip.Addr]error, err error) {
	refused = make(map[netip.Addr]error)
	err = m.changeAddresses(list, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(a netip.Addr, errno unix.Errno) error {
		switch {
		case errno == unix.EEXIST:
		case errno == unix.EACCES && a.Is6():
			refused[a] = fmt.Errorf("give %s the address %v: %w; IPv6 is off there, set the sysctl net.ipv6.conf.%s.disable_ipv6 to 0", Device, a, errno, Device)
		default:
			refused[a] = fmt.Errorf("give %s the address %v: %w", Device, a, errno)
		}
		return nil
	})
	return refused, err
}

func (m *machine) removeAddresses(list []netip.Addr) error {
	return m.changeAddresses(list, unix.RTM_DELADDR, 0, func(a netip.Addr, errno unix.Errno) error {
		if errno == unix.EADDRNOTAVAIL {
			return nil
		}
		return fmt.Errorf("take the address %v from %s: %w", a, Device, errno)
	})
}

// changeAddresses adds addresses to the device or removes them, depending on kind.
func (m *machine) changeAddresses(list []netip.Addr, kind, flags uint16, failure func(netip.Addr, unix.Errno) error) error {
	m.requests.reset()
	for _, a := range list {
		m.requests.address(kind, flags, m.device.Attrs().Index, a)
	}
	var failed error
	err := m.addresses.execute(&m.requests, func(i int, errno unix.Errno) {
		failed = cmp.Or(failed, failure(list[i], errno))
	})
	return errors.Join(err, failed)
}

// address appends a message about an address of the device. The scope and flags keep the kernel
// from choosing the address as a source, for example when masquerading.
func (r *requests) address(kind, flags uint16, index int, a netip.Addr) {
	const own, permanent = unix.IFA_LOCAL, math.MaxUint32
	scope, addressFlags := byte(unix.RT_SCOPE_HOST), byte(0)
	if model.FamilyOf(a) == model.IPv6 {
		// The address is deprecated: valid forever, but never preferred.
		scope, addressFlags = unix.RT_SCOPE_UNIVERSE, unix.IFA_F_NODAD
	}
	r.begin(kind, flags)
	r.buf = append(r.buf, domain(model.FamilyOf(a)), byte(a.BitLen()), addressFlags, scope)
	r.buf = append(r.buf, host32(uint32(index))...)
	r.bytes(own, a.AsSlice())
	r.bytes(unix.IFA_ADDRESS, a.AsSlice())
	if model.FamilyOf(a) == model.IPv6 {
		info := r.nest(unix.IFA_CACHEINFO)
		for _, v := range []uint32{0, permanent, 0, 0} {
			// Preferred and valid lifetime, then two times that only the kernel sets.
			r.buf = append(r.buf, host32(v)...)
		}
		r.endNest(info)
	}
	r.end()
}

// removeDevice removes the device if it exists.
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
