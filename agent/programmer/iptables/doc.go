// Package iptables programs a node's Services with iptables, in the tables nat and filter of both IP families, over
// nf_tables or the legacy interface. It exists for nodes whose kernel or whose other software keeps them with iptables;
// within that it aims at few rules, few of them on a packet's way, and small changes. docs/iptables.md says what of that
// concerns an operator.
//
// # In nat
//
// The first packet of a connection finds the frontend that it comes to in a tree of chains: by the lowest bits of the
// address, or the highest of a nodePort; see tree. What stands there is, most of all, the DNAT rules of the Service port's
// backends, each chosen with equal probability. Where that would take more rules, or where a chain is needed anyway, it is
// one rule that leads to a chain of the Service port:
//
//	SLICECAST-S-  Sources: those leave it for the next, others come out at its end
//	SLICECAST-R-  Routes that differ: by class, to a set
//	SLICECAST-P-  the cluster set, SLICECAST-L- the local set: DNAT rules, or with more than 64 backends:
//	SLICECAST-G-  DNAT rules of a group of them
//
// There are two trees of addresses. What is found in the first, VIPS, is masqueraded unless it comes from pods, as the usual
// cluster IP; in the second, EXTERNAL, always, as is what comes to nodePorts: so a usual frontend needs no rule for that.
// As with kube-proxy, a bit of the packet mark says that a connection is to be masqueraded: it is set on the way, and cleared
// if no Service is found. Hairpins are masqueraded where source and destination are the same local backend.
//
// With affinity each backend has a list of clients (the match recent): a first rule for each backend leads there who is on
// its list, and the rules that choose put the client on one. There is no chain for a backend.
//
// # In filter
//
// What some or all are kept from has rules in trees of the same kind. They see what nat has not translated. With Sources
// these come first; then each class that is rejected or dropped. What nat translates does not come by, so classes are only
// told apart where some are rejected and others dropped.
//
// # Changes
//
// What changes is written by one iptables-restore --noflush for an IP family, which takes effect at once in each table.
// It holds the chains whose rules differ from what the kernel holds, as hashes of them tell, which Replace reads and
// Apply keeps. The state of the kernel is a function of the wanted state, whatever the way to it was. Connections are in
// conntrack's hands and are never touched. A list of clients is as the kernel keeps it as long as a rule names it, so it
// outlives all that does not remove its backend, restarts included.
//
// # Others
//
// Watch tells what others did to the rules, by cheap means: the generation of nf_tables, which this package's own changes
// explain or do not, and in the legacy variant the sizes of the base chains. Only what is unexplained makes it read the
// rules. There a change by others to chains of this package alone, and in the very moment in which it writes, goes unseen.
package iptables
