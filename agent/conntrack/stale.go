package conntrack

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// frontend is a destination of flows. A NodePort's address is only a port.
type frontend struct {
	family  model.Family
	address netip.AddrPort
}

func frontendOf(id view.ServicePortID, f view.Frontend) frontend {
	return frontend{id.Family, netip.AddrPortFrom(f.Address, f.Port)}
}

// maxGone bounds how many frontends that are gone are remembered until the next pass. There are so
// many only if passes keep failing.
const maxGone = 1 << 16

// set records a Service port; nil means that it is gone. The caller holds c.mu.
func (c *Cleaner) set(id view.ServicePortID, after *view.ServicePort) {
	if id.Protocol != model.UDP {
		return
	}
	if before := c.ports[id]; before != nil {
		delete(c.ports, id)
		for _, f := range before.Frontends {
			// Otherwise, another Service port has the frontend already.
			if at := frontendOf(id, f); c.frontends[at] == before {
				delete(c.frontends, at)
				c.markGone(at)
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

// markGone records that a frontend is gone, unless a Service port has it. The caller holds c.mu.
func (c *Cleaner) markGone(at frontend) {
	if c.frontends[at] == nil && len(c.gone) < maxGone {
		c.gone[at] = struct{}{}
	}
}

// takeGone removes a family's frontends from c.gone and returns them. The caller holds c.mu.
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

// stale reports whether a flow is stale. gone contains the frontends that have gone since the last
// pass, and addresses are the node's, ascending. The caller holds c.mu.
func (c *Cleaner) stale(family model.Family, gone map[frontend]struct{}, addresses []netip.Addr, f netlink.Flow) bool {
	original, reply := f.Original.Destination, f.Reply.Source
	if !original.IsValid() || !reply.IsValid() {
		return false // the kernel did not say where the flow leads
	}
	at, nodePort := frontend{family, original}, frontend{family, netip.AddrPortFrom(netip.Addr{}, original.Port())}
	if port := c.frontends[at]; port != nil {
		return leadsElsewhere(port, reply)
	}
	port := c.frontends[nodePort]
	_, atGone := gone[at]
	_, nodePortGone := gone[nodePort]
	if port != nil || nodePortGone {
		if _, ours := slices.BinarySearchFunc(addresses, original.Addr(), netip.Addr.Compare); ours {
			if port != nil {
				return leadsElsewhere(port, reply)
			}
			atGone = true
		}
	}
	// An untranslated flow to a frontend that is gone does not go to a Service: the address may belong
	// to somebody else by now.
	return atGone && reply != original
}

// leadsElsewhere reports whether reply is none of the serving endpoints of a flow's Service port.
// If the port has none, the flow may also lead to an endpoint that receives new connections without
// serving, as happens with publishNotReadyAddresses.
func leadsElsewhere(port *view.ServicePort, reply netip.AddrPort) bool {
	if port.Serving.Len() == 0 {
		return !port.Cluster.Contains(reply) && !port.Local.Contains(reply)
	}
	return !port.Serving.Contains(reply)
}
