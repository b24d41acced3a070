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

// deviceAddresses gives the addresses that a device has, without the one that the kernel gives each device.
func (p *Programmer) deviceAddresses(device netlink.Link) (map[netip.Addr]bool, error) {
	list, err := p.listAddresses()
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
	device int // its index
}

// listAddresses gives the addresses of all devices, reading them again where some came or went meanwhile.
func (p *Programmer) listAddresses() (list []deviceAddress, err error) {
	err = readAgain(func() error {
		list = list[:0]
		r := &p.requests
		r.reset()
		r.begin(unix.RTM_GETADDR, 0)
		r.buf = append(r.buf, make([]byte, unix.SizeofIfAddrmsg)...) // of any family and device
		r.end()
		return p.addresses.dump(r, func(body []byte) {
			if a := parseAddress(body); a.IsValid() {
				list = append(list, a)
			}
		})
	})
	return list, err
}

// parseAddress reads a message about an address. It is not valid if that is of another family than the IP families.
func parseAddress(body []byte) (a deviceAddress) {
	if len(body) < unix.SizeofIfAddrmsg || body[0] != unix.AF_INET && body[0] != unix.AF_INET6 {
		return a
	}
	a.device = int(hostNumber(body[4:]))
	for kind, value := range attributes(body[unix.SizeofIfAddrmsg:]) {
		// Where a device leads to one other, IFA_ADDRESS is the other's.
		if kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !a.IsValid() {
			a.Addr, _ = netip.AddrFromSlice(value)
		}
	}
	return a
}

// readAgain reads something again as long as others change it meanwhile, up to a limit.
func readAgain(read func() error) (err error) {
	for range maxReads {
		if err = read(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return err
}

// addressesElsewhere gives the node's addresses that other devices have than those of Services.
func (p *Programmer) addressesElsewhere() (map[netip.Addr]bool, error) {
	list, err := p.listAddresses()
	if err != nil {
		return nil, fmt.Errorf("read the node's addresses: %w", err)
	}
	kubeProxys := 0
	if link, err := p.links.LinkByName(KubeProxyDevice); err == nil {
		kubeProxys = link.Attrs().Index
	}
	found := map[netip.Addr]bool{}
	for _, a := range list {
		if a.device != p.device.Attrs().Index && a.device != kubeProxys {
			found[a.Addr] = true
		}
	}
	return found, nil
}

// nodePortAddresses gives those of the node's own addresses that have NodePorts.
func nodePortAddresses(node view.Node, own map[netip.Addr]bool) map[model.Family][]netip.Addr {
	found := map[model.Family][]netip.Addr{}
	for a := range own {
		if hasNodePorts(node, a) {
			found[model.FamilyOf(a)] = append(found[model.FamilyOf(a)], a)
		}
	}
	for _, list := range found {
		slices.SortFunc(list, netip.Addr.Compare)
	}
	return found
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

// addAddresses gives the device addresses. Those that the kernel refuses, as all of IPv6 where a sysctl disables it, come with the reason: the others
// are there.
func (p *Programmer) addAddresses(list []netip.Addr) (refused map[netip.Addr]error, err error) {
	refused = make(map[netip.Addr]error)
	err = p.changeAddresses(list, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(a netip.Addr, errno unix.Errno) error {
		if errno != unix.EEXIST {
			refused[a] = fmt.Errorf("give %s the address %v: %w", Device, a, errno)
		}
		return nil
	})
	return refused, err
}

func (p *Programmer) removeAddresses(list []netip.Addr) error {
	return p.changeAddresses(list, unix.RTM_DELADDR, 0, func(a netip.Addr, errno unix.Errno) error {
		if errno == unix.EADDRNOTAVAIL {
			return nil
		}
		return fmt.Errorf("take the address %v from %s: %w", a, Device, errno)
	})
}

// changeAddresses has the kernel give the device addresses, or take them from it.
func (p *Programmer) changeAddresses(list []netip.Addr, kind, flags uint16, failure func(netip.Addr, unix.Errno) error) error {
	p.requests.reset()
	for _, a := range list {
		p.requests.address(kind, flags, p.device.Attrs().Index, a)
	}
	var failed error
	err := p.addresses.execute(&p.requests, func(i int, errno unix.Errno) {
		failed = cmp.Or(failed, failure(list[i], errno))
	})
	return errors.Join(err, failed)
}

// address writes a message about an address of the device. The kernel is not to choose it as a source, e.g. of what is
// masqueraded.
func (r *requests) address(kind, flags uint16, index int, a netip.Addr) {
	const own, permanent = unix.IFA_LOCAL, math.MaxUint32
	family, scope, addressFlags := byte(unix.AF_INET), byte(unix.RT_SCOPE_HOST), byte(0)
	if model.FamilyOf(a) == model.IPv6 {
		// Deprecated: valid for ever, preferred for no time.
		family, scope, addressFlags = unix.AF_INET6, unix.RT_SCOPE_UNIVERSE, unix.IFA_F_NODAD
	}
	r.begin(kind, flags)
	r.buf = append(r.buf, family, byte(a.BitLen()), addressFlags, scope)
	r.buf = append(r.buf, host32(uint32(index))...)
	r.bytes(own, a.AsSlice())
	r.bytes(unix.IFA_ADDRESS, a.AsSlice())
	if model.FamilyOf(a) == model.IPv6 {
		info := r.nest(unix.IFA_CACHEINFO)
		for _, v := range []uint32{0, permanent, 0, 0} { // preferred, valid, and two times that only the kernel tells
			r.buf = append(r.buf, host32(v)...)
		}
		r.endNest(info)
	}
	r.end()
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
