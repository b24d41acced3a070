package view

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// claim is what only one Service port can have: an address and port, or a NodePort of an IP family.
type claim struct {
	address  netip.Addr // not set for a NodePort
	port     uint16
	protocol model.Protocol
	family   model.Family
}

// String returns the claim as Problems describe it: "10.96.0.1 port 80/TCP" or "node port 30080/TCP
// over IPv4".
func (c claim) String() string {
	if c.address.IsValid() {
		return fmt.Sprintf("%s port %d/%s", c.address, c.port, c.protocol)
	}
	return fmt.Sprintf("node port %d/%s over %s", c.port, c.protocol, c.family)
}

// claimant is a Service that wants a claim. Its field as is the kind of frontend that it wants the
// claim for.
type claimant struct {
	*service
	as FrontendKind
}

// claims records which Service owns each claim, and which others want it.
//
// Invariants:
//
//  1. A claim that at least one Service wants has an owner. A claim that no Service wants has no
//     entry.
//  2. rivals has an entry exactly for the claims that several Services want. The entry contains all
//     of them, sorted by claimant.compare, and the first one is the owner.
type claims struct {
	owners map[claim]claimant
	// rivals contains, for each claim that several Services want, all these Services: the owner first,
	// and then the others in the order in which they will get the claim.
	rivals map[claim][]claimant
}

// ranks orders the kinds of addresses by who decides on them. The API server assigns a cluster IP
// to one Service only, the cluster's load balancer assigns its addresses, and anybody who may write
// a Service may write any external IP.
var ranks = map[FrontendKind]int{NodePort: 0, ClusterIP: 1, LoadBalancer: 2, ExternalIP: 3}

// compare returns a negative number if c comes before o when both want the same claim. The better
// kind of address comes first, then the older Service, then the first by namespace and name.
func (c claimant) compare(o claimant) int {
	return cmp.Or(cmp.Compare(ranks[c.as], ranks[o.as]),
		cmp.Compare(c.claimed.CreationTimeSeconds, o.claimed.CreationTimeSeconds),
		cmp.Compare(c.key.Namespace, o.key.Namespace), cmp.Compare(c.key.Name, o.key.Name))
}

// first returns the part of a Problem that says why c gets a claim before o.
func (c claimant) first(o claimant) string {
	if c.as != o.as {
		return fmt.Sprintf("goes first to Service %s as its %s, which comes before %s", c.key, c.as, o.as)
	}
	return fmt.Sprintf("goes first to Service %s, which is older or comes first by name", c.key)
}

// take records that s wants c; s must not want it yet. It touches the Service that comes directly
// after s, whose problem names s from now on, and no others. So the number of rivals does not
// matter.
func (cs *claims) take(c claim, s claimant, touch func(*service)) {
	owner, ok := cs.owners[c]
	if !ok {
		cs.owners[c] = s
		return
	}
	rivals := cs.rivals[c]
	if rivals == nil {
		rivals = []claimant{owner}
	}
	i, _ := slices.BinarySearchFunc(rivals, s, claimant.compare)
	rivals = slices.Insert(rivals, i, s)
	cs.rivals[c], cs.owners[c] = rivals, rivals[0]
	if i+1 < len(rivals) {
		touch(rivals[i+1].service)
	}
}

// release records that s does not want c any more. It touches the Service that comes directly after
// s, which owns c now or whose problem names another Service.
func (cs *claims) release(c claim, s claimant, touch func(*service)) {
	rivals := cs.rivals[c]
	if rivals == nil {
		delete(cs.owners, c)
		return
	}
	i, _ := slices.BinarySearchFunc(rivals, s, claimant.compare)
	rivals = slices.Delete(rivals, i, i+1)
	cs.rivals[c], cs.owners[c] = rivals, rivals[0]
	if i < len(rivals) {
		touch(rivals[i].service)
	}
	if len(rivals) == 1 {
		delete(cs.rivals, c)
	}
}

// ahead returns who comes directly before s, which does not own c but wants it.
func (cs *claims) ahead(c claim, s claimant) claimant {
	rivals := cs.rivals[c]
	i, _ := slices.BinarySearchFunc(rivals, s, claimant.compare)
	return rivals[i-1]
}
