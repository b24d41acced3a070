// Package ipvs programs a node's Services with IPVS, the kernel's load balancer, for those who want
// its schedulers. An nftables table, whose rules never change with Services, decides which Service
// a packet is for, which set of backends it leads to for this client, and whether the connection is
// masqueraded. IPVS chooses the backend. docs/ipvs.md describes it for operators.
//
// # The path of a packet
//
// IPVS sees packets to the node, and packets that the node sends. Cluster IPs are on a dummy
// device, except those that other interfaces of the node have, so packets to them are packets to
// the node. External addresses may be other machines'. Only packets to a Service's port there are
// delivered to the node: the table marks them, and the routing policy looks at the mark.
//
// Just before IPVS sees the packet, a map of the table gives it another mark. The mark depends on
// the packet's address, protocol and port, and on where the packet comes from: pods, this node or
// others.
//
// Each of a Service port's two sets of backends is a virtual service of IPVS for a mark. So one
// virtual service serves cluster IPs, load balancers' addresses and NodePorts alike, on all
// addresses that the node has. Adding or removing a backend is a single change. Further bits of the
// mark say what else to do with the packet: refuse it, drop it or masquerade the connection. They
// are cleared before IPVS looks. Masquerading is noted in conntrack's mark. Once IPVS has sent the
// packet on, its mark is cleared.
//
// Service ports with affinity have a virtual service for each of their addresses instead: see
// services.
//
// # Changes
//
// Each IP family is read, changed and reported separately. If one fails as a whole, the other one
// is still programmed. When the kernel refuses something of a Service port, an ordinary one is
// tried to find out whether the family has failed.
//
// Replace reads the table, the virtual services and the device's addresses, and changes what
// differs. The table holds the numbers of the virtual services with the names of their Service
// ports, so another process keeps them. A virtual service itself says that it belongs to this
// package, by its mark or by a flag. So none is left behind, whenever a process ends.
//
// Backends are in IPVS before the table leads to them, and are removed after the table has stopped
// doing so. So no packet is led to something that does not exist. Everything that one Apply changes
// in the table changes at once for each packet.
//
// A backend that is removed gets the weight 0. Its TCP connections go on until they end or a limit
// passes. UDP flows move at once. Connections to a Service that is removed end, because its
// addresses are removed. Connections to a Service port that is renamed go on: a new Service port
// inherits the virtual services of a removed one if it has one of that one's frontends.
//
// # Parts
//
// A Programmer has a family for each IP family. They share the balancer, which is the kernel's
// IPVS, the device, and nf_tables. A family has a layout of its table, a record of what the kernel
// holds, and drains. A change collects what has to be done, and is then carried out.
package ipvs
