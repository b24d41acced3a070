package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/programmer"
	"github.com/slicecast/slicecast/internal/model"
)

// Retirement removes what this package has created from a node that another programmer has
// programmed meanwhile. It works in steps, so that open connections go on. New connections do not
// reach IPVS, because the other programmer uses nat, which sees them first.
type Retirement struct {
	// Limit is how long TCP connections may go on. Those that are still open then end: see
	// ledFrontends.
	Limit time.Duration

	began   time.Time // zero means not yet
	refused bool      // a rule refuses new connections that still come here
}

// Step takes the next step. As long as it returns programmer.ErrDraining, the caller calls it again
// some seconds later.
//
// The first step makes the node's own new connections come from another address than the Service's.
// They have the Service's address as their source as long as it is the node's, and would get no
// reply after its removal. The next step refuses connections that the other programmer does not
// serve. When no TCP connection is left or the time is up, Step removes everything.
func (r *Retirement) Step(ctx context.Context) error {
	links, err := netlink.NewHandle()
	if err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	defer links.Close()
	device, err := links.LinkByName(Device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return Cleanup(ctx) // without the device, no connection goes on
	}
	if err != nil {
		return fmt.Errorf("find the device %s: %w", Device, err)
	}
	if r.began.IsZero() {
		if err := preferOtherSources(links, device); err != nil {
			return err
		}
		r.began = time.Now()
		return programmer.ErrDraining
	}
	m := &machine{}
	defer m.close()
	if err := m.open(); err != nil {
		return err
	}
	if err := m.openIPVS(); err != nil {
		return fmt.Errorf("open a socket for IPVS: %w", err)
	}
	if !r.refused {
		if err := m.refuseNew(); err != nil {
			return err
		}
		r.refused = true
	}
	if time.Since(r.began) < r.Limit {
		if leads, err := m.leads(); leads || err != nil {
			return errors.Join(err, programmer.ErrDraining)
		}
	}
	return Cleanup(ctx)
}

// refuseNew inserts a rule before those that lead to IPVS. It refuses new connections only.
func (m *machine) refuseNew() error {
	all, err := m.tables.conn.ListTables()
	if err != nil {
		return fmt.Errorf("list nftables tables: %w", err)
	}
	for _, t := range all {
		if t.Name == Table {
			m.tables.conn.InsertRule(&nftables.Rule{
				Table: t, Chain: &nftables.Chain{Table: t, Name: routeChain}, Exprs: join(isNew(), verdict(expr.VerdictGoto, unknownChain)),
			})
		}
	}
	return m.tables.write()
}

// leads reports whether IPVS has an open TCP connection.
func (m *machine) leads() (bool, error) {
	all, err := m.ipvs.GetServices()
	if err != nil {
		return false, fmt.Errorf("read IPVS' virtual services: %w", err)
	}
	for _, s := range all {
		k, ok := ours(s)
		if !ok {
			continue
		}
		destinations, err := m.ipvs.GetDestinations(s)
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return false, fmt.Errorf("read the destinations of IPVS' virtual service %v: %w", k, err)
		}
		for _, d := range destinations {
			if d.ActiveConnections > 0 { // UDP flows do not count as active
				return true, nil
			}
		}
	}
	return false, nil
}

// outside are addresses that nobody has (RFC 5737, RFC 3849). They serve to ask for the route out
// of the node.
var outside = map[model.Family]netip.Addr{model.IPv4: netip.MustParseAddr("192.0.2.1"), model.IPv6: netip.MustParseAddr("2001:db8:ffff:ffff::1")}

// sourceProtocol marks the routes that preferOtherSources adds.
const sourceProtocol = netlink.RouteProtocol(0x5c)

// preferOtherSources makes the node's connections to an address of the device come from the address
// that the node uses towards the outside. It replaces the kernel's routes, whose source is the
// address itself, by routes with another source. A family without a route to the outside keeps the
// kernel's routes.
func preferOtherSources(links *netlink.Handle, device netlink.Link) error {
	for family, outside := range outside {
		err := eachLocalRoute(links, device, family, unix.RTPROT_KERNEL, func(held netlink.Route) error {
			way, err := links.RouteGet(outside.AsSlice())
			if err != nil || len(way) == 0 || way[0].Src == nil || way[0].LinkIndex == device.Attrs().Index {
				return nil //nolint:nilerr // there is none
			}
			other := localRoute(device, held.Dst)
			other.Src, other.Protocol = way[0].Src, sourceProtocol
			if err := links.RouteAddEcmp(other); err != nil && !errors.Is(err, unix.EEXIST) {
				// For IPv4, it comes before the kernel's route.
				return fmt.Errorf("route %v with another source: %w", held.Dst, err)
			}
			if family == model.IPv4 {
				return nil
			}
			own := localRoute(device, held.Dst)
			own.Protocol = unix.RTPROT_KERNEL
			if err := links.RouteDel(own); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("remove the route to %v: %w", held.Dst, err)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// restoreSources undoes preferOtherSources. It adds IPv6 addresses again, so that the kernel
// creates their routes.
func (f *family) restoreSources() error {
	var again []netip.Addr
	var others []*netlink.Route
	err := eachLocalRoute(f.links, f.device, f.family, sourceProtocol, func(held netlink.Route) error {
		other := localRoute(f.device, held.Dst)
		other.Src, other.Protocol = held.Src, sourceProtocol
		others = append(others, other)
		if a, ok := netip.AddrFromSlice(held.Dst.IP); ok && f.family == model.IPv6 {
			again = append(again, a)
		}
		return nil
	})
	if err != nil || len(others) == 0 {
		return err
	}
	removed := f.removeAddresses(again)
	refused, err := f.addAddresses(again)
	if err := errors.Join(append(slices.Collect(maps.Values(refused)), removed, err)...); err != nil {
		return err
	}
	for _, other := range others {
		if err := f.links.RouteDel(other); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("remove the route to %v: %w", other.Dst, err)
		}
	}
	return nil
}

func localRoute(device netlink.Link, to *net.IPNet) *netlink.Route {
	return &netlink.Route{LinkIndex: device.Attrs().Index, Dst: to, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}
}

// eachLocalRoute calls do with each route of a protocol by which a device's addresses of an IP
// family are the node's.
func eachLocalRoute(links *netlink.Handle, device netlink.Link, family model.Family, protocol netlink.RouteProtocol, do func(netlink.Route) error) error {
	filter := &netlink.Route{LinkIndex: device.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: protocol}
	var held []netlink.Route
	err := readAgain(func() (err error) {
		held, err = links.RouteListFiltered(int(domain(family)), filter, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE|netlink.RT_FILTER_PROTOCOL)
		return err
	})
	if err != nil {
		return fmt.Errorf("read the %v routes of %s: %w", family, device.Attrs().Name, err)
	}
	for _, r := range held {
		if ip, ok := netip.AddrFromSlice(r.Dst.IP); !ok || ip.IsLinkLocalUnicast() {
			continue // a link-local address belongs to the kernel
		}
		if err := do(r); err != nil {
			return err
		}
	}
	return nil
}
