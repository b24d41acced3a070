package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// kernelPatience bounds the time for what the kernel does in the background. It usually takes a few
// milliseconds.
const kernelPatience = 10 * time.Second

// veth creates a pair of interfaces with one end in each of two hosts, and sets both up.
func veth(a *Host, aName string, b *Host, bName string) (aLink, bLink netlink.Link, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = aName
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: bName, PeerNamespace: netlink.NsFd(b.ns)}
	if err := a.links.LinkAdd(pair); err != nil {
		return nil, nil, fmt.Errorf("add a veth pair %s of %s, %s of %s: %w", aName, a.Name, bName, b.Name, err)
	}
	if aLink, err = a.setUp(aName); err != nil {
		return nil, nil, err
	}
	bLink, err = b.setUp(bName)
	return aLink, bLink, err
}

func (h *Host) setUp(name string) (netlink.Link, error) {
	link, err := h.links.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("find %s of %s: %w", name, h.Name, err)
	}
	if err := h.links.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("set %s of %s up: %w", name, h.Name, err)
	}
	return link, nil
}

// awaitUp waits until the kernel has brought an interface up. The kernel does so in the background
// and drops packets until then.
func (h *Host) awaitUp(link netlink.Link) error {
	return h.await(link, func() error {
		now, err := h.links.LinkByIndex(link.Attrs().Index)
		if err == nil && now.Attrs().OperState != netlink.OperUp {
			err = fmt.Errorf("it is %v", now.Attrs().OperState)
		}
		return err
	})
}

// awaitReady is awaitUp for an interface with addresses, which IPv6 also prepares in the
// background. Without a link-local address a host does not resolve neighbors. And a host accepts
// packets for an address only once the address is in the table of local routes, which is the last
// step.
func (h *Host) awaitReady(link netlink.Link) error {
	if err := h.awaitUp(link); err != nil {
		return err
	}
	return h.await(link, func() error {
		addrs, err := h.links.AddrList(link, netlink.FAMILY_V6) //nolint:forbidigo // await repeats it
		if err != nil {
			return err
		}
		filter := &netlink.Route{Table: unix.RT_TABLE_LOCAL, LinkIndex: link.Attrs().Index}
		routes, err := h.links.RouteListFiltered(netlink.FAMILY_V6, filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF) //nolint:forbidigo // await repeats it
		if err != nil {
			return err
		}
		linkLocal := false
		for _, addr := range addrs {
			linkLocal = linkLocal || addr.IP.IsLinkLocalUnicast()
			if !slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Type == unix.RTN_LOCAL && r.Dst.IP.Equal(addr.IP) }) {
				return fmt.Errorf("%s is not usable", addr.IP)
			}
		}
		if !linkLocal {
			return errors.New("it has no link-local address")
		}
		return nil
	})
}

// await polls condition until it returns nil.
func (h *Host) await(link netlink.Link, condition func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), kernelPatience)
	defer cancel()
	if err := WaitForEvery(ctx, time.Millisecond, condition); err != nil {
		return fmt.Errorf("wait for %s of %s: %w", link.Attrs().Name, h.Name, err)
	}
	return nil
}

// removeLink removes an interface and with it its peer. It returns nil if there is no such
// interface, also if it goes meanwhile: the kernel removes the peers of a namespace's interfaces
// some time after its last process has ended.
func (h *Host) removeLink(name string) error {
	link, err := h.links.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err == nil {
		err = h.links.LinkDel(link)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove %s of %s: %w", name, h.Name, err)
	}
	return nil
}

func (h *Host) addAddr(link netlink.Link, addr netip.Prefix) error {
	flags := 0
	if addr.Addr().Is6() {
		flags = unix.IFA_F_NODAD
	}
	if err := h.links.AddrAdd(link, &netlink.Addr{IPNet: ipNet(addr), Flags: flags}); err != nil {
		return fmt.Errorf("add %s to %s of %s: %w", addr, link.Attrs().Name, h.Name, err)
	}
	return nil
}

// route is a route to dst through link. If via is valid, it is the next hop; otherwise dst is on
// the link. Table 0 stands for the main table.
type route struct {
	dst   netip.Prefix
	link  netlink.Link
	via   netip.Addr
	table int
}

// addRoute adds a route, or replaces the existing one with the same destination.
func (h *Host) addRoute(r route) error {
	kernel := &netlink.Route{LinkIndex: r.link.Attrs().Index, Dst: ipNet(r.dst), Table: r.table}
	if r.via.IsValid() {
		kernel.Gw = r.via.AsSlice()
		kernel.Flags = int(netlink.FLAG_ONLINK)
	} else {
		kernel.Scope = netlink.SCOPE_LINK
	}
	if err := h.links.RouteReplace(kernel); err != nil {
		return fmt.Errorf("%s: add a route to %s: %w", h.Name, r.dst, err)
	}
	return nil
}

// The next hop of pods and clients. No host has these addresses; permanent neighbor entries
// resolve them. The router on the other end therefore needs no address on the link. Such an address
// would be one more local address for programmers to handle.
var (
	linkGateway4 = netip.MustParseAddr("169.254.1.1")
	linkGateway6 = netip.MustParseAddr("fe80::1")
)

// attach connects a host to its router with a dedicated link. The host's only routes lead to the
// router, and the router has routes to the host's addresses.
func attach(h, router *Host, portName string) (err error) {
	var port netlink.Link
	if h.eth0, port, err = veth(h, "eth0", router, portName); err != nil {
		return err
	}
	h.attract = func(dst netip.Prefix, via netip.Addr) error {
		return router.addRoute(route{dst: dst, link: port, via: via})
	}
	for _, gateway := range []struct {
		addr netip.Addr
		dst  netip.Prefix
	}{{linkGateway4, anyIPv4}, {linkGateway6, anyIPv6}} {
		err := h.links.NeighAdd(&netlink.Neigh{
			LinkIndex: h.eth0.Attrs().Index, Family: family(gateway.addr), State: netlink.NUD_PERMANENT,
			IP: gateway.addr.AsSlice(), HardwareAddr: port.Attrs().HardwareAddr,
		})
		if err != nil {
			return fmt.Errorf("add router %s as neighbor of %s: %w", router.Name, h.Name, err)
		}
		if err := h.addRoute(route{dst: gateway.dst, link: h.eth0, via: gateway.addr}); err != nil {
			return err
		}
	}
	for _, addr := range []netip.Addr{h.IPv4, h.IPv6} {
		single := netip.PrefixFrom(addr, addr.BitLen())
		if err := errors.Join(h.addAddr(h.eth0, single), h.attract(single, netip.Addr{})); err != nil {
			return err
		}
	}
	return errors.Join(h.awaitReady(h.eth0), router.awaitReady(port))
}

// AddAddress adds an address to a node, pod or client, and routes to it in the rest of the network.
func (h *Host) AddAddress(addr netip.Addr) {
	h.t.Helper()
	if err := h.addAddress(addr); err != nil {
		h.t.Fatalf("testenv: %s: add address %s: %v", h.Name, addr, err)
	}
}

func (h *Host) addAddress(addr netip.Addr) error {
	if h.world {
		return errors.New("the world cannot have more addresses")
	}
	single := netip.PrefixFrom(addr, addr.BitLen())
	if err := h.addAddr(h.eth0, single); err != nil {
		return err
	}
	return errors.Join(h.attract(single, netip.Addr{}), h.awaitReady(h.eth0))
}

// Attract makes the network deliver packets for any address of the given networks to a pod or a
// client, instead of the host that received them before. A pod can attract networks in its node's
// pod CIDRs. A client can attract any network, including all addresses that no host has. The host's
// kernel does not have these addresses and ignores the packets; a packet socket receives them.
func (h *Host) Attract(networks ...netip.Prefix) {
	h.t.Helper()
	for _, network := range networks {
		if err := h.attract(network, h.Addr(network.Addr().Is6())); err != nil {
			h.t.Fatalf("testenv: deliver %s to %s: %v", network, h.Name, err)
		}
	}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func family(addr netip.Addr) int {
	if addr.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

// nth returns address number i of a network. i must be below 256.
func nth(p netip.Prefix, i int) netip.Addr {
	bytes := p.Addr().AsSlice()
	bytes[len(bytes)-1] += byte(i)
	addr, _ := netip.AddrFromSlice(bytes)
	return addr
}
