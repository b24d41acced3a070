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

// claims tells which Service has what several may want.
type claims struct {
	owners map[claim]*service
	// rivals are, for what several Services want, all of them: the owner, and then in the order in which they will get it.
	rivals map[claim][]*service
}

func newClaims() claims {
	return claims{owners: make(map[claim]*service), rivals: make(map[claim][]*service)}
}

// before tells whether s comes before o where both want the same: it is older, or else first by name.
func (s *service) before(o *service) bool {
	return cmp.Or(cmp.Compare(s.claimed.CreationTimeSeconds, o.claimed.CreationTimeSeconds),
		cmp.Compare(s.key.Namespace, o.key.Namespace), cmp.Compare(s.key.Name, o.key.Name)) < 0
}

// take has s want c, which it may do already. Those for whom that makes a difference are touched.
func (cs *claims) take(c claim, s *service, touch func(*service)) {
	owner := cs.owners[c]
	if owner == nil {
		cs.owners[c] = s
		return
	}
	rivals := cs.rivals[c]
	if rivals == nil {
		rivals = []*service{owner}
	}
	if slices.Contains(rivals, s) {
		return
	}
	i := 0
	for i < len(rivals) && rivals[i].before(s) {
		i++
	}
	cs.rivals[c] = slices.Insert(rivals, i, s)
	if i == 0 {
		cs.own(c, s, touch)
	}
}

// release has s want c no longer, if it did.
func (cs *claims) release(c claim, s *service, touch func(*service)) {
	rivals := cs.rivals[c]
	if rivals == nil {
		if cs.owners[c] == s {
			delete(cs.owners, c)
		}
		return
	}
	rivals = slices.DeleteFunc(rivals, func(r *service) bool { return r == s })
	cs.rivals[c] = rivals
	if cs.owners[c] == s {
		cs.own(c, rivals[0], touch)
	}
	if len(rivals) == 1 {
		delete(cs.rivals, c)
	}
}

// own gives c, which others want too, to s. They all have to be looked at: what they are told names the owner.
func (cs *claims) own(c claim, s *service, touch func(*service)) {
	cs.owners[c] = s
	for _, r := range cs.rivals[c] {
		touch(r)
	}
}
