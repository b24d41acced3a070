// Package nftables programs a node's Services with nftables, over netlink, in one table "slicecast"
// for each IP family. It is built for speed on both ends. A packet finds its backend by hash
// lookups only. A change costs the kernel as many set elements as backends changed, in one
// transaction, whatever the number of Services.
//
// # Table
//
// Everything that changes with Services is an element of a map. A frontend's address, protocol and
// port lead to an integer, which combines the Service port's id with a policy. The policy says what
// happens to connections from pods, from the node and from others.
//
// Chains exist only for policies, which are few, and for sizes of backend sets, which Service ports
// share. The chain for a size draws a random index, and id and index lead to the backend. A size is
// a number of backends rounded up. If the index that was drawn has no backend, another one is
// drawn. docs/nftables.md explains the table to those who read it on a node.
//
// Connections are translated, rejected and dropped in nat chains, so that only the first packet of
// a connection passes them. The few remaining filter rules run after the translation by all
// proxies. So another proxy may serve other Services, or the same ones while the node changes from
// one proxy to the other.
//
// A packet makes several lookups, and a transaction may be committed between two of them. The
// packet then finds nothing, and is looked up a second time.
//
// # Changes
//
// Replace reads the table and changes what differs. That is also how a new process learns what the
// previous one left. The comments of frontends identify the Service port of an id, and a hash in a
// rule's user data identifies the rule. Affinity is in a map that packets fill. It survives every
// change that does not remove the table. A table that cannot be changed to the wanted state is
// removed and created again, while another one stands in for it.
//
// Apply knows what the kernel holds, and adds and removes elements in one transaction. If the
// kernel refuses the transaction, Apply tries it in halves until the refused Service ports are
// alone. The table stays as it was for those.
//
// While a kernel without preemption carries out a transaction, packets may wait. So both commit
// more than a few hundred elements in short transactions, in an order in which packets find all of
// a Service port or nothing of it. What leads packets to Service ports is still committed at once
// if a change both adds and removes some of that.
//
// Backends are in slots, whose indices count from 0 without gaps. If a backend leaves, the last one
// moves to its slot. The slots of all Service ports are in a few maps. The number of elements in a
// map is limited, because the time that the kernel takes to list a map grows with the square of its
// size.
package nftables
