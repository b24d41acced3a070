package testenv

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// TB is the part of [testing.TB] that this package needs. A program that is not a test provides its
// own.
type TB interface {
	// Helper marks the calling function as a helper.
	Helper()
	// Fatalf reports a failure and does not return.
	Fatalf(format string, args ...any)
	// Cleanup registers f to be called at the end, in reverse order of registration.
	Cleanup(f func())
}

// Network is a router with a segment of nodes, their pods, and clients. Several goroutines may call
// its methods, and those of its hosts, at the same time. If t is a testing.TB, however, only the
// test's own goroutine may make it fail.
type Network struct {
	// World is the namespace of the calling process, in which its servers and its control plane
	// listen.
	World *Host

	t      TB
	router *Host
	bridge netlink.Link // the router's interface to the nodes
	number int          // the index of this network in worlds

	mu        sync.Mutex // guards the fields below
	nodes     map[*Node]struct{}
	nodeCount int // the number of nodes ever added
	clients   []*Client
	addresses *pool // the addresses of clients
}

// The network's addresses; see the package documentation. The router has a fixed address for the
// default route of nodes. Pods and clients do not need one; see attach.
var (
	nodeNetwork4 = netip.MustParsePrefix("192.168.0.0/24")
	nodeNetwork6 = netip.MustParsePrefix("2001:db8::/64")
	routerIPv4   = netip.MustParseAddr("192.168.0.1")
	routerIPv6   = netip.MustParseAddr("2001:db8::ffff")
	anyIPv4      = netip.MustParsePrefix("0.0.0.0/0")
	anyIPv6      = netip.MustParsePrefix("::/0")
)

const (
	firstNode  = 2 // 192.168.0.2 to .191
	maxNodes   = 190
	firstWorld = 200 // 192.168.0.200 to .253
	maxWorlds  = 54

	// Numbers of routing tables, and the priority of the rules that lead to them. The namespace of
	// the process has a table for each network; a router has one for each client.
	firstTable   = 1000
	rulePriority = 1000
)

// ServiceCIDRs returns the networks of cluster IPs: 10.96.0.0/16 and fd00:10:96::/112.
func ServiceCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
}

// NewNetwork creates an empty network, which t closes in the end. The process must be isolated.
func NewNetwork(t TB) *Network {
	t.Helper()
	if !isolated {
		t.Fatalf("testenv: the process is not isolated: call testenv.Main from TestMain, or testenv.Isolate first thing in main")
	}
	n := &Network{
		t:         t,
		nodes:     map[*Node]struct{}{},
		addresses: newPool(2, netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:cafe::/64")),
	}
	// Registered first, so that Close also removes a network that is only partly set up.
	t.Cleanup(n.Close)
	if err := n.startRouter(); err != nil {
		t.Fatalf("testenv: set up the router: %v", err)
	}
	if err := n.startWorld(); err != nil {
		t.Fatalf("testenv: connect the world: %v", err)
	}
	return n
}

func (n *Network) startRouter() (err error) {
	if n.router, err = newHost(n.t, "router", routerSysctls); err != nil {
		return err
	}
	// Multicast snooping would delay neighbor discovery until the bridge hears a multicast
	// querier. A bridge without a fixed hardware address uses the lowest one of its ports. When
	// that port went away with its node, hosts would send to the old address for seconds.
	snooping := false
	n.bridge = &netlink.Bridge{
		LinkAttrs:         netlink.LinkAttrs{Name: "nodes", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}},
		MulticastSnooping: &snooping,
	}
	if err := n.router.links.LinkAdd(n.bridge); err != nil {
		return fmt.Errorf("add a bridge: %w", err)
	}
	if err := n.router.links.LinkSetUp(n.bridge); err != nil {
		return fmt.Errorf("set the bridge up: %w", err)
	}
	// A client may have an address of the nodes' network, but it does not hear the ARP requests of
	// nodes. The router answers them.
	err = n.router.Do(func() error {
		return setSysctls(map[string]string{"net/ipv4/conf/nodes/proxy_arp": "1", "net/ipv4/neigh/nodes/proxy_delay": "0"})
	})
	return errors.Join(
		err,
		n.router.addAddr(n.bridge, netip.PrefixFrom(routerIPv4, nodeNetwork4.Bits())),
		n.router.addAddr(n.bridge, netip.PrefixFrom(routerIPv6, nodeNetwork6.Bits())),
		n.addVoid(),
	)
}

// addVoid adds a link without hosts to the router, and makes it the default route. An unknown
// destination is then unreachable after one attempt at address resolution. Without any route the
// kernel would answer sooner, but IPv4 limits these answers to one a second, which no setting of a
// namespace changes.
func (n *Network) addVoid() error {
	void, end, err := veth(n.router, "void", n.router, "void-end")
	if err != nil {
		return err
	}
	err = n.router.Do(func() error {
		return setSysctls(map[string]string{
			"net/ipv4/neigh/void/mcast_solicit":   "1",
			"net/ipv4/neigh/void/retrans_time_ms": "10",
			"net/ipv6/neigh/void/mcast_solicit":   "1",
			"net/ipv6/neigh/void/retrans_time_ms": "10",
		})
	})
	return errors.Join(err,
		n.router.addRoute(route{dst: anyIPv4, link: void}),
		n.router.addRoute(route{dst: anyIPv6, link: void}),
		n.router.awaitReady(void),
		n.router.awaitUp(end),
	)
}

// worlds records which network numbers the process uses.
var worlds struct {
	sync.Mutex // guards taken
	taken      [maxWorlds]bool
}

// startWorld connects the namespace of the process to the nodes' segment. Because all networks have
// the same addresses, the routes to this network apply only to packets whose source is an address
// of its interface.
func (n *Network) startWorld() error {
	worlds.Lock()
	defer worlds.Unlock()
	n.number = slices.Index(worlds.taken[:], false)
	if n.number < 0 {
		return fmt.Errorf("the process already has %d networks: close one", maxWorlds)
	}
	world := &Host{
		t:     n.t,
		Name:  "world",
		IPv4:  nth(nodeNetwork4, firstWorld+n.number),
		IPv6:  nth(nodeNetwork6, firstWorld+n.number),
		world: true,
	}
	var err error
	if world.ns, err = netns.Get(); err != nil {
		return err
	}
	if world.links, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return errors.Join(err, world.ns.Close())
	}
	worlds.taken[n.number] = true
	n.World = world
	name := fmt.Sprintf("world%d", n.number)
	link, err := n.plug(world, name, "world", netip.PrefixFrom(world.IPv4, 32), netip.PrefixFrom(world.IPv6, 128))
	if err != nil {
		return err
	}
	// Do not answer ARP requests for the addresses of other networks.
	if err := setSysctls(map[string]string{"net/ipv4/conf/" + name + "/arp_ignore": "1"}); err != nil {
		return err
	}
	table := firstTable + n.number
	for _, route := range []route{
		{dst: nodeNetwork4}, {dst: nodeNetwork6}, {dst: anyIPv4, via: routerIPv4}, {dst: anyIPv6, via: routerIPv6},
	} {
		route.link, route.table = link, table
		if err := world.addRoute(route); err != nil {
			return err
		}
	}
	for _, rule := range n.worldRules() {
		if err := world.links.RuleAdd(rule); err != nil {
			return fmt.Errorf("add %v: %w", rule, err)
		}
	}
	return nil
}

// RouteWorld makes connections of this process, and of processes that it starts, use this network
// if they are not bound to a source address. Only one network of a process can have this.
func (n *Network) RouteWorld() {
	n.t.Helper()
	link, err := n.World.links.LinkByName(fmt.Sprintf("world%d", n.number))
	if err != nil {
		n.t.Fatalf("testenv: route the world: %v", err)
	}
	for _, r := range []route{
		{dst: nodeNetwork4}, {dst: nodeNetwork6}, {dst: anyIPv4, via: routerIPv4}, {dst: anyIPv6, via: routerIPv6},
	} {
		r.link = link
		if err := n.World.addRoute(r); err != nil {
			n.t.Fatalf("testenv: route the world: %v", err)
		}
	}
}

func (n *Network) worldRules() []*netlink.Rule {
	var rules []*netlink.Rule
	for _, addr := range []netip.Addr{n.World.IPv4, n.World.IPv6} {
		rule := netlink.NewRule()
		rule.Priority = rulePriority
		rule.Src = ipNet(netip.PrefixFrom(addr, addr.BitLen()))
		rule.Family = family(addr)
		rule.Table = firstTable + n.number
		rules = append(rules, rule)
	}
	return rules
}

func (n *Network) stopWorld() error {
	var errs []error
	for _, rule := range n.worldRules() {
		if err := n.World.links.RuleDel(rule); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove %v: %w", rule, err))
		}
	}
	errs = append(errs, n.World.removeLink(fmt.Sprintf("world%d", n.number)), n.World.close())
	worlds.Lock()
	defer worlds.Unlock()
	worlds.taken[n.number] = false
	return errors.Join(errs...)
}

// plug connects a host to the nodes' segment. name is the interface of the host, portName that of
// the router.
func (n *Network) plug(h *Host, name, portName string, addrs ...netip.Prefix) (netlink.Link, error) {
	link, peer, err := veth(h, name, n.router, portName)
	if err != nil {
		return nil, err
	}
	if err := n.router.links.LinkSetMaster(peer, n.bridge); err != nil {
		return nil, fmt.Errorf("add %s to the bridge: %w", h.Name, err)
	}
	for _, addr := range addrs {
		if err := h.addAddr(link, addr); err != nil {
			return nil, err
		}
	}
	return link, errors.Join(h.awaitReady(link), n.router.awaitUp(peer), n.router.awaitReady(n.bridge))
}

// Close stops and removes all servers, processes and hosts of the network. Later calls have no
// effect.
func (n *Network) Close() {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	for node := range n.nodes {
		errs = append(errs, node.close())
	}
	for _, client := range n.clients {
		errs = append(errs, client.close())
	}
	if n.World != nil {
		errs = append(errs, n.stopWorld())
	}
	if n.router != nil {
		errs = append(errs, n.router.close())
	}
	n.nodes, n.clients, n.World, n.router = nil, nil, nil, nil
	if err := errors.Join(errs...); err != nil {
		n.t.Fatalf("testenv: close the network: %v", err)
	}
}
