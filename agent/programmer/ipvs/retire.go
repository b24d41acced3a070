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

// Retirement removes what this package made from a node that another programmer has programmed meanwhile, in steps, so that what is
// open goes on. New connections do not come here: nat, which the other one uses, sees them before.
type Retirement struct {
	// Limit is how long TCP connections may go on. What is open after it ends, see ledFrontends.
	Limit time.Duration

	began   time.Time // zero: not yet
	refused bool      // what comes here nonetheless
}

// Step takes the next step; it is to be called again some seconds later for as long as it gives programmer.ErrDraining.
//
// The first one has the node's own new connections come from another address than the Service's, which they have as long as
// that is the node's, as their replies would be lost without it. The next ones refuse what comes that the other programmer
// does not serve. When no TCP connection is left, or the time is up, all is removed.
func (r *Retirement) Step(ctx context.Context) error {
	links, err := netlink.NewHandle()
	if err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	defer links.Close()
	device, err := links.LinkByName(Device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return Cleanup(ctx) // nothing that is open goes on without
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

// refuseNew puts a rule before those that lead to IPVS. What belongs to a connection passes them.
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

// leads tells whether there is an open TCP connection.
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
			if d.ActiveConnections > 0 { // which UDP has none of
				return true, nil
			}
		}
	}
	return false, nil
}

// outside are addresses that are nobody's (RFC 5737, RFC 3849), to ask for the way out of the node.
var outside = map[model.Family]netip.Addr{model.IPv4: netip.MustParseAddr("192.0.2.1"), model.IPv6: netip.MustParseAddr("2001:db8:ffff:ffff::1")}

// sourceProtocol marks the routes of preferOtherSources.
const sourceProtocol = netlink.RouteProtocol(0x5c)

// preferOtherSources has connections of the node to an address of the device come from the node's address on the way out, by routes
// in the place of the kernel's, whose source is the address itself. A family without a way out keeps them.
func preferOtherSources(links *netlink.Handle, device netlink.Link) error {
	for family, outside := range outside {
		err := eachLocalRoute(links, device, family, unix.RTPROT_KERNEL, func(held netlink.Route) error {
			way, err := links.RouteGet(outside.AsSlice())
			if err != nil || len(way) == 0 || way[0].Src == nil || way[0].LinkIndex == device.Attrs().Index {
				return nil //nolint:nilerr // there is none
			}
			other := localRoute(device, held.Dst)
			other.Src, other.Protocol = way[0].Src, sourceProtocol
			if err := links.RouteAddEcmp(other); err != nil && !errors.Is(err, unix.EEXIST) { // before the kernel's, for IPv4
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

// restoreSources undoes what preferOtherSources did: IPv6 addresses come anew, for the kernel to make their routes.
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

// eachLocalRoute calls do with the routes by which a device's addresses of an IP family are the
// node's, as far as they are of a protocol.
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
			continue // the kernel's own
		}
		if err := do(r); err != nil {
			return err
		}
	}
	return nil
}
