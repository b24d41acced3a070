package trace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	anetlink "github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/agent/programmer/ipvs"
	"github.com/slicecast/slicecast/internal/model"
)

// serviceDevices are the devices whose addresses are those of Services, in the modes for IPVS.
var serviceDevices = []string{ipvs.Device, ipvs.KubeProxyDevice}

// ReadFacts reads the addresses of the node in the network namespace of the calling thread.
func ReadFacts() (Facts, error) {
	f := Facts{Local: map[netip.Addr]bool{}, interfaces: map[netip.Addr]string{}}
	links, err := anetlink.Links()
	if err != nil {
		return f, fmt.Errorf("list this machine's interfaces: %w", err)
	}
	ofServices := map[int]bool{}
	for _, l := range links {
		ofServices[l.Index] = slices.Contains(serviceDevices, l.Name)
		f.KubeProxyIPVS = f.KubeProxyIPVS || l.Name == ipvs.KubeProxyDevice
		f.IPVS = f.IPVS || ofServices[l.Index]
	}
	list, err := anetlink.Addresses()
	if err != nil {
		return f, fmt.Errorf("list this machine's addresses: %w", err)
	}
	for _, a := range list {
		address := a.Addr()
		f.Local[address] = true
		if ofServices[a.Link] && !address.IsLinkLocalUnicast() {
			f.Services = append(f.Services, address)
		}
		if !ofServices[a.Link] {
			f.Addresses = append(f.Addresses, address)
		}
	}
	if f.IPVS {
		if err := f.readDelivered(); err != nil {
			return f, err
		}
	}
	f.readForwarding(links)
	slices.SortFunc(f.Addresses, netip.Addr.Compare)
	f.Addresses = slices.Compact(f.Addresses)
	return f, nil
}

// readDelivered reads which marks the routing policy looks up in a table that delivers everything
// to the node. It leaves out rules that compare only a part of the mark, or that are for one
// interface.
func (f *Facts) readDelivered() error {
	s, err := anetlink.Open(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer s.Close()
	f.Delivered = map[model.Family][]uint32{}
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		if !Has(family) {
			continue
		}
		rules, err := s.Rules(family)
		if err != nil {
			return fmt.Errorf("read the rules of the %v routing policy: %w", family, err)
		}
		routes, err := s.Routes(family)
		if err != nil {
			return fmt.Errorf("read the %v routes: %w", family, err)
		}
		for _, r := range rules {
			delivers := func(to anetlink.Route) bool {
				return to.Table == r.Table && to.Type == unix.RTN_LOCAL && !to.Destination.IsValid()
			}
			if r.Action == unix.FR_ACT_TO_TBL && r.Mask == math.MaxUint32 && r.Incoming == "" && slices.ContainsFunc(routes, delivers) {
				f.Delivered[family] = append(f.Delivered[family], r.Mark)
			}
		}
	}
	return nil
}

// readForwarding reads which interfaces do not forward what arrives over them. IPv4 has a setting
// for each (ip_route_input_slow in net/ipv4/route.c). IPv6 has one for all, and since Linux 6.17
// another one for each that overrides it (ip6_forward in net/ipv6/ip6_output.c).
func (f *Facts) readForwarding(links []anetlink.Link) {
	is := func(path, value string) bool {
		b, err := os.ReadFile("/proc/sys/net/" + path)
		return err == nil && strings.TrimSpace(string(b)) == value
	}
	f.NotForwarding, f.PartlyForwarding = map[model.Family]string{}, map[model.Family]string{}
	const all6 = "net.ipv6.conf.all.forwarding = 0"
	noneOf6 := is("ipv6/conf/all/forwarding", "0")
	off := map[model.Family][]string{}
	on := map[model.Family]int{}
	for _, l := range links {
		name := l.Name
		if l.Flags&net.FlagLoopback != 0 || slices.Contains(serviceDevices, name) {
			continue
		}
		escaped := strings.ReplaceAll(name, ".", "/")
		if is("ipv4/conf/"+name+"/forwarding", "0") {
			off[model.IPv4] = append(off[model.IPv4], "net.ipv4.conf."+escaped+".forwarding = 0")
		} else {
			on[model.IPv4]++
		}
		if noneOf6 && !is("ipv6/conf/"+name+"/force_forwarding", "1") {
			off[model.IPv6] = append(off[model.IPv6], "net.ipv6.conf."+escaped+".force_forwarding = 0")
		} else {
			on[model.IPv6]++
		}
	}
	named := func(family model.Family) string {
		return strings.Join(off[family][:min(len(off[family]), maxInterfaces)], ", ")
	}
	switch {
	case len(off[model.IPv4]) == 0:
	case on[model.IPv4] > 0:
		f.PartlyForwarding[model.IPv4] = named(model.IPv4)
	case is("ipv4/ip_forward", "0"):
		f.NotForwarding[model.IPv4] = "net.ipv4.ip_forward = 0"
	default:
		f.NotForwarding[model.IPv4] = named(model.IPv4)
	}
	switch {
	case len(off[model.IPv6]) == 0:
	case on[model.IPv6] > 0:
		f.PartlyForwarding[model.IPv6] = all6 + ", " + named(model.IPv6)
	default:
		f.NotForwarding[model.IPv6] = all6
	}
}

// maxInterfaces bounds the interfaces that a text names.
const maxInterfaces = 5

// InterfaceTo returns the interface that the route to an address leads over, in the network
// namespace of the calling thread. It returns an empty string if there is none, or if the address
// is the node's own.
func InterfaceTo(a netip.Addr) string {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return ""
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil || link.Attrs().Flags&net.FlagLoopback != 0 {
		return ""
	}
	return link.Attrs().Name
}

// StrictInterfaces returns the settings by which packets of a source are dropped that arrive over
// another interface than the one that the route to the source leads over. Only interfaces with an
// address are considered, without bridges and tunnels: answers of a node with several networks may
// take another way than the client's packets.
func StrictInterfaces(source netip.Addr) (settings []string, err error) {
	expected := InterfaceTo(source)
	if !source.Is4() || expected == "" {
		return nil, nil // IPv6 has no such setting
	}
	links, err := anetlink.Links()
	if err != nil {
		return nil, fmt.Errorf("list this machine's interfaces: %w", err)
	}
	addresses, err := anetlink.Addresses()
	if err != nil {
		return nil, fmt.Errorf("list this machine's addresses: %w", err)
	}
	level := func(name string) int {
		b, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + name + "/rp_filter")
		if err != nil {
			return 0
		}
		n, _ := strconv.Atoi(strings.TrimSpace(string(b)))
		return n
	}
	uplinks := map[string]bool{}
	for _, l := range links {
		isNetwork := slices.ContainsFunc(addresses, func(a anetlink.Address) bool {
			return a.Link == l.Index && a.Addr().Is4() && !a.IsSingleIP()
		})
		if isNetwork && l.Flags&net.FlagLoopback == 0 && slices.Contains(uplinkKinds, l.Kind) {
			uplinks[l.Name] = true
		}
	}
	if !uplinks[expected] {
		return nil, nil
	}
	for _, name := range slices.Sorted(maps.Keys(uplinks)) {
		// The kernel takes the larger one (IN_DEV_RPFILTER in include/linux/inetdevice.h).
		if name != expected && max(level("all"), level(name)) == 1 && len(settings) < maxInterfaces {
			settings = append(settings, fmt.Sprintf("net.ipv4.conf.%s.rp_filter = 1", strings.ReplaceAll(name, ".", "/")))
		}
	}
	return settings, nil
}

// uplinkKinds are the kinds of interfaces by which a node may be connected to others.
var uplinkKinds = []string{"", "veth", "vlan", "bond", "team", "macvlan", "ipvlan"}

// Read reads the rules of an IP family that the kernel holds, in the network namespace of the
// calling thread. It uses the programs for saving of both variants of iptables, if they are there.
func Read(ctx context.Context, family model.Family, facts Facts) (*Rules, error) {
	r := newRules(family, facts)
	if facts.IPVS {
		if err := errors.Join(r.readIPSets(), r.readIPVS()); err != nil {
			return nil, err
		}
	}
	c, err := nft.Dial()
	var ofIPTables []*nft.Held
	switch {
	case errors.Is(err, unix.EPROTONOSUPPORT): // then it holds no rules
	case err != nil:
		return nil, fmt.Errorf("read the rules of nf_tables: %w", err)
	default:
		defer c.Close()
		if ofIPTables, err = r.addNFTables(c); err != nil {
			return nil, err
		}
	}
	if err := r.readNFT(ctx, ofIPTables); err != nil {
		return nil, err
	}
	if err := r.readLegacy(ctx); err != nil {
		return nil, err
	}
	r.finish()
	return r, nil
}

// Has reports whether the kernel has an IP family, even if no interface has an address of it.
func Has(family model.Family) bool {
	fd, err := unix.Socket(int(anetlink.Domain(family)), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return !errors.Is(err, unix.EAFNOSUPPORT)
}
