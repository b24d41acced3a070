// Package nftables programs a node's Services with nftables, over netlink, in one table "slicecast" for each IP family. It
// exists for speed on both ends: a packet finds its backend by hash lookups only, and a change costs the kernel as many
// set elements as there are backends that changed, in one transaction, whatever the number of Services.
//
// # Table
//
// All that changes with Services are elements of maps. A frontend's address, protocol and port lead to an integer: the
// Service port's id, and a policy that tells what becomes of whom. Chains there are for policies, which are few, and for
// sizes of sets of backends, which a Service port shares with others: there an index is drawn at random, and id and index
// lead to the backend. A size is a number of backends rounded up; what falls on an index without a backend is drawn again.
// docs/nftables.md explains the table for those who read it on a node.
//
// The chains are nat chains, rejecting and dropping included, so that only the first packet of a connection passes them.
// What is filtered besides is filtered after all proxies' translation, so that other proxies may serve other Services, or
// the same ones while a node changes over.
//
// A packet makes several lookups, and a transaction may come between two of them. Then it is looked up again.
//
// # Changes
//
// Replace reads the table and changes what differs. A process that starts finds out by it what another one left: ids are
// found by the comments of frontends, and rules are told by a hash in their user data. Affinity is held by a map that
// packets fill. It survives all that does not remove the table. A table that can't be changed to what is wanted is
// made anew, while another stands in for it.
//
// Apply knows what the kernel holds. Its elements come and go in one transaction. When the kernel refuses it, it is tried
// in halves until the Service ports to blame are alone; the table is kept as it was for those.
//
// Backends come in slots: the indices from 0 without gaps. When one goes, the last one takes its place. All Service ports'
// slots are in a few maps, as the kernel takes a time to give back a map that grows with the square of its size.
package nftables
