// Package testenv builds a small cluster network from network namespaces: nodes, pods and hosts
// outside the cluster, joined by veth pairs in the real kernel. With it, tests and the demo observe
// what a Service does to real packets, without touching the machine that they run on.
//
// # Isolation
//
// A test package contains
//
//	func TestMain(m *testing.M) { testenv.Main(m) }
//
// and an ordinary program calls [Isolate] at the start of main. Both run the same binary again
// inside new network, mount and PID namespaces, and inside a user namespace if they are not root.
// When the process ends for any reason, the kernel kills every process started inside and removes
// every interface, route and rule. The machine's network cannot be reached from inside.
//
// # Network
//
//	net := testenv.NewNetwork(t)
//	a, b := net.AddNode("a"), net.AddNode("b")
//	pod := b.AddPod("pod")
//	pod.Serve(testenv.TCP, 8080)
//	client := net.AddClient("client")
//	client.RouteVia(a, testenv.ServiceCIDRs()...)
//	dst := netip.AddrPortFrom(pod.IPv4, 8080)
//	result := client.Probe(ctx, testenv.TCP, dst, 10, testenv.ProbeOptions{})
//	require.Equal(t, map[string]int{"pod": 10}, result.Backends(), result)
//
// Every host has one interface eth0 with an IPv4 and an IPv6 address:
//
//	nodes    192.168.0.2, .3 ...    2001:db8::1, ::2 ...
//	pods     10.180.N.0/24          fd00:10:180:N::/64            on node N
//	clients  203.0.113.2, .3 ...    2001:db8:cafe::2, ::3 ...
//	World    192.168.0.200 ...      2001:db8::c8 ...              the process's own namespace
//
// Nodes share an Ethernet segment with a router. The router knows only the pod CIDRs of the nodes
// and the clients, so a packet to a virtual IP that no node translates comes back as [Unreachable].
// A pod has a link of its own to its node and no other route. All its traffic, including traffic to
// itself through a virtual IP, therefore passes the node's netfilter hooks. As on a real node, a
// hairpin connection works only if it is masqueraded.
//
// A process can have several networks, all with the same addresses except for those of World. Nodes
// and pods reach a server that listens on a wildcard address in the process, or in a process that
// it starts in the usual way, at World.IPv4 and World.IPv6. For the opposite direction use the
// methods of World, because they know which network to use.
package testenv
