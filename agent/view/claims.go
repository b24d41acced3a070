package view

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/internal/model"
)

// claim is what only one Service port can have: an address and port, or a NodePort of a family.
type claim struct {
	address  netip.Addr // not set: a NodePort
	port     uint16
	protocol model.Protocol
	family   model.Family
}

// String is for Problems: "10.96.0.1 port 80/TCP", "node port 30080/TCP over IPv4".
func (c claim) String() string {
	if c.address.IsValid() {
		return fmt.Sprintf("%s port %d/%s", c.address, c.port, c.protocol)
	}
	return fmt.Sprintf("node port %d/%s over %s", c.port, c.protocol, c.family)
}

// claimant is a Service that wants something, and as what: what of a claim's address it is of the Service's.
type claimant struct {
	*service
	as FrontendKind
}

// claims tells which Service has what several may want.
type claims struct {
	owners map[claim]claimant
	// rivals are, for what several Services want, all of them: the owner, and then in the order in which they will get it.
	rivals map[claim][]claimant
}

func newClaims() claims {
	return claims{owners: make(map[claim]claimant), rivals: make(map[claim][]claimant)}
}

// ranks are the kinds of addresses by who decides on them: the API server gives a cluster IP to one Service only, the cluster's
// load balancer has its addresses, and anybody who may write a Service writes an external IP.
var ranks = map[FrontendKind]int{NodePort: 0, ClusterIP: 1, LoadBalancer: 2, ExternalIP: 3}

// compare tells who comes first where both want the same: the one with the better kind of address, then the older one, then the
// first by name.
func (c claimant) compare(o claimant) int {
	return cmp.Or(cmp.Compare(ranks[c.as], ranks[o.as]), cmp.Compare(c.claimed.CreationTimeSeconds, o.claimed.CreationTimeSeconds),
		cmp.Compare(c.key.Namespace, o.key.Namespace), cmp.Compare(c.key.Name, o.key.Name))
}

// before says, in Problems, that a claim is c's and why it is not o's.
func (c claimant) before(o claimant) string {
	if c.as != o.as {
		return fmt.Sprintf("%s's as its %s, which comes before %s", c.key, c.as, o.as)
	}
	return fmt.Sprintf("%s's, which is older or comes first by name", c.key)
}

// take has s want c, which it does not yet. Those for whom that makes a difference are touched.
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
	cs.rivals[c] = slices.Insert(rivals, i, s)
	if i == 0 {
		cs.own(c, s, touch)
	}
}

// release has s want c no longer.
func (cs *claims) release(c claim, s *service, touch func(*service)) {
	rivals := cs.rivals[c]
	if rivals == nil {
		delete(cs.owners, c)
		return
	}
	rivals = slices.DeleteFunc(rivals, func(r claimant) bool { return r.service == s })
	cs.rivals[c] = rivals
	if cs.owners[c].service == s {
		cs.own(c, rivals[0], touch)
	}
	if len(rivals) == 1 {
		delete(cs.rivals, c)
	}
}

// own gives c, which others want too, to s. They all have to be looked at: what they are told names the owner.
func (cs *claims) own(c claim, s claimant, touch func(*service)) {
	cs.owners[c] = s
	for _, r := range cs.rivals[c] {
		touch(r.service)
	}
}
