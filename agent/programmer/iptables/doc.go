// Package iptables programs a node's Services with iptables, in the tables nat and filter of both
// IP families, over nf_tables or the legacy interface. It is for nodes whose kernel or other
// software requires iptables. Within that limit it aims at few rules, few of them on a packet's
// path, and small changes. docs/iptables.md describes the rules for operators.
//
// # In nat
//
// The first packet of a connection finds its frontend in a tree of chains, by the lowest bits of
// the address or the highest bits of a nodePort: see tree. Usually the tree holds the DNAT rules of
// the Service port's backends, each chosen with equal probability. If that would take more rules,
// or a chain is needed anyway, the tree holds one rule that leads to a chain of the Service port:
//
//	SLICECAST-S-  sources: packets from outside them return, the others go on
//	SLICECAST-R-  routes that differ: leads each class of clients to its set
//	SLICECAST-P-  the cluster set: DNAT rules, or groups if there are more than 64 backends
//	SLICECAST-L-  the local set, in the same way
//	SLICECAST-G-  DNAT rules of a group of a set's backends
//
// There are two trees of addresses. A connection to an address in the first one, VIPS, is
// masqueraded unless it comes from pods, as for a usual cluster IP. A connection to an address in
// the second one, EXTERNAL, or to a nodePort, is always masqueraded. So a usual frontend needs no
// rule for masquerading. As with kube-proxy, a bit of the packet mark says that a connection is to
// be masqueraded. It is set on the way, and cleared if no Service is found. Hairpins are
// masqueraded if source and destination are the same local backend.
//
// With affinity, each backend has a list of clients, in the match recent. A first rule for each
// backend leads the clients on its list to it. The rules that choose a backend put the client on
// that backend's list. There is no chain for a single backend.
//
// # In filter
//
// What some or all clients must not reach has rules in trees of the same kind. They see only what
// nat has not translated. If a frontend has sources, their rules come first. Then there is a rule
// for each class of clients that is rejected or dropped. Translated packets do not reach these
// rules, so they distinguish between classes only if some are rejected and others dropped.
//
// # Changes
//
// Changes are written by one iptables-restore --noflush for each IP family, which takes effect at
// once in filter and then in nat. If rules in filter refuse what nat leads to backends from now on,
// another one removes these rules. So each packet is either translated or refused. If it would
// create many chains with iptables-nft, others write their rules before, a few hundred at a time.
// Nothing leads to these chains until then, and the kernel never works on one transaction for long,
// which would hold up packets. The input holds the chains whose rules differ from those in the
// kernel. They are compared by hashes, which Replace computes from the kernel's rules and Apply
// keeps up to date. The state of the kernel depends only on the wanted state, not on the changes
// that led to it.
//
// Established connections belong to conntrack and are never touched. The kernel keeps a list of
// clients as long as a rule names it. So the list survives everything that does not remove its
// backend, including restarts.
//
// # Others
//
// Watch detects what others did to the rules by cheap means. For nf_tables that is the generation
// number, which this package's own changes either explain or do not. For the legacy variant it is
// the sizes of the base chains. Only an unexplained change makes Watch read the rules. In the
// legacy variant, Watch misses a change by others if it concerns only chains of this package and
// comes at the very moment when the package writes.
package iptables
