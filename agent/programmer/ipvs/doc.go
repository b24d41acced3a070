// Package ipvs programs a node's Services with IPVS, the kernel's load balancer, for those who want its schedulers. An
// nftables table, whose rules never change with Services, decides what a packet's Service is, where that leads for whoever
// sent it, and whether it is masqueraded; IPVS chooses the backend. docs/ipvs.md shows it to operators.
//
// # The way of a packet
//
// All addresses of Services but the node's own are on a dummy device, so that the kernel takes what is sent to them for
// the node's, and IPVS sees it. Just before it does, a map of the table gives the packet a mark, by its address, protocol
// and port and by where it comes from: pods, this node, others. Each of a Service port's two sets of backends is a virtual
// service of IPVS for a mark, so that one of them serves cluster IPs, load balancers' addresses and NodePorts alike, on
// whichever addresses the node has, and a backend that comes or goes is one change. Marks say what else is to be done in
// bits that are gone when IPVS looks: refuse, drop, masquerade. Masquerading is noted in conntrack's mark. When IPVS has sent
// the packet on, its mark is cleared.
//
// Service ports with affinity have a virtual service for each of their addresses instead: see services.
//
// # Changes
//
// Each IP family is read, changed and reported by itself: one that fails as a whole leaves the
// other one as it should be. When the kernel refuses something of a Service port, an ordinary one
// is tried, which tells whether the family has failed.
//
// Replace reads the table, the virtual services and the device's addresses, and changes what differs. The table has the
// numbers of the virtual services with the names of their Service ports, so another process keeps them. That a virtual service
// is ours it says itself, by its mark or by a flag: so none is left behind, whenever a process ends. Backends are there
// before the table leads to them and leave after it, so nobody is led to what is not there; what one Apply changes in the
// table changes at once for each packet.
//
// A backend that is gone gets the weight 0: its TCP connections go on until they end or a limit passes. Those of UDP move at
// once. Connections to a Service that is gone end, as its addresses do. Those of a Service port that is renamed go on: one that
// comes gets the virtual services of one that goes and had a frontend of it.
package ipvs
