package netlink

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/internal/model"
)

// Address is an address of an interface.
type Address struct {
	// Prefix is the address with the length of its network's prefix.
	netip.Prefix
	// Link is the index of the interface.
	Link int
}

// Link is an interface.
type Link struct {
	Index, MTU int
	Name       string
	// Kind is the kind of a virtual interface, such as veth. It is empty for a physical one.
	Kind  string
	Flags net.Flags
}

// Route is a route, with those of its attributes that callers need.
type Route struct {
	// Destination is not valid for a default route.
	Destination netip.Prefix
	// Source is the address that the route prefers as a packet's source. It may be invalid.
	Source netip.Addr
	// Link is the index of the interface. It is 0 if the route has several, which are Hops then.
	Link int
	Hops []int
	// Gateway is that of the route's IP family. It may be invalid. Via means that there is one of the
	// other family.
	Gateway        netip.Addr
	Via            bool
	Table          uint32
	Protocol, Type byte
}

// Rule is a rule of the routing policy: which packets are routed by which table. It has those of
// its attributes that callers need.
type Rule struct {
	Priority, Mark, Mask, Table uint32
	// Goto is the priority of the rule with which an action FR_ACT_GOTO goes on.
	Goto   uint32
	Action byte // unix.FR_ACT_*
	// Incoming is the name of the interface over which the packets come. Packets that the node itself
	// sends count as coming over lo.
	Incoming string
}

// Addresses returns the addresses that interfaces have, in the network namespace of the calling
// thread.
func Addresses() ([]Address, error) {
	s, err := Open(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return s.Addresses(unix.AF_UNSPEC)
}

// Links returns the interfaces in the network namespace of the calling thread.
func Links() ([]Link, error) {
	s, err := Open(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return list(s, unix.RTM_GETLINK, unix.AF_UNSPEC, unix.SizeofIfInfomsg, linkOf)
}

// Addresses returns the addresses of a domain that interfaces have. AF_UNSPEC stands for both IP
// families.
func (s *Socket) Addresses(domain byte) ([]Address, error) {
	return list(s, unix.RTM_GETADDR, domain, unix.SizeofIfAddrmsg, AddressOf)
}

// Routes returns the routes of an IP family.
func (s *Socket) Routes(family model.Family) ([]Route, error) {
	return list(s, unix.RTM_GETROUTE, Domain(family), unix.SizeofRtMsg, RouteOf)
}

// Rules returns the rules of an IP family's routing policy.
func (s *Socket) Rules(family model.Family) ([]Rule, error) {
	return list(s, unix.RTM_GETRULE, Domain(family), unix.SizeofRtMsg, RuleOf)
}

// list returns all objects of a domain that parse accepts. header is the length of the protocol's
// fixed header.
func list[T any](s *Socket, kind uint16, domain byte, header int, parse func(Message) (T, bool)) (all []T, err error) {
	w := &Writer{}
	at := w.Begin(kind, 0)
	w.Buf = append(append(w.Buf, domain), make([]byte, header-1)...)
	w.End(at)
	err = s.Read(w, func() { all = all[:0] }, func(m Message) {
		if one, ok := parse(m); ok {
			all = append(all, one)
		}
	})
	return all, err
}

// AddressOf parses a message about an address. ok is false if the address belongs to neither IP
// family.
func AddressOf(m Message) (a Address, ok bool) {
	if len(m.Body) < unix.SizeofIfAddrmsg || m.Body[0] != unix.AF_INET && m.Body[0] != unix.AF_INET6 {
		return a, false
	}
	a.Link = int(Uint32(m.Body[4:8]))
	for kind, value := range Attributes(m.Attributes(unix.SizeofIfAddrmsg)) {
		// On a point-to-point device, IFA_ADDRESS is the address of the other end.
		if kind == unix.IFA_LOCAL || kind == unix.IFA_ADDRESS && !a.IsValid() {
			address, _ := netip.AddrFromSlice(value)
			a.Prefix = netip.PrefixFrom(address, int(m.Body[1]))
		}
	}
	return a, a.IsValid()
}

func linkOf(m Message) (l Link, ok bool) {
	if len(m.Body) < unix.SizeofIfInfomsg {
		return l, false
	}
	l.Index = int(Uint32(m.Body[4:8]))
	for from, to := range map[uint32]net.Flags{
		unix.IFF_UP: net.FlagUp, unix.IFF_BROADCAST: net.FlagBroadcast, unix.IFF_LOOPBACK: net.FlagLoopback,
		unix.IFF_POINTOPOINT: net.FlagPointToPoint, unix.IFF_MULTICAST: net.FlagMulticast, unix.IFF_RUNNING: net.FlagRunning,
	} {
		if Uint32(m.Body[8:12])&from != 0 {
			l.Flags |= to
		}
	}
	for kind, value := range Attributes(m.Attributes(unix.SizeofIfInfomsg)) {
		switch kind {
		case unix.IFLA_IFNAME:
			l.Name = Text(value)
		case unix.IFLA_MTU:
			l.MTU = int(Uint32(value))
		case unix.IFLA_LINKINFO:
			l.Kind = Text(Attribute(value, unix.IFLA_INFO_KIND))
		}
	}
	return l, true
}

// RuleOf parses a message about a rule of the routing policy.
func RuleOf(m Message) (r Rule, ok bool) {
	if len(m.Body) < unix.SizeofRtMsg {
		return r, false
	}
	r.Action = m.Body[7]
	numbers := map[uint16]*uint32{
		unix.FRA_PRIORITY: &r.Priority, unix.FRA_FWMARK: &r.Mark, unix.FRA_FWMASK: &r.Mask, unix.FRA_TABLE: &r.Table, unix.FRA_GOTO: &r.Goto,
	}
	for kind, value := range Attributes(m.Attributes(unix.SizeofRtMsg)) {
		if number := numbers[kind]; number != nil {
			*number = Uint32(value)
		}
		if kind == unix.FRA_IIFNAME {
			r.Incoming = Text(value)
		}
	}
	return r, true
}

// RouteOf parses a message about a route.
func RouteOf(m Message) (r Route, ok bool) {
	if len(m.Body) < unix.SizeofRtMsg {
		return r, false
	}
	r.Table, r.Protocol, r.Type = uint32(m.Body[4]), m.Body[5], m.Body[7]
	for kind, value := range Attributes(m.Attributes(unix.SizeofRtMsg)) {
		switch kind {
		case unix.RTA_DST:
			if a, ok := netip.AddrFromSlice(value); ok {
				r.Destination = netip.PrefixFrom(a, int(m.Body[1]))
			}
		case unix.RTA_TABLE:
			r.Table = Uint32(value)
		case unix.RTA_PREFSRC:
			r.Source, _ = netip.AddrFromSlice(value)
		case unix.RTA_OIF:
			r.Link = int(Uint32(value))
		case unix.RTA_GATEWAY:
			r.Gateway, _ = netip.AddrFromSlice(value)
		case unix.RTA_VIA:
			r.Via = true
		case unix.RTA_MULTIPATH:
			r.Hops = hopsOf(value)
		}
	}
	return r, true
}

// hopsOf returns the indexes of the interfaces in the attribute of a route that has several.
func hopsOf(value []byte) (links []int) {
	for len(value) >= unix.SizeofRtNexthop {
		links = append(links, int(Uint32(value[4:8])))
		size := (int(binary.NativeEndian.Uint16(value[:2])) + 3) &^ 3
		if size < unix.SizeofRtNexthop || size > len(value) {
			break
		}
		value = value[size:]
	}
	return links
}
