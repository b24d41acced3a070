package conntrack

import (
	"net/netip"
	"slices"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// judge tells which flows of a family are stale.
type judge struct {
	// frontends have the endpoints that serve each, see key. None: flows may lead anywhere.
	frontends map[netip.AddrPort]view.Backends
	// served: any frontend has endpoints.
	served bool
	// nodePorts: some of frontends are NodePorts, and addrs, ascending, are the addresses that they are judged on.
	nodePorts bool
	addrs     []netip.Addr
}

// key is a frontend's address and port; NodePorts have no address.
func key(f view.Frontend) netip.AddrPort { return netip.AddrPortFrom(f.Address, f.Port) }

// judge makes a judge of what the kernel has. c.mu is held.
func (c *Cleaner) judge(family model.Family) judge {
	j := judge{frontends: make(map[netip.AddrPort]view.Backends)}
	for id, port := range c.ports {
		if id.Family != family {
			continue
		}
		for _, f := range port.Frontends {
			j.frontends[key(f)] = port.Serving
			j.nodePorts = j.nodePorts || f.Kind == view.NodePort
		}
		j.served = j.served || port.Serving.Len() > 0
	}
	return j
}

// is tells whether a flow is stale.
func (j *judge) is(f flow) bool {
	endpoints, ok := j.frontends[f.original]
	if !ok && j.nodePorts {
		if endpoints, ok = j.frontends[netip.AddrPortFrom(netip.Addr{}, f.original.Port())]; ok {
			_, ok = slices.BinarySearchFunc(j.addrs, f.original.Addr(), netip.Addr.Compare)
		}
	}
	return ok && endpoints.Len() > 0 && !endpoints.Contains(f.reply)
}
