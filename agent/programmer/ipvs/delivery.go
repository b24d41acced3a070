package ipvs

import (
	"errors"
	"fmt"
	"net"
	"slices"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/internal/model"
)

// markDeliver is the mark of packets from elsewhere that IPVS is to see whether or not their
// address is the node's. The routing policy delivers them to the node. No virtual service has this
// mark. All of it is compared, so that marks of others with the same bits mean nothing here.
const markDeliver = markTag

// deliveryTable is the number of the routing table that delivers everything to the node.
const deliveryTable = markTag

// deliveryRules lead packets with markDeliver to deliveryTable. They are in the order in which they
// can be added. What counts as coming from the node is left out: with src_valid_mark, the kernel
// looks up the way back to a packet's source with the packet's mark and would find that the source
// is the node itself.
var deliveryRules = []netlink.Rule{
	{Priority: 94, Action: unix.FR_ACT_NOP},
	{Priority: 92, Mark: markDeliver, Mask: ^uint32(0), Incoming: "lo", Action: unix.FR_ACT_GOTO, Goto: 94},
	{Priority: 93, Mark: markDeliver, Mask: ^uint32(0), Action: unix.FR_ACT_TO_TBL, Table: deliveryTable},
}

// deliveryRule returns the library's form of a rule.
func deliveryRule(family model.Family, r netlink.Rule) *vnetlink.Rule {
	v := vnetlink.NewRule()
	v.Family, v.Priority, v.Type, v.Table, v.IifName = int(netlink.Domain(family)), int(r.Priority), r.Action, int(r.Table), r.Incoming
	if r.Mark != 0 {
		v.Mark, v.Mask = r.Mark, &r.Mask
	}
	if r.Goto != 0 {
		v.Goto = int(r.Goto)
	}
	return v
}

// deliveryRoute returns the route of deliveryTable. It is over lo, because the kernel removes the
// routes of an interface with its last address.
func deliveryRoute(family model.Family) *vnetlink.Route {
	length := net.IPv4len
	if family == model.IPv6 {
		length = net.IPv6len
	}
	const lo = 1
	return &vnetlink.Route{
		LinkIndex: lo, Table: int(deliveryTable), Type: unix.RTN_LOCAL, Protocol: sourceProtocol, Scope: vnetlink.SCOPE_HOST,
		Dst: &net.IPNet{IP: make(net.IP, length), Mask: make(net.IPMask, length)},
	}
}

// deliver makes the routing policy deliver packets with markDeliver to the node. It adds what is
// missing.
func (d *device) deliver(family model.Family) error {
	if err := d.links.RouteAdd(deliveryRoute(family)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("deliver %v packets by a route over lo in table %d: %w", family, deliveryTable, err)
	}
	for _, r := range deliveryRules {
		if err := d.links.RuleAdd(deliveryRule(family, r)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add rule %d of the %v routing policy: %w", r.Priority, family, err)
		}
	}
	return nil
}

// otherDelivery returns what the routing policy lacks of what deliver adds.
func (d *device) otherDelivery(family model.Family) (lacking []string, err error) {
	rules, err := d.addresses.Rules(family)
	if err != nil {
		return nil, fmt.Errorf("read the rules of the %v routing policy: %w", family, err)
	}
	for _, r := range deliveryRules {
		if !slices.Contains(rules, r) {
			lacking = append(lacking, fmt.Sprintf("the rule %d of the %v routing policy", r.Priority, family))
		}
	}
	routes, err := d.addresses.Routes(family)
	if err != nil {
		return nil, fmt.Errorf("read the %v routes: %w", family, err)
	}
	if !slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Table == deliveryTable && r.Type == unix.RTN_LOCAL }) {
		lacking = append(lacking, fmt.Sprintf("the %v route over lo in table %d", family, deliveryTable))
	}
	return lacking, nil
}

// undeliver removes what deliver has added.
func (d *device) undeliver(family model.Family) error {
	missing := func(err error) bool {
		return slices.ContainsFunc([]error{unix.ESRCH, unix.ENOENT, unix.EAFNOSUPPORT, unix.EOPNOTSUPP}, func(e error) bool { return errors.Is(err, e) })
	}
	for _, r := range deliveryRules {
		if err := d.links.RuleDel(deliveryRule(family, r)); err != nil && !missing(err) {
			return fmt.Errorf("remove rule %d of the %v routing policy: %w", r.Priority, family, err)
		}
	}
	if err := d.links.RouteDel(deliveryRoute(family)); err != nil && !missing(err) {
		return fmt.Errorf("remove the %v route of table %d: %w", family, deliveryTable, err)
	}
	return nil
}
