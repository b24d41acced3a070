// Package testenv is a small cluster's network made of network namespaces: nodes, pods and hosts outside the cluster,
// joined by veth pairs, in the real kernel. Tests and the demo use it to see what a Service does to real packets,
// without touching the machine they run on.
//
// # Isolation
//
// A test package says
//
//	func TestMain(m *testing.M) { testenv.Main(m) }
//
// and an ordinary program calls [Isolate] first thing in main. Either runs the same binary again inside new network,
// mount and PID namespaces (and a user namespace when it is not root). When the process ends, however it ends, the
// kernel kills every process that was started in there and removes every interface, route and rule.
// There is no way out to the machine's network from inside.
//
// # Network
//
//	net := testenv.NewNetwork(t)
//	a, b := net.AddNode("a"), net.AddNode("b")
//	pod := b.AddPod("pod")
//	pod.Serve(testenv.TCP, 8080)
//	client := net.AddClient("client")
//	client.RouteVia(a, testenv.ServiceCIDRs()...)
//	result := client.Probe(ctx, testenv.TCP, netip.AddrPortFrom(pod.IPv4, 8080), 10, testenv.ProbeOptions{})
//	require.Equal(t, map[string]int{"pod": 10}, result.Backends(), result)
//
// Every host has one interface eth0 with an IPv4 and an IPv6 address:
//
//	nodes    192.168.0.2, .3 ...    2001:db8::1, ::2 ...          pods of node N: 10.180.N.0/24, fd00:10:180:N::/64
//	clients  203.0.113.2, .3 ...    2001:db8:cafe::2, ::3 ...
//	World    192.168.0.200 ...      2001:db8::c8 ...              the calling process's own namespace
//
// Nodes share an Ethernet segment with a router that knows every node's pod CIDR, the clients, and nothing else: a
// packet to a virtual IP that no node translates comes back as [Unreachable]. A pod has a link of its own to its node
// and no other way, so that all its traffic, also to itself by way of a virtual IP, passes the node's netfilter hooks.
// As on a real node, a hairpin connection works only if it is masqueraded.
//
// Several networks can live in one process, each with the same addresses; only World's differ. A server listening on
// a wildcard address in the process, or in a process that it starts as usual, is reached from nodes and pods at
// World.IPv4 and World.IPv6. The other way round, use the methods of World: they know which of the networks is meant.
package testenv
