// Package iptables programs a node's Services with iptables, in the tables nat and filter of both IP families, over
// nf_tables or the legacy interface. It exists for nodes whose kernel or whose other software keeps them with iptables;
// within that it aims at few rules, few of them on a packet's way, and small changes.
//
// # Rules
//
// A Service port has a chain SLICECAST-P-… with one DNAT rule for each backend, chosen with equal probability. With more
// than 64 backends these are in groups with a chain SLICECAST-G-… each. Each of its frontends (a cluster IP, a nodePort)
// is one rule that leads to that chain and names the Service port in a comment. These rules stand in chains of at most 16
// addresses or port numbers, which packets come to by the lowest digits of the address or the highest of the port; see
// tree. Service ports without backends have a REJECT rule for each frontend instead, dispatched in the same way.
//
// For a Service port with n backends and f frontends that is n + f rules (and about √n for groups), f without backends,
// one more for each frontend whose masquerading is unusual for its kind. The dispatch adds about one rule for each two to
// four addresses, each local backend's address one for hairpins, and 31 never change. So 1000 cluster IPs with 50 backends
// each are 51,300 rules, and 10,000 with 5 are 64,400. The first packet of a connection passes about 25 of them to come to
// its Service port's chain, there half as many as it has backends or a few dozen; other packets pass 4.
//
// # Masquerading
//
// As with kube-proxy, a bit of the packet mark says that a connection is to be masqueraded. It is set while a Service is
// looked up and cleared if there is none. Hairpins are masqueraded where source and destination are the same local
// backend.
//
// # Changes
//
// What changes is written by one iptables-restore --noflush for an IP family, which takes effect at once in each table.
// It holds the chains whose rules differ from what the kernel holds, as hashes of them tell, which Replace reads and
// Apply keeps. The state of the kernel is a function of the wanted state, whatever the way to it was. Connections are in
// conntrack's hands and are never touched.
package iptables
