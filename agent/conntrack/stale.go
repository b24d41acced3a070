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

// set takes note of a Service port; nil: it is gone. c.mu is held.
func (c *Cleaner) set(id view.ServicePortID, after *view.ServicePort) {
	if id.Protocol != model.UDP {
		return
	}
	if before := c.ports[id]; before != nil {
		delete(c.ports, id)
		for _, f := range before.Frontends {
			if at := frontendOf(id, f); c.frontends[at] == before { // else another Service port has it already
				delete(c.frontends, at)
			}
		}
	}
	if after != nil {
		c.ports[id] = after
		for _, f := range after.Frontends {
			c.frontends[frontendOf(id, f)] = after
		}
	}
	c.pending[id.Family] = true
	c.alarm()
}

// serves tells whether a family has any endpoint that serves: else nothing is stale. c.mu is held.
func (c *Cleaner) serves(family model.Family) bool {
	for id, port := range c.ports {
		if id.Family == family && port.Serving.Len() > 0 {
			return true
		}
	}
	return false
}

// stale tells whether a flow is. addresses, ascending, are the node's. c.mu is held.
func (c *Cleaner) stale(family model.Family, addresses []netip.Addr, f flow) bool {
	port := c.frontends[frontend{family, f.original}]
	if port == nil {
		port = c.frontends[frontend{family, netip.AddrPortFrom(netip.Addr{}, f.original.Port())}]
		if port == nil {
			return false
		}
		if _, ours := slices.BinarySearchFunc(addresses, f.original.Addr(), netip.Addr.Compare); !ours {
			return false
		}
	}
	return port.Serving.Len() > 0 && !port.Serving.Contains(f.reply)
}
