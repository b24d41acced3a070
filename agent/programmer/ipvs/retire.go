package ipvs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
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

// Step performs the next step. As long as it returns programmer.ErrDraining, the caller calls it
// again some seconds later.
//
// The first step makes the node's own new connections come from another address than the Service's.
// They have the Service's address as their source as long as it is the node's, and would get no
// reply after its removal. The next step refuses connections that the other programmer does not
// serve. When no TCP connection is left or the time is up, Step removes everything.
func (r *Retirement) Step(ctx context.Context) error {
	m, err := openLoaded()
	if m == nil || err != nil {
		return err
	}
	defer m.close()
	if exists, err := m.device.find(); err != nil {
		return err
	} else if !exists || m.ipvs == nil {
		return m.cleanup(ctx) // no connection goes on
	}
	if r.began.IsZero() {
		if err := m.device.preferOtherSources(); err != nil {
			return err
		}
		r.began = time.Now()
		return programmer.ErrDraining
	}
	if !r.refused {
		if err := m.refuseNew(); err != nil {
			return err
		}
		r.refused = true
	}
	if time.Since(r.began) < r.Limit {
		if leads, err := m.ipvs.leads(); leads || err != nil {
			return errors.Join(err, programmer.ErrDraining)
		}
	}
	return m.cleanup(ctx)
}

// refuseNew inserts a rule before those that lead to IPVS. It refuses new connections only. Those
// to external addresses are no longer delivered.
func (m *machine) refuseNew() error {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		serves, err := Serves(family)
		if err != nil {
			return err
		}
		if !serves {
			continue
		}
		t := nft.Messages{Table: tableOf(family)}
		t.InsertRule(preroutingChain, nft.Do(isNew(), nft.Return()))
		t.InsertRule(routeChain, nft.Do(isNew(), nft.Goto(unknownChain)))
		if err := m.nft.Commit(t.Batch()); err != nil {
			return fmt.Errorf("write nftables table %s: %w", Table, err)
		}
	}
	return nil
}

// leads reports whether IPVS has an open TCP connection.
func (b *balancer) leads() (bool, error) {
	keys, err := b.ours()
	var held []heldBackend
	for _, k := range keys {
		if held, err = b.readBackends(held[:0], k); err != nil {
			return false, err
		}
		// UDP flows do not count as active.
		if slices.ContainsFunc(held, func(b heldBackend) bool { return b.active > 0 }) {
			return true, nil
		}
	}
	return false, err
}

// outside are addresses that nobody has (RFC 5737, RFC 3849). They serve to ask for the route out
// of the node.
var outside = map[model.Family]netip.Addr{
	model.IPv4: netip.MustParseAddr("192.0.2.1"), model.IPv6: netip.MustParseAddr("2001:db8:ffff:ffff::1"),
}

// sourceProtocol marks the routes that preferOtherSources adds.
const sourceProtocol = vnetlink.RouteProtocol(0x5c)

// preferOtherSources makes the node's connections to an address of the device come from the address
// that the node uses towards the outside. It replaces the kernel's routes, whose source is the
// address itself, by routes with another source. A family without a route to the outside keeps the
// kernel's routes.
func (d *device) preferOtherSources() error {
	for family, outside := range outside {
		routes, err := d.localRoutes(family, unix.RTPROT_KERNEL)
		if err != nil {
			return err
		}
		way, err := d.links.RouteGet(outside.AsSlice())
		if err != nil || len(way) == 0 || way[0].Src == nil || way[0].LinkIndex == d.index() {
			continue // there is no route to the outside
		}
		for _, own := range routes {
			other := *own
			other.Src, other.Protocol = way[0].Src, sourceProtocol
			if err := d.links.RouteAddEcmp(&other); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("route %v with another source: %w", own.Dst, err)
			}
			if family == model.IPv4 {
				continue // the new route comes before the kernel's
			}
			if err := d.removeRoute(own); err != nil {
				return err
			}
		}
	}
	return nil
}

// restoreSources undoes preferOtherSources for an IP family. It adds IPv6 addresses again, so that
// the kernel creates their routes.
func (d *device) restoreSources(family model.Family) error {
	routes, err := d.localRoutes(family, sourceProtocol)
	if err != nil {
		return err
	}
	var again []netip.Addr
	for _, r := range routes {
		if a, ok := netip.AddrFromSlice(r.Dst.IP); ok && family == model.IPv6 {
			again = append(again, a)
		}
	}
	removed := d.removeAddresses(again)
	refused, err := d.addAddresses(again)
	if err := errors.Join(append(slices.Collect(maps.Values(refused)), removed, err)...); err != nil {
		return err
	}
	for _, r := range routes {
		if err := d.removeRoute(r); err != nil {
			return err
		}
	}
	return nil
}

// removeRoute removes a route if it exists.
func (d *device) removeRoute(r *vnetlink.Route) error {
	if err := d.links.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("remove the route to %v: %w", r.Dst, err)
	}
	return nil
}

// localRoutes returns the routes of a protocol by which the device's addresses of an IP family are
// the node's.
func (d *device) localRoutes(family model.Family, protocol vnetlink.RouteProtocol) ([]*vnetlink.Route, error) {
	held, err := d.addresses.Routes(family)
	if err != nil {
		return nil, fmt.Errorf("read the %v routes of %s: %w", family, d.link.Attrs().Name, err)
	}
	var routes []*vnetlink.Route
	for _, r := range held {
		isOurs := r.Link == d.index() && r.Table == unix.RT_TABLE_LOCAL && r.Type == unix.RTN_LOCAL && r.Protocol == byte(protocol)
		to := r.Destination.Addr()
		if !isOurs || !to.IsValid() || to.IsLinkLocalUnicast() {
			continue // a link-local address belongs to the kernel
		}
		routes = append(routes, &vnetlink.Route{
			LinkIndex: r.Link, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: protocol, Scope: vnetlink.SCOPE_HOST,
			Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(r.Destination.Bits(), to.BitLen())}, Src: r.Source.AsSlice(),
		})
	}
	return routes, nil
}

// ledFrontends are the frontends from which IPVS leads connections, as keys of the tables' maps.
// They include both addresses and NodePorts.
type ledFrontends map[model.Family]map[string]bool

func newLedFrontends() ledFrontends { return ledFrontends{model.IPv4: {}, model.IPv6: {}} }

func (l ledFrontends) addTable(family model.Family, held elements) {
	for k := range held {
		if k.set == others.frontends() || k.set == others.nodePorts() {
			l[family][k.key] = true
		}
	}
}

// forget makes conntrack forget the connections that IPVS led from these frontends, once it no
// longer does. Otherwise the packets that clients still send would go nowhere, because nat looks
// only at new connections. After forget, nat treats them as new. UDP goes on with another backend.
// A backend resets an unknown TCP connection, so that clients connect again at once instead of
// waiting.
func (l ledFrontends) forget() error {
	socket, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer socket.Close()
	for family, keys := range l {
		if len(keys) == 0 {
			continue
		}
		var gone [][]byte
		err := socket.Flows(family, 0, func(f netlink.Flow) {
			if led(f, keys) {
				gone = append(gone, bytes.Clone(f.Attributes))
			}
		})
		if err != nil {
			return err
		}
		for _, attributes := range gone {
			if err := socket.RemoveFlow(family, attributes); err != nil {
				return err
			}
		}
	}
	return nil
}

// led reports whether IPVS leads a connection from one of the frontends. IPVS does if the replies
// come from an address or port to which the client does not send, and nat does not translate the
// connection.
func led(f netlink.Flow, frontends map[string]bool) bool {
	to := f.Original.Destination
	if f.Status&nft.CtStatusDNAT != 0 || to == f.Reply.Source {
		return false
	}
	port := portKey(f.Original.Protocol, to.Port())
	return frontends[addressKey(to.Addr())+port] || frontends[port]
}
