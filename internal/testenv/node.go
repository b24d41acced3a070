package testenv

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Node is a node of the cluster. It is a host and the router of its pods.
type Node struct {
	*Host
	// PodCIDR4 and PodCIDR6 are 10.180.N.0/24 and fd00:10:180:N::/64, where N numbers the nodes of
	// a network from 0.
	PodCIDR4, PodCIDR6 netip.Prefix

	network *Network
	port    string // the name of the link's end on the router

	mu        sync.Mutex // guards the fields below
	pods      map[*Pod]struct{}
	podCount  int // the number of pods ever added
	addresses *pool
}

// Pod is a pod on a node.
type Pod struct {
	*Host
	// Node is the node that the pod runs on.
	Node *Node

	port string // the name of the link's end on the node
}

// Client is a host outside the cluster.
type Client struct {
	*Host

	network *Network
	table   int // the router's routing table for packets from this client
}

// AddNode adds a node without pods and without netfilter rules.
func (n *Network) AddNode(name string) *Node {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	node, err := n.addNode(name)
	if err != nil {
		n.t.Fatalf("testenv: add node %s: %v", name, err)
	}
	return node
}

func (n *Network) addNode(name string) (*Node, error) {
	if n.nodeCount == maxNodes {
		return nil, fmt.Errorf("the network has already had %d nodes: create another network", maxNodes)
	}
	number := n.nodeCount
	n.nodeCount++
	node := &Node{
		Host:     &Host{Name: name, IPv4: nth(nodeNetwork4, 2+number), IPv6: nth(nodeNetwork6, 1+number)},
		PodCIDR4: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 180, byte(number), 0}), 24),
		PodCIDR6: netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: 0x10, 4: 0x01, 5: 0x80, 7: byte(number)}), 64),
		network:  n,
		port:     fmt.Sprintf("node%d", number),
		pods:     map[*Pod]struct{}{},
	}
	node.addresses = newPool(1, node.PodCIDR4, node.PodCIDR6)
	return node, n.boot(node)
}

// boot creates the namespace of a node and connects it.
func (n *Network) boot(node *Node) error {
	host, err := newHost(n.t, node.Name, routerSysctls)
	if err != nil {
		return err
	}
	host.IPv4, host.IPv6 = node.IPv4, node.IPv6
	node.Host = host
	n.nodes[node] = struct{}{}
	eth0, err := n.plug(host, "eth0", node.port, netip.PrefixFrom(host.IPv4, nodeNetwork4.Bits()), netip.PrefixFrom(host.IPv6, nodeNetwork6.Bits()))
	if err != nil {
		return err
	}
	host.eth0 = eth0
	host.attract = func(dst netip.Prefix, _ netip.Addr) error { return n.routeTo(node, dst, 0) }
	return errors.Join(
		host.addRoute(route{dst: anyIPv4, link: eth0, via: routerIPv4}),
		host.addRoute(route{dst: anyIPv6, link: eth0, via: routerIPv6}),
		n.routeTo(node, node.PodCIDR4, 0),
		n.routeTo(node, node.PodCIDR6, 0),
	)
}

func (n *Network) routeTo(node *Node, dst netip.Prefix, table int) error {
	via := node.IPv4
	if dst.Addr().Is6() {
		via = node.IPv6
	}
	return n.router.addRoute(route{dst: dst, link: n.bridge, via: via, table: table})
}

// Reboot removes the node's namespace with its pods and all processes on them, and creates an empty
// one for the node, with its name and addresses. It sets Host, which nobody else may use meanwhile.
func (node *Node) Reboot() {
	node.t.Helper()
	t := node.t
	node.network.mu.Lock()
	defer node.network.mu.Unlock()
	if err := node.reboot(); err != nil {
		t.Fatalf("testenv: reboot node %s: %v", node.Name, err)
	}
}

func (node *Node) reboot() error {
	// Others have the hardware address in their neighbor tables. A machine keeps it, too.
	address := node.eth0.Attrs().HardwareAddr
	if err := errors.Join(node.close(), node.network.router.removeLink(node.port)); err != nil {
		return err
	}
	node.mu.Lock()
	defer node.mu.Unlock()
	node.pods, node.addresses = map[*Pod]struct{}{}, newPool(1, node.PodCIDR4, node.PodCIDR6)
	if err := node.network.boot(node); err != nil {
		return err
	}
	if err := node.links.LinkSetHardwareAddr(node.eth0, address); err != nil {
		return fmt.Errorf("set the hardware address: %w", err)
	}
	node.eth0.Attrs().HardwareAddr = address // for the next reboot
	return nil
}

// Delete removes the node, its pods and all processes on them.
func (node *Node) Delete() {
	node.t.Helper()
	node.network.mu.Lock()
	delete(node.network.nodes, node)
	node.network.mu.Unlock()
	if err := node.close(); err != nil {
		node.t.Fatalf("testenv: delete node %s: %v", node.Name, err)
	}
}

func (node *Node) close() error {
	node.mu.Lock()
	defer node.mu.Unlock()
	var errs []error
	for pod := range node.pods {
		errs = append(errs, pod.close())
	}
	node.pods = nil
	return errors.Join(append(errs, node.Host.close())...)
}

// AddPod adds a pod. It has the given addresses, which must be in the node's pod CIDRs, or else the
// node's next ones: 10.180.N.1, fd00:10:180:N::1 and so on.
func (node *Node) AddPod(name string, addrs ...netip.Addr) *Pod {
	node.t.Helper()
	node.mu.Lock()
	defer node.mu.Unlock()
	pod, err := node.addPod(name, addrs)
	if err != nil {
		node.t.Fatalf("testenv: add pod %s to node %s: %v", name, node.Name, err)
	}
	return pod
}

func (node *Node) addPod(name string, addrs []netip.Addr) (*Pod, error) {
	if node.pods == nil {
		return nil, errors.New("the node has been deleted")
	}
	for _, addr := range addrs {
		if !node.PodCIDR4.Contains(addr) && !node.PodCIDR6.Contains(addr) {
			return nil, fmt.Errorf("%s is not in the node's pod CIDRs %s and %s", addr, node.PodCIDR4, node.PodCIDR6)
		}
	}
	host, err := newHost(node.t, name)
	if err != nil {
		return nil, err
	}
	node.podCount++
	pod := &Pod{Host: host, Node: node, port: fmt.Sprintf("pod%d", node.podCount)}
	node.pods[pod] = struct{}{}
	if host.IPv4, host.IPv6, err = node.addresses.take(addrs); err != nil {
		return nil, err
	}
	if err := attach(host, node.Host, pod.port); err != nil {
		return nil, err
	}
	// The router has routes to the node's pod CIDRs, but not to addresses that are added later.
	toNode := host.attract
	host.attract = func(dst netip.Prefix, via netip.Addr) error {
		return errors.Join(toNode(dst, via), node.attract(dst, via))
	}
	return pod, nil
}

// Delete removes the pod and all processes on it. Its addresses become free for other pods.
func (pod *Pod) Delete() {
	pod.t.Helper()
	node := pod.Node
	node.mu.Lock()
	defer node.mu.Unlock()
	if _, ok := node.pods[pod]; !ok {
		return // deleted already, possibly with its node
	}
	delete(node.pods, pod)
	node.addresses.release(pod.IPv4, pod.IPv6)
	if err := errors.Join(node.removeLink(pod.port), pod.close()); err != nil {
		pod.t.Fatalf("testenv: delete pod %s: %v", pod.Name, err)
	}
}

// AddClient adds a host outside the cluster. It has the given addresses or else the next ones:
// 203.0.113.2, 2001:db8:cafe::2 and so on. It reaches nodes and pods; for virtual IPs see
// [Client.RouteVia].
func (n *Network) AddClient(name string, addrs ...netip.Addr) *Client {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	client, err := n.addClient(name, addrs)
	if err != nil {
		n.t.Fatalf("testenv: add client %s: %v", name, err)
	}
	return client
}

func (n *Network) addClient(name string, addrs []netip.Addr) (*Client, error) {
	host, err := newHost(n.t, name)
	if err != nil {
		return nil, err
	}
	client := &Client{Host: host, network: n, table: firstTable + len(n.clients)}
	port := fmt.Sprintf("client%d", len(n.clients))
	n.clients = append(n.clients, client)
	if host.IPv4, host.IPv6, err = n.addresses.take(addrs); err != nil {
		return nil, err
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rule := netlink.NewRule()
		rule.Priority = rulePriority
		rule.Family = family
		rule.IifName = port
		rule.Table = client.table
		if err := n.router.links.RuleAdd(rule); err != nil {
			return nil, fmt.Errorf("add %v: %w", rule, err)
		}
	}
	return client, attach(host, n.router, port)
}

// RouteVia routes packets from this client to the given networks through a node. An upstream router
// does the same with external IPs, and probes of cluster IPs from outside need it. It replaces
// earlier routes of the client to the same networks.
func (c *Client) RouteVia(node *Node, dsts ...netip.Prefix) {
	c.t.Helper()
	for _, dst := range dsts {
		if err := c.network.routeTo(node, dst, c.table); err != nil {
			c.t.Fatalf("testenv: route %s by way of node %s: %v", dst, node.Name, err)
		}
	}
}

// RouteAcross routes packets from this client to the given network through several nodes, and each
// connection through one of them, as a load balancer does. It replaces earlier routes of the client
// to the same network. Without nodes, it removes the route.
func (c *Client) RouteAcross(nodes []*Node, dst netip.Prefix) error {
	ipv6 := dst.Addr().Is6()
	balanced := &netlink.Route{Dst: ipNet(dst), Table: c.table, Family: family(dst.Addr())}
	if len(nodes) == 0 {
		if err := c.network.router.links.RouteDel(balanced); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("remove the route to %s: %w", dst, err)
		}
		return nil
	}
	for _, node := range nodes {
		balanced.MultiPath = append(balanced.MultiPath, &netlink.NexthopInfo{
			LinkIndex: c.network.bridge.Attrs().Index, Gw: node.Addr(ipv6).AsSlice(), Flags: int(netlink.FLAG_ONLINK),
		})
	}
	if err := c.network.router.links.RouteReplace(balanced); err != nil {
		return fmt.Errorf("route %s across %d nodes: %w", dst, len(nodes), err)
	}
	return nil
}

// pool allocates pairs of an IPv4 and an IPv6 address.
type pool struct {
	prefix4, prefix6 netip.Prefix
	first, next      int
	taken            map[netip.Addr]bool
}

const lastAddress = 254 // of a /24

func newPool(first int, prefix4, prefix6 netip.Prefix) *pool {
	return &pool{prefix4: prefix4, prefix6: prefix6, first: first, next: first, taken: map[netip.Addr]bool{}}
}

// take allocates an IPv4 and an IPv6 address: the given address of a family or, if none is given,
// the next free one.
func (p *pool) take(given []netip.Addr) (v4, v6 netip.Addr, err error) {
	for _, addr := range given {
		switch {
		case p.taken[addr]:
			return v4, v6, fmt.Errorf("address %s is taken", addr)
		case addr.Is4():
			v4 = addr
		default:
			v6 = addr
		}
	}
	// Released addresses are reused last, as on a real node.
	for range lastAddress {
		if v4.IsValid() && v6.IsValid() {
			break
		}
		next4, next6 := nth(p.prefix4, p.next), nth(p.prefix6, p.next)
		if !v4.IsValid() && !p.taken[next4] {
			v4 = next4
		}
		if !v6.IsValid() && !p.taken[next6] {
			v6 = next6
		}
		if p.next++; p.next > lastAddress {
			p.next = p.first
		}
	}
	if !v4.IsValid() || !v6.IsValid() {
		return v4, v6, fmt.Errorf("%s and %s have no more addresses", p.prefix4, p.prefix6)
	}
	p.taken[v4], p.taken[v6] = true, true
	return v4, v6, nil
}

func (p *pool) release(addrs ...netip.Addr) {
	for _, addr := range addrs {
		delete(p.taken, addr)
	}
}
