package conntrack

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// frontend is where flows are to. NodePorts have no address.
type frontend struct {
	family  model.Family
	address netip.AddrPort
}

func frontendOf(id view.ServicePortID, f view.Frontend) frontend {
	return frontend{id.Family, netip.AddrPortFrom(f.Address, f.Port)}
}

// maxGone bounds how many frontends that are gone are remembered until a pass: only a table that can't be cleaned leads to so many.
const maxGone = 1 << 16

// set notes a Service port; nil means that it is gone. c.mu is held.
func (c *Cleaner) set(id view.ServicePortID, after *view.ServicePort) {
	if id.Protocol != model.UDP {
		return
	}
	if before := c.ports[id]; before != nil {
		delete(c.ports, id)
		for _, f := range before.Frontends {
			if at := frontendOf(id, f); c.frontends[at] == before { // else another Service port has it already
				delete(c.frontends, at)
				c.lose(at)
			}
		}
	}
	if after != nil {
		c.ports[id] = after
		for _, f := range after.Frontends {
			at := frontendOf(id, f)
			c.frontends[at] = after
			delete(c.gone, at)
		}
	}
	c.pending[id.Family] = true
	c.alarm()
}

// lose notes that a frontend is gone, unless a Service port has it. c.mu is held.
func (c *Cleaner) lose(at frontend) {
	if c.frontends[at] == nil && len(c.gone) < maxGone {
		c.gone[at] = struct{}{}
	}
}

// takeGone removes a family's frontends from those that are gone, and returns them. c.mu is held.
func (c *Cleaner) takeGone(family model.Family) map[frontend]struct{} {
	taken := map[frontend]struct{}{}
	for at := range c.gone {
		if at.family == family {
			taken[at] = struct{}{}
			delete(c.gone, at)
		}
	}
	return taken
}

// putBack has a pass that failed be made again. c.mu is held.
func (c *Cleaner) putBack(family model.Family, gone map[frontend]struct{}) {
	c.pending[family] = true
	for at := range gone {
		c.lose(at)
	}
}

// stale reports whether a flow is. gone are the frontends that are gone since the last pass, and addresses, ascending, the node's.
// c.mu is held.
func (c *Cleaner) stale(family model.Family, gone map[frontend]struct{}, addresses []netip.Addr, f flow) bool {
	at, nodePort := frontend{family, f.original}, frontend{family, netip.AddrPortFrom(netip.Addr{}, f.original.Port())}
	if port := c.frontends[at]; port != nil {
		return leadsElsewhere(port, f)
	}
	port := c.frontends[nodePort]
	_, atGone := gone[at]
	_, nodePortGone := gone[nodePort]
	if port != nil || nodePortGone {
		if _, ours := slices.BinarySearchFunc(addresses, f.original.Addr(), netip.Addr.Compare); ours {
			if port != nil {
				return leadsElsewhere(port, f)
			}
			atGone = true
		}
	}
	// What is not translated is not to a Service: the address may be somebody else's by now.
	return atGone && f.reply != f.original
}

// leadsElsewhere reports whether a flow to a Service port does not lead to one of its endpoints that serve. If none does, it may lead
// to one of those that get new connections nevertheless, as publishNotReadyAddresses has it.
func leadsElsewhere(port *view.ServicePort, f flow) bool {
	if port.Serving.Len() == 0 {
		return !port.Cluster.Contains(f.reply) && !port.Local.Contains(f.reply)
	}
	return !port.Serving.Contains(f.reply)
}
